"""Is the scaler necessary? The same training in every kind of precision, and what became of it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from amp_lab.autocast import autocast
from amp_lab.devices import default_device
from amp_lab.grad_scaler import GradScaler
from amp_lab.tasks import Task, train


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        autocast: dtype of the autocast region, None without one.
        scale: the loss scale at the start, None without a scaler.
        dynamic: whether the scale follows what happens; else it stays (a *static* loss scale).
        weights: dtype of the model, and so of its gradients and of the optimizer's state.
        half_weights: whether the weights are rounded to float16 after every step, as if they were
            stored in float16, while everything else is as it would be without.
    """

    autocast: torch.dtype | None = None
    scale: float | None = None
    dynamic: bool = True
    weights: torch.dtype = torch.float32
    half_weights: bool = False


MODES = {
    "float32": Mode(),
    "autocast, no scaler": Mode(torch.float16),
    "autocast + GradScaler": Mode(torch.float16, scale=2.0**16),
    "static scale 2^2": Mode(torch.float16, scale=2.0**2, dynamic=False),
    "static scale 2^40": Mode(torch.float16, scale=2.0**40, dynamic=False),
    "half weights + GradScaler": Mode(torch.float16, scale=2.0**16, half_weights=True),
    "pure half": Mode(weights=torch.float16),
    "bfloat16, no scaler": Mode(torch.bfloat16),
}


@dataclass(frozen=True)
class Result:
    """What one training did.

    Attributes:
        losses: the loss of every step's batch.
        before: the loss over all the data before training.
        after: the loss over all the data after it.
        model: the model as it ended.
    """

    losses: list[float]
    before: float
    after: float
    model: nn.Module

    def progress(self, reference: "Result") -> float:
        """Return by how much the loss fell, as a share of the fall in `reference`.

        1 is as much, 0 nothing, below 0 it rose; NaN where the loss is not finite.
        """
        if not math.isfinite(self.after):
            return math.nan
        return (self.before - self.after) / (reference.before - reference.after)

    def verdict(self, reference: "Result") -> str:
        """Say in two words how the training went, compared with `reference` (float32)."""
        progress = self.progress(reference)
        if math.isnan(progress):
            return "not finite"
        if progress < 0.1:
            return "learns nothing"
        return "falls behind" if progress < 0.95 else "as float32"


def run(task: Task, mode: Mode, steps: int, seed: int = 0, *, own: bool = True) -> Result:
    """Train `task` in `mode`.

    With `own`, by this package's `autocast` (emulated, so that the numbers are those of a GPU on
    every device) and `GradScaler`; without, by torch's.
    """
    device = default_device()
    options: dict[str, Any] = {"weights_dtype": mode.weights, "optimizer": task.optimizer}
    options["stop_at_nan"] = mode.scale is None  # nothing would skip the steps with NaN
    if mode.autocast is not None:
        make = partial(autocast, emulate=True) if own else torch.autocast
        options["autocast"] = partial(make, device.type, mode.autocast)
    if mode.scale is not None:
        scaler = GradScaler if own else torch.amp.GradScaler
        # A static scale: it grows after a billion steps, and this factor rounds to no change.
        fixed: Any = {"growth_interval": 10**9, "backoff_factor": 1 - 2.0**-53}
        behaviour = {} if mode.dynamic else fixed
        options["scaler"] = scaler(device.type, init_scale=mode.scale, **behaviour)
    if mode.half_weights:
        options["optimizer"] = _keeping_half_weights(task.optimizer)
    before = _loss(task, task.fresh_model(seed, device))
    trained = train(task, steps=steps, seed=seed, **options)
    return Result(trained.losses, before, _loss(task, trained.model), trained.model)


def compare(
    task: Task,
    steps: int,
    modes: Iterable[str] = MODES,
    seed: int = 0,
    *,
    own: bool = True,
    progress: bool = False,
) -> dict[str, Result]:
    """Train `task` in each of the modes from the same weights on the same batches.

    float32 comes first even if it is not asked for; `own` is that of `run`; `progress` shows a bar.
    """
    names: Iterable[str] = dict.fromkeys(["float32", *modes])
    if progress:
        from tqdm.auto import tqdm

        names = tqdm(names, desc=task.name, leave=False)
    return {name: run(task, MODES[name], steps, seed, own=own) for name in names}


def recheck(
    task: Task, steps: int, modes: Sequence[str], seeds: Iterable[int] = range(5)
) -> dict[str, list[str]]:
    """Return the verdict on each mode for each seed: other initial weights, other batches."""
    verdicts: dict[str, list[str]] = {mode: [] for mode in modes}
    for seed in seeds:
        results = compare(task, steps, modes, seed)
        for mode in modes:
            verdicts[mode].append(results[mode].verdict(results["float32"]))
    return verdicts


def static_scales(
    task: Task, steps: int, log2_scales: Iterable[int], seed: int = 0
) -> dict[int, Result]:
    """Train `task` under float16 autocast once for each static loss scale 2^k."""
    modes = {k: Mode(torch.float16, scale=2.0**k, dynamic=False) for k in log2_scales}
    return {k: run(task, mode, steps, seed) for k, mode in modes.items()}


def count_error(task: Task, model: nn.Module | None) -> float:
    """Return by how many digits a model of `tasks.counting` is off on average.

    Without a model, by how many one is off that answers the same mean count for every picture.
    """
    really = task.targets.sum((1, 2, 3))
    counted = really.mean()
    if model is not None:
        with torch.no_grad():
            like = next(model.parameters())
            counted = model(task.inputs.to(like)).sum((1, 2, 3)).cpu()
    return (counted - really).abs().mean().item()


def _loss(task: Task, model: nn.Module) -> float:
    """Return the mean loss over all the data, in float32 or what the model is in."""
    like = next(model.parameters())
    total = 0.0
    with torch.no_grad():
        for inputs, targets in zip(task.inputs.split(256), task.targets.split(256), strict=True):
            outputs = model(inputs.to(like)).float()
            total += task.loss(outputs, targets.to(like.device)).item() * len(inputs)
    return total / len(task.inputs)


def _keeping_half_weights(
    make: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return `make` for weights that are stored in float16: what a step writes is rounded."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)

        @torch.no_grad()
        def round_weights(*_: Any) -> None:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.copy_(weight.half())

        optimizer.register_step_post_hook(round_weights)
        return optimizer

    return made
