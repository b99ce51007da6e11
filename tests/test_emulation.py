"""Emulation against float64 rounded once and against torch's own half kernels."""

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_lab.autocast import autocast
from amp_lab.emulation import emulated_call, round_to
from amp_lab.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat

NATIVE = {torch.float16: FP16, torch.bfloat16: BF16}
ODD = FloatFormat(6, 5)
FORMATS = [FP16, BF16, TF32, FP8_E4M3, FP8_E5M2, ODD]

# name: function, shapes of its tensors, what precedes them, keyword arguments
OPS: dict[str, tuple[Callable, list[tuple[int, ...]], list, dict[str, Any]]] = {
    "linear": (F.linear, [(5, 8), (6, 8), (6,)], [], {}),
    "linear, one row": (F.linear, [(8,), (6, 8)], [], {}),
    "matmul": (torch.matmul, [(4, 6, 9), (9, 8)], [], {}),
    "Tensor.matmul": (Tensor.matmul, [(4, 6, 9), (9,)], [], {}),
    "@": (Tensor.__matmul__, [(6, 9), (9, 8)], [], {}),
    "mm": (torch.mm, [(6, 9), (9, 8)], [], {}),
    "mv": (torch.mv, [(6, 9), (9,)], [], {}),
    "bmm": (torch.bmm, [(2, 6, 9), (2, 9, 8)], [], {}),
    "addmm": (torch.addmm, [(6,), (8, 6), (6, 6)], [], {"beta": 2, "alpha": 3}),
    "addmv": (torch.addmv, [(6,), (6, 9), (9,)], [], {}),
    "addr": (torch.addr, [(6, 9), (6,), (9,)], [], {}),
    "addbmm": (torch.addbmm, [(3, 3), (8, 3, 4), (8, 4, 3)], [], {}),
    "baddbmm": (torch.baddbmm, [(8, 3, 3), (8, 3, 4), (8, 4, 3)], [], {"beta": 2}),
    "vecdot": (torch.linalg.vecdot, [(4, 9), (4, 9)], [], {}),
    "einsum": (torch.einsum, [(4, 6, 5), (4, 3, 5)], ["bij,bkj->bik"], {}),
    "einsum, one operand": (torch.einsum, [(4, 6, 6)], ["bii->bi"], {}),
    "prelu": (F.prelu, [(4, 6), (6,)], [], {}),
    "conv1d": (F.conv1d, [(8, 4, 10), (3, 4, 5), (3,)], [], {"padding": "same"}),
    "conv2d": (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)], [], {"padding": 1}),
    "conv2d, groups": (torch.conv2d, [(2, 4, 8, 8), (4, 2, 3, 3)], [], {"groups": 2, "stride": 2}),
    "conv3d": (F.conv3d, [(2, 3, 4, 4, 4), (3, 3, 3, 3, 3)], [], {}),
    "conv_transpose1d": (F.conv_transpose1d, [(4, 6, 6), (6, 3, 3), (3,)], [], {"stride": 2}),
    "conv_transpose2d": (F.conv_transpose2d, [(4, 6, 6, 6), (6, 3, 3, 3)], [], {"stride": 2}),
    "conv_transpose3d": (F.conv_transpose3d, [(2, 3, 4, 4, 4), (3, 2, 3, 3, 3)], [], {}),
    "conv_tbc": (torch.conv_tbc, [(7, 2, 3), (3, 3, 4), (4,)], [], {"pad": 1}),
}
each_op = pytest.mark.parametrize("op", OPS)
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
each_dtype = pytest.mark.parametrize("dtype", NATIVE)


