"""Operations that torch builds from others, taken apart so that autocast reaches the parts.

torch's own autocast sits inside the operator library: it meets the matrix products within
`torch.gru` one by one. A `TorchFunctionMode` sits outside and meets `torch.gru`. So for the policy
`PARTS` it calls `take_apart`. Functions written in Python are run with the mode switched on again
(`_open`). What is written in C++ is written once more here: same operations, same order.

In every function below, `caster` is the `CastMode`. It is switched off, as torch does while a mode
is at work; `with caster` switches it on, `caster.lower` and `caster.float32` carry out a policy.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from string import ascii_letters
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from amp_lab import recurrent_parts


def take_apart(caster: Any, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
    """Call `func(*args, **kwargs)`, with `caster` applied to the operations it consists of."""
    rules = _IN_PYTHON if isinstance(func, FunctionType) else _IN_CPP
    name = func.__name__.partition(".")[0]  # torch.ops.aten.gru.input is named "gru.input"
    return rules.get(name, _open)(caster, func, *args, **kwargs)


def _open(caster: Any, func: Callable, *args: Any, **kwargs: Any) -> Any:
    with caster:
        return opened(func)(*args, **kwargs)


@cache
def opened(func: FunctionType) -> FunctionType:
    """Return a copy of a Python function that does not hand itself over to an active mode.

    `torch.nn.functional.normalize` begins by asking `has_torch_function`: is a mode active? Then
    the mode is to run it. The copy is told no, and the operations in its body meet the mode.
    """
    questions = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    return _copy(func, func.__globals__ | dict.fromkeys(questions, lambda *_: False))


def _copy(func: FunctionType, namespace: dict[str, Any]) -> FunctionType:
    copy = FunctionType(
        func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _attention(caster: Any, func: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """For speed, leave the mode off and put casts into the copy: its body makes 40 small calls."""
    if kwargs.get("need_weights", True):  # then it calls more than these two listed functions
        return _open(caster, func, *args, **kwargs)
    namespace = dict(func.__globals__)
    for listed in (F.linear, F.scaled_dot_product_attention):
        namespace[listed.__name__] = _casting(caster, listed)
    for name in func.__code__.co_names:
        if name.startswith("_in_projection"):  # they call F.linear, too
            namespace[name] = _copy(namespace[name], namespace)
    return _copy(func, namespace)(*args, **kwargs)


def _casting(caster: Any, func: Callable) -> Callable:
    return lambda *args, **kwargs: caster.lower(func, args, kwargs)


def _loss(
    caster: Any, func: Callable, input: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Listed as float32, but Python broadcasts the inputs before they are cast."""
    if input.shape == target.shape:
        return caster.float32(func, (input, target, *args), kwargs)
    return _open(caster, func, input, target, *args, **kwargs)


