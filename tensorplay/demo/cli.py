"""The command line of the demo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tensorplay import logs
from tensorplay.errors import TensorPlayError
from tensorplay.version import __version__

#: The two loss curves may differ by this much.
TOLERANCE = 1e-5
#: What the model must recognise of the held-out digits after ``EPOCHS`` or more.
ACCURACY = 0.97
EPOCHS = 12
LEARNING_RATE = 2e-3


@click.command(
    name="demo",
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=EPOCHS,
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
    "--broker",
    metavar="ADDRESS",
    envvar="TENSORPLAY_BROKER",
    show_envvar=True,
    help="Use the workers worker0 and worker1 at this broker, which are waited for, instead of "
    "starting some on this machine.",
)
@logs.options("warning", json=False)
@click.version_option(__version__, prog_name="tensorplay demo")
def main(epochs: int, seed: int, picture: Path, broker: str | None, log_level: str) -> None:
    """Train a model that is spread over two workers and this process.

    Starts a broker and two workers on this machine, or joins those of --broker, puts the first
    part of a convolutional network on one worker, the second on the other, and trains it on
    handwritten digits. Then it trains the same model in this process alone and compares the
    losses.

    Exit codes: 0 all is well, 1 the losses differ by more than 1e-5 (or fewer than 97 % of
    the held-out digits are recognised after 12 epochs or more), 2 wrong usage, 130 interrupted.
    """
    logs.configure(log_level)
    try:
        passed = run(epochs, seed, picture, broker)
    except (ImportError, TensorPlayError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if passed else 1)


def run(epochs: int, seed: int, picture: Path, broker: str | None = None) -> bool:
    """Runs the demo and returns whether it showed what it is to show.

    Args:
        epochs: How often to go through the digits.
        seed: Of everything random.
        picture: Where to draw the loss curves.
        broker: Where workers ``worker0`` and ``worker1`` are; None starts them here.
    """
    import torch
    from rich.console import Console

    from tensorplay.demo import data, model, report, train
    from tensorplay.distributed.optim import DistributedOptimizer

    torch.set_num_threads(1)  # the losses are compared: sums are taken in one order
    console = Console()
    digits = data.load(seed)
    total = train.steps(digits, epochs)
    console.print(
        f"Waiting for two workers at {broker} ..."
        if broker
        else "Starting a broker and two workers ..."
    )
    with _workers(broker) as workers:
        spread = model.spread(seed, workers)
        console.print(spread)
        optimizer = DistributedOptimizer(
            torch.optim.Adam, model.parameters(spread), lr=LEARNING_RATE
        )
        with report.progress(console, "two workers", total) as on_step:
            remote_losses = train.train(
                spread, optimizer, digits, epochs=epochs, seed=seed, on_step=on_step
            )
        recognised = train.accuracy(spread, digits)
    alone = model.local(seed)
    with report.progress(console, "one process", total) as on_step:
        local_losses = train.train(
            alone,
            torch.optim.Adam(alone.parameters(), lr=LEARNING_RATE),
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
    alike = difference <= TOLERANCE
    if not alike:
        console.print(f"Failed: the losses may differ by {TOLERANCE:.0e}", style="red")
    learned = recognised >= ACCURACY or epochs < EPOCHS
    if not learned:
        console.print(f"Failed: {ACCURACY:.0%} of the digits must be recognised", style="red")
    return alike and learned


@contextmanager
def _workers(broker: str | None) -> Iterator[list[str]]:
    """Makes this process a client of two workers while it lasts, and yields their names."""
    import tensorplay
    from tensorplay.distributed import rpc

    if broker is None:
        with tensorplay.local_cluster(workers=2) as cluster:
            yield cluster.workers
        return
    rpc.init_rpc("demo", broker=broker)
    try:
        yield [info.name for info in rpc.wait_for_workers(["worker0", "worker1"])]
    finally:
        rpc.shutdown(graceful=False)
