"""The table of the migration guide has every public name of what it is about."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.docs.snippets import ROOT

#: All that stands in a cell of a table.
NAMED = {
    name
    for row in re.findall(
        r"^\| .+ \|$",
        (ROOT / "docs" / "migrating-from-torch-rpc.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    for name in re.findall(r"\w+", row)
}

PLACES = [
    "torch.distributed.rpc",
    "torch.distributed.rpc.functions",
    "torch.distributed.rpc.backend_registry",
    "torch.distributed.rpc:RRef",
    "torch.distributed.autograd",
    "torch.distributed.optim",
    "torch.distributed.optim:DistributedOptimizer",
    "torch.distributed.nn.api.remote_module:RemoteModule",
]

#: Prints the public names that modules and classes of torch's define themselves.
_LIST = """
import inspect, sys, torch
from importlib import import_module

for place in sys.argv[1:]:
    where, _, attribute = place.partition(":")
    thing = import_module(where)
    for name in dir(getattr(thing, attribute) if attribute else thing):
        if name[0] == "_":
            continue
        if attribute:
            own = not hasattr(torch.nn.Module, name)
        else:
            value = getattr(thing, name)
            home = getattr(value, "__module__", None) or ""
            own = any(part in home for part in ("rpc", "distributed.autograd", "optim"))
            own = own and not inspect.ismodule(value)
        if own:
            print(place, name)
"""


def test_every_public_name_of_torch_is_in_the_table() -> None:
    # In a process of its own: torch's RPC has no business in that of other tests.
    command = [sys.executable, "-c", _LIST, *PLACES]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    names = [line.split() for line in listed.stdout.splitlines()]
    assert {place for place, _ in names} == set(PLACES)
    assert not [pair for pair in names if pair[1] not in NAMED]
