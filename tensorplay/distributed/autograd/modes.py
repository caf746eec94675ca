"""The caller's modes - grad, inference, autocast - and how they hold on the callee."""

from __future__ import annotations

from types import TracebackType

import msgspec
import torch

__all__ = ["Autocast", "Modes", "enabled_autocast"]


class Autocast(msgspec.Struct, frozen=True, array_like=True):
    """Autocast, as enabled for one type of device.

    Attributes:
        device: Type of device, such as ``"cpu"``.
        dtype: Name of the dtype that operations are cast to.
        cache: Whether casts of weights are remembered until the call ends.
    """

    device: str
    dtype: str
    cache: bool = True


def enabled_autocast() -> list[Autocast]:
    """Returns the types of device for which autocast is enabled in this thread."""
    if not torch._C._is_any_autocast_enabled():
        return []
    cache = torch.is_autocast_cache_enabled()
    return [
        Autocast(device, str(torch.get_autocast_dtype(device)).removeprefix("torch."), cache)
        for device in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(device)
    ]


class Modes:
    """A context manager under which a thread has the modes of a caller.

    Args:
        grad: Whether grad mode is on.
        inference: Whether inference mode is on.
        autocast: The types of device for which autocast is.
    """

    __slots__ = (
        "_autocast",
        "_before",
        "_cache_before",
        "_casts_before",
        "_grad",
        "_guard",
        "_inference",
    )

    def __init__(self, grad: bool, inference: bool, autocast: list[Autocast]) -> None:
        self._grad = grad
        self._inference = inference
        self._autocast = autocast
        self._before = True
        self._casts_before: list[tuple[str, bool, torch.dtype]] = []
        self._cache_before = True
        self._guard: torch.inference_mode | None = None

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        if self._inference:
            self._guard = torch.inference_mode()
            self._guard.__enter__()
        torch._C._set_grad_enabled(self._grad)
        if self._autocast:
            self._enter_autocast()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._autocast:
            self._leave_autocast()
        if self._guard is not None:
            self._guard.__exit__(kind, error, traceback)
        torch._C._set_grad_enabled(self._before)

    # What torch.autocast does, but without its checks: the caller has passed them, and a
    # device type that is missing here is no fault.

    def _enter_autocast(self) -> None:
        torch.autocast_increment_nesting()
        self._cache_before = torch.is_autocast_cache_enabled()
        for cast in self._autocast:
            device = cast.device
            before = (
                device,
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
            self._casts_before.append(before)
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, getattr(torch, cast.dtype))
            torch.set_autocast_cache_enabled(cast.cache)

    def _leave_autocast(self) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        for device, enabled, dtype in self._casts_before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cache_before)
