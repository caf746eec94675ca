from __future__ import annotations

import torch

import tensorplay.nn
from tensorplay.nn import Module, Parameter


def test_names_are_those_of_torch() -> None:
    assert Module is torch.nn.Module
    assert Parameter is torch.nn.Parameter
    assert tensorplay.nn.Linear is torch.nn.Linear
    assert tensorplay.nn.functional is torch.nn.functional
    assert "Conv2d" in dir(tensorplay.nn)
