"""The command line of the demo."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tensorplay import logs
from tensorplay.version import __version__

#: The two loss curves may differ by this much.
TOLERANCE = 1e-5
#: What the model must recognise of the held-out digits after the default number of epochs.
ACCURACY = 0.97


@click.command(
    name="demo",
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=12,
    envvar="TENSORPLAY_DEMO_EPOCHS",
    show_default=True,
    show_envvar=True,
    help="How often to go through the digits.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("demo-loss.png"),
    show_default=True,
    help="Where to draw the loss curves.",
)
@click.option(
    "--log-level",
    type=click.Choice(logs.LEVELS, case_sensitive=False),
    default="warning",
    envvar="TENSORPLAY_LOG_LEVEL",
    show_default=True,
    show_envvar=True,
    help="Least important level that is logged, on standard error.",
)
@click.version_option(__version__, prog_name="tensorplay demo")
def main(epochs: int, seed: int, picture: Path, log_level: str) -> None:
    """Train a model that is spread over two workers and this process.

    Starts a broker and two workers on this machine, puts the first part of a convolutional
    network on one worker, the second on the other, and trains it on handwritten digits. Then it
    trains the same model in this process alone and compares the losses.

    Exit codes: 0 all is well, 1 the losses differ by more than 1e-5 (or fewer than 97 % of
    the held-out digits are recognised after 12 epochs or more), 2 wrong usage, 130 interrupted.
    """
    logs.configure(log_level)
    try:
        passed = run(epochs, seed, picture)
    except ImportError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if passed else 1)


def run(epochs: int, seed: int, picture: Path) -> bool:
    """Runs the demo and returns whether it showed what it is to show."""
    import torch
    from rich.console import Console

    import tensorplay
    from tensorplay.demo import data, model, report, train
    from tensorplay.distributed.optim import DistributedOptimizer

    torch.set_num_threads(1)  # the losses are compared: sums are taken in one order
    console = Console()
    digits = data.load(seed)
    total = train.steps(digits, epochs)
    console.print("Starting a broker and two workers ...")
    with tensorplay.local_cluster(workers=2) as cluster:
        spread = model.spread(seed, cluster.workers)
        console.print(spread)
        parameters = [
            *spread.edges.remote_parameters(),
            *spread.shapes.remote_parameters(),
            *spread.verdict.parameters(),
        ]
        optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=2e-3)
        with report.progress(console, "two workers", total) as on_step:
            remote_losses = train.train(
                spread, optimizer, digits, epochs=epochs, seed=seed, on_step=on_step
            )
        recognised = train.accuracy(spread, digits)
    alone = model.local(seed)
    with report.progress(console, "one process", total) as on_step:
        local_losses = train.train(
            alone,
            torch.optim.Adam(alone.parameters(), lr=2e-3),
            digits,
            epochs=epochs,
            seed=seed,
            on_step=on_step,
        )
    difference = max(abs(a - b) for a, b in zip(remote_losses, local_losses, strict=True))
    report.draw(picture, remote_losses, local_losses)
    console.print(f"Accuracy on {len(digits.held_out_labels)} held-out digits: {recognised:.2%}")
    console.print(f"Largest difference from the losses of one process: {difference:.1e}")
    console.print(f"Loss curves: {picture}")
    return difference <= TOLERANCE and (recognised >= ACCURACY or epochs < 12)
