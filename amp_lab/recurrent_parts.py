"""torch's recurrent networks on a CPU, written out in the operations that they consist of.

torch's autocast has no entry for `torch.gru` on a CPU: it casts for the matrix products within, and
leaves the state in the dtype that it came in. A layer of `torch.lstm` is mostly one operation of
oneDNN's, which is listed. The order of operations is torch's throughout, because the gradients of a
tensor that is used more than once are added in the order of its uses.

Not every CPU has oneDNN's LSTM in half precision; on one without AVX-512 even bfloat16 is missing.
There torch's autocast fails, because it decides for oneDNN before it casts. Here such a layer is
computed step by step, as torch does with `torch.backends.mkldnn` disabled.

(What a GPU computes is another thing: see `amp_lab.recurrent`.)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class _Layer(NamedTuple):
    """The weights of one layer in one direction."""

    caster: Any
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None

    def from_input(self, x: Tensor) -> Tensor:
        return self.caster.lower(F.linear, (x, self.w_ih, self.b_ih), {})

    def from_hidden(self, h: Tensor) -> Tensor:
        return self.caster.lower(F.linear, (h, self.w_hh, self.b_hh), {})

    def project(self, h: Tensor) -> Tensor:
        return h if self.w_hr is None else self.caster.lower(torch.matmul, (h, self.w_hr.t()), {})

    def onednn_lstm(
        self, x: Tensor, state: Sequence[Tensor], backwards: bool, train: bool
    ) -> Sequence[Tensor] | None:
        """Run over `(time, batch, features)`; return outputs, final h and c.

        None where oneDNN has no such LSTM for this CPU, which can only be found out by trying.
        """
        w_ih, w_hh = self.w_ih, self.w_hh
        has_biases = self.b_ih is not None
        biases = (self.b_ih, self.b_hh) if has_biases else map(torch.zeros_like, (w_ih, w_hh))
        kind = 2, w_hh.shape[-1], 1, has_biases, False, False, train  # an LSTM of one layer
        args = x, w_ih, w_hh, *biases, *state, backwards, [], *kind
        try:
            return self.caster.lower(torch.mkldnn_rnn_layer, args, {})[:3]
        except RuntimeError as error:
            if "could not create a primitive" not in str(error):
                raise
            return None


# From what the input contributes to the gates, and the state, to the new state.
Step = Callable[..., tuple[Tensor, ...]]


def _lstm_step(layer: _Layer, from_input: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    gates = layer.from_hidden(h) + from_input
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return layer.project(o.sigmoid() * c.tanh()), c


def _gru_step(layer: _Layer, from_input: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    reset_x, update_x, new_x = from_input.chunk(3, 1)
    reset_h, update_h, new_h = layer.from_hidden(h).chunk(3, 1)
    reset = (reset_h + reset_x).sigmoid()
    update = (update_h + update_x).sigmoid()
    new = (new_x + new_h * reset).tanh()
    return ((h - new) * update + new,)


def _simple_step(
    activation: Callable, layer: _Layer, from_input: Tensor, h: Tensor
) -> tuple[Tensor, ...]:
    return (activation(layer.from_hidden(h) + from_input),)


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": partial(_simple_step, torch.tanh),
    "rnn_relu": partial(_simple_step, torch.relu),
}


def cell(
    caster: Any,
    func: Callable,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Call `torch.lstm_cell`, `gru_cell`, `rnn_tanh_cell` or `rnn_relu_cell`."""
    layer = _Layer(caster, w_ih, w_hh, b_ih, b_hh)
    is_lstm = not isinstance(hx, Tensor)
    step = _STEPS[func.__name__.partition(".")[0].removesuffix("_cell")]
    state = step(layer, layer.from_input(input), *(hx if is_lstm else (hx,)))
    return state if is_lstm else state[0]


def network(caster: Any, func: Callable, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Call `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu`, with a padded or a packed input."""
    name = func.__name__.partition(".")[0]
    sizes = None
    if isinstance(args[0], Tensor) and args[0].dtype == torch.int64:  # packed
        sizes, args = args[0].tolist(), args[1:]
    hx, weights, has_biases, num_layers, dropout, train, bidirectional, *batch_first = args
    if any(batch_first):
        x = x.transpose(0, 1)
    states = list(
        zip(*(h.unbind(0) for h in ([hx] if isinstance(hx, Tensor) else hx)), strict=True)
    )
    each = len(weights) // len(states)
    final: list[Sequence[Tensor]] = []
    for index in range(num_layers):
        outputs = []
        for backwards in (False, True)[: 1 + bidirectional]:
            w_ih, w_hh, *rest = weights[len(final) * each : (len(final) + 1) * each]
            layer = _Layer(caster, w_ih, w_hh, *([] if has_biases else [None, None]), *rest)
            state: Sequence[Tensor] = states[len(final)]
            result = None
            if name == "lstm" and sizes is None and layer.w_hr is None and _decides_for_onednn(x):
                result = layer.onednn_lstm(x.contiguous(), state, backwards, train)
            if result:
                output, *state = result
            else:
                gates = layer.from_input(x)
                steps = gates.split(sizes) if sizes else gates.unbind(0)
                steps, state = _scan(partial(_STEPS[name], layer), steps, state, backwards)
                output = torch.cat(steps) if sizes else torch.stack(steps)
            outputs.append(output)
            final.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and index < num_layers - 1:
            x = F.dropout(x, dropout)
    if any(batch_first):
        x = x.transpose(0, 1)
    return x, *(torch.stack(s) for s in zip(*final, strict=True))


def _decides_for_onednn(x: Tensor) -> bool:
    trains_in_half = x.dtype == torch.float16 and torch.is_grad_enabled()
    return bool(torch.backends.mkldnn.enabled) and not trains_in_half


def _scan(
    step: Step, inputs: Sequence[Tensor], initial: Sequence[Tensor], backwards: bool
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """Run through time and return all outputs and the final state.

    The batch shrinks where packed sequences end. Backwards it grows.
    """
    inputs = inputs[::-1] if backwards else inputs
    running = len(inputs[0])
    state = initial if running == len(initial[0]) else [s[:running] for s in initial]
    outputs, ended = [], []
    for x in inputs:
        if len(x) < running:
            ended.append([s[len(x) :] for s in state])
            state = [s[: len(x)] for s in state]
        elif len(x) > running:
            state = [
                torch.cat([s, i[running : len(x)]]) for s, i in zip(state, initial, strict=True)
            ]
        running = len(x)
        state = step(x, *state)
        outputs.append(state[0])
    if ended:
        state = [torch.cat(parts) for parts in zip(state, *ended[::-1], strict=True)]
    return outputs[::-1] if backwards else outputs, state
