"""Finds the broker: from what the caller said, from the environment, or by starting one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta

from tensorplay.distributed.rpc.address import BrokerAddress
from tensorplay.errors import BrokerError, ConfigError

#: Environment variable with the broker's address.
BROKER_VARIABLE = "TENSORPLAY_BROKER"
#: Under ``torchrun`` the port of MASTER_PORT belongs to its store; the address is put there.
_STORE_KEY = "tensorplay/broker"
#: Seconds within which a broker that this process starts must be ready.
_START_SECONDS = 30.0

_lock = threading.Lock()
_embedded: subprocess.Popen[str] | None = None


def find_broker(given: str | None, init_method: str | None, rank: int) -> BrokerAddress:
    """Returns where the broker is; starts one where nothing says so.

    The first of these decides: ``given``, ``init_method``, the variable TENSORPLAY_BROKER,
    MASTER_ADDR and MASTER_PORT (``env://``; rank 0 starts the broker there), and last an
    embedded broker on a free port of the loopback interface.

    Args:
        given: The argument ``broker`` of ``init_rpc``.
        init_method: The option of that name.
        rank: Rank of this process, or -1.

    Raises:
        ConfigError: If an address has no known form, or ``env://`` lacks its variables.
        BrokerError: If a broker that this process started does not come up.
    """
    text = given or init_method or os.environ.get(BROKER_VARIABLE)
    if text is None:
        text = "env://" if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ else None
    if text is None:
        return _start_embedded("tcp://127.0.0.1:0")
    if text.startswith("env://"):
        return _from_environment(rank)
    return BrokerAddress.parse(text)


def stop_embedded_broker() -> None:
    """Lets go of the broker that this process started; it ends when its peers have left."""
    global _embedded
    with _lock:
        broker, _embedded = _embedded, None
    if broker is None or broker.stdin is None:
        return
    broker.stdin.close()
    # Reaped in the background: it may serve others for a while.
    threading.Thread(target=_reap, args=(broker,), daemon=True).start()


def _reap(broker: subprocess.Popen[str]) -> None:
    broker.wait()
    if broker.stdout is not None:
        broker.stdout.close()


def _from_environment(rank: int) -> BrokerAddress:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigError("env:// takes the broker from MASTER_ADDR and MASTER_PORT; set both")
    if rank < 0:
        rank = int(os.environ.get("RANK", "-1"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _through_store(host, int(port), rank)
    if rank == 0:
        _start_embedded(f"tcp://{_loopback_or(host)}:{port}")
    return BrokerAddress.parse(f"tcp://{host}:{port}")


def _loopback_or(host: str) -> str:
    return "127.0.0.1" if host in ("localhost", "127.0.0.1") else host


def _through_store(host: str, port: int, rank: int) -> BrokerAddress:
    """Rank 0 starts the broker on a free port and publishes it in torchrun's store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_START_SECONDS))
    if rank == 0:
        address = _start_embedded(f"tcp://{_loopback_or(host)}:0")
        store.set(_STORE_KEY, str(address))
        return address
    return BrokerAddress.parse(store.get(_STORE_KEY).decode())


def _start_embedded(bind: str) -> BrokerAddress:
    """Starts a broker as a child that ends with this process."""
    global _embedded
    command = [sys.executable, "-m", "tensorplay.broker", "--bind", bind, "--exit-with-parent"]
    if not bind.startswith(("tcp://127.", "tcp://[::1]")):
        # MASTER_ADDR names an address of this host that the other hosts are to reach.
        command.append("--insecure")
    with _lock:
        broker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert broker.stdout is not None
        line = broker.stdout.readline()
        if not line:
            broker.wait()
            raise BrokerError(
                f"the broker that this process started at {bind} ended with exit code "
                f"{broker.returncode}; its log says why"
            )
        _embedded = broker
    return BrokerAddress.parse(line.split()[-1])
