"""What is cast and what is not, and the cache of weights, bit by bit as in torch's autocast."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_lab import BF16, FP8_E4M3, FP16, TF32, FloatFormat, autocast, clear_autocast_cache
from amp_lab.casting import CastMode
from amp_lab.emulation import emulated_call, round_to

LOW = [torch.bfloat16, torch.float16]
each_low = pytest.mark.parametrize("low", LOW, ids=str)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def contexts(low):
    return torch.autocast("cpu", low), autocast("cpu", low)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# What is cast


@each_low
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_never_cast(low, dtype):
    x = torch.ones(3, 3).to(dtype)
    for context in contexts(low):
        with context:
            assert torch.stack([x, x]).dtype == dtype
            if dtype != torch.bool:
                assert torch.mm(x, x).dtype == dtype
                assert torch.trace(x).dtype == dtype


@each_low
def test_float64_among_float32_is_left_and_torchs_error_follows(low):
    a, b = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.float64)
    for context in contexts(low):
        with context, pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(a, b)


@each_low
def test_tensors_of_another_device_are_left_alone(low):
    elsewhere = torch.empty(3, 3, device="meta")
    for context in contexts(low):
        with context:
            assert torch.mm(elsewhere, elsewhere).dtype == torch.float32
            assert torch.trace(elsewhere.to(low)).dtype == low
            assert torch.cat([elsewhere.half(), elsewhere.half()]).dtype == torch.float16
    here = torch.ones(3, 3)
    with CastMode("cuda", low, False, {}):
        assert torch.mm(here, here).dtype == torch.float32
        assert here.to(low).exp().dtype == here.to(low).sum().dtype == low
        assert torch.dot(here[0].to(low), here[0].to(low)).dtype == low


@each_low
def test_regions_for_two_devices_work_at_once(low):
    """As torch's do: the outer one is for another device and still there."""
    x = torch.ones(3, 3)
    with CastMode("cuda", low, False, {}), autocast("cpu", low):
        assert torch.mm(x, x).dtype == low
    with autocast("cpu", low), CastMode("cuda", low, False, {}):
        assert torch.mm(x, x).dtype == low


@each_low
def test_functions_methods_and_operators(low):
    x, w = torch.randn(4, 5), torch.randn(5, 3)
    expected = torch.mm(x.to(low), w.to(low))
    with autocast("cpu", low):
        for result in (torch.mm(x, w), x.mm(w), torch.matmul(x, w), x.matmul(w), x @ w):
            assert equal(result, expected)
        assert equal(torch.ops.aten.mm(x, w), expected)
        assert equal(torch.ops.aten.mm.default(x, w), expected)
        assert equal(torch.linalg.matmul(x, w), expected)
        assert equal(x.__rmatmul__(torch.eye(4)), x.to(low))
        assert (2.0**x).dtype == torch.float32


@each_low
def test_in_place_forms_are_on_no_list(low):
    """Neither on torch's: they cannot change the dtype of the tensor that they write to."""
    for context in contexts(low):
        x, m = torch.zeros(3, 3), torch.ones(3, 3)
        with context:
            x.addmm_(m, m)
            x += m @ m  # float32 += low
            x @= m  # not in place: x = x @ m
        assert x.dtype == low
    x, m = torch.zeros(3, 3), torch.ones(3, 3)
    with autocast("cpu", low), pytest.raises(RuntimeError, match="dtype"):
        x.addmm_(m, m.to(low))


@each_low
def test_out_forms_are_on_no_list(low):
    x, w = torch.randn(4, 5), torch.randn(5, 3)
    for context in contexts(low):
        out = torch.empty(4, 3)
        with context:
            assert torch.mm(x, w, out=out) is out
            assert torch.matmul(x, w, out=torch.empty(4, 3)).dtype == torch.float32
            torch.addmm(torch.zeros(3), x, w, out=out)
            assert torch.mm(x, w, out=None).dtype == low
        assert torch.equal(out, x @ w)
    results = []
    for context in contexts(low):
        with context:
            results.append(torch.cat([x, x.to(low)], out=torch.empty(8, 5)))
    assert equal(*results)


