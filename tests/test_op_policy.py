"""The op lists against torch: what it registers, computes on the CPU, and does to fake tensors.

`SAMPLES` has arguments for every listed operation. A torch release that changes a list, or adds an
operation, fails here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_lab import autocast, op_policy
from amp_lab.casting import CastMode
from amp_lab.op_policy import LISTS, Policy

# Deprecated functions (torch.qr, torch.cholesky, ...) are listed too.
pytestmark = pytest.mark.filterwarnings("ignore")

LOW = [torch.bfloat16, torch.float16]
REGISTERED = {
    device_type: {
        registration.removeprefix("aten::").partition(".")[0]
        for registration in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    }
    for device_type, key in {
        "cpu": "AutocastCPU",
        "cuda": "AutocastCUDA",
        "mps": "AutocastMPS",
        "xpu": "AutocastXPU",
    }.items()
}


def T(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def U(*shape: int) -> Tensor:
    """Between 0.1 and 0.9: probabilities."""
    return (torch.rand(shape) * 0.8 + 0.1).requires_grad_()


def square() -> Tensor:
    """Well conditioned in half precision too, all singular values different."""
    return (torch.randn(3, 3) * 0.1 + torch.diag(torch.tensor([1.0, 2.0, 3.0]))).requires_grad_()


def spd() -> Tensor:
    a = torch.randn(3, 3) * 0.1
    return (a @ a.T + torch.diag(torch.tensor([1.0, 2.0, 3.0]))).requires_grad_()


def triangle() -> Tensor:
    return spd().detach().tril().requires_grad_()


def signs(*shape: int) -> Tensor:
    return torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)


def classes(*shape: int) -> Tensor:
    return torch.randint(3, shape)


def lstm_layer() -> tuple:
    x, h = T(5, 2, 4), T(2, 3)
    weights = T(12, 4), T(12, 3), T(12), T(12)
    return x, *weights, h, T(2, 3), False, [], 2, 3, 1, True, False, False, True


def cell(gates: int) -> tuple:
    h = (T(2, 3), T(2, 3)) if gates == 4 else T(2, 3)
    return T(2, 4), h, T(3 * gates, 4), T(3 * gates, 3), T(3 * gates), T(3 * gates)


def unpooling(dimensions: int) -> tuple:
    x = torch.randn(1, 1, *[4] * dimensions)
    pool = torch.nn.functional.max_pool2d if dimensions == 2 else torch.nn.functional.max_pool3d
    values, indices = pool(x, 2, return_indices=True)
    rest = ([2] * 3, [0] * 3) if dimensions == 3 else ()
    return values.requires_grad_(), indices, [4] * dimensions, *rest


def convolution(*more: Any) -> tuple:
    return T(2, 3, 5, 5), T(4, 3, 3, 3), T(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *more


def attention_layer() -> tuple:
    x = torch.randn(2, 3, 8)
    weights = torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)
    return x, x, x, 8, 2, *weights


# Arguments for each listed operation; as a dict, keyword arguments to go with them.
SAMPLES: dict[str, Callable[[], tuple | tuple[tuple, dict]]] = {
    "_addmm_activation": lambda: (torch.randn(3), torch.randn(2, 4), torch.randn(4, 3)),
    "_convolution": lambda: convolution(False, False, True),
    "_grid_sampler_2d_cpu_fallback": lambda: (T(1, 1, 4, 4), T(1, 3, 3, 2), 0, 0, False),
    "_lu_with_info": lambda: (square(),),
    "_mps_convolution": lambda: (T(2, 3, 5, 5), T(4, 3, 3, 3), T(4), [0, 0], [1, 1], [1, 1], 1),
    "_native_multi_head_attention": attention_layer,
    "_scaled_dot_product_flash_attention": lambda: (T(1, 2, 3, 8), T(1, 2, 3, 8), T(1, 2, 3, 8)),
    "_thnn_fused_gru_cell": lambda: (T(2, 9), T(2, 9), T(2, 3), T(9), T(9)),
    "_thnn_fused_lstm_cell": lambda: (T(2, 12), T(2, 12), T(2, 3), T(12), T(12)),
    "_upsample_bicubic2d_aa": lambda: (T(1, 1, 4, 4), [6, 6], False),
    "_upsample_bilinear2d_aa": lambda: (T(1, 1, 4, 4), [6, 6], False),
    "_upsample_nearest_exact1d": lambda: (T(1, 1, 4), [6]),
    "_upsample_nearest_exact2d": lambda: (T(1, 1, 4, 4), [6, 6]),
    "_upsample_nearest_exact3d": lambda: (T(1, 1, 2, 2, 2), [3, 3, 3]),
    "acos": lambda: (U(4),),
    "adaptive_avg_pool3d": lambda: (T(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool3d": lambda: (T(1, 2, 4, 4, 4), [2, 2, 2]),
    "addbmm": lambda: (T(2, 4), T(3, 2, 5), T(3, 5, 4)),
    "addcdiv": lambda: (T(4), T(4), U(4)),
    "addcmul": lambda: (T(4), T(4), T(4)),
    "addmm": lambda: (T(4), T(2, 5), T(5, 4)),
    "addmv": lambda: (T(2), T(2, 5), T(5)),
    "addr": lambda: (T(2, 5), T(2), T(5)),
    "asin": lambda: (U(4),),
    "atan2": lambda: (T(4), T(4)),
    "avg_pool3d": lambda: (T(1, 2, 4, 4, 4), [2, 2, 2]),
    "baddbmm": lambda: (T(3, 2, 4), T(3, 2, 5), T(3, 5, 4)),
    "batch_norm": lambda: (T(4, 3), T(3), T(3), None, None, True, 0.1, 1e-5, False),
    "bilinear": lambda: (T(5, 3), T(5, 4), T(2, 3, 4), T(2)),
    "binary_cross_entropy": lambda: (U(4), U(4).detach()),
    "binary_cross_entropy_with_logits": lambda: (T(4), U(4).detach()),
    "bmm": lambda: (T(3, 2, 5), T(3, 5, 4)),
    "cat": lambda: ([T(2, 3), T(4, 3)],),
    "cdist": lambda: (T(3, 4), T(5, 4)),
    "chain_matmul": lambda: ([T(2, 3), T(3, 4), T(4, 5)],),
    "cholesky": lambda: (spd(),),
    "cholesky_inverse": lambda: (triangle(),),
    "cholesky_solve": lambda: (T(3, 2), triangle()),
    "conv1d": lambda: (T(2, 3, 8), T(4, 3, 3), T(4)),
    "conv2d": lambda: (T(2, 3, 6, 6), T(4, 3, 3, 3), T(4)),
    "conv3d": lambda: (T(2, 3, 4, 4, 4), T(4, 3, 2, 2, 2), T(4)),
    "conv_tbc": lambda: (T(6, 2, 3), T(3, 3, 4), T(4)),
    "conv_transpose1d": lambda: (T(2, 3, 6), T(3, 4, 3), T(4)),
    "conv_transpose2d": lambda: (T(2, 3, 5, 5), T(3, 4, 3, 3), T(4)),
    "conv_transpose3d": lambda: (T(2, 3, 3, 3, 3), T(3, 4, 2, 2, 2), T(4)),
    "convolution": convolution,
    "cosh": lambda: (T(4),),
    "cosine_embedding_loss": lambda: (T(3, 4), T(3, 4), signs(3)),
    "cosine_similarity": lambda: (T(3, 4), T(3, 4)),
    "cross": lambda: (T(2, 3), T(2, 3), 1),
    "cross_entropy_loss": lambda: (T(5, 3), classes(5)),
    "ctc_loss": lambda: (T(6, 2, 3), 1 + classes(2, 3) % 2, [6, 5], [3, 2]),
    "cudnn_convolution": lambda: (
        *(T(2, 3, 5, 5), T(4, 3, 3, 3)),
        *([0, 0], [1, 1], [1, 1], 1, False, False, True),
    ),
    "cudnn_convolution_transpose": lambda: (
        *(T(2, 3, 5, 5), T(3, 4, 3, 3)),
        *([0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, True),
    ),
    "cumprod": lambda: (T(3, 4), 1),
    "cumsum": lambda: (T(3, 4), 1),
    "dist": lambda: (T(4), T(4)),
    "dot": lambda: (T(4), T(4)),
    "einsum": lambda: ("ij,jk->ik", [T(2, 3), T(3, 4)]),
    "erfinv": lambda: (U(4),),
    "exp": lambda: (T(4),),
    "expm1": lambda: (T(4),),
    "fake_quantize_per_tensor_affine": lambda: (T(4), 0.1, 0, 0, 255),
    "fft_fft": lambda: (T(3, 8),),
    "fft_fft2": lambda: (T(4, 4),),
    "fft_fftn": lambda: (T(4, 4),),
    "fft_hfft": lambda: (T(8),),
    "fft_ifft": lambda: (T(3, 8),),
    "fft_ifft2": lambda: (T(4, 4),),
    "fft_ifftn": lambda: (T(4, 4),),
    "fft_ihfft": lambda: (T(8),),
    "fft_irfft": lambda: (T(8),),
    "fft_irfft2": lambda: (T(4, 4),),
    "fft_irfftn": lambda: (T(4, 4),),
    "fft_rfft": lambda: (T(3, 8),),
    "fft_rfft2": lambda: (T(4, 4),),
    "fft_rfftn": lambda: (T(4, 4),),
    "fractional_max_pool2d": lambda: (T(1, 2, 6, 6), [2, 2], [3, 3], U(1, 2, 2).detach()),
    "fractional_max_pool3d": lambda: (T(1, 2, 5, 5, 5), [2] * 3, [3] * 3, U(1, 2, 3).detach()),
    "frobenius_norm": lambda: (T(3, 4), [1]),
    "geqrf": lambda: (T(3, 3).detach(),),
    "grid_sampler": lambda: (T(1, 1, 4, 4), T(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_2d": lambda: (T(1, 1, 4, 4), T(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_3d": lambda: (T(1, 1, 4, 4, 4), T(1, 2, 2, 2, 3), 0, 0, False),
    "group_norm": lambda: (T(2, 4, 3), 2, T(4), T(4)),
    "gru_cell": lambda: cell(3),
    "hinge_embedding_loss": lambda: (T(4), signs(4)),
    "huber_loss": lambda: (T(4), T(4)),
    "index_copy": lambda: (T(3, 4), 0, torch.tensor([0, 2]), T(2, 4)),
    "index_put": lambda: (T(3, 4), [torch.tensor([0, 2])], T(2, 4)),
    "inverse": lambda: (square(),),
    "kl_div": lambda: (T(3, 4), U(3, 4).detach()),
    "l1_loss": lambda: (T(4), T(4)),
    "layer_norm": lambda: (T(3, 4), [4], T(4), T(4)),
    "linalg_cholesky": lambda: (spd(),),
    "linalg_cholesky_ex": lambda: (spd(),),
    "linalg_cond": lambda: (square(),),
    "linalg_eig": lambda: (square().detach(),),
    "linalg_eigh": lambda: (spd().detach(),),
    "linalg_eigvals": lambda: (square(),),
    "linalg_eigvalsh": lambda: (spd(),),
    "linalg_householder_product": lambda: (T(3, 2), U(2)),
    "linalg_inv": lambda: (square(),),
    "linalg_inv_ex": lambda: (square(),),
    "linalg_lstsq": lambda: (torch.eye(4, 2), torch.randn(4, 1)),
    "linalg_matrix_norm": lambda: (T(3, 4),),
    "linalg_matrix_rank": lambda: (square(),),
    "linalg_multi_dot": lambda: ([T(2, 3), T(3, 4), T(4, 5)],),
    "linalg_qr": lambda: (square(),),
    "linalg_solve": lambda: (square(), T(3, 2)),
    "linalg_svd": lambda: (square().detach(),),
    "linalg_svdvals": lambda: (square(),),
    "linalg_tensorinv": lambda: ((torch.eye(6) * 2).view(6, 2, 3).requires_grad_(), 1),
    "linalg_tensorsolve": lambda: ((torch.eye(6) * 2).view(2, 3, 6).requires_grad_(), T(2, 3)),
    "linalg_vecdot": lambda: (T(3, 4), T(3, 4)),
    "linalg_vector_norm": lambda: (T(3, 4),),
    "linear": lambda: (T(5, 4), T(3, 4), T(3)),
    "log": lambda: (U(4),),
    "log10": lambda: (U(4),),
    "log1p": lambda: (U(4),),
    "log2": lambda: (U(4),),
    "log_softmax": lambda: (T(3, 4), 1),
    "logsumexp": lambda: (T(3, 4), 1),
    "lstm_cell": lambda: cell(4),
    "lu_solve": lambda: (T(3, 1), *torch.linalg.lu_factor(square().detach())),
    "margin_ranking_loss": lambda: (T(4), T(4), signs(4)),
    "matmul": lambda: (T(3, 2, 5), T(5, 4)),
    "max_pool3d": lambda: (T(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_unpool2d": lambda: unpooling(2),
    "max_unpool3d": lambda: unpooling(3),
    "mkldnn_rnn_layer": lstm_layer,
    "mm": lambda: (T(2, 5), T(5, 4)),
    "mse_loss": lambda: (T(4), T(4)),
    "multi_margin_loss": lambda: (T(5, 3), classes(5)),
    "multilabel_margin_loss": lambda: (T(2, 3), torch.tensor([[1, -1, 0], [2, 0, -1]])),
    "multilabel_margin_loss_forward": lambda: (T(2, 3), torch.tensor([[1, -1, 0], [2, 0, -1]]), 1),
    "mv": lambda: (T(2, 5), T(5)),
    "nanquantile": lambda: (T(5), 0.4),
    "native_layer_norm": lambda: (T(3, 4), [4], T(4), T(4), 1e-5),
    "nll_loss": lambda: (T(5, 3), classes(5)),
    "nll_loss2d": lambda: (T(2, 3, 2, 2), classes(2, 2, 2)),
    "norm": lambda: (T(3, 4), 2),
    "nuclear_norm": lambda: (square(),),
    "orgqr": lambda: (T(3, 2), U(2)),
    "ormqr": lambda: (T(3, 3), U(3), T(3, 2)),
    "pdist": lambda: (T(4, 3),),
    "pinverse": lambda: (square(),),
    "poisson_nll_loss": lambda: (T(4), U(4).detach(), True, False, 1e-8, 1),
    "polar": lambda: (U(4), T(4)),
    "pow": lambda: (U(4), 2.5),
    "prelu": lambda: (T(3, 4), U(4)),
    "prod": lambda: (T(3, 4),),
    "qr": lambda: (square(),),
    "quantile": lambda: (T(5), 0.4),
    "reciprocal": lambda: (U(4),),
    "reflection_pad1d": lambda: (T(1, 2, 4), [1, 2]),
    "reflection_pad2d": lambda: (T(1, 2, 4, 4), [1, 2, 1, 0]),
    "renorm": lambda: (T(3, 4), 2, 0, 1.0),
    "replication_pad1d": lambda: (T(1, 2, 4), [1, 2]),
    "replication_pad2d": lambda: (T(1, 2, 4, 4), [1, 2, 1, 0]),
    "replication_pad3d": lambda: (T(1, 2, 3, 3, 3), [1, 2, 1, 0, 1, 1]),
    "rms_norm": lambda: (T(3, 4), [4], T(4)),
    "rnn_relu_cell": lambda: cell(1),
    "rnn_tanh_cell": lambda: cell(1),
    "rsqrt": lambda: (U(4),),
    "scaled_dot_product_attention": lambda: (T(1, 2, 3, 8), T(1, 2, 3, 8), T(1, 2, 3, 8)),
    "scatter_add": lambda: (T(3, 4), 0, torch.zeros(1, 4, dtype=torch.long), T(1, 4)),
    "sinh": lambda: (T(4),),
    "smooth_l1_loss": lambda: (T(4), T(4)),
    "soft_margin_loss": lambda: (T(4), signs(4)),
    "softmax": lambda: (T(3, 4), 1),
    "softplus": lambda: (T(4),),
    "stack": lambda: ([T(2, 3), T(2, 3)],),
    "stft": lambda: ((T(32), 8), {"return_complex": True, "window": torch.hann_window(8)}),
    "sum": lambda: (T(3, 4),),
    "svd": lambda: (square().detach(),),
    "tan": lambda: (U(4),),
    "tensordot": lambda: (T(2, 3), T(3, 4), [1], [0]),
    "trace": lambda: (T(3, 3),),
    "triangular_solve": lambda: (T(3, 2), square()),
    "triplet_margin_loss": lambda: (T(3, 4), T(3, 4), T(3, 4)),
    "upsample_bicubic2d": lambda: (T(1, 1, 4, 4), [6, 6], False),
    "upsample_bilinear2d": lambda: (T(1, 1, 4, 4), [6, 6], False),
    "upsample_linear1d": lambda: (T(1, 1, 4), [6], False),
    "upsample_nearest1d": lambda: (T(1, 1, 4), [6]),
    "upsample_nearest2d": lambda: (T(1, 1, 4, 4), [6, 6]),
    "upsample_nearest3d": lambda: (T(1, 1, 2, 2, 2), [3, 3, 3]),
    "upsample_trilinear3d": lambda: (T(1, 1, 2, 2, 2), [3, 3, 3], False),
    "vdot": lambda: (T(4), T(4)),
    "view_as_complex": lambda: (T(3, 2),),
}


def sample(name: str) -> tuple[tuple, dict]:
    torch.manual_seed(0)
    arguments = SAMPLES[name]()
    has_kwargs = len(arguments) == 2 and isinstance(arguments[1], dict)
    return arguments if has_kwargs else (arguments, {})


def as_dtypes(arguments: Any, dtypes: list[torch.dtype]) -> Any:
    """Fresh leaves of these dtypes, in turn, in place of the float32 tensors."""
    count = iter(range(100))

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype = dtypes[next(count) % len(dtypes)] if x.dtype == torch.float32 else x.dtype
        return x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)

    return tree_map(convert, arguments)


def listed(device_type: str) -> set[str]:
    """The names on our list that torch calls listed."""
    lists = LISTS[device_type]
    names = {n for policy in lists if policy is not Policy.PARTS for n in lists[policy].split()}
    return names - {"gru", "lstm", "rnn_relu", "rnn_tanh"}  # torch: in CUDA builds, as _cudnn_rnn


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps", "xpu"])
def test_the_lists_name_what_torch_registers(device_type):
    registered = REGISTERED[device_type] - {"_cudnn_rnn", "_cudnn_rnn_flatten_weight", "miopen_rnn"}
    ours = listed(device_type)
    if device_type == "xpu":  # which shares CUDA's list
        ours -= {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert ours == registered


@pytest.mark.parametrize("device_type", LISTS)
def test_no_name_is_listed_twice(device_type):
    names = " ".join(LISTS[device_type].values()).split()
    assert len(names) == len(set(names))


def test_every_listed_operation_has_a_sample():
    assert set(SAMPLES) == set.union(*map(listed, LISTS))


def test_table_is_readable():
    rows = op_policy.table("cuda")
    assert ("softmax", "float32 result") in rows
    assert ("matmul", "lower precision") in rows
    assert rows[0].operation == "acos"
    assert [str(row.policy) for row in rows if row.operation == "pow"] == ["float32"]
    assert ("softmax", "float32 result") not in op_policy.table("cpu")
    assert ("mse_loss", "float32") in op_policy.table("cpu")
    assert ("gru", "its parts") in op_policy.table("cpu")


def test_functions_finds_every_way_to_call_an_operation():
    functions = op_policy.functions("softmax")
    assert {torch.softmax, Tensor.softmax, torch.nn.functional.softmax} <= set(functions)
    assert {torch.ops.aten.softmax, torch.ops.aten.softmax.int} <= set(functions)
    assert torch.linalg.lu_solve not in op_policy.functions("lu_solve")
    assert Tensor.__rmatmul__ in op_policy.functions("matmul")


def run(
    context: AbstractContextManager, function: Callable, args: Any, kwargs: dict
) -> tuple[Any, list[Tensor | None] | None]:
    """Outputs and, where there are any, gradients; or the error's type."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    torch.manual_seed(1)
    try:
        with context:
            result = function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return type(error), None  # some ways to call it take other arguments
    outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    roots = [x for x in outputs if x.requires_grad]
    if not roots or not inputs:
        return outputs, None
    gradients = [torch.ones_like(x) for x in roots]
    return outputs, list(torch.autograd.grad(roots, inputs, gradients, allow_unused=True))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b
    if a.is_complex() and b.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if a.dtype == b.dtype == torch.uint8:
        return a.shape == b.shape  # oneDNN's workspace, part of it never written
    return a.dtype == b.dtype and torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", sorted(listed("cpu")))
