"""Which operation runs in which precision: autocast's decisions, as data.

torch keeps one list per kind of device, and they differ more than one would think: `softmax` and
`sum` are on the list for CUDA and on none for the CPU, where `max_pool3d` and the Fourier
transforms are. What is on no list runs in whatever dtype its inputs have.

    op_policy.table("cuda")    a list, as rows of operation and policy
    op_policy.policies("cuda") the same by function, which is what `amp_lab.autocast` looks up

Names are those of ATen, torch's operator library: `linalg_qr` is `torch.linalg.qr`, `softmax` is
`torch.softmax`, `Tensor.softmax` and `torch.nn.functional.softmax`.

Source: documentation page "Automatic Mixed Precision package", "Autocast Op Reference", which is
not complete. The tests hold the lists against what torch does: on the CPU by computing, for the
other devices by the dtypes of fake tensors.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch


class Policy(StrEnum):
    """What autocast does with an operation."""

    LOWER = "lower precision"
    """Cast the inputs to the region's dtype: products, which tensor cores add up in float32."""

    FLOAT32 = "float32"
    """Cast the inputs to float32: what overflows, or loses too much, in half precision."""

    FLOAT32_RESULT = "float32 result"
    """Leave the inputs, ask for a float32 result. A dtype that the caller asks for stands."""

    WIDEST = "widest input"
    """Cast the inputs to float32 where one of them is: for operations that want one dtype."""

    BANNED = "banned"
    """Raise an error that says what to use instead."""

    PARTS = "its parts"
    """On no list, but made of operations that are: these are treated one by one."""


_CPU = {
    Policy.LOWER: """
        _addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
        conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot
        linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention
    """,
    Policy.FLOAT32: """
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
        avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
        cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss
        fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2
        fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
        grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
        lu_solve margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss
        multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile
        nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod qr quantile
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
        smooth_l1_loss soft_margin_loss stft svd trace triangular_solve triplet_margin_loss
        view_as_complex
    """,
    Policy.WIDEST: "cat index_copy stack",
}

_CUDA = {
    Policy.LOWER: """
        _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell
        _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d
        conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution cudnn_convolution
        cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell
        matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """,
    Policy.FLOAT32: """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin
        binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist
        erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss
        layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm pdist
        poisson_nll_loss pow reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss
        softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """,
    Policy.FLOAT32_RESULT: """
        cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax norm prod softmax sum
    """,
    Policy.WIDEST: """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """,
    Policy.BANNED: "binary_cross_entropy",
}

# On no list, but written, in Python or C++, on top of listed operations (see amp_lab.composites).
# The losses among them are listed; in Python they broadcast their inputs first.
_PARTS = """
    functional.einsum functional.norm functional.tensordot inner linalg_matrix_power lobpcg
    nn.functional.huber_loss nn.functional.interpolate nn.functional.l1_loss
    nn.functional.linear_cross_entropy nn.functional.local_response_norm nn.functional.lp_pool3d
    nn.functional.mse_loss nn.functional.multi_head_attention_forward
    nn.functional.smooth_l1_loss pca_lowrank svd_lowrank
"""
_CPU[Policy.PARTS] = f"""{_PARTS}
    bilinear chain_matmul einsum gru gru_cell linalg_multi_dot lstm lstm_cell pad rnn_relu
    rnn_relu_cell rnn_tanh rnn_tanh_cell tensordot
"""
_CUDA[Policy.PARTS] = f"""{_PARTS}
    Tensor.__rdiv__ Tensor.norm nn.functional.gaussian_nll_loss nn.functional.gumbel_softmax
    nn.functional.lp_pool1d nn.functional.lp_pool2d nn.functional.multilabel_soft_margin_loss
    nn.functional.normalize nn.functional.triplet_margin_with_distance_loss pairwise_distance
"""
# cuDNN's recurrent networks, which torch lists in CUDA builds only, as `_cudnn_rnn`.
_CUDA[Policy.LOWER] += "gru lstm rnn_relu rnn_tanh"

