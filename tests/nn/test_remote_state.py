"""Reading and loading the state of a remote module, and the hooks around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorplay.distributed.nn import RemoteModule
from tests.nn.modules import Container, Net, Scale, Stateful

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def test_remote_state_dict_is_that_of_the_module() -> None:
    state, expected = RemoteModule("worker0", Net).remote_state_dict(), Net().state_dict()
    assert list(state) == list(expected)
    assert state._metadata == expected._metadata  # type: ignore[attr-defined]
    prefixed = RemoteModule("worker0", Net).remote_state_dict(prefix="net.")
    assert list(prefixed) == [f"net.{name}" for name in expected]


def test_the_state_is_a_copy() -> None:
    handle = RemoteModule("worker0", Scale)
    handle.remote_state_dict()["factor"].fill_(9.0)
    assert handle.remote_state_dict()["factor"] == 2.0


def test_keep_vars_keeps_parameters() -> None:
    handle = RemoteModule("worker0", Scale)
    assert isinstance(handle.remote_state_dict(keep_vars=True)["factor"], torch.nn.Parameter)
    assert not handle.remote_state_dict()["factor"].requires_grad


def test_load_remote_state_dict() -> None:
    handle, local = RemoteModule("worker0", Net), Net()
    result = handle.load_remote_state_dict(local.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for name, value in handle.remote_state_dict().items():
        assert torch.equal(value, local.state_dict()[name])
    # A state that needs gradients is loaded as values, too.
    handle.load_remote_state_dict(local.state_dict(keep_vars=True))
    assert handle.get_parameter("first.weight").requires_grad


def test_strict_and_assign() -> None:
    handle = RemoteModule("worker0", Scale)
    state = {"factor": torch.tensor(5.0, dtype=torch.float64), "other": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"Missing key.*offset(.|\n)*Unexpected key.*other") as e:
        handle.load_remote_state_dict(state)
    assert str(e.value).startswith("Error(s) in loading state_dict for RemoteModule:")
    result = handle.load_remote_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["offset"], ["other"])
    assert handle.get_parameter("factor").dtype is torch.float32
    handle.load_remote_state_dict(state, strict=False, assign=True)
    assert handle.get_parameter("factor").dtype is torch.float64
    with pytest.raises(TypeError, match="dict-like"):
        handle.load_remote_state_dict([])  # type: ignore[arg-type]


def test_extra_state_is_part_of_the_state() -> None:
    handle = RemoteModule("worker0", Stateful)
    assert handle.remote_state_dict() == {"_extra_state": "initial"}
    handle.load_remote_state_dict({"_extra_state": {"step": 3}})
    assert handle.get_extra_state() == {"step": 3}


class Hooks:
    """Registers all four hooks on a handle and notes what they are given."""

    def __init__(self, handle: RemoteModule) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.removable = [
            handle.register_state_dict_pre_hook(self.save_pre),
            handle.register_state_dict_post_hook(lambda *args: self.save_post(*args)),
            handle.register_load_state_dict_pre_hook(self.load_pre),
            handle.register_load_state_dict_post_hook(self.load_post),
        ]

    def save_pre(self, module: Any, prefix: str, keep_vars: bool) -> None:
        self.seen.append(("save_pre", module, prefix, keep_vars))

    def save_post(self, module: Any, state: Any, prefix: str, metadata: Any) -> None:
        self.seen.append(("save_post", module, prefix, metadata))
        state[f"{prefix}added"] = "by the hook"

    def load_pre(self, module: Any, state: Any, prefix: str, *rest: Any) -> None:
        self.seen.append(("load_pre", module, prefix))
        state.pop(f"{prefix}added", None)

    def load_post(self, module: Any, keys: Any) -> None:
        self.seen.append(("load_post", module))
        keys.unexpected_keys.clear()


def test_hooks_run_around_the_remote_state() -> None:
    handle = RemoteModule("worker0", Scale)
    hooks = Hooks(handle)
    state = handle.remote_state_dict()
    assert state.pop("added") == "by the hook"
    handle.load_remote_state_dict({**state, "added": 1, "unexpected": 2})
    assert hooks.seen == [
        ("save_pre", handle, "", False),
        ("save_post", handle, "", {"version": 1}),
        ("load_pre", handle, ""),
        ("load_post", handle),
    ]
    for removable in hooks.removable:
        removable.remove()
    assert "added" not in handle.remote_state_dict()
    assert len(hooks.seen) == 4


def test_hooks_run_when_a_container_includes_the_handle() -> None:
    handle = RemoteModule("worker0", Scale)
    hooks, container = Hooks(handle), Container(handle)
    state = container.state_dict()
    assert state["inner.added"] == "by the hook"
    container.load_state_dict({**state, "inner.unexpected": 2})
    assert [(event[0], event[1]) for event in hooks.seen] == [
        ("save_pre", handle),
        ("save_post", handle),
        ("load_pre", handle),
        ("load_post", handle),
    ]
    assert [event[2] for event in hooks.seen[:3]] == ["inner."] * 3


def test_a_post_hook_can_make_loading_fail() -> None:
    handle = RemoteModule("worker0", Scale)
    handle.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.append("wanted"))
    with pytest.raises(RuntimeError, match="wanted"):
        handle.load_remote_state_dict(handle.remote_state_dict())
