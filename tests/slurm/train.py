"""Training code of a job: calls every task by its rank."""

from __future__ import annotations

import os
import sys

import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule

if __name__ == "__main__":
    tasks = int(os.environ["SLURM_NTASKS"])
    rpc.init_rpc("trainer")
    rpc.wait_for_workers([f"worker{rank}" for rank in range(tasks)], timeout=90)
    for rank in range(tasks):
        assert rpc.rpc_sync(rank, os.getenv, ("SLURM_PROCID",)) == str(rank)
        RemoteModule(f"rank:{rank}", torch.nn.Linear, (2, 2))(torch.ones(1, 2)).sum().backward()
    rpc.shutdown(graceful=False)
    print(f"{tasks} tasks were called", flush=True)
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
