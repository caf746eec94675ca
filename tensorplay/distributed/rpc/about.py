"""What a process tells the broker of itself."""

from __future__ import annotations

import os
import platform
import socket

import torch

from tensorplay.protocol.messages import PROTOCOL_VERSION, Hello, Role
from tensorplay.version import __version__


def hello(
    name: str,
    namespace: str,
    incarnation: int,
    role: Role,
    rank: int,
    world_size: int,
    device: str,
) -> Hello:
    """Returns the registration of this process.

    Args:
        name: Name to register.
        namespace: Where.
        incarnation: The peer's address on the wire.
        role: WORKER or CLIENT.
        rank: Rank to ask for, or -1.
        world_size: Size of the fixed world, or 0.
        device: Default device of what is placed here.
    """
    return Hello(
        protocol=PROTOCOL_VERSION,
        name=name,
        namespace=namespace,
        incarnation=incarnation,
        role=role,
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        versions={
            "tensorplay": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
    )
