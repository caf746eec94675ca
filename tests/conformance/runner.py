"""Runs the harness in a process where torch's process groups live until their process ends.

The destructor of gloo's process group joins a thread while it holds the interpreter's lock, and
that thread may need the lock to let go of a tensor that Python has seen: whoever drops the last
reference to a ``DistributedDataParallel`` waits for ever now and then. It is a fault of torch,
which shows with torch's own RPC as well; none of the suite's tests is about it. A group that is
kept is not destructed.

    python runner.py HARNESS [ARGUMENTS OF THE HARNESS]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

_kept: list[Any] = []


def keep_process_groups() -> None:
    """Has every process group that is made from now on live until its process ends."""
    make = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        _kept.append(dist.group.WORLD)

    dist.init_process_group = init_process_group


if __name__ == "__main__":
    keep_process_groups()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