@each_low
def test_keyword_arguments(low):
    x, w, b = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3)
    images, kernel = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    calls = [
        lambda: F.linear(input=x, weight=w, bias=b),
        lambda: F.linear(x, weight=w),
        lambda: F.conv2d(images, kernel, bias=b, stride=2, padding=1),
        lambda: torch.addmm(input=b, mat1=x, mat2=w.t(), beta=0.5, alpha=2),
        lambda: torch.cat(tensors=[x, x.to(low)], dim=1),
        lambda: torch.stack(tensors=(x, x), dim=-1),
        lambda: F.cross_entropy(input=x.to(low), target=torch.arange(4), label_smoothing=0.1),
        lambda: F.mse_loss(input=x.to(low), target=x, reduction="sum"),
        lambda: F.pad(input=images.to(low), pad=(1, 1, 1, 1), mode="reflect"),
        lambda: F.pad(images.to(low), (1, 1), mode="constant", value=2.0),
        lambda: torch.einsum("ij,kj->ik", x, w),
        lambda: torch.prod(input=x.to(low), dim=1, keepdim=True),
        lambda: F.bilinear(input1=x, input2=x, weight=torch.ones(2, 5, 5)),
        lambda: torch.inner(input=x, other=x),
        lambda: torch.linalg.multi_dot(tensors=[x, w.t()]),
        lambda: torch.linalg.matrix_power(input=x[:, :4], n=2),
        lambda: x[:, :4].matrix_power(3),
        lambda: torch.tensordot(a=x, b=w.t(), dims=1),
        lambda: F.pairwise_distance(x1=x, x2=x, p=1.0),
        lambda: torch.lobpcg(A=x @ x.t() + torch.eye(4), k=1, niter=1)[0],
    ]
    for call in calls:
        theirs, ours = contexts(low)
        with theirs:
            expected = call()
        with ours:
            assert equal(call(), expected)


def test_keyword_arguments_of_a_float32_result():
    x = torch.randn(4, 5).half()
    with autocast("cpu", torch.float16, emulate=True):
        assert torch.softmax(dim=1, input=x).dtype == torch.float32
        assert torch.linalg.vector_norm(x=x).dtype == torch.float32
        assert x.sum(dim=1).dtype == torch.float32
        assert x.sum(dim=1, dtype=torch.float16).dtype == torch.float16
        assert torch.softmax(x, 1, torch.float16).dtype == torch.float16
        assert torch.sum(input=torch.ones(3, dtype=torch.int32)).dtype == torch.int64
        assert torch.cumsum(x.double(), 0).dtype == torch.float64


def test_keyword_arguments_of_the_caller_are_not_changed():
    given = {"input": torch.ones(2, 2), "weight": torch.ones(2, 2)}
    before = dict(given)
    with autocast("cpu"):
        F.linear(**given)
    assert all(given[name] is before[name] for name in given)


@each_low
def test_what_is_on_no_list_promotes_as_always(low):
    x, y = torch.randn(3, 3), torch.randn(3, 3).to(low)
    with autocast("cpu", low):
        assert (x + y).dtype == torch.float32
        assert y.exp().dtype == low
        assert torch.relu(y).dtype == low


@each_low
def test_widest_input_wins_and_a_third_dtype_is_refused(low):
    other = LOW[1 - LOW.index(low)]
    x = torch.randn(2, 2)
    for context in contexts(low):
        with context:
            assert torch.cat([x.to(low), x]).dtype == torch.float32
            assert torch.cat([x.to(low), x.to(low)]).dtype == low
            assert torch.cat([x, x.to(other)]).dtype == torch.float32
            with pytest.raises(RuntimeError, match=r"convert it first|prioritize"):
                torch.cat([x.to(other), x])


@each_low
def test_gradients_have_the_dtypes_of_the_forward_pass(low):
    """Each cast is a node of the graph, so half-precision results get such gradients."""
    x, w = leaf(4, 5), leaf(3, 5)
    with autocast("cpu", low):
        y = F.linear(x, w)
    seen = []
    y.register_hook(lambda g: seen.append(g.dtype))
    y.float().sum().backward()
    assert seen == [low]
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert torch.equal(w.grad, w.grad.to(low).float()), "computed in half precision"


