"""Modules and composed functions: outputs and gradients bit by bit as under torch's autocast."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves, tree_map

from amp_lab import autocast
from amp_lab.op_policy import LISTS, Policy

LOW = [torch.bfloat16, torch.float16]
each_low = pytest.mark.parametrize("low", LOW, ids=str)


def contexts(low: torch.dtype, **kwargs: Any) -> list[AbstractContextManager]:
    return [torch.autocast("cpu", low, **kwargs), autocast("cpu", low, **kwargs)]


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def run(
    context: AbstractContextManager, function: Callable, inputs: Any, parameters: list[Tensor]
) -> list[Tensor | None]:
    """Outputs, then gradients of inputs and parameters, for fresh leaves and the same seed."""
    inputs = tree_map(
        lambda x: (
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        ),
        inputs,
    )
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    torch.manual_seed(1)
    with context:
        result = function(*inputs)
    outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    roots = [x for x in outputs if x.requires_grad]
    if not roots or not leaves + parameters:
        return outputs
    gradients = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) for x in roots]
    gradients = [g.to(x.dtype) for g, x in zip(gradients, roots, strict=True)]
    return outputs + list(
        torch.autograd.grad(roots, leaves + parameters, gradients, allow_unused=True)
    )


def assert_same(
    function: Callable,
    inputs: Any,
    low: torch.dtype,
    parameters: Any = (),
    contexts: Callable[[torch.dtype], list[AbstractContextManager]] = contexts,
) -> None:
    parameters = list(parameters)
    theirs, ours = (run(c, function, inputs, parameters) for c in contexts(low))
    assert len(theirs) == len(ours)
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert equal(a, b), f"tensor {i} of {len(theirs)}: {b}, torch has {a}"


def x(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def classes(*shape: int) -> Tensor:
    return torch.randint(3, shape)


def signs(*shape: int) -> Tensor:
    return torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]] = {
    "Linear": (lambda: nn.Linear(6, 5), lambda: (x(4, 6),)),
    "Linear, 3-D": (lambda: nn.Linear(6, 5), lambda: (x(2, 4, 6),)),
    "Linear, no bias": (lambda: nn.Linear(6, 5, bias=False), lambda: (x(6),)),
    "Bilinear": (lambda: nn.Bilinear(4, 5, 3), lambda: (x(6, 4), x(6, 5))),
    "Bilinear, 3-D": (lambda: nn.Bilinear(4, 5, 3, bias=False), lambda: (x(2, 3, 4), x(2, 3, 5))),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3, padding="same"), lambda: (x(2, 3, 9),)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), lambda: (x(2, 3, 9, 9),)),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 4, 3, groups=2, dilation=2), lambda: (x(2, 4, 9, 9),)),
    "Conv2d, reflect": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        lambda: (x(2, 3, 6, 6),),
    ),
    "Conv2d, circular": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        lambda: (x(2, 3, 6, 6),),
    ),
    "Conv3d": (lambda: nn.Conv3d(3, 4, 2), lambda: (x(2, 3, 4, 4, 4),)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), lambda: (x(2, 3, 6),)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), lambda: (x(2, 3, 6, 6),)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(3, 4, 2), lambda: (x(2, 3, 3, 3, 3),)),
    "Embedding": (
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)),
        lambda: (torch.tensor([[0, 2], [4, 4]]),),
    ),
    "EmbeddingBag": (
        lambda: nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 3)),
        lambda: (torch.tensor([[0, 2], [4, 4]]),),
    ),
    **{
        name: (
            lambda layer=layer: nn.Sequential(nn.Conv1d(4, 4, 1), layer(), nn.Conv1d(4, 4, 1)),
            lambda: (x(2, 4, 6),),
        )
        for name, layer in [
            ("BatchNorm1d", lambda: nn.BatchNorm1d(4)),
            ("InstanceNorm1d", lambda: nn.InstanceNorm1d(4, affine=True)),
            ("GroupNorm", lambda: nn.GroupNorm(2, 4)),
            ("LayerNorm", lambda: nn.LayerNorm(6)),
            ("RMSNorm", lambda: nn.RMSNorm(6)),
            ("LocalResponseNorm", lambda: nn.LocalResponseNorm(2)),
            ("MaxPool1d", lambda: nn.MaxPool1d(2)),
            ("AvgPool1d", lambda: nn.AvgPool1d(2)),
            ("LPPool1d", lambda: nn.LPPool1d(2, 2)),
            ("AdaptiveAvgPool1d", lambda: nn.AdaptiveAvgPool1d(3)),
            ("AdaptiveMaxPool1d", lambda: nn.AdaptiveMaxPool1d(3)),
            ("Softmax", lambda: nn.Softmax(1)),
            ("LogSoftmax", lambda: nn.LogSoftmax(1)),
            ("GELU", nn.GELU),
            ("PReLU", nn.PReLU),
            ("Softplus", nn.Softplus),
            ("Dropout", lambda: nn.Dropout(0.5)),
            ("ReflectionPad1d", lambda: nn.ReflectionPad1d(2)),
            ("ReplicationPad1d", lambda: nn.ReplicationPad1d(2)),
            ("ConstantPad1d", lambda: nn.ConstantPad1d(2, 1.0)),
            ("CircularPad1d", lambda: nn.CircularPad1d(2)),
            ("Upsample", lambda: nn.Upsample(scale_factor=2, mode="linear")),
        ]
    },
    **{
        name: (
            lambda layer=layer: nn.Sequential(nn.Conv3d(2, 2, 1), layer(), nn.Conv3d(2, 2, 1)),
            lambda: (x(1, 2, 4, 4, 4),),
        )
        for name, layer in [
            ("BatchNorm3d", lambda: nn.BatchNorm3d(2)),
            ("LocalResponseNorm, 5-D", lambda: nn.LocalResponseNorm(2)),
            ("MaxPool3d", lambda: nn.MaxPool3d(2)),
            ("AvgPool3d", lambda: nn.AvgPool3d(2)),
            ("LPPool3d", lambda: nn.LPPool3d(2, 2)),
            ("AdaptiveAvgPool3d", lambda: nn.AdaptiveAvgPool3d(2)),
            ("AdaptiveMaxPool3d", lambda: nn.AdaptiveMaxPool3d(2)),
            ("FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, output_size=2)),
            ("ReflectionPad3d", lambda: nn.ReflectionPad3d(1)),
            ("ReplicationPad3d", lambda: nn.ReplicationPad3d(1)),
        ]
    },
    **{
        name: (
            lambda layer=layer: nn.Sequential(nn.Conv2d(2, 2, 1), layer(), nn.Conv2d(2, 2, 1)),
            lambda: (x(2, 2, 6, 6),),
        )
        for name, layer in [
            ("BatchNorm2d", lambda: nn.BatchNorm2d(2)),
            ("BatchNorm2d, eval", lambda: nn.BatchNorm2d(2).eval()),
            ("MaxPool2d", lambda: nn.MaxPool2d(2)),
            ("AvgPool2d", lambda: nn.AvgPool2d(2)),
            ("LPPool2d", lambda: nn.LPPool2d(2, 2)),
            ("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(3)),
            ("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_size=3)),
            ("ReflectionPad2d", lambda: nn.ReflectionPad2d(1)),
            ("ReplicationPad2d", lambda: nn.ReplicationPad2d(1)),
            ("ZeroPad2d", lambda: nn.ZeroPad2d(1)),
            ("Upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
            ("PixelShuffle", lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2))),
        ]
    },
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), lambda: (*[x(5, 3, 8)] * 3,)),
    "MultiheadAttention, extras": (
        lambda: nn.MultiheadAttention(
            8, 2, batch_first=True, kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True
        ),
        lambda: (x(3, 5, 8), x(3, 4, 6), x(3, 4, 4), torch.tensor([[False] * 3 + [True]] * 3)),
    ),
    "MultiheadAttention, no weights": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.3),
        lambda: (x(3, 5, 8), x(3, 4, 8), x(3, 4, 8), None, False, torch.randn(5, 4)),
    ),
    "MultiheadAttention, cross": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
        lambda: (x(5, 3, 8), x(4, 3, 6), x(4, 3, 4), None, False),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: (x(3, 5, 8),),
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu"),
            2,
            enable_nested_tensor=False,
        ),
        lambda: (x(5, 3, 8), nn.Transformer.generate_square_subsequent_mask(5)),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
        lambda: (x(3, 5, 8), x(3, 4, 8)),
    ),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda: (x(3, 5, 8), x(3, 4, 8)),
    ),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@each_low
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, low):
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module = make()
    state = {key: value.clone() for key, value in module.state_dict().items()}

    def forward(*args: Any) -> Any:
        module.load_state_dict(state)  # batch norm counts
        return module(*args)

    assert_same(forward, inputs(), low, list(module.parameters()))


@each_low
@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoderLayer", "Transformer"])
def test_transformers_in_eval_mode_with_gradients(name, low):
    """With gradients torch takes no fast path either."""
    make, inputs = MODULES[name]
    module = make().eval()
    assert_same(module, inputs(), low, list(module.parameters()))


@each_low
def test_transformer_encoder_in_eval_mode_is_equal_within_rounding(low):
    """torch takes its fused fast path here. An active mode keeps it from that."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    inputs = torch.randn(3, 5, 16)
    with torch.no_grad():
        exact = module(inputs)
        exact_attention, _ = attention(inputs, inputs, inputs)
        for context in contexts(low):
            with context:
                y = module(inputs)
                z, _ = attention(inputs, inputs, inputs)
            accuracy = 4 * torch.finfo(low).eps
            assert torch.allclose(y.float(), exact, rtol=accuracy, atol=accuracy)
            assert torch.allclose(z.float(), exact_attention, rtol=accuracy, atol=accuracy)


