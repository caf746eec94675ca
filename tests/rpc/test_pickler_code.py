"""What goes by reference, what by value, and what is not there on arrival."""

from __future__ import annotations

import enum
import functools
import operator
import pickle
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from tensorplay.distributed.rpc import pickler
from tensorplay.errors import CodeNotFoundError, SerializationError
from tests.rpc.travel import size, travel


def double(x: Any) -> Any:
    return 2 * x


class Maths:
    factor = 3

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def scaled(cls, x: int) -> int:
        return x * cls.factor

    def method(self, x: int) -> int:
        return x * self.factor


class Inherits(Maths):
    factor = 5


class Colour(enum.Enum):
    RED = 1


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# ------------------------------------------------------------------------------------ by reference


@pytest.mark.parametrize(
    "thing",
    [
        double,
        len,
        torch.add,
        torch.Tensor.add_,
        torch.nn.functional.relu,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add,
        operator.add,
        Maths,
        Maths.static,
        Colour.RED,
        Colour,
        torch.float8_e4m3fn,
        torch.strided,
        torch.channels_last,
        torch.nn.Linear,
        type(None),
        None,
        ...,
        NotImplemented,
        sys,
    ],
    ids=lambda thing: getattr(thing, "__qualname__", None) or str(thing),
)
def test_what_can_be_imported_goes_by_reference(thing: Any) -> None:
    assert travel(thing) is thing
    assert size(thing) < 250


def test_methods() -> None:
    assert travel(Maths.scaled)(2) == 6
    assert travel(Inherits.scaled)(2) == 10
    assert travel(Maths().method)(2) == 6
    assert travel(Maths.method)(Maths(), 2) == 6
    assert travel([1, 2].append)(3) is None
    assert travel(torch.ones(2).add)(1).tolist() == [2, 2]


def test_partials() -> None:
    partial = functools.partial(functools.partial(torch.add, torch.ones(2)), alpha=2)
    assert travel(partial)(torch.ones(2)).tolist() == [3, 3]
    assert travel(functools.partial(lambda x, y: x - y, y=1))(3) == 2


def test_script_functions_and_modules() -> None:
    assert travel(scripted)(torch.zeros(1)).item() == 1
    module = torch.jit.script(torch.nn.Linear(2, 1))
    assert torch.equal(travel(scripted)(torch.ones(2)), torch.tensor([2.0, 2.0]))
    pickled = pickler.dumps(scripted)
    assert b"scripted" in pickled.head
    try:
        got = travel(module)
    except SerializationError as error:
        assert "Script" in str(error)  # noqa: PT017
    else:
        assert torch.equal(got(torch.ones(2)), module(torch.ones(2)))


# ---------------------------------------------------------------------------------------- by value


def test_lambdas_and_closures() -> None:
    offset = torch.ones(2)
    assert travel(lambda x: x + offset)(torch.zeros(2)).tolist() == [1, 1]
    assert travel(lambda: double(4))() == 8


def test_recursive_and_mutually_recursive_closures() -> None:
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert travel(factorial)(5) == 120
    assert travel((even, odd))[0](10)


def test_a_closure_arrives_with_variables_of_its_own() -> None:
    count = 0

    def increment() -> int:
        nonlocal count
        count += 1
        return count

    got = travel(increment)
    assert (got(), got()) == (1, 2)
    assert count == 0


def test_local_classes_with_inheritance_and_super() -> None:
    class Local(Maths):
        def method(self, x: int) -> int:
            return super().method(x) + 1

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    assert travel(Local()).method(2) == 7
    assert travel(Layer())(torch.ones(2)).tolist() == [1, 1]
    cls, one = travel((Local, Local()))
    assert type(one) is cls


def test_classes_made_at_run_time() -> None:
    made = type("Made", (), {"value": 3, "get": lambda self: self.value})
    assert travel(made().get)() == 3
    local = enum.Enum("local", {"A": 1})
    assert travel(local.A).value == 1


def test_functions_with_defaults_annotations_and_attributes() -> None:
    def function(x: int, *, y: Any = torch.ones(1), **rest: Any) -> Any:  # noqa: B008
        """Says something."""
        return x + y

    function.mark = "marked"  # type: ignore[attr-defined]
    got = travel(function)
    assert got(1).item() == 2
    assert (got.__doc__, got.mark) == ("Says something.", "marked")


