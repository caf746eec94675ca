"""Numbers that stand for functions."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import cloudpickle
import pytest
import torch

from tensorplay.distributed.rpc import callables, pickler
from tensorplay.distributed.rpc.callables import Definitions, Told
from tensorplay.errors import ProtocolError
from tests.rpc import helpers


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module that can be imported and changed."""
    made = types.ModuleType("numbered_functions")
    sys.modules[made.__name__] = made
    define(made, "return 1")
    yield made
    del sys.modules[made.__name__]


def define(module: types.ModuleType, body: str) -> None:
    exec(f"def function():\n    {body}", vars(module))


@pytest.mark.parametrize("function", [helpers.add, torch.add, len, torch.nn.functional.relu])
def test_functions_by_reference_have_a_number(function: object) -> None:
    numbered = callables.find(function)
    assert numbered is not None
    assert callables.find(function) == numbered
    definitions = Definitions()
    definitions.learn(1, numbered.number, numbered.definition)
    for _ in range(2):
        assert definitions.resolve(1, numbered.number) is function


def test_what_goes_by_value_has_none() -> None:
    factor = 2

    def closure(x: int) -> int:
        return x * factor

    numbers: list[int] = []
    method = helpers.Counter(1).increment
    for function in (closure, lambda: 1, numbers.append, method, helpers.Counter):
        assert callables.find(function) is None


def test_different_functions_have_different_numbers() -> None:
    numbers = {callables.find(one) for one in (helpers.add, helpers.echo, torch.add, torch.mul)}
    assert len(numbers) == 4


def test_a_function_that_was_replaced_goes_by_value(module: types.ModuleType) -> None:
    old = module.function
    assert callables.find(old) is not None
    define(module, "return 2")
    assert callables.find(old) is None
    assert callables.find(module.function) is not None


def test_a_module_that_goes_by_value_later_does(module: types.ModuleType) -> None:
    assert callables.find(module.function) is not None
    cloudpickle.register_pickle_by_value(module)
    try:
        assert callables.find(module.function) is None
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert callables.find(module.function) is not None


def test_a_function_that_was_replaced_here_is_found_anew(module: types.ModuleType) -> None:
    numbered = callables.find(module.function)
    assert numbered is not None
    definitions = Definitions()
    definitions.learn(1, numbered.number, numbered.definition)
    assert definitions.resolve(1, numbered.number)() == 1
    define(module, "return 2")
    assert definitions.resolve(1, numbered.number)() == 2


def test_functions_are_not_kept_alive(module: types.ModuleType) -> None:
    numbered = callables.find(module.function)
    before = len(callables._numbered)
    define(module, "return 2")
    gc.collect()
    assert len(callables._numbered) < before
    assert callables.find(module.function) != numbered


def test_when_there_are_too_many_functions_go_with_each_call(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callables, "MOST_FUNCTIONS", 0)
    assert callables.find(module.function) is None


def test_a_definition_that_cannot_be_imported_here_fails_each_call_alike() -> None:
    definitions = Definitions()
    definitions.learn(1, 1, pickler.dumps(helpers.add).head.replace(b"helpers", b"no_such"))
    for _ in range(2):
        with pytest.raises(ImportError, match="no_such"):
            definitions.resolve(1, 1)


def test_each_caller_has_numbers_of_its_own_until_it_is_gone() -> None:
    definitions = Definitions()
    definitions.learn(1, 1, pickler.dumps(len).head)
    definitions.learn(2, 1, pickler.dumps(abs).head)
    assert definitions.resolve(1, 1) is len
    assert definitions.resolve(2, 1) is abs
    definitions.forget(1)
    with pytest.raises(ProtocolError, match="function 1, which is not defined"):
        definitions.resolve(1, 1)
    assert definitions.resolve(2, 1) is abs


@pytest.mark.parametrize(("number", "size"), [(0, 1), (-1, 1), (1 << 30, 1), (1, 1 << 20)])
def test_definitions_are_bounded(number: int, size: int) -> None:
    with pytest.raises(ProtocolError, match="numbers go up to"):
        Definitions().learn(1, number, b"x" * size)


def test_a_callee_that_is_lost_knows_nothing_any_more() -> None:
    told = Told()
    held = told.to(1)
    held.add(5)
    assert 5 in told.to(1)
    told.forget(1)
    held.add(6)  # by a call that was on its way when the callee was lost
    assert told.to(1) == set()