def test_tensor_subclasses_keep_their_say():
    class Logged(Tensor):
        calls = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2, 2).as_subclass(Logged)
    with autocast("cpu", torch.bfloat16):
        y = torch.mm(x, x)
    assert isinstance(y, Logged)
    assert y.dtype == torch.bfloat16
    assert torch.mm in Logged.calls


# The cache


def casts(y: Tensor) -> set:
    """The nodes just before the leaves: one for each cast."""
    found, stack = set(), [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            if "ToCopy" in node.name():
                found.add(node)
            stack += [parent for parent, _ in node.next_functions]
    return found


@each_low
def test_a_weight_is_cast_once(low):
    x, w = torch.randn(4, 5).to(low), leaf(5, 5)
    for context in contexts(low):
        with context:
            y = x @ w @ w
        assert len(casts(y)) == 1
    with autocast("cpu", low, cache_enabled=False):
        assert len(casts(x @ w @ w)) == 2
    gradients = []
    for cache_enabled in (True, False):
        for kind in (torch.autocast, autocast):
            with kind("cpu", low, cache_enabled=cache_enabled):
                y = x @ w @ w
            gradients += torch.autograd.grad(y.float().square().sum(), w)
    assert equal(gradients[0], gradients[1])
    assert equal(gradients[2], gradients[3])


@each_low
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 5),
        lambda: leaf(5, 5) * 1,
        lambda: leaf(5, 5, dtype=torch.float16),
        lambda: torch.randn(5, 5).t().requires_grad_(),
        lambda: torch.randn(6, 5)[:5].requires_grad_(),
    ],
    ids=["no grad", "no leaf", "not float32", "transposed view", "slice"],
)
def test_only_float32_leaves_that_require_grad_and_are_no_views_are_cached(low, make):
    w = make()
    cache: dict = {}
    with CastMode("cpu", low, False, cache):
        torch.mm(w, w)
    assert cache == {low: {}}
    w = leaf(5, 5)
    with CastMode("cpu", low, False, cache):
        torch.mm(w, w)
    assert list(cache[low]) == [id(w)]


def test_the_cache_is_cleared_when_the_outermost_region_ends():
    x, w = torch.ones(1, 1, dtype=torch.bfloat16), leaf(1, 1)
    for kind in (torch.autocast, autocast):
        with torch.no_grad():
            w.fill_(1.0)
        with kind("cpu"):
            with kind("cpu"):
                assert (x @ w).item() == 1
            with torch.no_grad():
                w.fill_(2.0)  # the cached cast does not notice
            assert (x @ w).item() == 1
        with kind("cpu"):
            assert (x @ w).item() == 2


def test_clear_autocast_cache():
    x, w = torch.ones(1, 1, dtype=torch.bfloat16), leaf(1, 1)
    with autocast("cpu"):
        x @ w
        with torch.no_grad():
            w.fill_(2.0)
        clear_autocast_cache()
        assert (x @ w).item() == 2


def test_the_cache_is_cleared_after_an_error():
    w = leaf(3, 3)
    try:
        with autocast("cpu"):
            torch.mm(w, w)
            raise KeyError
    except KeyError:
        pass
    reference = weakref.ref(w)
    del w
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_a_cast_without_grad_never_serves_a_use_with_grad(no_grad):
    """torch's cache does, and the weight then has no gradient."""
    x, w = torch.randn(4, 3), leaf(3, 3)
    with autocast("cpu"):
        expected = x @ w
    gradient = torch.autograd.grad(expected.float().sum(), w)[0]
    with autocast("cpu"):
        with no_grad():
            assert torch.equal(x @ w, expected)
        y = x @ w
        with no_grad():
            assert torch.equal(x @ w, expected)
    assert torch.equal(torch.autograd.grad(y.float().sum(), w)[0], gradient)