def with_gradients(
    call: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor | None = None
) -> list[Tensor]:
    """Result and gradients of `call(*inputs)` for fresh leaves and the given output gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = call(*leaves)
    if gradient is None:
        gradient = torch.ones(result.shape)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient.to(result.dtype))]


def calls(op: str, fmt: FloatFormat | torch.dtype) -> tuple[Callable, Callable]:
    """The operation as it is, and emulated."""
    func, _, before, kwargs = OPS[op]
    return (
        lambda *x: func(*before, *x, **kwargs),
        lambda *x: emulated_call(func, [*before, *x], kwargs, fmt),
    )


def integers(shape: tuple[int, ...], largest: int) -> Tensor:
    return torch.randint(-largest, largest + 1, shape).float()


def draw(op: str, make: Callable[[tuple[int, ...]], Tensor]) -> tuple[list[Tensor], Tensor]:
    inputs = [make(shape) for shape in OPS[op][1]]
    return inputs, make(tuple(calls(op, FP32)[0](*inputs).shape))


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal number by number, NaN included, whatever the dtypes."""
    return torch.equal(a.double().nan_to_num(1e300), b.double().nan_to_num(1e300))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Rounding points: where accumulation is exact, every bit is determined.


@each_op
@each_dtype
def test_equals_the_native_kernel_where_that_one_is_exact(op, dtype):
    inputs, gradient = draw(op, lambda shape: integers(shape, 3))
    plain, emulated = calls(op, dtype)
    ours = with_gradients(emulated, inputs, gradient)
    native = with_gradients(plain, [x.to(dtype) for x in inputs], gradient)
    assert ours[0].dtype == native[0].dtype == dtype
    assert all(map(equal, ours, native))


@each_op
@each_format
def test_one_rounding_of_the_exact_result(op, fmt):
    """With integers, sums below 2^24 are exact in float32: float64 rounded once must come out.

    Most results need more bits than the format has, and some overflow.
    """
    inputs, gradient = draw(op, lambda shape: fmt.round(integers(shape, 60)))
    plain, emulated = calls(op, fmt)
    exact = with_gradients(plain, [x.double() for x in inputs], gradient)
    assert max(r.abs().max() for r in exact) < 2**24
    ours = with_gradients(emulated, inputs, gradient)
    for got, wanted in zip(ours, exact, strict=True):
        assert equal(got, fmt.round(wanted))


@each_op
@each_format
def test_unrounded_inputs_and_gradients_are_rounded_first(op, fmt):
    inputs, gradient = draw(op, torch.randn)
    _, emulated = calls(op, fmt)
    rounded = [fmt.round(x) for x in inputs]
    ours = with_gradients(emulated, inputs, gradient)
    assert all(map(equal, ours, with_gradients(emulated, rounded, fmt.round(gradient))))
    assert all(equal(fmt.round(r.float()), r) for r in ours), "off the grid"


# Accuracy on random numbers.

LARGE: dict[str, list[tuple[int, ...]]] = {
    "linear": [(128, 256), (96, 256), (96,)],
    "bmm": [(8, 64, 48), (8, 48, 32)],
    "baddbmm": [(8, 32, 32), (8, 32, 64), (8, 64, 32)],
    "einsum": [(8, 64, 64), (8, 48, 64)],
    "conv1d": [(8, 16, 100), (32, 16, 5), (32,)],
    "conv2d": [(4, 32, 16, 16), (32, 32, 3, 3), (32,)],
    "conv_transpose2d": [(4, 16, 12, 12), (16, 8, 3, 3)],
}


def differ(a: Tensor, b: Tensor) -> float:
    return (a.double() != b.double()).double().mean().item()


@pytest.mark.parametrize("op", LARGE)
@pytest.mark.parametrize("fmt", [FP16, BF16, TF32, FP8_E4M3], ids=lambda f: f.name)
def test_at_least_995_in_1000_are_the_exact_result_rounded_once(op, fmt):
    """The others are one ulp off, unless the sum has cancelled: then float32's own error shows.

    That error is bounded by 2^-20 of the sum of the absolute products (16 float32 roundings), in
    the emulation as in a tensor core.
    """
    inputs = [fmt.round(torch.randn(shape)) for shape in LARGE[op]]
    plain, emulated = calls(op, fmt)
    gradient = fmt.round(torch.randn(plain(*inputs).shape))
    exact = with_gradients(plain, [x.double() for x in inputs], gradient)
    sizes = with_gradients(plain, [x.double().abs() for x in inputs], gradient.abs())
    ours = with_gradients(emulated, inputs, gradient)
    for got, wanted, size in zip(ours, map(fmt.round, exact), sizes, strict=True):
        assert differ(got, wanted) <= 0.005
        one_ulp = torch.tensor([fmt.spacing(w) for w in wanted.flatten().tolist()])
        tolerated = one_ulp.reshape(wanted.shape).clamp(min=size * 2.0**-20)
        assert ((got.double() - wanted).abs() <= tolerated).all()


