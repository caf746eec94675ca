"""Making, calling and steering a module on a worker."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.nn.api.remote_module import _RemoteModule
from tensorplay.distributed.rpc import payload
from tests.nn import modules
from tests.nn.modules import Container, Counted, Keywords, Net, Scale

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

X = torch.arange(3.0)


# Making.


@pytest.mark.parametrize(
    ("place", "worker"),
    [
        ("worker0/cpu", "worker0"),
        ("worker1", "worker1"),
        ("rank:0/cpu", "worker0"),
        ("rank:1", "worker1"),
    ],
)
def test_the_forms_of_a_remote_device(place: str, worker: str) -> None:
    handle = RemoteModule(place, Scale, (3.0,))
    assert handle.module_rref.owner_name() == worker
    assert handle.device == "cpu"
    assert torch.equal(handle(X), 3 * X)


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu")])
def test_a_bare_device_is_one_of_this_process(place: Any) -> None:
    handle = RemoteModule(place, Scale)
    assert handle.on == rpc.get_worker_info().name
    assert handle.module_rref.is_owner()
    assert torch.equal(handle(X), 2 * X)


def test_arguments_of_the_constructor() -> None:
    handle = RemoteModule("worker0", nn.Linear, (3,), {"out_features": 2, "bias": False})
    assert handle(X).shape == (2,)
    assert len(handle.remote_parameters()) == 1


def test_any_callable_that_returns_a_module_will_do() -> None:
    width = 5
    handle = RemoteModule("worker0", lambda: nn.Linear(3, width))
    assert handle(X).shape == (width,)


def test_rank_and_name_are_the_same_worker_in_every_respect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    maps = rpc._get_current_rpc_agent().options.device_maps
    assert not RemoteModule("rank:0", Scale).is_device_map_set
    monkeypatch.setitem(maps, "worker0", {cpu: cpu})
    by_name, by_rank = RemoteModule("worker0", Scale), RemoteModule("rank:0", Scale)
    assert by_name.is_device_map_set
    assert by_rank.is_device_map_set
    assert repr(by_name) == repr(by_rank)
    assert torch.equal(by_name(X), by_rank(X))
    assert by_name.module_rref.owner() == by_rank.module_rref.owner()


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((3,), {}), ((3, 2), {"no_such": 1}), ((3, "two"), {})]
)
def test_an_error_of_the_constructor_is_raised_where_the_handle_is_made(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        RemoteModule("worker0", nn.Linear, args, kwargs)


def test_the_constructors_own_exception_arrives() -> None:
    with pytest.raises(KeyError, match="no such configuration"):
        RemoteModule("worker0", modules.raise_on_construction)


@pytest.mark.parametrize("cls", [dict, modules.NotAModule])
def test_a_class_of_no_module_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"must return a tensorplay.nn.Module, got <class"):
        RemoteModule("worker0", cls)


def test_a_handle_of_a_handle_is_refused() -> None:
    with pytest.raises(ValueError, match="handle of a remote module"):
        RemoteModule("worker0", RemoteModule, ("worker1", Scale))


def test_without_rpc_nothing_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.api, "_is_current_rpc_agent_set", lambda: False)
    with pytest.raises(AssertionError, match="init_rpc"):
        RemoteModule("worker0", Scale)


@pytest.mark.parametrize("place", ["nobody/cpu", "rank:99/cpu"])
def test_an_unknown_worker_is_a_value_error_that_lists_who_is_there(place: str) -> None:
    with pytest.raises(ValueError, match="worker0"):
        RemoteModule(place, Scale)


def test_a_device_that_does_not_exist_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no device that torch knows"):
        RemoteModule("worker0/nonsense", Scale)


def test_a_dropped_handle_frees_the_module_without_the_garbage_collector() -> None:
    handle = RemoteModule("worker0", Counted)
    assert rpc.rpc_sync("worker0", modules.count_alive) == 1
    gc.disable()
    try:
        del handle
        deadline = time.monotonic() + 20
        while rpc.rpc_sync("worker0", modules.count_alive):
            assert time.monotonic() < deadline, "the owner keeps the module"
    finally:
        gc.enable()


# However a handle came to be, it is a whole nn.Module.


def made(how: str) -> Any:
    handle = RemoteModule("worker0", Scale)
    if how == "from its reference":
        return RemoteModule.init_from_module_rref("worker0", handle.get_module_rref())
    if how == "from the wire":
        return rpc.rpc_sync("worker1", modules.own_handle, (handle,))
    if how == "from a worker's reference":
        return rpc.rpc_sync("worker1", modules.adopt, ("worker0", handle.get_module_rref()))
    if how == "as a submodule":
        return RemoteModule("worker0", nn.Sequential, (Scale(),)).get_submodule("0")
    return handle


ORIGINS = [
    "by the constructor",
    "from its reference",
    "from the wire",
    "from a worker's reference",
    "as a submodule",
]


@pytest.mark.parametrize("how", ORIGINS)
def test_every_handle_can_be_called_printed_and_hooked(how: str) -> None:
    handle = made(how)
    for result in modules.call_all_ways(handle, X):
        assert torch.equal(result, 2 * X)
    assert modules.inspect(handle) | {"attributes": None} == {
        "repr": "RemoteModule(worker0/cpu, Scale)",
        "training": True,
        "is_module": True,
        "type": "RemoteModule",
        "hooks": ["hook"],
        "attributes": None,
    }
    assert torch.equal(handle.remote_parameters()[0].to_here(), torch.tensor(2.0))
    assert list(Container(handle).state_dict()) == [
        "front.weight",
        "front.bias",
        "inner.factor",
        "inner.offset",
    ]


def test_a_reference_to_no_module_is_refused() -> None:
    rref: Any = rpc.remote("worker0", dict)
    with pytest.raises(
        ValueError, match=r"must refer to a tensorplay.nn.Module, got <class 'dict'>"
    ):
        RemoteModule.init_from_module_rref("worker0", rref)


def test_a_handle_made_from_a_reference_knows_the_mode() -> None:
    handle = RemoteModule("worker0", Net)
    handle.eval()
    assert not RemoteModule.init_from_module_rref("worker0", handle.module_rref).training


# Calling.


def test_call_forward_and_forward_async_with_all_kinds_of_arguments() -> None:
    handle = RemoteModule("worker0", Scale)
    for result in (
        handle(X, times=2.0),
        handle(X, 2.0),
        handle.forward(x=X, times=2.0),
        handle.forward_async(X, times=2.0).wait(),
    ):
        assert torch.equal(result, 4 * X)


def test_keywords_do_not_collide_with_what_travels_beside_them() -> None:
    names = ["args", "call_args", "device", "is_device_map_set", "kwargs", "module_rref", "to"]
    handle = RemoteModule("worker0", Keywords)
    assert handle(**dict.fromkeys(names)) == names
    assert handle.forward_async(**dict.fromkeys(names)).wait() == names


def test_many_calls_at_a_time() -> None:
    handle = RemoteModule("worker0", Scale)
    futures = [handle.forward_async(X, float(n)) for n in range(50)]
    for n, future in enumerate(futures):
        assert torch.equal(future.wait(), 2 * n * X)


def test_a_single_tensor_stays_a_single_tensor() -> None:
    result = RemoteModule("worker0", nn.Identity)(torch.ones(4, 2))
    assert isinstance(result, torch.Tensor)
    assert result.shape == (4, 2)


def test_host_inputs_move_to_the_modules_device_also_nested() -> None:
    handle = RemoteModule("worker0/meta", modules.TypeOf)
    batch = {"x": [X], "more": modules.Batch(X)}
    assert handle(modules.Pair(X, X), batch=batch) == ["meta"] * 4
    assert RemoteModule("worker0/meta", nn.Linear, (3, 2))(X).device.type == "meta"


def test_an_error_in_forward_arrives() -> None:
    handle = RemoteModule("worker0", nn.Linear, (3, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        handle(torch.ones(1, 7))


def test_hooks_of_the_remote_module_run_there() -> None:
    handle = RemoteModule("worker0", Scale)
    rpc.rpc_sync("worker0", modules.double_on_call, (handle.module_rref,))
    assert torch.equal(handle(X), 4 * X)


def test_gradients_reach_the_input_and_the_remote_parameters() -> None:
    handle = RemoteModule("worker0", Scale)
    x = torch.ones(3, requires_grad=True)
    handle(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    (parameter,) = handle.remote_parameters()
    assert rpc.rpc_sync("worker0", gradient, (parameter,)) == 3.0


def gradient(rref: Any) -> float:
    return float(rref.local_value().grad)


def test_training_starts_with_parameters_that_need_gradients_whatever_the_callers_mode() -> None:
    with torch.no_grad():
        handle = RemoteModule("worker0", nn.Linear, (3, 2))
    assert handle.get_parameter("weight").requires_grad


# Steering.


def test_train_and_eval_reach_the_module_and_the_handle_follows() -> None:
    handle = RemoteModule("worker0", Net)
    rref = handle.get_module_rref()
    for mode in (False, True):
        assert handle.train(mode) is handle
        assert handle.training is mode
        assert rpc.rpc_sync("worker0", modules.training_modes, (rref,)) == {mode}
    assert handle.eval() is handle
    assert not handle.training
    assert rpc.rpc_sync("worker0", modules.training_modes, (rref,)) == {False}


def test_train_moves_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = RemoteModule("worker0", nn.Linear, (1000, 1000))
    sizes: list[int] = []
    real = payload.unpack

    def unpack(frames: Any, **options: Any) -> Any:
        sizes.append(sum(len(frame) for frame in frames))
        return real(frames, **options)

    monkeypatch.setattr(payload, "unpack", unpack)
    handle.eval()
    assert sum(sizes) < 1000


def test_compile_compiles_the_remote_module() -> None:
    handle = RemoteModule("worker0", Scale)
    handle.compile(backend="eager")
    assert rpc.rpc_sync("worker0", modules.is_compiled, (handle.module_rref,))
    assert handle._compiled_call_impl is None
    assert torch.equal(handle(X), 2 * X)


def test_remote_parameters() -> None:
    handle = RemoteModule("worker0", Net)
    assert [rref.owner_name() for rref in handle.remote_parameters()] == ["worker0"] * 6
    assert handle.remote_parameters(recurse=False) == []
    values = [rref.to_here() for rref in handle.remote_parameters()]
    state = handle.remote_state_dict()
    assert torch.equal(values[0], state["first.weight"])


def test_the_reference_to_the_module() -> None:
    handle = RemoteModule("worker0", Scale)
    assert handle.get_module_rref() is handle.module_rref
    assert isinstance(handle.get_module_rref().to_here(), Scale)
    assert handle.module_rref.owner() == rpc.get_worker_info("worker0")


# Scripted and compiled modules.


def script_linear() -> nn.Module:
    return torch.jit.script(nn.Linear(3, 2))


def compiled_scale() -> nn.Module:
    return torch.compile(Scale(), backend="eager")  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module() -> None:
    handle = RemoteModule("worker0", script_linear)
    assert handle(X).shape == (2,)
    assert handle.remote_state_dict().keys() == {"weight", "bias"}
    copy = handle.get_module_rref().to_here()
    assert torch.equal(copy(X), handle(X))
    assert torch.equal(rpc.rpc_sync("worker1", modules.call, (handle, X)), handle(X))


def test_a_compiled_module() -> None:
    handle = RemoteModule("worker0", compiled_scale)
    assert torch.equal(handle(X), 2 * X)
    assert torch.equal(rpc.rpc_sync("worker1", modules.call, (handle, X)), 2 * X)


def test_the_base_class_can_be_used_without_an_interface() -> None:
    assert torch.equal(_RemoteModule("worker0", Scale)(X), 2 * X)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_host_inputs_move_there_and_results_come_back() -> None:
    handle = RemoteModule("worker0/cuda:0", modules.TypeOf)
    batch = {"x": [X], "more": modules.Batch(X)}
    assert handle(modules.Pair(X, X), batch=batch) == ["cuda"] * 4
    assert RemoteModule("worker0/cuda:0", Scale)(X).device.type == "cpu"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        RemoteModule("worker0/cuda:100", Scale)
