"""``python -m tests.chaos --faults 1000 --seed 7``: breaks a running system, writes figures."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from tests.chaos import report
from tests.chaos.driver import Driver, Plan


@click.command(context_settings={"show_default": True})
@click.option("--faults", default=1000, help="How many things are broken.")
@click.option("--seed", default=1, help="Decides what, when and for how long.")
@click.option("--workers", default=3, help="How many workers.")
@click.option("--clients", default=2, help="How many clients.")
@click.option("--pace", default=0.35, help="Seconds from one fault to the next, on average.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for figures and logs.")
def main(
    faults: int, seed: int, workers: int, clients: int, pace: float, output: Path | None
) -> None:
    """Break a running system on purpose and account for every call."""
    folder = output or Path(tempfile.mkdtemp(prefix="tensorplay-chaos-"))
    records = folder / "records"
    records.mkdir(parents=True, exist_ok=True)
    plan = Plan(faults=faults, seed=seed, workers=workers, clients=clients, pace=pace)
    driver = Driver(plan, records)
    result = driver.run(lambda n: click.echo(f"{n} faults", err=True) if n % 50 == 0 else None)
    found = report.figures(plan, result)
    report.write(found, folder)
    click.echo(report.markdown(found))
    for complaint in found["complaints"][:50]:
        click.echo(complaint)
    click.echo(f"written to {folder}")
    sys.exit(1 if found["complaints"] else 0)


if __name__ == "__main__":
    main()