@pytest.mark.parametrize("op", LARGE)
def test_no_worse_than_the_native_float16_kernel(op):
    inputs = [torch.randn(shape).half() for shape in LARGE[op]]
    plain, emulated = calls(op, torch.float16)
    gradient = torch.randn(plain(*inputs).shape).half()
    exact = [FP16.round(r) for r in with_gradients(plain, [x.double() for x in inputs], gradient)]
    ours = with_gradients(emulated, inputs, gradient)
    native = with_gradients(plain, inputs, gradient)
    for got, theirs, wanted in zip(ours, native, exact, strict=True):
        # Both are float32 sums, in another order: 1 in 1,000 is the noise between the two.
        assert differ(got, wanted) <= differ(theirs, wanted) + 0.001


@pytest.mark.parametrize(
    ("masked", "kwargs"),
    [
        (None, {}),
        (None, {"is_causal": True}),
        (None, {"enable_gqa": True, "scale": 0.5}),
        ("bool", {}),
        ("float", {}),
        ("float", {"enable_gqa": True}),
    ],
)
def test_attention_is_one_operation(masked, kwargs):
    heads = 2 if "enable_gqa" in kwargs else 4
    inputs = [torch.randn(2, 4, 16, 32), *torch.randn(2, 2, heads, 16, 32)]
    mask = {None: None, "bool": torch.rand(16, 16) > 0.2, "float": torch.randn(16, 16)}[masked]
    exact_mask = mask.half().double() if masked == "float" else mask
    attention = F.scaled_dot_product_attention
    ours = with_gradients(
        lambda *x: emulated_call(attention, x, {"attn_mask": mask, **kwargs}, torch.float16), inputs
    )
    exact = with_gradients(
        lambda *x: attention(*x, attn_mask=exact_mask, **kwargs),
        [x.half().double() for x in inputs],
    )
    assert ours[0].dtype == torch.float16
    assert differ(ours[0], FP16.round(exact[0])) <= 0.005
    # The gradients of q and k are differences of nearly equal numbers: float32's error shows.
    for got, wanted in zip(ours, exact, strict=True):
        assert differ(got, FP16.round(wanted)) <= 0.02


# Range.


def test_every_float16_number_survives_a_product_with_one():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[~every.isnan()]
    result = emulated_call(torch.mm, [every[:, None], torch.ones(1, 1)], {}, torch.float16)
    assert torch.equal(
        result[:, 0].view(torch.int16)[every != 0], every.view(torch.int16)[every != 0]
    )


@pytest.mark.parametrize("flush", [False, True])
def test_float16_subnormals_round_to_nearest_even(flush):
    """They are normal numbers in float32, so not even flushing denormals touches them."""
    ulps = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 1022.5, 1023.5])
    rounded = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 1022.0, 1024.0])
    left = (ulps * 2.0**-12)[:, None].requires_grad_()
    try:
        assert torch.set_flush_denormal(flush) or not flush
        products = emulated_call(torch.mm, [left, torch.tensor([[2.0**-12]])], {}, torch.float16)
        assert torch.equal(products, (rounded * 2.0**-24).half()[:, None])
        # The gradient is 3 x 2^-26: three quarters of the smallest number round up to it.
        products.backward(torch.full_like(products, 3 * 2.0**-14))
        assert torch.equal(left.grad, torch.full_like(left, 2.0**-24))
    finally:
        torch.set_flush_denormal(False)


def test_sums_of_products_too_small_for_float16_are_kept_until_the_rounding():
    tiny = torch.full((1, 4), 2.0**-13)  # each product is 2^-26, a quarter of the smallest number
    result = emulated_call(F.linear, [tiny, tiny], {}, torch.float16)
    assert result.item() == 2.0**-24


def test_bfloat16_subnormals():
    small = torch.tensor([[2.0**-130, -(2.0**-133)]])
    result = emulated_call(torch.mm, [small.T, torch.ones(1, 1)], {}, torch.bfloat16)
    assert torch.equal(result.float(), small.T)