@each_low
def test_padding_mask_in_eval_mode(low):
    """torch's fast path cannot do this on a CPU: its nested tensors are of two dtypes."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    inputs = torch.randn(3, 5, 16)
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    with torch.no_grad():
        exact = module(inputs, src_key_padding_mask=mask)
        with autocast("cpu", low):
            y = module(inputs, src_key_padding_mask=mask)
    accuracy = 4 * torch.finfo(low).eps
    assert torch.allclose(y.float()[~mask], exact[~mask], rtol=accuracy, atol=accuracy)


RECURRENT = {
    f"{kind.__name__}, {options}": (kind, options)
    for kind in (nn.RNN, nn.GRU, nn.LSTM)
    for options in (
        {},
        {"batch_first": True, "bidirectional": True},
        {"num_layers": 2, "dropout": 0.4, "bias": False},
    )
} | {
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu"}),
    "LSTM, projections": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
}


@cache
def has_onednn_lstm(low: torch.dtype) -> bool:
    """Has oneDNN an LSTM in this dtype for this CPU? If not, torch's autocast fails."""
    try:
        with torch.autocast("cpu", low):
            nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        return False
    return True


@contextmanager
def torchs_without_onednn(low: torch.dtype) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TF32, which the flags set too
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", low):
            yield


def lstm_contexts(low: torch.dtype) -> list[AbstractContextManager]:
    theirs, ours = contexts(low)
    return [theirs if has_onednn_lstm(low) else torchs_without_onednn(low), ours]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@each_low
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_networks(name, with_state, low):
    torch.manual_seed(0)
    kind, options = RECURRENT[name]
    module = kind(6, 4, **options)
    inputs: list[Any] = [x(5, 3, 6)]
    if with_state:
        copies = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
        batch = 5 if options.get("batch_first") else 3
        state = x(copies, batch, options.get("proj_size", 4))
        inputs.append((state, x(copies, batch, 4)) if kind is nn.LSTM else state)
    is_onednn = kind is nn.LSTM and "proj_size" not in options
    assert_same(module, inputs, low, module.parameters(), lstm_contexts if is_onednn else contexts)


