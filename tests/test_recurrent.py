"""Emulated recurrent networks against torch's own modules."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

from amp_lab.emulation import emulated_call
from amp_lab.formats import FP16, FP32, FloatFormat

ODD = FloatFormat(6, 5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def integers(shape: tuple[int, ...], largest: int) -> Tensor:
    return torch.randint(-largest, largest + 1, shape).float()


class Emulated(TorchFunctionMode):
    """The smallest mode that emulates recurrent networks: enough to run torch's own modules."""

    def __init__(self, fmt: FloatFormat | torch.dtype) -> None:
        super().__init__()
        self.fmt = fmt
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name.startswith(("lstm", "gru", "rnn_")):
            self.seen.append(name)
            return emulated_call(func, args, kwargs or {}, self.fmt)
        return func(*args, **(kwargs or {}))


def tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in a module's output."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for item in value or () for t in tensors(item)]


def run(
    module: nn.Module, x: Tensor, make_input: Callable = lambda x: x, *state: Any
) -> list[Tensor]:
    """Outputs of a module, then gradients of input and parameters for random output gradients."""
    x = x.detach().requires_grad_()
    outputs = tensors(module(make_input(x), *state))
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [x, *module.parameters()], gradients)]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("kind", "proj_size"), [(nn.LSTM, 0), (nn.LSTM, 3), (nn.GRU, 0), (nn.RNN, 0)]
)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_recurrent_networks_have_torchs_structure(kind, proj_size, packed):
    """With a format that rounds nothing they are torch's networks, gradients included."""
    projection = {"proj_size": proj_size} if proj_size else {}
    for layers, bidirectional, batch_first, bias in itertools.product((1, 2), *[(False, True)] * 3):
        module = kind(
            4,
            5,
            layers,
            bidirectional=bidirectional,
            batch_first=batch_first,
            bias=bias,
            **projection,
        )
        x = torch.randn(3, 6, 4) if batch_first else torch.randn(6, 3, 4)

        def pack(x: Tensor, batch_first: bool = batch_first) -> Any:
            if not packed:
                return x
            return pack_padded_sequence(x, [5, 6, 2], batch_first, enforce_sorted=False)

        expected = run(module, x, pack)
        with Emulated(FP32) as mode:
            ours = run(module, x, pack)
        assert len(mode.seen) == 1
        for got, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=5e-6, rtol=1e-5)
        with Emulated(torch.float16):
            ours = run(module, x, pack)
        assert ours[0].dtype == torch.float16
        for got, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_cells_have_torchs_structure(kind, bias):
    module = kind(4, 5, bias=bias)
    state = torch.randn(3, 5), torch.randn(3, 5)
    for x, given_state in ((torch.randn(3, 4), state), (torch.randn(4), None)):
        if given_state and kind is not nn.LSTMCell:
            given_state = given_state[0]
        expected = run(module, x, lambda x: x, given_state)
        with Emulated(FP32) as mode:
            ours = run(module, x, lambda x: x, given_state)
        assert len(mode.seen) == 1
        for got, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(got, wanted)
        with Emulated(torch.float16):
            assert {t.dtype for t in tensors(module(x, given_state))} == {torch.float16}


def test_dropout_between_layers():
    module = nn.GRU(4, 5, 2, dropout=1.0, bias=False)
    with Emulated(torch.float16):
        output, hidden = module(torch.randn(6, 3, 4))
        assert not output.any()
        assert hidden[0].all()
        assert module.eval()(torch.randn(6, 3, 4))[0].all()


def test_recurrent_rounding_points_equal_native_half():
    """With integers and relu every sum is exact, so torch's half network gives the same bits.

    The values grow beyond 2,048, where float16 no longer holds every integer.
    """
    module = nn.RNN(4, 3, nonlinearity="relu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(integers(tuple(parameter.shape), 3))
    x = integers((6, 2, 4), 3)
    with Emulated(torch.float16):
        output, hidden = module(x)
    native_output, native_hidden = module.half()(x.half())
    assert output.max() > 2048
    assert torch.equal(output, native_output)
    assert torch.equal(hidden, native_hidden)


def test_a_recurrent_weights_gradient_is_one_float32_sum():
    """4,096 steps that give 1 each: added up in float16 the gradient would stop at 2,048."""
    module = nn.RNN(1, 1, nonlinearity="relu", bias=False)
    with torch.no_grad():
        module.weight_ih_l0.fill_(1.0)
        module.weight_hh_l0.fill_(0.0)
    with Emulated(torch.float16):
        output, _ = module(torch.ones(4096, 1, 1))
    output.backward(torch.ones_like(output))
    assert module.weight_ih_l0.grad.item() == 4096.0
    assert module.weight_hh_l0.grad.item() == 4096.0  # 4,095 lies halfway between two float16


@pytest.mark.parametrize("fmt", [torch.float16, ODD], ids=str)
def test_lstm_state_and_gradients_lie_on_the_grid(fmt):
    grid = ODD if fmt is ODD else FP16
    module = nn.LSTM(4, 5, 2)
    with Emulated(fmt):
        values = run(module, torch.randn(6, 3, 4))
    assert all(torch.equal(grid.round(v.float()), v.float()) for v in values)