@each_format
def test_overflow_and_nan(fmt):
    largest = torch.tensor([[fmt.max], [-fmt.max], [math.nan], [1.0]])
    result = emulated_call(torch.mm, [largest, torch.tensor([[2.0]])], {}, fmt).flatten().tolist()
    if fmt.finite_only:
        assert all(map(math.isnan, result[:3]))
    else:
        assert result[:2] == [math.inf, -math.inf]
        assert math.isnan(result[2])
    assert result[3] == 2.0


def test_a_sum_beyond_the_largest_float16_may_come_back():
    """The accumulator is float32: only the result has to fit."""
    row = torch.tensor([[256.0, 256.0, 256.0]])
    column = torch.tensor([[256.0], [256.0], [-256.0]])
    assert emulated_call(torch.mm, [row, column], {}, torch.float16).item() == math.inf
    column[1] = -256.0
    column[2] = 1.0
    assert emulated_call(torch.mm, [row, column], {}, torch.float16).item() == 256.0


# What is cast, what is handed out.


def test_float64_and_integers_are_left_alone():
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    for fmt in (torch.float16, TF32):
        result = emulated_call(torch.mm, [a, b], {}, fmt)
        assert torch.equal(result, a @ b)
        assert result.dtype == torch.float64
        i = torch.arange(6).reshape(2, 3)
        assert torch.equal(emulated_call(torch.mm, [i, i.T], {}, fmt), i @ i.T)
        with pytest.raises(RuntimeError, match="dtype"):
            emulated_call(torch.mm, [a, b.float()], {}, fmt)


@each_dtype
def test_low_precision_inputs_of_either_kind_are_taken(dtype):
    x = torch.randn(3, 4)
    for other in NATIVE:
        result = emulated_call(F.linear, [x.to(other), x], {}, dtype)
        assert result.dtype == dtype
        assert torch.equal(result, emulated_call(F.linear, [x.to(other).float(), x], {}, dtype))


def test_a_format_that_is_float16_by_another_name_is_stored_as_float16():
    x = torch.randn(3, 4)
    assert emulated_call(F.linear, [x, x], {}, FloatFormat(5, 10)).dtype == torch.float16
    assert emulated_call(F.linear, [x, x], {}, FP8_E4M3).dtype == torch.float32
    assert round_to(x, FP16).dtype == torch.float16
    assert equal(round_to(x, ODD), ODD.round(x))
    assert round_to(x.double(), FP16).dtype == torch.float64


def test_keyword_arguments():
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    by_name = emulated_call(F.linear, [], {"input": x, "weight": w, "bias": b}, torch.float16)
    assert torch.equal(by_name, emulated_call(F.linear, [x, w, b], {}, torch.float16))


def test_gradients_between_operations_have_the_low_dtype():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    hidden = emulated_call(F.linear, [x, w], {}, torch.float16)
    seen = []
    hidden.register_hook(lambda gradient: seen.append(gradient.dtype))
    emulated_call(torch.mm, [hidden, w], {}, torch.float16).float().sum().backward()
    assert seen == [torch.float16]
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert equal(x.grad, x.grad.half())


