"""``python -m tests.soak``: 200,000 calls and more; prints figures, fails if anything grew."""

from __future__ import annotations

import logging
import sys

import click
import torch

from tensorplay.cluster import local_cluster
from tests.soak import soak


@click.command(context_settings={"show_default": True})
@click.option("--calls", default=200_000, help="How many calls.")
@click.option("--rrefs", default=20_000, help="How many remote references.")
@click.option("--passes", default=20_000, help="How many pairs of forward and backward.")
def main(calls: int, rrefs: int, passes: int) -> None:
    """Make many calls and see whether memory, files and threads stay as they are."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    plan = soak.Plan(calls=calls, rrefs=rrefs, passes=passes)
    with local_cluster(workers=2) as cluster:
        found = soak.run(cluster, plan, lambda line: click.echo(line, err=True))
    click.echo(soak.markdown(found))
    for complaint in found["complaints"]:
        click.echo(complaint)
    sys.exit(1 if found["complaints"] else 0)


if __name__ == "__main__":
    main()