@each_low
def test_lstm_on_a_cpu_without_onednns(monkeypatch, low):
    """On every CPU; those that have it may round a product otherwise than without oneDNN."""
    torch.manual_seed(0)
    module, data = nn.LSTM(6, 4, num_layers=2, bidirectional=True), x(5, 3, 6)
    arguments = module, [data], list(module.parameters())
    expected = run(torchs_without_onednn(low), *arguments)

    def missing(*args: Any) -> None:
        raise RuntimeError("could not create a primitive descriptor for the LSTM")

    monkeypatch.setattr(torch, "mkldnn_rnn_layer", missing)
    tolerance = 2 * torch.finfo(low).eps
    for ours, theirs in zip(run(autocast("cpu", low), *arguments), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_lstm_with_an_error_of_its_own_raises_it(monkeypatch):
    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "mkldnn_rnn_layer", broken)
    with autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="out of memory"):
        nn.LSTM(6, 4)(torch.zeros(5, 3, 6))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@each_low
@pytest.mark.parametrize("name", RECURRENT)
def test_packed_sequences(name, low):
    torch.manual_seed(0)
    kind, options = RECURRENT[name]
    options = {**options, "batch_first": False}
    module = kind(6, 4, **options)

    def forward(data: Tensor) -> Any:
        packed = pack_padded_sequence(data, torch.tensor([5, 2, 3]), enforce_sorted=False)
        output, state = module(packed)
        return output.data, state

    assert_same(forward, [x(5, 3, 6)], low, list(module.parameters()))