@each_format
def test_every_use_of_a_cached_weight_rounds_its_own_gradient(fmt):
    """Native mode casts a weight once, and the half gradients of its uses are added in half."""
    w, *inputs = torch.randn(4, 4), *torch.randn(2, 2, 4)

    def gradient(linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        leaf = w.clone().requires_grad_()
        cached = round_to(leaf, fmt)
        sum(linear(x, cached) for x in inputs).sum().backward()
        return leaf.grad

    def emulated(x: Tensor, low: Tensor) -> Tensor:
        return emulated_call(
            F.linear, [x, low], {}, fmt, lambda t: t if t is low else round_to(t, fmt)
        )

    ours = gradient(emulated)
    of_each_use = [
        with_gradients(lambda x, w: emulated_call(F.linear, [x, w], {}, fmt), [x, w])[2]
        for x in inputs
    ]
    assert torch.equal(ours, fmt.round(sum(of_each_use)))
    if fmt.dtype in NATIVE:
        assert torch.equal(ours, gradient(lambda x, low: F.linear(x.to(low.dtype), low)))


@pytest.mark.parametrize("fmt", [torch.float16, FP8_E5M2], ids=str)
def test_the_callers_cast_is_used_once_per_tensor(fmt):
    cast = []

    def remember(x: Tensor) -> Tensor:
        cast.append(x)
        return round_to(x, fmt)

    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    result = emulated_call(F.linear, [x, w, b], {}, fmt, remember)
    assert [id(t) for t in cast] == [id(x), id(w), id(b)]
    assert torch.equal(result, emulated_call(F.linear, [x, w, b], {}, fmt))


@pytest.mark.parametrize("fmt", [torch.float16, FP8_E5M2], ids=str)
def test_second_derivatives(fmt):
    x = torch.full((2, 2), 0.5, requires_grad=True)
    w = torch.eye(2, requires_grad=True)
    y = emulated_call(torch.mm, [x, w], {}, fmt)
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    # first = 2 x w w^T; the derivative of its sum at w = 1 is 2 (x^T 1 + (x^T 1)^T), 1 all ones.
    assert torch.equal(second, torch.full((2, 2), 4.0))


@pytest.mark.filterwarnings("ignore:There is a performance drop because")
@pytest.mark.parametrize("fmt", [torch.float16, FP8_E5M2], ids=str)
def test_function_transforms(fmt):
    """`torch.func` differentiates it and maps it over the examples of a batch."""
    x, w = torch.randn(3, 4), torch.randn(5, 4)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return emulated_call(F.linear, [x, w], {}, fmt).float().sin().sum()

    def gradient(x: Tensor) -> Tensor:
        return with_gradients(lambda w: loss(w, x), [w])[1]

    assert torch.equal(torch.func.grad(loss)(w, x), gradient(x))
    per_example = torch.vmap(torch.func.grad(loss), (None, 0))(w, x)
    assert torch.equal(per_example, torch.stack([gradient(row) for row in x]))


def test_compiled_and_checkpointed():
    x, w = torch.randn(3, 4), torch.randn(5, 4)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return emulated_call(F.linear, [x, w], {}, torch.float16).float().sin()

    plain = with_gradients(function, [x, w])
    compiled = with_gradients(torch.compile(function, backend="aot_eager", fullgraph=True), [x, w])
    assert all(map(torch.equal, compiled, plain))
    again = with_gradients(lambda *x: checkpoint(function, *x, use_reentrant=False), [x, w])
    assert all(map(torch.equal, again, plain))


def test_no_grad_memory_format_and_views():
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    w = torch.randn(4, 3, 3, 3, requires_grad=True)
    with torch.no_grad():
        result = emulated_call(F.conv2d, [x, w], {}, torch.float16)
    assert not result.requires_grad
    assert result.is_contiguous(memory_format=torch.channels_last)
    strided = torch.randn(8, 6).T[::2]
    expanded = torch.randn(1, 8).expand(5, 8)
    assert torch.equal(
        emulated_call(F.linear, [strided, expanded], {}, torch.float16),
        emulated_call(F.linear, [strided.contiguous(), expanded.contiguous()], {}, torch.float16),
    )


@settings(deadline=None, max_examples=60)
@given(
    batch=st.lists(st.integers(0, 3), max_size=2),
    sizes=st.tuples(*[st.integers(0, 5)] * 3),
    broadcast=st.booleans(),
    fmt=st.sampled_from(FORMATS),
)
def test_matmul_of_any_shape(batch, sizes, broadcast, fmt):
    n, k, m = sizes
    inputs = [
        fmt.round(integers((*batch, n, k), 60)),
        fmt.round(integers((k, m) if broadcast else (*batch, k, m), 60)),
    ]
    exact = with_gradients(torch.matmul, [x.double() for x in inputs])
    ours = with_gradients(lambda *x: emulated_call(torch.matmul, x, {}, fmt), inputs)
    assert all(map(equal, ours, map(fmt.round, exact)))


# Several products in a row.


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 2)]),
        ("ij,jk,kl", [(3, 4), (4, 5), (5, 2)]),
        (" bij , bjk , bk -> ib ", [(2, 3, 4), (2, 4, 5), (2, 5)]),
        ("...ij,jk,...kl->...il", [(2, 3, 4), (4, 5), (2, 5, 2)]),
        ("...ij,jk,...kl", [(2, 3, 4), (4, 5), (2, 5, 2)]),
        ("ii,ij,jk,k->", [(3, 3), (3, 4), (4, 2), (2,)]),
        ("i,i,i", [(4,), (4,), (4,)]),
        ("a,b,c->abc", [(2,), (3,), (4,)]),
        ("Zb,bA,Ac", [(2, 3), (3, 4), (4, 2)]),
    ],
)
def test_einsum_of_several_operands(equation, shapes):
    operands = [integers(shape, 3) for shape in shapes]
    exact = with_gradients(lambda *x: torch.einsum(equation, *x), operands)
    for before in ([equation, *operands], [equation, operands]):
        result = emulated_call(torch.einsum, before, {}, torch.float16)
        assert result.dtype == torch.float16
        assert equal(result, exact[0])
    ours = with_gradients(
        lambda *x: emulated_call(torch.einsum, [equation, *x], {}, FP32), operands
    )
    assert all(map(equal, ours, exact))