@pytest.mark.parametrize("where", ["__main__", "notebook"])
def test_what_a_script_or_a_notebook_defines_travels_by_value(where: str, tmp_path: Path) -> None:
    cell = """
        import enum, dataclasses, torch
        SCALE = 3
        def scale(x): return x * SCALE
        def nested(x): return scale(scale(x))
        @dataclasses.dataclass
        class Config:
            size: int
            def make(self): return torch.nn.Linear(self.size, 1)
        class Kind(enum.Enum):
            A = 1
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(2, 2)
            def forward(self, x): return nested(self.inner(x))
    """
    pack = """
        import sys, pickle
        from tensorplay.distributed.rpc import payload
        frames = payload.pack([nested, Config(4), Kind.A, Block(), Block])
        pickle.dump([bytes(f) for f in frames], open(sys.argv[1], "wb"))
    """
    if where == "notebook":  # cells are run in the namespace of __main__, from no file
        script = f"exec(compile({textwrap.dedent(cell)!r}, '<ipython-input-1>', 'exec'))\n"
    else:
        script = textwrap.dedent(cell)
    path, out = tmp_path / "script.py", tmp_path / "frames"
    path.write_text(script + textwrap.dedent(pack), encoding="utf-8")
    subprocess.run([sys.executable, str(path), str(out)], check=True, timeout=60)
    from tensorplay.distributed.rpc import payload

    nested, config, kind, block, cls = payload.unpack(pickle.loads(out.read_bytes()))
    assert nested(2) == 18
    assert config.make()(torch.ones(4)).shape == (1,)
    assert kind.value == 1
    assert block(torch.ones(2)).shape == (2,)
    assert type(block) is cls


def test_a_module_can_be_sent_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def f(x):\n    return x + 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    cloudpickle.register_pickle_by_value(only_here)
    try:
        pickled = pickler.dumps(only_here.f)
    finally:
        cloudpickle.unregister_pickle_by_value(only_here)
    monkeypatch.delitem(sys.modules, "only_here")
    monkeypatch.undo()
    assert pickler.loads(pickled.head, [])(1) == 2


# --------------------------------------------------------------------------- code that is not here


def test_a_module_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("absent_models")
    exec("class Net: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "absent_models", module)
    pickled = pickler.dumps(module.Net())
    monkeypatch.delitem(sys.modules, "absent_models")
    with pytest.raises(ModuleNotFoundError, match=r"absent_models\.Net.*sys\.path") as info:
        pickler.loads(pickled.head, pickled.tensors)
    assert info.value.name == "absent_models"
    assert "register_pickle_by_value" in str(info.value)


def test_a_module_that_a_sent_function_uses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("absent_library")
    monkeypatch.setitem(sys.modules, "absent_library", module)
    pickled = pickler.dumps(lambda: module)
    monkeypatch.setitem(sys.modules, "absent_library", None)
    with pytest.raises(ModuleNotFoundError, match=r"the module absent_library.*sys\.path") as info:
        pickler.loads(pickled.head, pickled.tensors)
    assert info.value.name == "absent_library"


def test_a_name_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("other_version")
    exec("def new(): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "other_version", module)
    pickled = pickler.dumps(module.new)
    del module.new
    with pytest.raises(CodeNotFoundError, match=r"other_version\.new"):
        pickler.loads(pickled.head, pickled.tensors)


def test_errors_of_an_object_that_is_unpickled_are_its_own() -> None:
    with pytest.raises(KeyError, match="own"):
        travel(RaisesOnArrival(KeyError("own")))
    with pytest.raises(IndexError, match="own"):
        travel(RaisesOnArrival(IndexError("own")))


class RaisesOnArrival:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __setstate__(self, state: Any) -> None:
        raise state["error"]


def test_native_functions_are_not_taken_for_their_namesakes() -> None:
    assert travel(torch.add) is torch.add
    native = vars(torch._C)["_VariableFunctions"].cdist  # torch.cdist is written in Python
    assert native != torch.cdist
    assert travel(native) == native


def test_functions_of_builtin_classes() -> None:
    assert travel(str.maketrans) == str.maketrans
    assert travel(len) is len
    assert travel([].append).__name__ == "append"


@pytest.mark.parametrize(
    "space", [torch, torch.Tensor, torch.nn, torch.linalg, torch.fft, torch.special, operator]
)
def test_every_function_and_class_of_torch_arrives_as_itself(space: Any) -> None:
    kinds = (types.BuiltinFunctionType, types.MethodDescriptorType, type)
    things = [thing for thing in vars(space).values() if isinstance(thing, kinds)]
    for sent, got in zip(things, travel(things), strict=True):
        assert got == sent


def test_functions_that_torch_makes_at_run_time_still_work() -> None:
    pool = travel(torch.nn.functional.max_pool1d)
    assert pool(torch.arange(4.0).view(1, 4), 2).tolist() == [[1, 3]]


def test_code_keeps_the_name_of_its_file() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f(x):\n    return x.missing\n", "<a cell>", "exec"), space)
    function = travel(space["f"])
    assert function.__code__.co_filename == "<a cell>"