@each_low
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("with_state", [False, True])
def test_cells(kind, with_state, low):
    torch.manual_seed(0)
    module = kind(6, 4)
    inputs: list[Any] = [x(3, 6)]
    if with_state:
        inputs.append((x(3, 4), x(3, 4)) if kind is nn.LSTMCell else x(3, 4))

    def two_steps(data: Tensor, state: Any = None) -> Any:
        return module(data, module(data, state))

    assert_same(two_steps, inputs, low, list(module.parameters()))


@each_low
def test_recurrent_operators_called_directly(low):
    torch.manual_seed(0)
    gru, cell, data = nn.GRU(6, 4), nn.GRUCell(6, 4, bias=False), x(5, 3, 6)
    settings = True, 1, 0.0, True, False, False
    for function in (
        lambda data: torch.ops.aten.gru(data, torch.zeros(1, 3, 4), gru._flat_weights, *settings),
        lambda data: torch.ops.aten.gru.input(
            data, torch.zeros(1, 3, 4), gru._flat_weights, *settings
        ),
    ):
        assert_same(function, [data], low, gru.parameters())
    for operator in (torch.gru_cell, torch.ops.aten.gru_cell, torch.ops.aten.gru_cell.default):
        assert_same(
            lambda data, f=operator: f(
                data[0], hx=torch.zeros(3, 4), w_ih=cell.weight_ih, w_hh=cell.weight_hh
            ),
            [data],
            low,
            cell.parameters(),
        )


def test_recurrent_network_after_a_layer_and_without_grad():
    torch.manual_seed(0)
    first, inputs = nn.Linear(6, 6), torch.randn(5, 3, 6)
    for module in (nn.GRU(6, 4), nn.LSTM(6, 4), nn.RNN(6, 4)):
        assert_same(
            lambda data, module=module: module(first(data))[0],
            [inputs],
            torch.bfloat16,
            [*first.parameters(), *module.parameters()],
            lstm_contexts,
        )
        with torch.no_grad():
            results = []
            for context in lstm_contexts(torch.bfloat16):
                with context:
                    results.append(module(first(inputs))[0])
        assert equal(*results)


def loss_inputs(*target: Tensor, shape: tuple[int, ...] = (5, 3)) -> tuple:
    return (x(*shape), *target)


def distribution() -> Tensor:
    return torch.rand(5, 3).softmax(1)


