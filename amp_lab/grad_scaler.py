"""Dynamic loss scaling: a drop-in for `torch.amp.GradScaler`, to be read from top to bottom.

Float16 flushes small gradients to zero. Multiplying the loss by a *scale* multiplies every
gradient by it (the chain rule is linear) and so moves them into float16's range; before the
optimizer sees them they are divided by it again. The largest scale that overflows nothing is
found by trial: when a gradient is infinite or NaN, the step is skipped and the scale lowered; when
a long row of steps went well, it is raised (Micikevicius et al., "Mixed Precision Training", 2018,
section 3.2; NVIDIA, "Train With Mixed Precision", "Choosing A Scaling Factor").

    scaler = GradScaler()
    with autocast(...): loss = ...
    scaler.scale(loss).backward()       # gradients come out multiplied by the scale
    scaler.unscale_(optimizer)          # optional: divide them now, to clip or to look at them
    scaler.step(optimizer)              # unscale if that was not done; step, or skip the step
    scaler.update()                     # lower or raise the scale

Methods, errors and `state_dict` are those of torch's class (torch 2.13), so that either loads the
other's checkpoint. Left out is the `grad_scaler=` argument of `optimizer.step`, deprecated since
torch 1.13, and torch's private methods, for subclasses to override. `update` also takes an int and
a tensor of any shape with one element. What torch's class lacks is keyword-only and off by default.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from amp_lab.finite import scale_and_check_
from amp_lab.scaler_state import Found, Iteration, ScalerState, Stage


class GradScaler(ScalerState):
    """Scale the loss, unscale the gradients, skip the step when one is not finite.

    Args:
        device: the kind of device; "cuda" without CUDA warns and disables the scaler.
        init_scale: the first scale.
        growth_factor: the scale is multiplied by this (> 1) after `growth_interval` steps in a row
            without an infinity or NaN.
        backoff_factor: and by this (< 1) when there was one.
        growth_interval: see growth_factor.
        enabled: False makes every method pass its argument on.
        min_scale: backoff does not lower the scale below it; the first time it would, a warning
            says so. A lower scale that is loaded or given to `update` stands until then.
            Against the spiral in which a falling scale flushes gradients to zero, that makes NaN,
            and the NaN lowers the scale further (PyTorch's issue 40497).
        process_group: ranks that skip a step together, for sharded gradients: a
            `torch.distributed` group over which what was found is reduced. A copy of the scaler,
            or what is unpickled, has none.
        history_size: how many updates `history` keeps.

    Raises:
        AssertionError: growth_factor <= 1 or backoff_factor >= 1.
        ValueError: min_scale is not in (0, init_scale].
    """

    # 1. Scale the loss

    def scale(self, outputs: Any) -> Any:
        """Return `outputs` (a tensor, or an iterable of them, nested at will) times the scale.

        Lists and tuples come back as such, other iterables as an iterator.

        Raises:
            ValueError: there is something else than tensors in it.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                device = outputs.device
                self._scale = torch.tensor(self._init_scale, dtype=torch.float32, device=device)
                self._growth_tracker = torch.tensor(
                    self._init_growth_tracker, dtype=torch.int32, device=device
                )
            return outputs * self._scale.to(outputs.device, non_blocking=True)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError(f"scale takes a tensor or an iterable of tensors, got {outputs!r}")

    # 2. Unscale the gradients

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place.

        To be called once, when all gradients are there, before clipping or looking at them.

        Raises:
            RuntimeError: it was called already, or after `step`.
            AssertionError: no loss was scaled yet.
            ValueError: there are float16 gradients, so the model was converted with `.half()`.
        """
        if not self._enabled:
            return
        scale, _ = self._state("unscale_")
        iteration = self._iterations[id(optimizer)]
        if iteration.stage is Stage.UNSCALED:
            raise RuntimeError(
                "unscale_() was already called on this optimizer since the last update(): "
                "call it once per step, after the last backward()"
            )
        if iteration.stage is Stage.STEPPED:
            raise RuntimeError("unscale_() is called after step(): call it before, or not at all")
        # In float64 and rounded once; MPS has no float64.
        wide = scale if scale.device.type == "mps" else scale.double()
        iteration.found_inf = self._check(optimizer, wide.reciprocal().float())
        iteration.stage = Stage.UNSCALED

    def _check(self, optimizer: Optimizer, factor: Tensor | None) -> Found:
        """Check all gradients, multiply them by the factor, and return what was found."""
        if torch.compiler.is_compiling():  # it depends on values, which the compiler has not
            return torch.compiler.disable(self._check)(optimizer, factor)
        every = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    if gradient.dtype == torch.float16 and factor is None:
                        # The sum of two entries may overflow.
                        gradient = parameter.grad = gradient.coalesce()
                    gradient = gradient._values()
                every.append(gradient)
        # By device and dtype, a list of lists and their indices.
        together: dict[Any, Any] = _group_tensors_by_device_and_dtype([every]) if every else {}
        if any(dtype.is_complex for _, dtype in together):
            raise NotImplementedError("complex gradients: torch's scaler takes none either")
        if factor is not None and any(dtype == torch.float16 for _, dtype in together):
            raise ValueError(
                "there are float16 gradients to unscale: keep the model in float32 and "
                "let autocast choose precisions, do not call model.half()"
            )
        found: Found = {}
        with torch.no_grad():
            for (device, _), ([gradients], _) in together.items():
                there = None if factor is None else factor.to(device, non_blocking=True)
                one = scale_and_check_(gradients, there)
                found[device] = found[device] + one if device in found else one
        if self._process_group is not None:
            found = self._reduce(found)
        return found

    def _reduce(self, found: Found) -> Found:
        """Let every rank of the group know what any of them found."""
        scale, _ = self._state("step")
        combined = self._sum(found.values(), scale)
        torch.distributed.all_reduce(combined, group=self._process_group)
        return {combined.device: combined}

    # 3. Step, or skip the step

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` unless a gradient is not finite.

        Returns what the optimizer returns; None when the step was skipped. An optimizer that
        unscales by itself (`fused=True`) gets the scale and what was found as its attributes
        `grad_scale` and `found_inf`, and nothing is read back from the device.

        Raises:
            RuntimeError: called twice since the last update, or with `closure=`.
            AssertionError: no loss was scaled, or no parameter has a gradient.
            ValueError: as `unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError(
                "step(closure=...) does not work with a GradScaler: the gradients that the closure "
                "computes would not be unscaled"
            )
        scale, _ = self._state("step")
        iteration = self._iterations[id(optimizer)]
        if iteration.stage is Stage.STEPPED:
            raise RuntimeError(
                "step() was already called on this optimizer since the last update(): call "
                "update() at the end of every iteration"
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._fused_step(optimizer, iteration, scale, *args, **kwargs)
        else:
            if iteration.stage is Stage.READY:
                self.unscale_(optimizer)
            if not iteration.found_inf:
                raise AssertionError(
                    "No inf checks were recorded for this optimizer: none of its parameters has a "
                    "gradient. Was backward() called on a loss that depends on them?"
                )
            result = None
            if not sum(found.item() for found in iteration.found_inf.values()):
                result = optimizer.step(*args, **kwargs)
        self._last_found_inf[optimizer] = iteration.found_inf
        iteration.stage = Stage.STEPPED
        return result

    def _fused_step(
        self, optimizer: Any, iteration: Iteration, scale: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if torch.compiler.is_compiling():  # it would lose the attributes
            uncompiled = torch.compiler.disable(self._fused_step)
            return uncompiled(optimizer, iteration, scale, *args, **kwargs)
        if iteration.stage is Stage.READY:
            iteration.found_inf = self._check(optimizer, None)
            # An optimizer may bring a factor of its own.
            optimizer.grad_scale = scale * getattr(optimizer, "grad_scale", 1)
        else:
            optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        optimizer.found_inf = self._sum(iteration.found_inf.values(), scale)
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    # 4. Update the scale

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lower the scale if any step was skipped; raise it after enough steps that were not.

        To be called once, at the end of the iteration. `new_scale`, a float or a tensor with one
        element, replaces the scale instead.

        Raises:
            AssertionError: no loss was scaled, no gradients were checked, or new_scale is a
                tensor of another device, with more elements, or that requires a gradient.
        """
        if not self._enabled:
            return
        if torch.compiler.is_compiling():  # it would lose the history
            return torch.compiler.disable(self.update)(new_scale)
        scale, tracker = self._state("update")
        before, found = scale.clone(), torch.zeros_like(scale)
        if new_scale is None:
            every = [f for i in self._iterations.values() for f in i.found_inf.values()]
            if not every:
                raise AssertionError(
                    "No inf checks were recorded prior to update: call step() or unscale_() first"
                )
            found = self._sum(every, scale) != 0
            self._adjust(scale, tracker, found)
        elif isinstance(new_scale, Tensor):
            if (
                new_scale.device.type != self._device
                or new_scale.numel() != 1
                or new_scale.requires_grad
            ):
                raise AssertionError(
                    f"new_scale must be a float, or a tensor with one element on {self._device!r} "
                    "that requires no gradient"
                )
            scale.copy_(new_scale.view(()))
        else:
            scale.fill_(new_scale)
        if self._history.maxlen:
            self._history.append((before, scale.clone(), found))
        self._iterations.clear()

    def _adjust(self, scale: Tensor, tracker: Tensor, found: Tensor) -> None:
        """Set scale and tracker to their next values, without reading them back."""
        wide = scale if scale.device.type == "mps" else scale.double()
        lowered = (wide * self._backoff_factor).float()
        raised = (wide * self._growth_factor).float()
        successful = tracker + 1
        grows = successful == self._growth_interval
        kept = torch.where(grows & raised.isfinite(), raised, scale)
        scale.copy_(torch.where(found, lowered, kept))
        tracker.copy_(torch.where(found | grows, 0, successful))
        if self._min_scale is not None:
            self._keep_above(self._min_scale, scale, found)

    def _keep_above(self, floor: float, scale: Tensor, found: Tensor) -> None:
        below = found & (scale < floor)
        scale.copy_(torch.where(below, floor, scale))
        # Reading `below` makes the host wait, so it is read until the one warning is given.
        if not self._floor_was_reported and bool(below):
            self._floor_was_reported = True
            warnings.warn(
                f"the loss scale would fall below min_scale = {floor:g} and stays there: "
                "gradients are not finite at a scale this low, so scaling is not the cause. Look "
                "for inf or NaN in the loss and the activations.",
                stacklevel=4,
            )

    def _state(self, method: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise AssertionError(
                f"{method} was called before any loss was scaled: "
                "call scaler.scale(loss).backward() first"
            )
        return self._scale, self._growth_tracker

    @staticmethod
    def _sum(found: Iterable[Tensor], scale: Tensor) -> Tensor:
        return sum((f.to(scale.device, non_blocking=True) for f in found), torch.zeros_like(scale))
