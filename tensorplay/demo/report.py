"""What the demo shows: a progress bar with the loss, and the curves as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class OnStep(Protocol):
    """Is told each loss."""

    def __call__(self, loss: float) -> None:
        """Shows a loss."""


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[OnStep]:
    """Shows a progress bar while it lasts.

    Args:
        console: Where.
        title: What is going on.
        total: How many steps there will be.

    Yields:
        A function that takes the loss of each step.
    """
    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, loss=float("nan"))

        def on_step(loss: float) -> None:
            bar.update(task, advance=1, loss=loss)

        yield on_step


def draw(picture: Path, remote: list[float], local: list[float]) -> None:
    """Draws two loss curves into a PNG file.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the demo needs matplotlib: pip install 'tensorplay-broker[demo]'"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.semilogy(local, linewidth=4, color="#c8c8c8", label="all in one process")
    axes.semilogy(remote, linewidth=1, color="#c2410c", label="spread over two workers")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy of the batch")
    axes.set_title("The same model, trained from the same seed")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