LOSSES: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "cross_entropy": (F.cross_entropy, lambda: loss_inputs(classes(5))),
    "cross_entropy of probabilities": (F.cross_entropy, lambda: loss_inputs(distribution())),
    "cross_entropy, weights": (
        lambda i, t, w: F.cross_entropy(i, t, weight=w, label_smoothing=0.1, ignore_index=2),
        lambda: loss_inputs(classes(5), torch.rand(3)),
    ),
    "cross_entropy of images": (
        F.cross_entropy,
        lambda: (x(2, 3, 4, 4), classes(2, 4, 4)),
    ),
    "nll_loss": (F.nll_loss, lambda: loss_inputs(classes(5))),
    "nll_loss of images": (F.nll_loss, lambda: (x(2, 3, 4, 4), classes(2, 4, 4))),
    "nll_loss, 5-D": (F.nll_loss, lambda: (x(2, 3, 2, 2, 2), classes(2, 2, 2, 2))),
    "nll_loss_nd": (torch._C._nn.nll_loss_nd, lambda: (x(2, 3, 4), classes(2, 4))),
    "mse_loss": (F.mse_loss, lambda: loss_inputs(torch.randn(5, 3))),
    "l1_loss": (F.l1_loss, lambda: loss_inputs(torch.randn(5, 3))),
    "smooth_l1_loss": (F.smooth_l1_loss, lambda: loss_inputs(torch.randn(5, 3))),
    "huber_loss": (F.huber_loss, lambda: loss_inputs(torch.randn(5, 3))),
    "kl_div": (
        lambda i, t: F.kl_div(i, t, reduction="batchmean"),
        lambda: loss_inputs(distribution()),
    ),
    "binary_cross_entropy": (
        lambda i, t: F.binary_cross_entropy(i.sigmoid(), t),
        lambda: loss_inputs(torch.rand(5, 3)),
    ),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        lambda: loss_inputs(torch.rand(5, 3)),
    ),
    "soft_margin_loss": (F.soft_margin_loss, lambda: loss_inputs(signs(5, 3))),
    "hinge_embedding_loss": (F.hinge_embedding_loss, lambda: loss_inputs(signs(5, 3))),
    "cosine_embedding_loss": (F.cosine_embedding_loss, lambda: (x(5, 3), x(5, 3), signs(5))),
    "margin_ranking_loss": (F.margin_ranking_loss, lambda: (x(5), x(5), signs(5))),
    "multi_margin_loss": (F.multi_margin_loss, lambda: loss_inputs(classes(5))),
    "multilabel_margin_loss": (
        F.multilabel_margin_loss,
        lambda: (x(2, 3), torch.tensor([[1, -1, 0], [2, 0, -1]])),
    ),
    "multilabel_soft_margin_loss": (
        F.multilabel_soft_margin_loss,
        lambda: loss_inputs(torch.rand(5, 3).round()),
    ),
    "triplet_margin_loss": (F.triplet_margin_loss, lambda: (x(5, 3), x(5, 3), x(5, 3))),
    "triplet_margin_with_distance_loss": (
        F.triplet_margin_with_distance_loss,
        lambda: (x(5, 3), x(5, 3), x(5, 3)),
    ),
    "poisson_nll_loss": (F.poisson_nll_loss, lambda: loss_inputs(torch.rand(5, 3))),
    "gaussian_nll_loss": (
        F.gaussian_nll_loss,
        lambda: loss_inputs(torch.rand(5, 3), torch.rand(5, 3)),
    ),
    "ctc_loss": (
        lambda i, t: F.ctc_loss(i.log_softmax(2), t, [6, 5], [3, 2]),
        lambda: (x(6, 2, 3), 1 + classes(2, 3) % 2),
    ),
    "linear_cross_entropy": (
        getattr(F, "linear_cross_entropy", None),
        lambda: (x(5, 4), x(3, 4), classes(5)),
    ),
}


@each_low
@pytest.mark.parametrize("through_a_layer", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, through_a_layer, low):
    torch.manual_seed(0)
    loss, inputs = LOSSES[name]
    if loss is None:
        pytest.skip("not in this torch")

    def function(first: Tensor, *rest: Any) -> Tensor:
        if through_a_layer:  # a half-precision input, as from a model
            first = first @ torch.eye(first.shape[-1])
        return loss(first, *rest)

    assert_same(function, inputs(), low)


