"""Random pickles, of pieces that attacks are made of: nothing happens but refusals."""

from __future__ import annotations

import os
import pickle
import subprocess
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorplay.distributed.rpc import allow, pickler
from tensorplay.distributed.rpc.allow import Guard, Policy
from tensorplay.errors import NotAllowedError
from tests.security import served
from tests.security.test_restricted import SERVED, dict_of, name, number, old_name, stream, text

NAMES = [
    *[("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "getattr")],
    *[("builtins", "bytearray"), ("builtins", "list"), ("builtins", "dict"), ("builtins", "set")],
    *[("collections", "deque"), ("collections", "defaultdict"), ("collections", "OrderedDict")],
    *[
        (SERVED, one)
        for one in ("add", "run", "os.system", "_private", "Counter", "Listing", "Net")
    ],
    *[(SERVED, one) for one in ("Meta", "Restored", "hand_out", "make_adder", "executed")],
    *[("torch.nn", "Linear"), ("torch", "float32"), ("torch", "Size"), ("torch", "load")],
    ("tensorplay.distributed.rpc.pickler", "_class_method"),
    ("tensorplay.distributed.rpc.pickler", "_native"),
    ("tensorplay.distributed.rpc.pickler", "_set_attributes"),
    ("tensorplay.distributed.rpc.pickler", "_tensor_at"),
]
PIECES = st.one_of(
    st.sampled_from([name(*one) for one in NAMES] + [old_name(*one) for one in NAMES]),
    st.sampled_from(["system", "__class__", "__globals__", "count", "x"]).map(text),
    st.integers(-3, 3).map(number),
    st.sampled_from(
        [
            *(pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST),
            *(pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
            *(pickle.LIST, pickle.DICT, pickle.FROZENSET, pickle.REDUCE, pickle.NEWOBJ),
            *(pickle.NEWOBJ_EX, pickle.BUILD, pickle.OBJ, pickle.APPEND, pickle.APPENDS),
            *(pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS, pickle.POP, pickle.DUP),
            *(pickle.MEMOIZE, pickle.BINGET + b"\0", pickle.BINPUT + b"\0", pickle.STACK_GLOBAL),
            dict_of(total=number(1), __class__=pickle.NONE),
            dict_of(total=number(1)),
        ]
    ),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, min_size=2, max_size=24))
def test_no_pickle_does_anything(pieces: list[bytes]) -> None:
    guard = Guard(Policy([SERVED, "torch.nn"]), "mallory")
    before = dict(vars(served.Counter))
    result: Any = None
    with (
        mock.patch.object(os, "system") as system,
        mock.patch.object(subprocess, "run") as run,
        mock.patch.object(subprocess, "Popen") as popen,
        allow.guarding(guard),
    ):
        try:
            result = pickler.loads(stream(b"".join(pieces)), ())
        except Exception:
            result = None
        assert not any(one.called for one in (system, run, popen))
        try:
            guard.check_request(result, (), {})
        except NotAllowedError:
            pass
        else:  # what may be called by what came out is what is allowed
            assert guard.policy.may_call(result) or allow._registered(result)
    assert served.executed == []
    assert dict(vars(served.Counter)) == before
