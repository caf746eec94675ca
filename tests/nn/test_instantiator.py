"""Interfaces: signatures that are checked at the caller."""

# Annotations are evaluated here, on purpose: an interface's are types as well as texts.
import inspect
from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import interface
from tensorplay.distributed.nn.api.remote_module import _RemoteModule
from tensorplay.distributed.nn.jit import instantiator
from tensorplay.distributed.rpc import api
from tests.nn.modules import Keywords

pytestmark = pytest.mark.timeout(60)


@interface
class Casting:
    """Annotations that are types, and a default that has no literal."""

    def forward(
        self,
        x: torch.Tensor,
        /,
        number: int,
        *rest: int,
        dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> tuple[torch.Tensor, int]:
        raise NotImplementedError


class Recorder:
    """Stands for the call of the module's owner; keeps what would be sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[Any, ...]] = []
        monkeypatch.setattr(api, "_call_owner", self)

    def __call__(
        self,
        rref: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        first: bool = False,
    ) -> rpc.Future[Any]:
        self.sent.append((args[2:], kwargs))
        future: rpc.Future[Any] = rpc.Future()
        future.set_result("result")
        return future


TARGET = instantiator.CallTarget(object(), "cpu", False, instantiator.FirstCall())  # type: ignore[arg-type]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_the_call_is_bound_to_the_signature(recorder: Recorder) -> None:
    made = instantiator.instantiate_scriptable_remote_module_template(Casting)
    assert made.forward(TARGET, 1, number=2) == "result"
    made.forward_async(TARGET, 1, 2, 3, 4, dtype=torch.int8, other=5)
    assert recorder.sent == [
        ((1, 2), {"dtype": torch.float32}),
        ((1, 2, 3, 4), {"dtype": torch.int8, "other": 5}),
    ]


@pytest.mark.parametrize("method", ["forward", "forward_async"])
@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1,), {}), ((), {"x": 1, "number": 2})])
def test_wrong_arguments_are_refused_before_anything_is_sent(
    recorder: Recorder, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    made = instantiator.instantiate_scriptable_remote_module_template(Casting)
    with pytest.raises(TypeError, match=r"Casting.forward\(x: torch.Tensor, /.*: .*'(x|number)'"):
        getattr(made, method)(TARGET, *args, **kwargs)
    assert recorder.sent == []


def test_the_methods_have_the_names_and_signature_of_the_interface() -> None:
    made = instantiator.instantiate_scriptable_remote_module_template(Casting)
    names = [method.__name__ for method in made._generated_methods]
    assert names == ["forward_async", "forward"]
    assert inspect.signature(made.forward) == inspect.signature(Casting.forward)
    parameters = inspect.signature(made.forward_async).parameters
    assert list(parameters.values()) == list(inspect.signature(Casting.forward).parameters.values())


def test_without_an_interface_everything_is_passed_on(recorder: Recorder) -> None:
    made = instantiator.instantiate_non_scriptable_remote_module_template()
    assert [method.__name__ for method in made._generated_methods] == ["forward_async", "forward"]
    made.forward(TARGET, 1, device=2, self_=3)
    assert recorder.sent == [((1,), {"device": 2, "self_": 3})]


def test_a_class_that_is_not_marked_is_refused() -> None:
    class Unmarked:
        def forward(self) -> None: ...

    with pytest.raises(AssertionError, match=r"@tensorplay.distributed.nn.interface"):
        instantiator.instantiate_scriptable_remote_module_template(Unmarked)


def test_an_interface_without_forward_is_refused() -> None:
    @interface
    class Empty: ...

    with pytest.raises(AssertionError, match=r"must declare a method `forward`"):
        instantiator.instantiate_scriptable_remote_module_template(Empty)


def test_interface_returns_the_class_marked() -> None:
    class Mine: ...

    assert interface(Mine) is Mine
    assert Mine.__tensorplay_interface__  # type: ignore[attr-defined]


@pytest.mark.usefixtures("cluster")
def test_a_class_that_is_not_marked_is_refused_before_a_module_is_made() -> None:
    with pytest.raises(AssertionError):
        _RemoteModule("worker0", Keywords, _module_interface_cls=Recorder)


@pytest.mark.usefixtures("cluster")
def test_the_handles_methods_show_the_signature() -> None:
    @interface
    class Local:
        def forward(self, *, a: int, b: int = 2) -> list[str]:
            raise NotImplementedError

    handle = _RemoteModule("worker0", Keywords, _module_interface_cls=Local)
    assert list(inspect.signature(handle.forward).parameters) == ["a", "b"]
    assert handle(a=1) == ["a", "b"]
    with pytest.raises(TypeError, match="missing a required"):
        handle.forward_async(b=2)