@each_low
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_that_broadcast(loss, low):
    """The gradient is summed over the copies before or after the cast: that shows in its bits."""

    def function(i: Tensor, t: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return loss(i, t)

    torch.manual_seed(0)
    assert_same(function, (x(7, 1).detach().to(low).requires_grad_(), x(1, 9)), low)


FUNCTIONS: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "scaled_dot_product_attention": (
        F.scaled_dot_product_attention,
        lambda: (x(2, 3, 5, 8), x(2, 3, 4, 8), x(2, 3, 4, 8), torch.randn(5, 4)),
    ),
    "scaled_dot_product_attention, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (*[x(2, 3, 5, 8)] * 3,),
    ),
    "tensordot": (torch.tensordot, lambda: (x(3, 4, 5), x(4, 5, 2))),
    "tensordot by dims": (
        lambda a, b: torch.tensordot(a, b, dims=([0, 2], [1, 0])),
        lambda: (x(3, 4, 5), x(5, 3, 2)),
    ),
    "tensordot to a number": (torch.tensordot, lambda: (x(4, 5), x(4, 5))),
    "tensordot to one number": (lambda a, b: torch.tensordot(a, b, 1), lambda: (x(1, 5), x(5, 1))),
    "tensordot, broadcast": (
        lambda a, b: torch.tensordot(a, b, dims=([0], [0])),
        lambda: (x(5, 3), x(1, 2)),
    ),
    "inner": (torch.inner, lambda: (x(3, 5), x(4, 5))),
    "inner of vectors": (torch.inner, lambda: (x(5), x(5))),
    "inner of numbers": (torch.inner, lambda: (x(), x(5))),
    "chain_matmul": (torch.chain_matmul, lambda: (x(2, 3), x(3, 4), x(4, 5))),
    "chain_matmul of one": (torch.chain_matmul, lambda: (x(2, 3),)),
    "multi_dot": (lambda *m: torch.linalg.multi_dot(m), lambda: (x(3), x(3, 4), x(4, 5), x(5))),
    **{
        f"matrix_power {n}": (
            lambda a, n=n: torch.linalg.matrix_power(a * 1, n),
            lambda: (x(3, 3),),
        )
        for n in (0, 1, 2, 3, 4, 7, 10)
    },
    "matrix_power -3": (
        lambda a: torch.linalg.matrix_power(a * 0.1 + torch.eye(3), -3),
        lambda: (x(3, 3),),
    ),
    "pad, reflect 3-D": (
        lambda a: F.pad(a, (1, 1, 0, 1, 1, 0), mode="reflect"),
        lambda: (x(1, 2, 3, 3, 3),),
    ),
    "stft": (
        lambda a: torch.view_as_real(
            torch.stft(a, 8, window=torch.hann_window(8), return_complex=True)
        ),
        lambda: (x(64),),
    ),
    "Tensor.stft": (
        lambda a: a.stft(8, window=torch.hann_window(8), return_complex=True).abs(),
        lambda: (x(64),),
    ),
    "pow and its kin": (lambda a: (a**2).sum() + (2**a).sum() + 1 / a.exp(), lambda: (x(4),)),
    "norm": (lambda a: torch.stack([a.norm(), torch.norm(a, p=1), a.norm(3, 0)]), lambda: (x(4),)),
    "normalize": (F.normalize, lambda: (x(4, 3),)),
    "interpolate, area 3-D": (
        lambda a: F.interpolate(a, size=2, mode="area"),
        lambda: (x(1, 2, 4, 4, 4),),
    ),
    "grid_sample": (
        lambda a, g: F.grid_sample(a, g, align_corners=False),
        lambda: (x(1, 2, 4, 4), x(1, 3, 3, 2)),
    ),
    "max_pool3d and back": (
        lambda a: F.max_unpool3d(*F.max_pool3d(a, 2, return_indices=True), 2),
        lambda: (x(1, 2, 4, 4, 4),),
    ),
    "max_pool1d and back": (
        lambda a: F.max_unpool1d(*F.max_pool1d(a, 2, return_indices=True), 2),
        lambda: (x(1, 2, 6),),
    ),
    "lu": (lambda a: torch.lu(a + 3 * torch.eye(3))[0], lambda: (x(3, 3),)),
    "Tensor.lu": (lambda a: (a + 3 * torch.eye(3)).lu()[0], lambda: (x(3, 3),)),
    "svd_lowrank": (lambda a: torch.svd_lowrank(a, q=2)[1], lambda: (torch.randn(5, 4),)),
    "pca_lowrank": (lambda a: torch.pca_lowrank(a, q=2)[1], lambda: (torch.randn(5, 4),)),
    "gumbel_softmax": (F.gumbel_softmax, lambda: (x(4, 3),)),
    "cdist": (torch.cdist, lambda: (x(4, 3), x(5, 3))),
    "pairwise_distance": (F.pairwise_distance, lambda: (x(4, 3), x(4, 3))),
    "embedding": (F.embedding, lambda: (torch.tensor([0, 2]), x(4, 3))),
    "stacks": (
        lambda a, b: [torch.hstack([a, b]), torch.vstack([a, b]), torch.concat([a, b])],
        lambda: (x(3, 3), x(3, 3)),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.lu is deprecated", "ignore:.*chain_matmul is deprecated")
@each_low
@pytest.mark.parametrize("dtypes", ["float32", "low", "both"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtypes, low):
    torch.manual_seed(0)
    function, inputs = FUNCTIONS[name]
    if name in ("inner of vectors", "tensordot to a number", "tensordot to one number"):
        with torch.autocast("cpu"):
            if torch.inner(torch.ones(2), torch.ones(2)).dtype != torch.float32:
                pytest.skip("this torch makes a matrix product of it")

    def convert(i: int, value: Any) -> Any:
        is_low = dtypes == "low" or (dtypes == "both" and i % 2)
        if isinstance(value, Tensor) and value.dtype == torch.float32 and is_low:
            return value.detach().to(low).requires_grad_(value.requires_grad)
        return value

    arguments = [convert(i, value) for i, value in enumerate(inputs())]
    try:
        run(torch.autocast("cpu", low), function, arguments, [])
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch does not do this with these dtypes")
    assert_same(function, arguments, low)


EQUATIONS = {
    "ij,jk->ik": ["ab", "bc"],
    "ij,kj": ["ab", "cb"],
    "bij,bjk->bik": ["dab", "dbc"],
    "...ij,jk->...ik": ["edab", "bc"],
    "i,i->i": ["a", "a"],
    "i,j->ij": ["a", "b"],
    "ij,ij->": ["ab", "ab"],
    "ij,k->k": ["ab", "c"],
    "ij,jk,kl->il": ["ab", "bc", "cd"],
    "ij,jk,k": ["ab", "bc", "c"],
    "bn,anm,bm->ba": ["ab", "cbd", "ad"],
    "ii->i": ["aa"],
    "ii,ij->j": ["aa", "ab"],
    "iij,j->i": ["aab", "b"],
    "ij,ij,jk->ik": ["ab", "ab", "bc"],
    "...,...->...": ["ab", "ab"],
    "...i,...i->...": ["dab", "ab"],
    "a b , b c -> c a": ["ab", "bc"],
    "ij->ji": ["ab"],
    "aB,Bc": ["ab", "bc"],
}
SIZES = {"a": 3, "b": 4, "c": 5, "d": 2, "e": 2}


@each_low
@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("ones", [False, True], ids=["", "with a size of 1"])
def test_einsum(equation, ones, low):
    torch.manual_seed(0)
    sizes = {**SIZES, "b": 1} if ones else SIZES
    operands = [x(*(sizes[letter] for letter in letters)) for letters in EQUATIONS[equation]]
    assert_same(lambda *o: torch.einsum(equation, *o), operands, low)
    assert_same(lambda *o: torch.einsum(equation, list(o)), operands, low)
    broadcast = [o.detach()[:1].requires_grad_() if o.dim() == 3 else o for o in operands]
    if not ones and equation.startswith("bij"):
        assert_same(lambda *o: torch.einsum(equation, *o), broadcast, low)


@each_low
def test_einsum_of_sublists_and_along_a_path(low):
    torch.manual_seed(0)
    a, b, c = x(3, 4), x(4, 5), x(5, 2)
    assert_same(lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), [a, b], low)
    for path in ([0, 1, 0, 1], [1, 2, 0, 1], [0, 2, 0, 1]):
        assert_same(
            lambda a, b, c, path=path: torch._VF.einsum("ij,jk,kl->li", [a, b, c], path=path),
            [a, b, c],
            low,
        )


def test_every_operation_with_parts_is_tested_here():
    tested = {name.split()[0].rstrip(",") for name in (*FUNCTIONS, *LOSSES)}
    tested |= {"bilinear", "einsum", "multi_head_attention_forward", "interpolate"}  # MODULES
    tested |= {"local_response_norm", "lp_pool3d", "linalg_matrix_power", "linalg_multi_dot"}
    tested |= {"gru", "lstm", "rnn_relu", "rnn_tanh", "rnn_tanh_cell", "lstm_cell", "gru_cell"}
    names = {name.rpartition(".")[2] for name in LISTS["cpu"][Policy.PARTS].split()}
    assert names - tested <= {"rnn_relu_cell", "lobpcg"}


def test_relu_cell_and_lobpcg():
    torch.manual_seed(0)
    cell = nn.RNNCell(6, 4, nonlinearity="relu")
    assert_same(cell, [x(3, 6), x(3, 4)], torch.bfloat16, list(cell.parameters()))
    a = torch.randn(12, 12)
    a = a @ a.T + 12 * torch.eye(12)
    results = []
    for context in contexts(torch.bfloat16):  # its backward fails in half precision, in torch too
        torch.manual_seed(0)
        with context:
            results.append(torch.lobpcg(a, k=2, niter=3)[0])
    assert equal(*results)


@each_low
def test_the_docstring_says_what_is_left_whole(low):
    """torch's autocast reaches the product in these, ours does not."""
    a = torch.randn(4, 4)
    for function in (torch.cov, torch.corrcoef, torch.linalg.pinv):
        theirs, ours = contexts(low)
        with theirs:
            assert function(a).dtype == low
        with ours:
            assert function(a).dtype == torch.float32


@each_low
@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("loss", [F.mse_loss, F.cross_entropy])
def test_a_model_that_uses_its_weights_twice(loss, cache_enabled, low):
    """Their gradients are added in half precision with the cache, in float32 without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 6))
    inputs, targets = torch.randn(4, 6), torch.rand(4, 6)
    results = [
        run(c, lambda i: loss(model(model(i)), targets), [inputs], list(model.parameters()))
        for c in contexts(low, cache_enabled=cache_enabled)
    ]
    assert all(map(equal, *results))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:Mismatch dtype", "ignore:RNN module weights")
@pytest.mark.parametrize("name", [*MODULES, *RECURRENT])
def test_modules_on_a_gpu(name):
    """Same dtypes; values within rounding, because cuDNN may choose other algorithms."""
    torch.manual_seed(0)
    if name in MODULES:
        make, inputs = MODULES[name]
        module, arguments = make().cuda(), inputs()
    else:
        kind, options = RECURRENT[name]
        module, arguments = kind(6, 4, **options).cuda(), [x(5, 3, 6)]
    arguments = tree_map(lambda t: t.cuda() if isinstance(t, Tensor) else t, list(arguments))
    results = []
    for kind in (torch.autocast, autocast):
        torch.manual_seed(1)
        with kind("cuda", torch.float16):
            output = module(*arguments)
        results.append([t for t in tree_leaves(output) if isinstance(t, Tensor)])
        assert all(t.is_cuda for t in results[-1])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3)
