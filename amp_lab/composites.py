"""Operations that torch builds from others, taken apart so that autocast reaches the parts.

torch's own autocast sits below the operator library and sees, say, the matrix products inside
`torch.gru`. A `TorchFunctionMode` sees only `torch.gru`. These are the ones whose parts are on a
list: functions written in Python are run with the mode switched on again (`opened`), those
written in C++ are written down here once more, with the same operations in the same order.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from amp_lab.recurrent import RECURRENT

_CHECKS = [
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
]


@functools.cache
def opened(func: Callable) -> Callable:
    """Return a copy of a Python function that does not hand itself to the active mode.

    `torch.nn.functional.normalize` starts with "is there a mode? then let the mode run me". With
    that question answered no, its body runs and the operations within meet the mode one by one.
    """
    assert isinstance(func, types.FunctionType)
    globals_ = func.__globals__ | dict.fromkeys(_CHECKS, lambda *_: False)
    copy = types.FunctionType(
        func.__code__, globals_, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _AsIs:
    """The core that `amp_lab.recurrent` computes with, when autocast does the casting."""

    product = staticmethod(F.linear)

    def __call__(self, func: Callable, *args: Any) -> Any:
        return func(*args)

    def cast(self, x: Tensor) -> Tensor:
        return x

    take = cast


def recurrent(name: str) -> Callable:
    return functools.partial(RECURRENT[name], _AsIs())


def tensordot(a: Tensor, b: Tensor, dims_a: Sequence[int], dims_b: Sequence[int]) -> Tensor:
    """A matrix product of the reshaped inputs."""
    for i, j in zip(dims_a, dims_b, strict=True):  # a dimension of size 1 meets all of the other
        if a.shape[i] == 1:
            b = b.sum(j, keepdim=True)
        elif b.shape[j] == 1:
            a = a.sum(i, keepdim=True)
    rest_a = [i for i in range(a.dim()) if i not in {d % a.dim() for d in dims_a}]
    rest_b = [j for j in range(b.dim()) if j not in {d % b.dim() for d in dims_b}]
    shape = [a.shape[i] for i in rest_a] + [b.shape[j] for j in rest_b]
    size = 1
    for i in dims_a:
        size *= a.shape[i]
    left = a.permute(rest_a + list(dims_a)).reshape(-1, size)
    right = b.permute(list(dims_b) + rest_b).reshape(size, -1)
    return torch.mm(left, right).reshape(shape)
