"""Makes a call that takes seconds: ``python long_call.py BROKER WORKER``."""

from __future__ import annotations

import sys
import time

from tensorplay.distributed import rpc


def work(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


if __name__ == "__main__":
    rpc.init_rpc("client", broker=sys.argv[1])
    rpc.wait_for_workers([sys.argv[2]], timeout=60)
    call = rpc.rpc_async(sys.argv[2], work, (3.0,))
    rpc.rpc_sync(sys.argv[2], work, (0.0,))
    print("under way", flush=True)
    print(call.wait(), flush=True)
    rpc.shutdown(graceful=False)
