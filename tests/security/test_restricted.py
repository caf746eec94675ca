"""Attacks on the unpickler that does not trust who sends.

Each pickle is written by hand, as an attacker would. None must have an effect.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.distributed.rpc import allow, pickler
from tensorplay.distributed.rpc.allow import Guard, Policy
from tensorplay.distributed.rpc.restricted import MOST_NESTED
from tensorplay.errors import ConfigError, NotAllowedError, ProtocolError
from tests.security import served

SERVED = "tests.security.served"
TORCH_MODULE = "torch.nn.modules.module"
violations: list[int] = []


@pytest.fixture(autouse=True)
def no_effect() -> Any:
    """Nothing that an attack wanted to run has run."""
    served.executed.clear()
    violations.clear()
    yield
    assert served.executed == []
    assert served.Counter.total == 0
    assert not hasattr(torch.nn.Linear, "polluted")


def load(data: bytes, *entries: str, tensors: tuple[torch.Tensor, ...] = ()) -> Any:
    guard = Guard(Policy(entries), "mallory", lambda: violations.append(1))
    with allow.guarding(guard):
        return pickler.loads(data, tensors)


def roundtrip(obj: Any, *entries: str) -> Any:
    pickled = pickler.dumps(obj)
    guard = Guard(Policy(entries), "alice")
    with allow.guarding(guard):
        return pickler.loads(pickled.head, pickled.tensors, pickled.buffers)


# Building blocks of pickles.


def text(value: str) -> bytes:
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def name(module: str, qualname: str) -> bytes:
    return text(module) + text(qualname) + pickle.STACK_GLOBAL


def old_name(module: str, qualname: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{qualname}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def call(function: bytes, *args: bytes) -> bytes:
    return function + tuple_of(*args) + pickle.REDUCE


def number(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def dict_of(**items: bytes) -> bytes:
    pairs = b"".join(text(key) + value for key, value in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS


def stream(body: bytes) -> bytes:
    return pickle.PROTO + b"\x05" + body + pickle.STOP


COMMAND = text("echo pwned")

#: Attacks by names, with what is allowed: the module itself, and torch.nn.
BY_NAME = {
    "os.system": call(name("os", "system"), COMMAND),
    "posix.system": call(name("posix", "system"), COMMAND),
    "os.system by GLOBAL": call(old_name("os", "system"), COMMAND),
    "os.system by INST": pickle.MARK + COMMAND + pickle.INST + b"os\nsystem\n",
    "os.system by OBJ": pickle.MARK + name("os", "system") + COMMAND + pickle.OBJ,
    "subprocess.Popen": call(name("subprocess", "Popen"), COMMAND),
    "eval": call(name("builtins", "eval"), COMMAND),
    "exec": call(name("builtins", "exec"), COMMAND),
    "compile": call(name("builtins", "compile"), COMMAND, COMMAND, text("exec")),
    "__import__": call(name("builtins", "__import__"), text("os")),
    "open": call(name("builtins", "open"), text("/etc/passwd")),
    "getattr": call(name("builtins", "getattr"), name(SERVED, "Counter"), text("os")),
    "setattr": call(name("builtins", "setattr"), name(SERVED, "Counter"), text("total"), number(1)),
    "vars": call(name("builtins", "vars"), name(SERVED, "Counter")),
    "globals": call(name("builtins", "globals")),
    "type": call(name("builtins", "type"), text("x"), tuple_of(), pickle.EMPTY_DICT),
    "map": call(name("builtins", "map"), name(SERVED, "add"), pickle.EMPTY_LIST),
    "operator.attrgetter": call(name("operator", "attrgetter"), text("os.system")),
    "operator.methodcaller": call(name("operator", "methodcaller"), text("count")),
    "operator.itemgetter": call(name("operator", "itemgetter"), number(0)),
    "functools.partial": call(name("functools", "partial"), name(SERVED, "add"), number(1)),
    "functools.reduce": call(name("functools", "reduce"), name(SERVED, "add"), pickle.EMPTY_LIST),
    "itertools.starmap": call(name("itertools", "starmap"), name(SERVED, "add"), tuple_of()),
    "importlib": call(name("importlib", "import_module"), text("os")),
    "runpy": call(name("runpy", "run_path"), COMMAND),
    "pickle.loads": call(name("pickle", "loads"), COMMAND),
    "_pickle.loads": call(name("_pickle", "loads"), COMMAND),
    "marshal.loads": call(name("marshal", "loads"), COMMAND),
    "types.CodeType": name("types", "CodeType"),
    "types.FunctionType": name("types", "FunctionType"),
    "copyreg": call(name("copyreg", "_reconstructor"), name(SERVED, "Counter")),
    "cloudpickle": call(name("cloudpickle.cloudpickle", "subimport"), text("os")),
    "cloudpickle's code": name("cloudpickle.cloudpickle", "_make_function"),
    "torch.load": call(name("torch.serialization", "load"), COMMAND),
    "torch.hub": call(name("torch.hub", "load"), COMMAND, COMMAND),
    "torch.jit": call(name("torch.jit._serialization", "load"), COMMAND),
    "torch's compiler of C++": call(name("torch.utils.cpp_extension", "load_inline"), COMMAND),
    "torch.from_file": call(
        name("tensorplay.distributed.rpc.pickler", "_native"), text("from_file")
    ),
    "the pickler's import": call(name("tensorplay.distributed.rpc.pickler", "_import"), text("os")),
    "the pickler's scripts": call(
        name("tensorplay.distributed.rpc.pickler", "_load_script"), pickle.SHORT_BINBYTES + b"\0"
    ),
    "the pickler's operators": call(
        name("tensorplay.distributed.rpc.pickler", "_operators"), text("aten"), text("from_file")
    ),
    "script modules": name("tensorplay.distributed.nn.api._script", "_script_module_receiver"),
    "a class method of the library": call(
        name("tensorplay.distributed.rpc.pickler", "_class_method"),
        name(SERVED, "Counter"),
        text("__subclasses__"),
    ),
    # From an allowed module to what it has imported.
    "an imported module": name(SERVED, "os"),
    "an imported module's function": call(name(SERVED, "os.system"), COMMAND),
    "an imported function": call(name(SERVED, "run"), COMMAND),
    "an imported module of an imported one": name(SERVED, "subprocess.os.system"),
    "a module in a class": call(name(SERVED, "Counter.os.system"), COMMAND),
    "a walk over a class": name(SERVED, "Counter.__init__.__globals__"),
    "a walk to all classes": name(SERVED, "Counter.__base__.__subclasses__"),
    "a class's class": name(SERVED, "Counter.__class__"),
    "a private function": call(name(SERVED, "_private"), COMMAND),
    "a value of the module": name(SERVED, "executed"),
    "the module's names": name(SERVED, "__dict__"),
    "the module's loader": name(SERVED, "__loader__.load_module"),
    "a metaclass": call(name(SERVED, "Meta"), text("x"), tuple_of(), pickle.EMPTY_DICT),
    "a module next to it": name("tests.security.helpers", "dial"),
    "a module whose name begins alike": name(SERVED + "_more", "add"),
    "a module that is not imported": name(SERVED + ".__main__", "add"),
    # Within torch.nn.
    "torch.nn's imports": name("torch.nn.modules.module", "torch.load"),
    "a getter in torch.nn": name("torch.nn.cpp", "OrderedDictWrapper"),
    "the compiler": name(TORCH_MODULE, "Module.compile"),
    "a private method": name(TORCH_MODULE, "Module._call_impl"),
    "hooks of all modules": name(TORCH_MODULE, "register_module_forward_hook"),
    # What is found out by calling what is allowed.
    "the result of a function": call(call(name(SERVED, "hand_out")), COMMAND),
    # Out of the stream.
    "a persistent object": COMMAND + pickle.BINPERSID,
    "a persistent object by name": pickle.PERSID + b"os.system\n",
}


@pytest.mark.parametrize("attack", BY_NAME)
def test_attacks_by_name(attack: str) -> None:
    with pytest.raises(NotAllowedError, match="asked for by 'mallory' and refused") as caught:
        load(stream(BY_NAME[attack]), SERVED, "torch.nn")
    assert violations, "it was not counted"
    assert SERVED in str(caught.value)


def test_these_attacks_work_without_a_guard() -> None:
    """The pickles are well-formed: what refuses them is the guard."""
    for attack in ("a value of the module", "an imported function", "os.system"):
        pickletools.dis(stream(BY_NAME[attack]), out=io.StringIO())
    assert pickle.loads(stream(BY_NAME["a value of the module"])) is served.executed
    assert pickle.loads(stream(name(SERVED, "os.system"))) is os.system


@pytest.mark.parametrize(
    "names", [(b"\x88", text("add")), (text(SERVED), b"\x88"), (text(SERVED), pickle.NONE)]
)
def test_names_that_are_no_texts(names: tuple[bytes, bytes]) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        load(stream(names[0] + names[1] + pickle.STACK_GLOBAL), SERVED)


@pytest.mark.parametrize("opcode", [pickle.EXT1 + b"\x01", pickle.EXT2 + b"\x01\0"])
def test_the_extension_registry_is_not_used(opcode: bytes) -> None:
    with pytest.raises(NotAllowedError, match="extension 1"):
        load(stream(opcode), SERVED)


# State of what is there already.


@pytest.mark.parametrize(
    "target",
    [
        name(SERVED, "Counter"),
        name(SERVED, "add"),
        name("torch.nn", "Linear"),
        name("builtins", "list"),
    ],
)
def test_classes_and_functions_cannot_be_changed(target: bytes) -> None:
    """BUILD sets attributes of whatever is on the stack: also of what everybody uses."""
    state = tuple_of(pickle.NONE, dict_of(total=number(7), polluted=number(7)))
    with pytest.raises(NotAllowedError, match="the state of"):
        load(stream(target + state + pickle.BUILD), SERVED, "torch.nn")


@pytest.mark.parametrize("attribute", ["__class__", "__dict__", "__init__"])
def test_what_an_object_is_cannot_be_changed(attribute: str) -> None:
    made = name(SERVED, "Counter") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    state = tuple_of(pickle.NONE, dict_of(**{attribute: name(SERVED, "Net")}))
    with pytest.raises(NotAllowedError, match=attribute):
        load(stream(made + state + pickle.BUILD), SERVED)


def test_a_state_that_hides_its_names_is_refused() -> None:
    made = name(SERVED, "Counter") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    other = name(SERVED, "Net") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    with pytest.raises(ProtocolError, match="a state that is no dict"):
        load(stream(made + other + pickle.BUILD), SERVED)


def test_items_are_added_to_containers_only() -> None:
    made = name(SERVED, "Net") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    for addition in (
        number(1) + pickle.APPEND,
        pickle.MARK + number(1) + pickle.APPENDS,
        text("a") + number(1) + pickle.SETITEM,
        pickle.MARK + text("a") + number(1) + pickle.SETITEMS,
        pickle.MARK + number(1) + pickle.ADDITEMS,
    ):
        with pytest.raises(NotAllowedError, match="the items of"):
            load(stream(made + addition), SERVED)


# Bombs.


@pytest.mark.parametrize(
    ("constructor", "args"),
    [
        ("bytearray", (10**9,)),
        ("bytes", (10**9,)),
        ("list", (range(10**9),)),
        ("tuple", (range(10**9),)),
        ("set", (range(10**9),)),
        ("frozenset", (range(10**9),)),
        ("dict", ()),
        ("str", (10**9,)),
        ("int", ("9" * 5000,)),
        ("object", ()),
    ],
)
def test_plain_types_make_nothing_large(constructor: str, args: tuple[Any, ...]) -> None:
    body = name("builtins", constructor) + pickle.dumps(args, 5)[2:-1] + pickle.REDUCE
    if b"\x95" in body:  # frames may not begin within another
        body = name("builtins", constructor)
        body += tuple_of(*(_plain(arg) for arg in args)) + pickle.REDUCE
    with pytest.raises(NotAllowedError, match=f"a call of builtins.{constructor}"):
        load(stream(body), SERVED)


def _plain(value: Any) -> bytes:
    if isinstance(value, range):
        return call(name("builtins", "range"), number(value.stop))
    return text(value) if isinstance(value, str) else number(value)


@pytest.mark.parametrize("container", ["Counter", "deque", "OrderedDict"])
def test_collections_make_nothing_large(container: str) -> None:
    large = call(name("builtins", "range"), number(10**9))
    with pytest.raises(NotAllowedError, match=container):
        load(stream(call(name("collections", container), large)))


@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 1_000_000])
def test_nesting_bombs(depth: int) -> None:
    """Hashing a tuple recurses in C, and ends the process where the stack does."""
    deep = pickle.EMPTY_TUPLE + pickle.TUPLE1 * depth
    body = pickle.EMPTY_DICT + deep + number(1) + pickle.SETITEM
    with pytest.raises(ProtocolError, match="nested deeper"):
        load(stream(body))


def test_nesting_bombs_of_frozen_sets_and_mixed_tuples() -> None:
    sets = pickle.EMPTY_TUPLE
    for _ in range(MOST_NESTED + 1):
        sets = pickle.MARK + sets + pickle.FROZENSET
    with pytest.raises(ProtocolError, match="nested deeper"):
        load(stream(sets))
    mixed = pickle.EMPTY_TUPLE + (pickle.NONE + pickle.TUPLE2) * (MOST_NESTED + 1)
    with pytest.raises(ProtocolError, match="nested deeper"):
        load(stream(mixed))


@pytest.mark.parametrize("depth", [MOST_NESTED + 2, 20_000])
def test_nesting_bombs_of_what_is_let_go_recursively(depth: int) -> None:
    """Deques and default dicts end the process when a deep nest of them is let go."""
    queue = name("collections", "deque") + pickle.EMPTY_TUPLE + pickle.REDUCE
    appended = queue * depth + pickle.APPEND * (depth - 1)
    extended = (queue + pickle.MARK) * (depth - 1) + queue + pickle.APPENDS * (depth - 1)
    made = queue
    for _ in range(min(depth, 1000)):
        made = name("collections", "deque") + tuple_of(pickle.EMPTY_LIST + made + pickle.APPEND)
        made += pickle.REDUCE
    usual = name("collections", "defaultdict") + tuple_of(name("builtins", "list")) + pickle.REDUCE
    item = usual + number(1)
    set_one = item * (depth - 1) + usual + pickle.SETITEM * (depth - 1)
    set_all = (usual + pickle.MARK + number(1)) * (depth - 1) + usual
    set_all += pickle.SETITEMS * (depth - 1)
    mixed = (
        (item + queue) * (depth // 2)
        + pickle.NONE
        + (pickle.APPEND + pickle.SETITEM) * (depth // 2)
    )
    for body in (appended, extended, made, set_one, set_all, mixed):
        with pytest.raises(ProtocolError, match="nested deeper"):
            load(stream(body))


def test_slices_are_not_nested() -> None:
    deep = name("builtins", "slice") + tuple_of(number(1), number(2), number(3)) + pickle.REDUCE
    outer = name("builtins", "slice") + tuple_of(deep, number(2), number(3)) + pickle.REDUCE
    with pytest.raises(NotAllowedError, match=r"a call of builtins\.slice"):
        load(stream(outer))


@pytest.mark.parametrize(
    "body",
    [
        pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 40),
        pickle.BINBYTES8 + struct.pack("<Q", 1 << 40),
        pickle.BINUNICODE8 + struct.pack("<Q", 1 << 40),
        pickle.FRAME + struct.pack("<Q", 1 << 40),
        pickle.LONG4 + struct.pack("<i", (1 << 31) - 1),
        pickle.INT + b"9" * 10_000 + b"\n",
    ],
)
def test_announced_sizes_allocate_nothing(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        load(stream(body))


def test_a_large_memo_index_allocates_nothing() -> None:
    body = pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 0xFFFFFFF0)
    assert load(stream(body)) is None


@pytest.mark.parametrize(
    "body",
    [b"", pickle.REDUCE, pickle.BUILD, pickle.POP + pickle.POP, pickle.BINGET + b"\x07", b"\xff"],
)
def test_damaged_pickles(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        load(stream(body))


# What must work.


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(1 << 70),
        1.5,
        2 + 1j,
        "text",
        b"bytes",
        bytearray(b"bytes"),
        [1, [2, (3, {"a": {4}})]],
        frozenset({1, 2}),
        slice(1, 2, 3),
        range(1, 9, 2),
        ...,
        collections.OrderedDict(a=1),
        collections.deque([1, 2], 3),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        torch.float32,
        torch.Size([2, 3]),
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
        (1,) * 200,
        int,
        dict,
    ],
)
def test_plain_values_travel(value: Any) -> None:
    came = roundtrip(value)
    assert came == value
    assert type(came) is type(value)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("k"), OSError(2, "gone"), RuntimeError()]
)
def test_exceptions_of_python_and_of_the_library_travel(error: Exception) -> None:
    came = roundtrip(error)
    assert (type(came), came.args) == (type(error), error.args)
    assert str(roundtrip(NotAllowedError("no"))) == "no"


def test_tensors_travel() -> None:
    tensor = torch.arange(3.0)
    came = roundtrip({"x": [tensor, torch.nn.Parameter(tensor)]})
    assert torch.equal(came["x"][0], tensor)
    tensor.note = "kept"  # type: ignore[attr-defined]
    assert roundtrip(tensor).note == "kept"


def test_allowed_objects_travel() -> None:
    assert roundtrip(served.add, SERVED) is served.add
    assert roundtrip(served.Counter, SERVED) is served.Counter
    assert roundtrip(served.Counter.Inner, SERVED) is served.Counter.Inner
    assert roundtrip(served.Counter(5), SERVED).value == 5
    assert roundtrip(served.Reduced(5), SERVED).value == 5
    assert isinstance(roundtrip(served.Restored(), SERVED), served.Restored)
    assert roundtrip(served.Listing([1, 2]), SERVED) == [1, 2]
    assert roundtrip(served.Counter.starting_at, SERVED)(3).value == 3


def test_a_single_name_allows_that_and_no_more() -> None:
    entry = f"{SERVED}.Counter"
    assert roundtrip(served.Counter(5), entry).value == 5
    assert roundtrip(served.Counter.Inner, entry) is served.Counter.Inner
    with pytest.raises(NotAllowedError):
        roundtrip(served.add, entry)


def test_a_function_of_torch_by_name() -> None:
    assert roundtrip(torch.add, "torch.add") is torch.add
    with pytest.raises(NotAllowedError, match=r"torch\.mul"):
        roundtrip(torch.mul, "torch.add")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 3),
        lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU()),
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16),
        lambda: torch.nn.LSTM(2, 3),
        lambda: torch.nn.BatchNorm1d(4),
        lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))]),
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
    ],
)
def test_modules_of_torch_travel(make: Callable[[], torch.nn.Module]) -> None:
    module = make()
    if hasattr(module, "parametrizations"):
        pytest.skip("its class is made when it is parametrized, and goes by value")
    came = roundtrip(module, "torch.nn")
    assert type(came) is type(module)
    for ours, theirs in zip(module.parameters(), came.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_code_by_value_is_refused() -> None:
    with pytest.raises(NotAllowedError, match="code that was sent by value"):
        roundtrip(lambda: None, SERVED)


# What may be called.


def check(function: Any, *args: Any, entries: tuple[str, ...] = (SERVED, "torch.nn")) -> None:
    Guard(Policy(entries), "mallory").check_request(function, args, {})


def test_only_what_is_allowed_is_called() -> None:
    good: list[Any] = [served.add, served.Counter, served.Counter(1).count]
    for function in (*good, torch.nn.functional.relu):
        check(function)
    check(served.Counter.starting_at)
    check(torch.nn.Linear(2, 2))
    check(served.make_adder())
    bad: list[Any] = [
        os.system,
        bytearray,
        list,
        print,
        torch.load,
        served.subprocess.run,
        served._private,
        served.Counter(1)._secret,
        served.hand_out(),
        torch.nn.Linear(2, 2).compile,
        served.Net().compile,
        torch.add,
        "add",
        None,
        [],
    ]
    for function in bad:
        with pytest.raises(NotAllowedError, match="a call of"):
            check(function)


def test_what_the_library_is_to_call_is_vetted() -> None:
    from tensorplay.distributed.nn.api import _remote_ops as ops

    check(ops._place_module, torch.nn.Linear, (2, 2), {}, "cpu")
    for function in (os.system, bytearray, torch.load):
        with pytest.raises(NotAllowedError, match="a call of"):
            check(ops._place_module, function, (), {}, "cpu")
    with pytest.raises(NotAllowedError, match="by name"):
        Guard(Policy(), "mallory").check_request(ops._place_module, (), {"module_cls": os.system})


def test_what_only_builds_is_not_called() -> None:
    with pytest.raises(NotAllowedError):
        check(pickler._native, "from_file")


@pytest.mark.parametrize(
    "method", ["_secret", "__reduce__", "__init__", "doubled", "missing", "os"]
)
def test_methods_are_public_ones_of_allowed_classes(method: str) -> None:
    guard = Guard(Policy([SERVED]), "mallory")
    with allow.guarding(guard):
        allow.check_method(served.Counter(1), "count")
        with pytest.raises(NotAllowedError, match="the method"):
            allow.check_method(served.Counter(1), method)
        with pytest.raises(NotAllowedError, match="the method"):
            allow.check_method("text", "upper")


def test_who_may_only_have_gradients_calls_nothing_else() -> None:
    from tensorplay.distributed.autograd.engine import _run_backward
    from tensorplay.distributed.nn.api import _remote_ops as ops

    guard = Guard(Policy(), "mallory", gradients_only=True)
    guard.check_request(_run_backward, (), {})
    for function in (served.add, ops._remote_forward, pickler._native):
        with pytest.raises(NotAllowedError, match="their keys allow no calls"):
            guard.check_request(function, (), {})


def test_a_name_in_a_gathering_must_be_the_senders() -> None:
    with allow.guarding(Guard(Policy(), "mallory")):
        with pytest.raises(NotAllowedError, match="in the name of 'alice'"):
            allow.check_sender("alice")
        allow.check_sender("mallory")


# What can be allowed.


@pytest.mark.parametrize(
    "entry", ["os", "os.path", "builtins", "subprocess", "torch", "torch.utils", "tensorplay"]
)
def test_what_would_allow_everything_cannot_be_allowed(entry: str) -> None:
    with pytest.raises(ConfigError, match="would allow everything"):
        Policy([entry])


@pytest.mark.parametrize("entry", ["no_such_module", f"{SERVED}.nothing", f"{SERVED}.os", ".x", ""])
def test_what_is_not_there_cannot_be_allowed(entry: str) -> None:
    with pytest.raises(ConfigError, match="cannot allow"):
        Policy([entry])


def test_without_a_guard_everything_is_loaded() -> None:
    pickled = pickler.dumps(os.getpid)
    assert pickler.loads(pickled.head, ()) is os.getpid


#: What of the library a pickle may call to build an object, and what a request may call. Whoever
#: adds to these has read what ``wire_safe`` says.
BUILDS = [
    "GroupInfo",
    "LoadReport",
    "ParamInfo",
    "Placement",
    "RRef._deserialize",
    "RemoteModule",
    "ShardInfo",
    "WorkerInfo",
    "_RemoteModule",
    "_as_subclass",
    "_bound",
    "_class_method",
    "_generated_methods",
    "_native",
    "_remote_module_receiver",
    "_set_attributes",
    "_unflatten",
]
CALLS = [
    "_backward",
    "_clip",
    "_compile",
    "_create_module",
    "_describe_module",
    "_drop",
    "_fail",
    "_finish",
    "_gather",
    "_get_extra_state",
    "_get_grads",
    "_get_submodule",
    "_get_tensor",
    "_get_type",
    "_load_state",
    "_norms",
    "_param_rrefs",
    "_place_module",
    "_register_module",
    "_release_context",
    "_remote_forward",
    "_require",
    "_restore_module",
    "_run_backward",
    "_save_state",
    "_scale",
    "_set_extra_state",
    "_set_grads",
    "_set_submodule",
    "_set_training",
    "_take",
    "_take_there",
    "_to_empty",
    "_unscale",
    "_values",
    "_write",
    "_zero",
    "add_group",
    "create_remotely",
    "load",
    "remove_last_group",
    "state",
    "step",
    "zero_grad",
]


def test_what_of_the_library_may_be_named_is_written_down() -> None:
    import tensorplay.distributed.nn
    import tensorplay.distributed.optim  # noqa: F401

    assert sorted(key[1] for key, safe in allow._safe.items() if safe.builds) == BUILDS
    assert sorted(key[1] for key, safe in allow._safe.items() if safe.calls) == CALLS
    for (module, qualname), safe in allow._safe.items():
        assert module.startswith("tensorplay.")
        assert (safe.obj.__module__, safe.obj.__qualname__) == (module, qualname)
