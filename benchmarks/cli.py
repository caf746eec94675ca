"""The command line: ``python -m benchmarks``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from benchmarks import picture, plan, report
from benchmarks.runner import Settings, run

FULL = Settings()
QUICK = Settings(repeats=3, seconds=0.1)
#: What is measured quickly: no gigabyte, a smaller crowd.
QUICK_LIMITS = plan.Limits(largest=128 * plan.MIB, workers=4, idle_workers=16, clients=(1, 4))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Fewer and shorter repeats, no gigabyte: 3 minutes.")
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Measure what this regular expression is found in; may be repeated.",
)
@click.option("--repeats", type=click.IntRange(min=1), help="How often each cell is measured.")
@click.option("--seconds", type=click.FloatRange(min=0.001), help="What one of them may take.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=FULL.threads,
    show_default=True,
    help="Threads for torch's operators in each process.",
)
@click.option("--ray/--no-ray", default=None, help="Measure Ray, too; by default if installed.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("benchmark-report"),
    show_default=True,
    help="Folder for report.json, report.md and report.png.",
)
@click.option("--list", "list_only", is_flag=True, help="Print what would be measured.")
def main(
    quick: bool,
    only: tuple[str, ...],
    repeats: int | None,
    seconds: float | None,
    threads: int,
    ray: bool | None,
    out: Path,
    list_only: bool,
) -> None:
    """Measures tensorplay beside torch.distributed.rpc, plain local work, and Ray.

    All run side by side on this machine and take turns; the ratios of medians are what counts.
    """
    base = QUICK if quick else FULL
    settings = replace(
        base,
        repeats=repeats or base.repeats,
        seconds=seconds or base.seconds,
        threads=threads,
    )
    limits = QUICK_LIMITS if quick else plan.Limits()
    try:
        stages = plan.only(plan.full_plan(limits, ray=plan.has_ray() if ray is None else ray), only)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from None
    if list_only:
        for stage in stages:
            for measurement in stage.measurements:
                click.echo(f"{stage.name}: {measurement.name}")
        return
    progress = Console(stderr=True)
    measured = run(stages, settings, lambda line: progress.print(line, highlight=False))
    out.mkdir(parents=True, exist_ok=True)
    text = report.to_markdown(measured, stages)
    (out / "report.json").write_text(report.to_json(measured), encoding="utf-8")
    (out / "report.md").write_text(text, encoding="utf-8")
    try:
        picture.draw(measured.results, out / "report.png")
    except ImportError:
        click.echo("no picture: matplotlib is not installed, pip install '.[demo]'", err=True)
    click.echo(f"{text}\nwritten to {out}")
