"""Loss scaling in numbers: traces of the scale over training, and the order of a step's calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.autocast import autocast
from amp_lab.devices import default_device
from amp_lab.formats import FP16
from amp_lab.grad_scaler import GradScaler
from amp_lab.scaler_state import Update
from amp_lab.tasks import Task

OVERFLOW = FP16.overflow_threshold


def half_precision() -> autocast:
    """Return the lesson's region: float16 on the default device, the same numbers on every one."""
    return autocast(default_device().type, torch.float16, emulate=True)


@dataclass(frozen=True)
class Trace:
    """The loss scale in use at every step, and the steps that were skipped."""

    scales: list[float]
    skipped: list[int]


def replay(
    largest: Sequence[float],
    *,
    init_scale: float,
    growth_interval: int,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
) -> Trace:
    """Return the trace that dynamic scaling leaves on recorded gradients.

    `largest[i]` is the largest magnitude among the float32 gradients of step i, which overflows
    float16 when this times the scale reaches 65520. A replay: in training a skipped step also
    changes the weights, and with them the gradients that follow.
    """
    trace = Trace([], [])
    scale, clean = init_scale, 0
    for step, magnitude in enumerate(largest):
        trace.scales.append(scale)
        clean += 1
        if magnitude * scale >= OVERFLOW:
            trace.skipped.append(step)
            scale, clean = scale * backoff_factor, 0
        elif clean == growth_interval:
            scale, clean = scale * growth_factor, 0
    return trace


def from_history(history: Sequence[Update]) -> Trace:
    """Return the trace of a real run from `GradScaler.history`."""
    return Trace([u.scale for u in history], [i for i, u in enumerate(history) if u.skipped])


def ceilings(largest: Sequence[float]) -> list[float]:
    """Return for every step the scale at which its largest gradient reaches 65520."""
    return [OVERFLOW / magnitude if magnitude else float("inf") for magnitude in largest]


def zero_gradients(
    model: nn.Module, task: Task, batch: tuple[Tensor, Tensor], scale: float
) -> tuple[float, float]:
    """Run one step in half precision with a static loss scale; return two numbers.

    The fraction of weight gradients that are exactly zero, and the largest error of the unscaled
    gradients against float32's, relative to the largest gradient.
    """

    def gradients(region: Callable[[], Any], factor: float) -> Tensor:
        model.zero_grad()
        with region():
            loss = task.loss(model(batch[0]), batch[1])
        (loss * factor).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    reference = gradients(torch.enable_grad, 1.0)
    ours = gradients(half_precision, scale) / scale
    error = (ours - reference).abs().max() / reference.abs().max()
    return (ours == 0).float().mean().item(), error.item()


# The calls of one step, by the names that the lesson uses. Each acts on a `Step`.
CORRECT = ("scale", "backward", "unscale_", "clip", "step", "update")
MAX_NORM = 0.1


@dataclass
class Outcome:
    """What came of training with the calls in some order.

    Attributes:
        error: the type and first words of the exception, or "".
        losses: the loss of every step that was reached.
        moved: how far the weights moved, as a Euclidean distance.
    """

    error: str
    losses: list[float]
    moved: float


def train_in_order(task: Task, order: Sequence[str], steps: int = 20) -> Outcome:
    """Train with the calls of each step in the given order, some perhaps missing or repeated."""
    model = task.fresh_model()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = GradScaler(default_device().type)
    losses: list[float] = []
    error = ""
    try:
        for inputs, targets in task.batches(steps):
            optimizer.zero_grad()
            with half_precision():
                loss = task.loss(model(inputs), targets)
            losses.append(loss.item())
            for call in order:
                if call == "scale":
                    loss = scaler.scale(loss)
                elif call == "backward":
                    loss.backward()
                elif call == "unscale_":
                    scaler.unscale_(optimizer)
                elif call == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                elif call == "step":
                    scaler.step(optimizer)
                elif call == "update":
                    scaler.update()
                else:
                    raise ValueError(f"no call {call!r}; there are {', '.join(CORRECT)}")
    except (RuntimeError, AssertionError) as raised:
        error = f"{type(raised).__name__}: {str(raised).split(':')[0]}"
    ends = zip(model.parameters(), start, strict=True)
    moved = sum((p.detach() - s).square().sum().item() for p, s in ends) ** 0.5
    return Outcome(error, losses, moved)