def test_cpu_list_computes_what_torch_computes(name, low):
    """Every way to call it, with inputs of both dtypes: same dtypes, same bits, same gradients."""
    args, kwargs = sample(name)
    compared = 0
    for function in op_policy.functions(name):
        for dtypes in ([torch.float32], [low], [torch.float32, low], [low, torch.float32]):
            expected = run(torch.autocast("cpu", low), function, *as_dtypes((args, kwargs), dtypes))
            ours = run(autocast("cpu", low), function, *as_dtypes((args, kwargs), dtypes))
            compared += isinstance(expected[0], list)
            # Where torch fails to promote two dtypes, ours may go on.
            assert same(expected, ours) or (isinstance(expected[0], type) and len(dtypes) == 2), (
                f"{function} of {dtypes}: {ours}, torch has {expected}"
            )
    # oneDNN's LSTM needs a CPU with AVX-512 for bfloat16 and with AMX for float16.
    may_lack = low == torch.float16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert compared >= 2 or (name == "mkldnn_rnn_layer" and may_lack)


@contextmanager
def torchs_autocast(device_type: str):
    """torch's autocast for a device that this machine need not have."""
    torch.set_autocast_enabled(device_type, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.clear_autocast_cache()


def dtypes_of_fakes(
    context: AbstractContextManager, function: Callable, args: tuple, kwargs: dict
) -> list[torch.dtype] | None:
    """None if the call fails: other arguments are wanted, or fake tensors cannot do it."""
    try:
        with context:
            result = function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return None
    return [x.dtype for x in tree_leaves(result) if isinstance(x, Tensor)]


# torch has no fake version of these.
NOT_FAKED = {
    "cuda": {
        "_thnn_fused_gru_cell",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "gru_cell",
    },
    "mps": {"_mps_convolution", "scaled_dot_product_attention"},
}


@pytest.mark.parametrize(
    ("device_type", "name"), [(d, name) for d in ("cuda", "mps") for name in sorted(listed(d))]
)
def test_other_lists_give_the_dtypes_of_torch(device_type, name):
    """Fake tensors of a GPU know their dtypes on machines without one."""
    low = torch.float16
    compared = 0
    for dtypes in ([torch.float32], [low], [torch.float32, low], [low, torch.float32]):
        real = as_dtypes(sample(name), dtypes)
        with FakeTensorMode():
            args, kwargs = tree_map(
                lambda x: (
                    torch.empty(x.shape, dtype=x.dtype, device=device_type)
                    if isinstance(x, Tensor)
                    else x
                ),
                real,
            )
            for function in op_policy.functions(name):
                expected = dtypes_of_fakes(torchs_autocast(device_type), function, args, kwargs)
                mode = CastMode(device_type, low, False, {})
                assert expected == dtypes_of_fakes(mode, function, args, kwargs), (
                    f"{function} of {dtypes}"
                )
                compared += expected is not None
    is_faked = name not in NOT_FAKED[device_type] | {"binary_cross_entropy", "grid_sampler"}
    assert bool(compared) == is_faked


def test_banned_operation_says_what_to_use_instead():
    probability, target = U(4), U(4).detach()
    with (
        autocast("cpu", torch.float16, emulate=True),  # CUDA's list
        pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
    ):
        torch.nn.functional.binary_cross_entropy(probability, target)
