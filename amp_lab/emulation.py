"""What a tensor core computes, computed with float32 kernels: `autocast(..., emulate=True)`.

A tensor core multiplies numbers of a low-precision format, adds the products up in float32, and
the sum is rounded to the format once, when it is stored (Micikevicius et al., "Mixed Precision
Training", 2018, section 3.3). A product of two such numbers is exact in float32 (11 + 11
significant bits for float16, 24 are there), so an ordinary float32 kernel does the same
arithmetic. Only the roundings at its two ends have to be added:

    inputs   -> cast    rounded to the format, as native autocast rounds them
             -> widen   the same numbers as float32
             -> func    the float32 kernel
    result   -> narrow  rounded to the format, once

All three are nodes of the autograd graph, and their derivatives round where the backward pass of
the native kernel rounds. Going back, `narrow` widens the gradient, which arrives in the format;
the float32 kernel multiplies it with the rounded inputs; `widen` rounds the resulting gradient,
once. That holds for inputs, weights and biases alike. In one picture, for `y = F.linear(x, w)`
under float16, everything on the right is float32 holding float16 numbers or sums of products:

    x, w --.half()--> x16, w16 --.float()--> x32, w32 --linear--> y32 --.half()--> y16
    dx   <--------    dx16     <--.half()--  dx32     <---------- g32 <--.float()- g16

float16 and bfloat16 results have these dtypes, as in native mode. A format that torch has no
arithmetic for (TF32, FP8, your own) lives in float32 tensors whose values lie on its grid.

What differs from the hardware: it stores the result of a TF32 product as float32, here it is
rounded like every other; its FP8 sums may hold fewer bits than float32 (DeepSeek-V3 Technical
Report, section 3.3.2). And the emulation is only as good as the float32 kernels: leave
`torch.set_float32_matmul_precision` at "highest".
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from amp_lab.formats import FloatFormat
from amp_lab.recurrent import RECURRENT

_STORED_AS_IS = (torch.float16, torch.bfloat16)
_CASTABLE = (torch.float32, *_STORED_AS_IS)


def emulated_call(
    func: Callable,
    args: Sequence,
    kwargs: dict[str, Any],
    fmt: FloatFormat | torch.dtype,
    cast: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Return `func(*args, **kwargs)` as a tensor core computes it in the format `fmt`.

    Args:
        func: an operation of the lower-precision policy, as function or method; not an in-place
            or `out=` form (autocast leaves those alone too).
        args, kwargs: as the user gave them. float32, float16 and bfloat16 tensors are rounded to
            `fmt`, inside lists and tuples too; everything else (float64, integers, masks, numbers)
            is passed on.
        fmt: `torch.float16`, `torch.bfloat16` or any `FloatFormat`.
        cast: how a tensor argument is rounded. The default is `round_to(tensor, fmt)`; autocast
            passes its own, which remembers the rounded weights of the region and knows which
            devices it is for.

    The result is of dtype float16 or bfloat16 where `fmt` is one of these, else float32 on the
    format's grid; float64 where only float64 came in.

    What consists of several products in a row rounds after each of them, because the next one
    takes numbers of the format: recurrent networks and their cells (`amp_lab.recurrent`), `einsum`
    of three and more operands, `multi_dot` and `chain_matmul`. Everything else is one operation,
    float32 inside. That includes `scaled_dot_product_attention`: fused kernels keep its scores in
    float32, and where they round the softmax before the second product depends on the kernel.
    """
    core = _TensorCore(fmt, cast)
    several_products = _SEVERAL_PRODUCTS.get(getattr(func, "__name__", ""))
    if several_products is not None:
        return several_products(core, *args, **kwargs)
    return core(func, *args, **kwargs)


def round_to(x: Tensor, fmt: FloatFormat | torch.dtype) -> Tensor:
    """Round float32, float16 or bfloat16 `x` to `fmt`; differentiable. Other dtypes pass unchanged.

    Returns a tensor of dtype float16 or bfloat16 where `fmt` is one of these, else a float32
    tensor on the format's grid, whose gradient is rounded to the grid as well.
    """
    return _TensorCore(fmt).cast(x)


