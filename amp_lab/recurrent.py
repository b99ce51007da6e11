"""LSTM, GRU and RNN taken apart: which products they consist of, and what lies between them.

A recurrent network is many products in a row, each taking what the step before has stored, so
rounding its inputs and its final result is not enough. Emulation rounds to the format

- every product, bias included: W_ih x + b_ih, W_hh h + b_hh, and W_hr h where there is one;
- the state (h, and c of an LSTM) after every time step;
- going back, the gradients of all these, and a weight's gradient once: it is one sum over all
  time steps.

What lies between the products is one elementwise operation in float32, as in the fused cells of
the GPU kernels. Outputs and state have the format's dtype throughout. (torch's autocast on a CPU
differs: it has no entry for these operations, casts the products within them and leaves an initial
state in float32, which makes every later one float32.)

The names and the order of the gates are those of the documentation pages of `torch.nn.LSTM`,
`GRU` and `RNN`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

# From the gates' two halves (W_ih x + b_ih and W_hh h + b_hh) and the state to the new state.
Step = Callable[..., tuple[Tensor, ...]]


class Core(Protocol):
    """What computes: the tensor core of `amp_lab.emulation`, or anything that does the same."""

    def cast(self, x: Tensor) -> Tensor:
        """Round an input or an initial state."""

    def take(self, x: Tensor) -> Tensor:
        """Round a weight, for `product`."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`, rounded, of a rounded x and taken weights."""

    def __call__(self, func: Callable, *args: Tensor) -> Any:
        """Return `func(*args)`, rounded, of rounded tensors."""


def _lstm_step(from_input: Tensor, from_hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (from_input + from_hidden).chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(from_input: Tensor, from_hidden: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    r, z, n = from_input.chunk(3, dim=1)
    hidden_r, hidden_z, hidden_n = from_hidden.chunk(3, dim=1)
    n = (n + (r + hidden_r).sigmoid() * hidden_n).tanh()
    return (n + (z + hidden_z).sigmoid() * (h - n),)


def _tanh_step(from_input: Tensor, from_hidden: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    return ((from_input + from_hidden).tanh(),)


def _relu_step(from_input: Tensor, from_hidden: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    return ((from_input + from_hidden).relu(),)


class _Weights(NamedTuple):
    """The weights of one layer in one direction, rounded, as float32."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None


def _scan(
    core: Core,
    step: Step,
    x: Tensor,
    sizes: list[int],
    state: tuple[Tensor, ...],
    weights: _Weights,
    backwards: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction over packed input; return the outputs and the final state.

    `x` is `(sum(sizes), features)`: the rows of time step 0, then of step 1, ... At step t the
    first `sizes[t]` sequences are running; the other rows of the state wait.
    """
    from_input = core.product(x, weights.w_ih, weights.b_ih).split(sizes)
    outputs = []
    for t in reversed(range(len(sizes))) if backwards else range(len(sizes)):
        running = [s[: sizes[t]] for s in state]
        from_hidden = core.product(running[0], weights.w_hh, weights.b_hh)
        new = core(step, from_input[t], from_hidden, *running)
        if weights.w_hr is not None:
            new = (core.product(new[0], weights.w_hr), *new[1:])
        outputs.append(new[0])
        if sizes[t] < len(state[0]):
            waiting = [s[sizes[t] :] for s in state]
            new = tuple(map(torch.cat, zip(new, waiting, strict=True)))
        state = new
    return torch.cat(outputs[::-1] if backwards else outputs), state


def _network(step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """Return `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu`, as nn.LSTM and its kin call them."""

    def padded(
        core: Core,
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        # A padded batch is a packed one whose sequences all end together.
        x = x.transpose(0, 1) if batch_first else x
        steps, batch = x.shape[:2]
        settings = has_biases, num_layers, dropout, train, bidirectional
        x, *final = packed(core, x.flatten(0, 1), [batch] * steps, hx, params, *settings)
        x = x.unflatten(0, (steps, batch))
        return x.transpose(0, 1) if batch_first else x, *final

    def packed(
        core: Core,
        x: Tensor,
        batch_sizes: Tensor | list[int],
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:
        sizes = batch_sizes if isinstance(batch_sizes, list) else batch_sizes.tolist()
        x, *initial = (core.cast(t) for t in (x, *(hx if isinstance(hx, list | tuple) else (hx,))))
        weights = [core.take(p) for p in params]
        directions = 1 + bidirectional
        each = len(weights) // (num_layers * directions)
        final = []
        for layer in range(num_layers):
            outputs = []
            for k in range(layer * directions, (layer + 1) * directions):
                w_ih, w_hh, *rest = weights[k * each : (k + 1) * each]
                own = _Weights(w_ih, w_hh, *([] if has_biases else [None, None]), *rest)
                state = tuple(s[k] for s in initial)
                output, state = _scan(core, step, x, sizes, state, own, k % directions == 1)
                outputs.append(output)
                final.append(state)
            x = torch.cat(outputs, dim=1)
            if layer < num_layers - 1:
                x = F.dropout(x, dropout, train)
        return x, *(torch.stack(s) for s in zip(*final, strict=True))

    def network(core: Core, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        has_batch_sizes = isinstance(args[1], Tensor) and args[1].dtype == torch.int64
        return (packed if has_batch_sizes else padded)(core, *args, **kwargs)

    return network


def _cell(step: Step) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return `torch.lstm_cell`, `gru_cell`, `rnn_tanh_cell` or `rnn_relu_cell`."""

    def cell(
        core: Core,
        x: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        state = tuple(map(core.cast, hx if isinstance(hx, list | tuple) else (hx,)))
        biases = (b if b is None else core.take(b) for b in (b_ih, b_hh))
        weights = _Weights(core.take(w_ih), core.take(w_hh), *biases)
        _, new = _scan(core, step, core.cast(x), [len(x)], state, weights)
        return new if isinstance(hx, list | tuple) else new[0]

    return cell


# By the name of the torch function.
RECURRENT = {
    "lstm": _network(_lstm_step),
    "gru": _network(_gru_step),
    "rnn_tanh": _network(_tanh_step),
    "rnn_relu": _network(_relu_step),
    "lstm_cell": _cell(_lstm_step),
    "gru_cell": _cell(_gru_step),
    "rnn_tanh_cell": _cell(_tanh_step),
    "rnn_relu_cell": _cell(_relu_step),
}