# Apple's GPUs share CUDA's list, except for these.
_NOT_ON_MPS = """
    _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d binary_cross_entropy conv_transpose3d
    cudnn_convolution cudnn_convolution_transpose gru gru_cell linalg_vecdot lstm norm rms_norm
    rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    vdot
"""
_MPS = {
    policy: " ".join(name for name in names.split() if name not in _NOT_ON_MPS.split())
    for policy, names in _CUDA.items()
}
_MPS[Policy.LOWER] += " _mps_convolution"
_MPS[Policy.FLOAT32] += f" batch_norm conv_transpose3d {_MPS.pop(Policy.FLOAT32_RESULT)}"

LISTS = {"cpu": _CPU, "cuda": _CUDA, "mps": _MPS, "xpu": _CUDA}
"""For each type of device, the names of the operations by policy, separated by blanks."""

# Other names for the same operation.
_ALSO = {
    "_lu_with_info": "functional.lu Tensor.lu",
    "acos": "arccos Tensor.arccos",
    "adaptive_max_pool3d": "nn.functional.adaptive_max_pool3d_with_indices",
    "asin": "arcsin Tensor.arcsin",
    "atan2": "arctan2 Tensor.arctan2",
    "cat": "column_stack concat concatenate dstack hstack row_stack vstack",
    "cross_entropy_loss": "nn.functional.cross_entropy",
    "erfinv": "special.erfinv",
    "expm1": "special.expm1",
    "fractional_max_pool2d": "nn.functional.fractional_max_pool2d_with_indices",
    "fractional_max_pool3d": "nn.functional.fractional_max_pool3d_with_indices",
    "grid_sampler": "nn.functional.grid_sample",
    "linalg_matrix_power": "Tensor.matrix_power matrix_power",
    "linalg_vector_norm": "linalg.norm",
    "log1p": "special.log1p",
    "log_softmax": "special.log_softmax",
    "logsumexp": "special.logsumexp",
    "matmul": "Tensor.__matmul__ Tensor.__rmatmul__ linalg.matmul",
    "max_unpool2d": "nn.functional.max_unpool1d",
    "nll_loss": "_C._nn.nll_loss_nd nn.functional.cross_entropy",
    "pow": "Tensor.__pow__ Tensor.__rpow__ Tensor.square square",
    "softmax": "nn.functional.softmin special.softmax",
}


class Row(NamedTuple):
    """One row of `table`."""

    operation: str
    policy: Policy


def table(device_type: str) -> list[Row]:
    """Return the list of "cpu", "cuda", "mps" or "xpu" in alphabetical order.

    What is listed and also reached through its parts (`mse_loss`) appears as what it is listed as.
    """
    policy_of = {
        name.rpartition(".")[2]: policy
        for policy in reversed(LISTS[device_type])
        for name in LISTS[device_type][policy].split()
    }
    return [Row(name, policy_of[name]) for name in sorted(policy_of, key=lambda n: n.strip("_"))]


@cache
def policies(device_type: str) -> dict[Callable, Policy]:
    """Return the policy of every function and method by which Python calls a listed operation."""
    return {
        function: policy
        for policy, names in LISTS[device_type].items()
        for name in names.split()
        for function in functions(name)
    }


@cache
def functions(name: str) -> tuple[Callable, ...]:
    """Return the functions and methods by which Python calls the operation `name`."""
    if "." in name:
        return tuple(_existing(name))
    paths = [name, f"Tensor.{name}", f"nn.functional.{name}", f"_C._nn.{name}", f"_VF.{name}"]
    for module in ("linalg", "fft"):
        if name.startswith(module):
            paths.append(f"{module}.{name.removeprefix(module + '_')}")
    found = list(_existing(*paths, *_ALSO.get(name, "").split()))
    for packet in _existing(f"ops.aten.{name}"):
        found.append(packet)
        if name != "norm":  # whose overloads do not all take a dtype
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(found)


def _existing(*paths: str) -> Iterator[Any]:
    """Yield what torch has under these names; releases and builds differ a little."""
    for path in paths:
        try:
            yield attrgetter(path)(torch)
        except AttributeError:
            continue
