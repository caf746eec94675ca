"""Calls one worker, with little and with much: ``python caller.py BROKER WORKER``."""

from __future__ import annotations

import os
import sys

import torch

from tensorplay.distributed import rpc

if __name__ == "__main__":
    address, worker = sys.argv[1:]
    options = rpc.BrokerRpcBackendOptions(connect_timeout=15.0)
    rpc.init_rpc("client", broker=address, rpc_backend_options=options)
    rpc.wait_for_workers([worker], timeout=60)
    assert rpc.rpc_sync(worker, os.getpid) == 1  # that of the first process of a container
    for size in (1, 1 << 10, 16 << 20):
        tensor = torch.arange(size, dtype=torch.float32)
        assert torch.equal(rpc.rpc_sync(worker, torch.neg, (tensor,)), -tensor)
    rpc.shutdown(graceful=False)
