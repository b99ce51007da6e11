"""The gradients of a training run in numbers: their histograms, step by step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.formats import FP16, FloatFormat
from amp_lab.histograms import Histogram, Outcome, record_gradients, total
from amp_lab.tasks import Task, train


@dataclass
class GradientLog:
    """The gradients of the recorded steps of one run.

    Attributes:
        steps: the numbers of these steps.
        activations: for each, the histogram of all activation gradients.
        weights: for each, the histogram of all weight gradients.
        largest: for each, the largest magnitude of both.
    """

    steps: list[int] = field(default_factory=list)
    activations: list[Histogram] = field(default_factory=list)
    weights: list[Histogram] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)

    def all_activations(self) -> Histogram:
        """Return one histogram of the activation gradients of all recorded steps."""
        return sum(self.activations, start=Histogram())

    def all_weights(self) -> Histogram:
        """Return one histogram of the weight gradients of all recorded steps."""
        return sum(self.weights, start=Histogram())


def record(task: Task, steps: int, every: int = 1, **options: Any) -> GradientLog:
    """Train `task` in float32 and return the gradients of every `every`-th step.

    `options` go to `amp_lab.tasks.train`.
    """
    log = GradientLog()
    recorder = ExitStack()
    recordings = None

    def start(model: nn.Module) -> None:
        nonlocal recordings
        recordings = recorder.enter_context(record_gradients(model))

    @contextmanager
    def watch(model: nn.Module) -> Iterator[None]:
        with recorder:
            start(model)
            yield

    def keep(step: int, model: nn.Module) -> None:
        if step % every == 0:
            assert recordings is not None
            gradients = (recordings.activation_gradients, recordings.weight_gradients)
            log.steps.append(step)
            log.activations.append(total(gradients[0]))
            log.weights.append(total(gradients[1]))
            log.largest.append(max(r.max.item() for g in gradients for r in g.values()))
            recorder.close()  # the steps in between are not slowed down
        if (step + 1) % every == 0:
            start(model)

    train(task, steps=steps, watch=watch, after_backward=keep, **options)
    return log


def scale_window(
    activations: Histogram,
    weights: Histogram,
    fmt: FloatFormat = FP16,
    tolerance: float = 0.001,
) -> tuple[int, int] | None:
    """Return (a, b): loss scales 2^a to 2^b flush at most `tolerance` and overflow nothing.

    The tolerance is a fraction of the non-zero gradients, of the activations and of the weights
    each. None where no power of two does both.
    """
    good = []
    for k in range(-30, 60):
        outcomes = [h.outcome(fmt, k) for h in (activations, weights)]
        flushed = max(o.fraction(o.flushed) for o in outcomes)
        if flushed <= tolerance and not any(o.overflowing for o in outcomes):
            good.append(k)
    return (good[0], good[-1]) if good else None


def really_scaled(
    model: nn.Module, task: Task, batch: tuple[Tensor, Tensor], log2_scale: int
) -> tuple[Outcome, Outcome]:
    """Scale the loss by 2^log2_scale, run backward, cast every gradient to float16, and count.

    Returns the outcomes of the activation and of the weight gradients. Nothing of `histograms` is
    used: this is what its answers are checked against.
    """
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
            outputs.append(output)

    layers = [m for m in model.modules() if not list(m.children())]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    model.zero_grad()
    (task.loss(model(batch[0]), batch[1]) * 2.0**log2_scale).backward()
    for handle in handles:
        handle.remove()
    return _cast([t.grad for t in outputs]), _cast([p.grad for p in model.parameters()])


def _cast(gradients: list[Tensor | None]) -> Outcome:
    flat = torch.cat([g.flatten() for g in gradients if g is not None])
    half = flat[flat != 0].half().abs()
    small = half < FP16.smallest_normal
    flushed, inf = int((half == 0).sum()), int(half.isinf().sum())
    subnormal = int(small.sum()) - flushed
    return Outcome(flushed, subnormal, len(half) - flushed - subnormal - inf, inf)