def test_without_grad_a_weight_is_cast_once_too():
    w = leaf(3, 3)
    cache: dict = {}
    with torch.no_grad(), CastMode("cpu", torch.bfloat16, False, cache):
        torch.mm(w, w)
        first = cache[torch.bfloat16][id(w)]
        torch.mm(w, w)
        assert cache[torch.bfloat16][id(w)] is first


def test_a_frozen_weight_gets_no_gradient_from_an_earlier_cast():
    x, w, v = torch.randn(4, 3), leaf(3, 3), leaf(3, 3)
    for kind in (torch.autocast, autocast):
        w.requires_grad_()
        with kind("cpu"):
            x @ w
            w.requires_grad_(False)
            y = x @ w @ v
        y.float().sum().backward()
        assert w.grad is None


def test_nested_regions_of_two_dtypes_have_casts_of_their_own():
    w = leaf(3, 3)
    with autocast("cpu", torch.bfloat16):
        assert torch.mm(w, w).dtype == torch.bfloat16
        with autocast("cpu", torch.float16):
            assert torch.mm(w, w).dtype == torch.float16
        assert torch.mm(w, w).dtype == torch.bfloat16


# Emulation


@pytest.mark.parametrize("fmt", [torch.float16, torch.bfloat16, FP16, BF16, TF32, FP8_E4M3])
def test_emulated_region_hands_products_to_the_emulation(fmt):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(4, 6)
    with autocast("cpu", fmt, emulate=True):
        y = model(x)
    first, _, last = model
    h = emulated_call(F.linear, [x, first.weight, first.bias], {}, fmt).relu()
    assert equal(y, emulated_call(F.linear, [h, last.weight, last.bias], {}, fmt))
    gradients = torch.autograd.grad(y.float().square().sum(), model.parameters())
    h = emulated_call(F.linear, [h, last.weight, last.bias], {}, fmt)
    expected = torch.autograd.grad(h.float().square().sum(), model.parameters())
    assert all(map(equal, gradients, expected))


def test_emulated_dtypes_are_those_of_native_mode_or_float32():
    x = torch.randn(3, 3)
    for dtype in LOW:
        with autocast("cpu", dtype, emulate=True):
            assert torch.mm(x, x).dtype == dtype
    with autocast("cpu", FloatFormat(4, 5), emulate=True):
        y = torch.mm(x, x)
    assert equal(y, FloatFormat(4, 5).round(y))


def test_emulation_follows_cudas_list_on_every_device():
    """What it computes is a GPU's arithmetic, so the numbers are the same with and without one."""
    many = torch.full((4096,), 16.0, dtype=torch.float16)
    with autocast("cpu", torch.float16):
        assert many.sum().item() == float("inf")  # on no list of the CPU's
    with autocast("cpu", torch.float16, emulate=True):
        assert many.sum().item() == 65536
        assert many[:4].softmax(0).dtype == torch.float32
        assert F.layer_norm(many[:4], (4,)).dtype == torch.float32
        assert torch.cat([many, many]).dtype == torch.float16


def test_emulated_weights_are_rounded_once():
    x, w = torch.randn(4, 3), leaf(3, 3)
    for fmt in (torch.float16, FP8_E4M3):
        cache: dict = {}
        with CastMode("cpu", fmt, True, cache):
            torch.mm(x, w)
            first = cache[fmt][id(w)]
            torch.mm(x, w)
        assert list(cache[fmt]) == [id(w)]
        assert cache[fmt][id(w)] is first
        assert equal(first[1], round_to(w, fmt))


def test_fp16_is_float16_in_the_cache_too():
    w = leaf(3, 3)
    cache: dict = {}
    for fmt in (FP16, torch.float16, FloatFormat(5, 10)):
        with CastMode("cpu", fmt, True, cache):
            torch.mm(w, w)
    assert list(cache) == [torch.float16]


def test_emulated_promotion():
    x = torch.randn(2, 2)
    with autocast("cpu", FP8_E4M3, emulate=True):
        assert torch.dot(x[0], x[1].half()).dtype == torch.float32
        assert F.mse_loss(x.half(), x).dtype == torch.float32