class _TensorCore:
    """Calls functions with rounded inputs, float32 inside, and a rounded result."""

    def __init__(
        self, fmt: FloatFormat | torch.dtype, cast: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.fmt = fmt if isinstance(fmt, FloatFormat) else FloatFormat.of(fmt)
        dtype = fmt.dtype if isinstance(fmt, FloatFormat) else fmt
        self.dtype = dtype if dtype in _STORED_AS_IS else None
        self._callers_cast = cast

    def __call__(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        args = _map_tensors(self.take, args)
        kwargs = {name: _map_tensors(self.take, value) for name, value in kwargs.items()}
        return _map_tensors(self.narrow, func(*args, **kwargs))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`: x is in the format already, weight and bias are taken."""
        return self.narrow(F.linear(self.widen(x), weight, bias))

    def cast(self, x: Tensor) -> Tensor:
        """Round an input to the format; other dtypes than float32 and below pass unchanged."""
        return self._callers_cast(x) if self._callers_cast else self._round(x)

    def take(self, x: Tensor) -> Tensor:
        """Round an input to the format and hold it as float32."""
        return self.widen(self.cast(x))

    def widen(self, x: Tensor) -> Tensor:
        """Hold numbers of the format as float32; going back, round the gradient."""
        if self.dtype is None:
            return _OnGrid.apply(x, self.fmt, False) if x.dtype == torch.float32 else x
        return x.float() if x.dtype == self.dtype else x

    def narrow(self, x: Tensor) -> Tensor:
        """Round a float32 result to the format; going back, take the gradient in the format."""
        return self._round(x) if x.dtype == torch.float32 else x

    def _round(self, x: Tensor) -> Tensor:
        if x.dtype not in _CASTABLE:
            return x
        if self.dtype is None:
            return _OnGrid.apply(x.float(), self.fmt, True)
        return x.to(self.dtype)


class _OnGrid(torch.autograd.Function):
    """Round the gradient to the format's grid, and the value too unless it is known to lie there.

    For formats without a dtype it does what `.half()` and `.float()` do for float16.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, fmt: FloatFormat, round_value: bool) -> Tensor:
        return fmt.round(x) if round_value else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, FloatFormat, bool], output: Tensor) -> None:
        ctx.fmt = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _OnGrid.apply(gradient, ctx.fmt, True), None, None


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in nested lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


def _einsum(core: _TensorCore, equation: str, *operands: Any) -> Tensor:
    """Contract two operands at a time, from left to right."""
    if len(operands) == 1 and not isinstance(operands[0], Tensor):
        operands = tuple(operands[0])  # einsum takes them as one list, too
    if len(operands) <= 2:
        return core(torch.einsum, equation, *operands)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:  # implicit output: the letters that occur once, in alphabetical order
        once = sorted(x for x in inputs if x not in ",." and inputs.count(x) == 1)
        output = "".join(["..." * ("..." in inputs), *once])
    first, second, *others = inputs.split(",")
    needed = set("".join([*others, output])) - {"."}
    kept = [letter for letter in dict.fromkeys(first + second) if letter in needed]
    pair = "".join(["..." * ("..." in first + second), *kept])
    result = core(torch.einsum, f"{first},{second}->{pair}", *operands[:2])
    return _einsum(core, f"{','.join([pair, *others])}->{output}", result, *operands[2:])


def _multi_dot(core: _TensorCore, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply in the order with the fewest multiplications, as torch does."""
    sizes = [1 if matrices[0].dim() == 1 else matrices[0].shape[0]]
    sizes += [m.shape[0] for m in matrices[1:]]
    sizes += [1 if matrices[-1].dim() == 1 else matrices[-1].shape[1]]

    # For matrices[first:end]: the fewest multiplications, and where to split for them.
    count = len(matrices)
    best = {(i, i + 1): (0, i) for i in range(count)}
    for length in range(2, count + 1):
        for first in range(count - length + 1):
            end = first + length
            outer = sizes[first] * sizes[end]
            best[first, end] = min(
                (best[first, i][0] + best[i, end][0] + outer * sizes[i], i)
                for i in range(first + 1, end)
            )

    def product(first: int, end: int) -> Tensor:
        if end - first == 1:
            return matrices[first]
        split = best[first, end][1]
        return core(torch.matmul, product(first, split), product(split, end))

    return product(0, count)


_SEVERAL_PRODUCTS: dict[str, Callable] = {
    "einsum": _einsum,
    "linalg_multi_dot": _multi_dot,
    "chain_matmul": lambda core, *matrices: _multi_dot(core, matrices),
    **RECURRENT,
}
