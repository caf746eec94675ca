"""Finds the broker: from what the caller said, from the environment, or by starting one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta

from tensorplay.address import BrokerAddress
from tensorplay.errors import BrokerError, ConfigError

#: Environment variable with the broker's address.
BROKER_VARIABLE = "TENSORPLAY_BROKER"
#: Environment variable that lets in everybody who reaches a broker which this process starts.
INSECURE_VARIABLE = "TENSORPLAY_INSECURE"
#: Under ``torchrun`` the port of MASTER_PORT belongs to its store; the address is put there.
_STORE_KEY = "tensorplay/broker"
#: Seconds within which a broker that this process starts must be ready.
_START_SECONDS = 30.0

_lock = threading.Lock()
_embedded: subprocess.Popen[str] | None = None


def find_broker(
    given: str | None, init_method: str | None, rank: int, curve_dir: str | None = None
) -> BrokerAddress:
    """Returns where the broker is; starts one where nothing says so.

    The first of these decides: ``given``, ``init_method``, the variable TENSORPLAY_BROKER,
    MASTER_ADDR and MASTER_PORT (``env://``; rank 0 starts the broker there), and last an
    embedded broker on a free port of the loopback interface.

    Args:
        given: The argument ``broker`` of ``init_rpc``.
        init_method: The option of that name.
        rank: Rank of this process, or -1.
        curve_dir: The key directory for a broker that is started; "" is none, None leaves it to
            the variable TENSORPLAY_CURVE_DIR.

    Raises:
        ConfigError: If an address has no known form, ``env://`` lacks its variables, or a broker
            would have to let in everybody who reaches this host.
        BrokerError: If a broker that this process started does not come up.
    """
    text = given or init_method or os.environ.get(BROKER_VARIABLE)
    if text is None:
        text = "env://" if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ else None
    if text is None:
        return _start_embedded("tcp://127.0.0.1:0", curve_dir)
    if text.startswith("env://"):
        return _from_environment(rank, curve_dir)
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


def _from_environment(rank: int, curve_dir: str | None) -> BrokerAddress:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigError("env:// takes the broker from MASTER_ADDR and MASTER_PORT; set both")
    if rank < 0:
        rank = int(os.environ.get("RANK", "-1"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _through_store(host, int(port), rank, curve_dir)
    if rank == 0:
        _start_embedded(f"tcp://{_loopback_or(host)}:{port}", curve_dir)
    return BrokerAddress.parse(f"tcp://{host}:{port}")


def _loopback_or(host: str) -> str:
    return "127.0.0.1" if host in ("localhost", "127.0.0.1") else host


def _all_here() -> bool:
    """Returns whether torchrun says that all processes are on this host."""
    size = os.environ.get("WORLD_SIZE")
    return size is not None and os.environ.get("LOCAL_WORLD_SIZE") == size


def _through_store(host: str, port: int, rank: int, curve_dir: str | None) -> BrokerAddress:
    """Rank 0 starts the broker on a free port and publishes it in torchrun's store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_START_SECONDS))
    if rank == 0:
        bind = "127.0.0.1" if _all_here() else _loopback_or(host)
        address = _start_embedded(f"tcp://{bind}:0", curve_dir)
        store.set(_STORE_KEY, str(address))
        return address
    return BrokerAddress.parse(store.get(_STORE_KEY).decode())


def _start_embedded(bind: str, curve_dir: str | None) -> BrokerAddress:
    """Starts a broker as a child that ends with this process."""
    global _embedded
    if curve_dir is None:
        curve_dir = os.environ.get("TENSORPLAY_CURVE_DIR", "")
    loopback = bind.startswith(("tcp://127.", "tcp://[::1]"))
    if not (loopback or curve_dir or os.environ.get(INSECURE_VARIABLE)):
        # MASTER_ADDR names an address of this host that the other hosts are to reach.
        raise ConfigError(
            f"MASTER_ADDR has this process start a broker at {bind}, which other hosts reach, and "
            "whoever reaches it can run code on its workers: let in only those whose keys you "
            "know, with TENSORPLAY_CURVE_DIR (see `tensorplay keys`), or say "
            f"{INSECURE_VARIABLE}=1 if everybody on that network may do so"
        )
    command = [sys.executable, "-m", "tensorplay.broker", "--bind", bind, "--exit-with-parent"]
    command += ["--curve-dir", curve_dir]
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
