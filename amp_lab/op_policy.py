"""Which operation runs in which precision: autocast's decisions, as data.

torch keeps one list per kind of device, and they differ. What is on no list runs in whatever dtype
its inputs have. `table("cuda")` shows a list as rows; `amp_lab.autocast` applies it.

Names are those of ATen, torch's operator library: `linalg_qr` is `torch.linalg.qr`, `softmax` is
`torch.softmax`, `Tensor.softmax` and `torch.nn.functional.softmax`. `functions` finds them all.

Source: "CUDA Ops that can autocast to float16" and its neighbours on the documentation page
"Automatic Mixed Precision package"; the tests hold the lists against what torch itself does.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum

import torch


class Policy(StrEnum):
    """What autocast does with an operation's inputs."""

    LOWER = "lower precision"
    """Cast to the region's dtype: products, where tensor cores are fast and sums are float32."""

    FLOAT32 = "float32"
    """Cast to float32: what overflows, or loses too much, in half precision."""

    FLOAT32_RESULT = "float32 result"
    """Leave the inputs, but ask for a float32 result unless the caller asked for a dtype."""

    WIDEST = "widest input"
    """Cast to float32 where one input is float32: all must have one dtype."""

    BANNED = "banned"
    """Raise an error that says what to use instead."""


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

LISTS = {"cpu": _CPU, "cuda": _CUDA}


def functions(name: str) -> Iterator[Callable]:
    """Yield the public functions and methods that are the ATen operation `name`."""
    namespaces = [torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch._VF]
    found = [getattr(namespace, name, None) for namespace in namespaces]
    for prefix, module in (("linalg_", torch.linalg), ("fft_", torch.fft)):
        found.append(getattr(module, name.removeprefix(prefix), None))
    yield from (f for f in found if callable(f))