def _pad(
    caster: Any,
    func: Callable,
    input: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    """`reflection_pad1d`, `2d` and `replication_pad1d` to `3d` are listed."""
    if len(pad) // 2 in {"reflect": (1, 2), "replicate": (1, 2, 3)}.get(mode, ()):
        return caster.float32(func, (input, pad, mode, value), {})
    return func(input, pad, mode, value)


def _matrix_chain(caster: Any, func: Callable, tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return func(tensors)
    return caster.lower(func, (tensors,), {})


def _matrix_power(caster: Any, func: Callable, input: Tensor, n: int) -> Tensor | None:
    if n < 0:
        with caster:
            input, n = torch.linalg.inv(input), -n
    if n < 2:
        return func(input, n)
    with caster:
        if n == 3:
            return (input @ input) @ input
        result, square = (input if n % 2 else None), input
        while n := n // 2:
            square = square @ square
            if n % 2:
                result = square if result is None else result @ square
        return result


def _pairwise_distance(
    caster: Any,
    func: Callable,
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> Tensor:
    with caster:
        return torch.norm(x1 - x2 + eps, p, -1, keepdim)


def _inner(caster: Any, func: Callable, input: Tensor, other: Tensor) -> Tensor:
    if min(input.dim(), other.dim()) == 0:
        return func(input, other)
    with caster:
        return torch.tensordot(input, other, ([-1], [-1]))


def _tensordot(
    caster: Any, func: Callable, a: Tensor, b: Tensor, dims_a: Sequence[int], dims_b: Sequence[int]
) -> Tensor:
    """A matrix product of the reshaped inputs, but a dot product where one number results."""
    for i, j in zip(dims_a, dims_b, strict=True):  # a single number meets all of the others
        if b.shape[j] == 1:
            a = a.sum(i, keepdim=True)
        elif a.shape[i] == 1:
            b = b.sum(j, keepdim=True)
    args = a, b, dims_a, dims_b
    if a.numel() == b.numel() == prod(a.shape[i] for i in dims_a):
        return func(*args)
    return caster.lower(func, args, {})


def _bilinear(
    caster: Any,
    func: Callable,
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Two products that autograd does not see: half-precision results, float32 gradients."""
    exact = func(input1, input2, weight)
    with caster, torch.no_grad():
        rows = torch.matmul(input1.reshape(-1, input1.shape[-1]), weight).transpose(0, 1)
        columns = input2.reshape(-1, 1, input2.shape[-1], 1)
        value = torch.matmul(rows.unsqueeze(-2), columns).view(exact.shape)
    result = _ValueOf.apply(exact, value.to(exact.dtype))
    return result if bias is None else result + bias


class _ValueOf(torch.autograd.Function):
    """Return the second tensor, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _einsum(
    caster: Any,
    func: Callable,
    equation: str,
    operands: Sequence[Tensor],
    path: Sequence[int] | None = None,
) -> Tensor:
    """Contract two operands at a time: a matrix product, unless no letter is summed over.

    (The gradient of a broadcast factor can differ from torch's in the last bit of float32.)
    """
    if len(operands) == 1:
        return func(equation, operands)
    terms, output = _letters(equation, operands)
    letters = output + "".join(sorted(set().union(*terms) - set(output)))
    operands = [_align(func, x, term, letters) for x, term in zip(operands, terms, strict=True)]
    for k in range(len(operands) - 1):
        i, j = sorted(path[2 * k : 2 * k + 2]) if path else (0, 1)
        right, left = operands.pop(j), operands.pop(i)
        needed = set(output).union(*(_used(x, letters) for x in operands))
        in_left, in_right = _used(left, letters) - needed, _used(right, letters) - needed
        left = _sum_over(in_left - in_right, left, letters)
        right = _sum_over(in_right - in_left, right, letters)
        if summed := in_left & in_right:
            kept = "".join(letter for letter in letters if letter not in summed)
            product = caster.lower(func, (f"{letters},{letters}->{kept}", [left, right]), {})
            result = _align(func, product, kept, letters)
        else:
            result = left * right
        operands.insert(len(operands) if path else 0, result)
    [result] = operands
    return result.reshape(result.shape[: len(output)])


def _align(einsum: Callable, x: Tensor, term: str, letters: str) -> Tensor:
    """Give `x` one dimension for each letter, of size 1 if it has none."""
    own = "".join(letter for letter in letters if letter in term)
    x = x if own == term else einsum(f"{term}->{own}", [x])
    return x[tuple(slice(None) if letter in own else None for letter in letters)]


def _used(x: Tensor, letters: str) -> set[str]:
    return {letter for letter, size in zip(letters, x.shape, strict=True) if size != 1}


def _sum_over(gone: set[str], x: Tensor, letters: str) -> Tensor:
    return x.sum([letters.index(letter) for letter in sorted(gone)], keepdim=True) if gone else x


def _letters(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the output, with letters in place of dots."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:  # implicit: the letters that occur once, in alphabetical order, capitals first
        once = [x for x in sorted(inputs) if x not in ".," and inputs.count(x) == 1]
        output = "".join(["..." * ("." in inputs), *once])
    terms = inputs.split(",")
    dotted = [x.dim() - len(t) + 3 if "." in t else 0 for x, t in zip(operands, terms, strict=True)]
    free = "".join(x for x in ascii_letters if x not in equation)[: max(dotted)]
    terms = [t.replace("...", free[len(free) - n :]) for t, n in zip(terms, dotted, strict=True)]
    return terms, output.replace("...", free)


_IN_PYTHON: dict[str, Callable] = {
    **dict.fromkeys(["huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"], _loss),
    "multi_head_attention_forward": _attention,
    "pad": _pad,
}
_IN_CPP: dict[str, Callable] = {
    "bilinear": _bilinear,
    "chain_matmul": _matrix_chain,
    "einsum": _einsum,
    "gru": recurrent_parts.network,
    "gru_cell": recurrent_parts.cell,
    "inner": _inner,
    "linalg_matrix_power": _matrix_power,
    "linalg_multi_dot": _matrix_chain,
    "lstm": recurrent_parts.network,
    "lstm_cell": recurrent_parts.cell,
    "matrix_power": _matrix_power,
    "pad": _pad,
    "pairwise_distance": _pairwise_distance,
    "rnn_relu": recurrent_parts.network,
    "rnn_relu_cell": recurrent_parts.cell,
    "rnn_tanh": recurrent_parts.network,
    "rnn_tanh_cell": recurrent_parts.cell,
    "tensordot": _tensordot,
}
