"""Takes the screenshots of the dashboard that the documentation shows.

``python -m tests.browser.screenshots [FOLDER] [SECONDS]``
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from tensorplay.cluster import local_cluster
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tests.browser.browser import DESKTOP, PHONE, browser

ROOT = Path(__file__).parents[2]


def work(stop: threading.Event) -> None:
    """Calls modules on the workers, now more and now less often."""
    layers = [RemoteModule(f"worker{rank}/cpu", torch.nn.Linear, (256, 256)) for rank in range(3)]
    began = time.monotonic()
    with torch.no_grad():
        while not stop.is_set():
            x = torch.ones(64 * (1 + int(time.monotonic() - began) // 7 % 4), 256)
            for layer in layers[: 1 + int(time.monotonic() - began) // 5 % 3]:
                x = layer(x)
            time.sleep(0.002 + 0.008 * (int(time.monotonic() - began) // 11 % 2))


def fail() -> None:
    """Raises, as a user's function may."""
    raise ValueError("expected 256 features, got 128")


def take(folder: Path, seconds: float) -> None:
    """Runs a cluster for a while, breaks a few things and takes the pictures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    stop = threading.Event()
    with local_cluster(workers=4, name="trainer", broker_options=("--http", address)) as cluster:
        worker = threading.Thread(target=work, args=(stop,))
        worker.start()
        try:
            time.sleep(seconds)
            with suppress(ValueError):
                rpc.rpc_sync("worker1", fail)
            cluster.kill("worker3")
            time.sleep(4)
            for name, size, dark in (
                ("dashboard-light", DESKTOP, False),
                ("dashboard-dark", DESKTOP, True),
                ("dashboard-phone", PHONE, True),
            ):
                with browser(size, dark=dark) as driver:
                    driver.get(f"http://{address}")
                    time.sleep(4)
                    driver.save_screenshot(str(folder / f"{name}.png"))
                    for entry in driver.get_log("browser"):
                        print(entry["level"], entry["message"])
        finally:
            stop.set()
            worker.join()


if __name__ == "__main__":
    take(
        Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images",
        float(sys.argv[2]) if len(sys.argv) > 2 else 60.0,
    )
