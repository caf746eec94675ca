"""Where something is placed: a worker, and a device of it."""

from __future__ import annotations

import torch

from tensorplay.errors import ConfigError

__all__ = ["_remote_device"]

_FORMS = (
    "The valid format is '<workername>/<device>', 'rank:<rank>/<device>', '<workername>', "
    "'rank:<rank>' or '<device>', for example 'worker0/cuda:0'"
)


class _remote_device:  # noqa: N801  (the name that torch gave it)
    """A device of a worker.

    Args:
        remote_device: One of

            - ``"<worker>/<device>"``, for example ``"worker0/cuda:0"``;
            - ``"rank:<rank>/<device>"``, for example ``"rank:0/cpu"``;
            - ``"<worker>"`` or ``"rank:<rank>"``: its host memory, ``"cpu"``;
            - ``"<device>"`` or a ``torch.device``: a device of whoever uses this.

            A text without a slash that torch can read as a device is a device.

    Raises:
        ConfigError: If the text has none of these forms, or torch knows no such device.
        TypeError: If it is neither a text nor a device.
    """

    def __init__(self, remote_device: str | torch.device) -> None:
        self._worker_name: str | None = None
        self._rank: int | None = None
        self._device: torch.device
        if isinstance(remote_device, torch.device):
            self._device = remote_device
            return
        if not isinstance(remote_device, str):
            raise TypeError(
                f"remote_device must be a str or a torch.device, got {type(remote_device)!r}"
            )
        worker, slash, device = remote_device.partition("/")
        if not slash:
            local = _parse_device(worker)
            if local is not None:
                self._device = local
                return
            device = "cpu"
        if not worker or "/" in device:
            raise ConfigError(f"Could not parse remote_device: {remote_device}. {_FORMS}")
        prefix, colon, rank = worker.partition(":")
        if not colon:
            self._worker_name = worker
        elif prefix == "rank" and rank.isascii() and rank.isdigit():
            self._rank = int(rank)
        else:
            raise ConfigError(f"Could not parse remote_device: {remote_device}. {_FORMS}")
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(
                f"Could not parse remote_device: {remote_device}. {device!r} is no device that "
                f"torch knows ({str(error).splitlines()[0]}). {_FORMS}"
            ) from None

    def worker_name(self) -> str | None:
        """Returns the worker's name; None if a rank, or only a device, was given."""
        return self._worker_name

    def rank(self) -> int | None:
        """Returns the worker's rank; None if a name, or only a device, was given."""
        return self._rank

    def device(self) -> torch.device:
        """Returns the device of that worker."""
        return self._device

    def __repr__(self) -> str:
        if self._worker_name is not None:
            return f"{self._worker_name}/{self._device}"
        if self._rank is not None:
            return f"rank:{self._rank}/{self._device}"
        return str(self._device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _remote_device):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str | None, int | None, torch.device]:
        return self._worker_name, self._rank, self._device


def _parse_device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None