@each_format
def test_every_product_of_an_einsum_is_rounded(fmt):
    operands = [torch.randn(shape) for shape in ((3, 4), (4, 5), (5, 2))]
    ours = with_gradients(
        lambda *x: emulated_call(torch.einsum, ["ij,jk,kl->il", *x], {}, fmt), operands
    )
    one_by_one = with_gradients(
        lambda a, b, c: emulated_call(
            torch.mm, [emulated_call(torch.mm, [a, b], {}, fmt), c], {}, fmt
        ),
        operands,
    )
    assert all(map(torch.equal, ours, one_by_one))


@pytest.mark.parametrize(
    "sizes", [(2, 3), (4, 2, 5), (5, 2, 7, 3), (2, 9, 1, 8, 4), (1, 4, 3, 2, 1)]
)
@pytest.mark.parametrize("vectors", ["", "first", "last", "both"])
def test_chains_of_matrices(sizes, vectors):
    """The order is torch's too: with these integers products round, each order differently."""
    inputs = [integers(shape, 40) for shape in itertools.pairwise((3, *sizes))]
    if vectors in ("first", "both"):
        inputs[0] = inputs[0][0]
    if vectors in ("last", "both"):
        inputs[-1] = inputs[-1][:, 0]
    low = [x.bfloat16() for x in inputs]
    native = with_gradients(lambda *x: torch.linalg.multi_dot(x), low)
    ours = with_gradients(
        lambda *x: emulated_call(torch.linalg.multi_dot, [list(x)], {}, torch.bfloat16), low
    )
    assert all(map(torch.equal, ours, native))
    if not vectors:
        assert torch.equal(emulated_call(torch.chain_matmul, inputs, {}, BF16), native[0])


# Inside `autocast(..., emulate=True)`.


def test_autocast_hands_over_its_products_and_rounds_new_weights_in_every_region():
    linear = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    x = torch.randn(4, 8)
    for _ in range(3):
        first = emulated_call(F.linear, [x, linear.weight, linear.bias], {}, torch.float16)
        wanted = emulated_call(F.linear, [first, linear.weight, linear.bias], {}, torch.float16)
        with autocast("cpu", torch.float16, emulate=True):
            result = linear(linear(x))
        assert torch.equal(result, wanted)
        result.float().square().mean().backward()
        optimizer.step()


def test_a_transformer_deviates_by_about_the_formats_precision():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, towards = torch.randn(2, 4, 7, 32)

    def step(context: AbstractContextManager) -> list[Tensor]:
        with context:
            result = model(x).float()
        return [result, *torch.autograd.grad((result * towards).sum(), model.parameters())]

    wanted = step(nullcontext())
    for fmt, error in ((torch.float16, 2e-3), (TF32, 2e-3), (torch.bfloat16, 0.1), (FP8_E4M3, 0.5)):
        ours = step(autocast("cpu", fmt, emulate=True))
        assert not torch.equal(ours[0], wanted[0])
        for got, reference in zip(ours, wanted, strict=True):
            assert (got - reference).norm() <= error * reference.norm()
