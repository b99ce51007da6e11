"""Apex's loss scaler: one number, and the rule that moves it.

    overflow             -> halve, but not below the minimum
    2,000 clean in a row -> double, but not above the maximum

It differs from `amp_lab.GradScaler`, which follows PyTorch, in where it stands in the loop. A
`GradScaler` belongs to the optimizers: it unscales once before a step and updates once after it. A
`LossScaler` belongs to one loss: it unscales and updates right after each backward pass of that
loss, so several losses that share an optimizer can have a scale each. It also has a maximum, and
its state is plain Python numbers.
"""

import torch
from torch import Tensor

from amp_lab.finite import scale_and_check_


class LossScaler:
    """A static or dynamic loss scale.

    Args:
        loss_scale: "dynamic", or the number that is used throughout.
        init_scale: where a dynamic scale starts (not above `max_loss_scale`).
        scale_factor: what it is divided by on overflow and multiplied with after a clean window.
        scale_window: clean backward passes in a row before it grows.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; `None` is no lower bound.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale)
        self._factor = scale_factor
        self._window = scale_window
        self._min = min_loss_scale or 0.0
        self._max = max_loss_scale
        self._unskipped = 0
        self._found_inf: dict[torch.device, Tensor] = {}

    def loss_scale(self) -> float:
        """Return the current scale."""
        return self._loss_scale

    @torch.no_grad()
    def unscale(self, scaled: Tensor, dtype: torch.dtype, kept: Tensor | None = None) -> Tensor:
        """Return `scaled / loss_scale` in `dtype`, added to `kept` if that is given.

        `scaled` is a gradient of the scaled loss. Where it has this dtype already it is unscaled
        in place. Whether it had an inf or a NaN is remembered until `update_scale`.
        """
        device = scaled.device
        # Two entries of a sparse gradient for one row may overflow when they are added.
        unscaled = scaled.coalesce().to(dtype) if scaled.is_sparse else scaled.to(dtype)
        values = unscaled.values() if scaled.is_sparse else unscaled
        found = scale_and_check_([values], torch.tensor(1.0 / self._loss_scale, device=device))
        self._found_inf[device] = self._found_inf.get(device, 0.0) + found
        return unscaled if kept is None else kept.add_(unscaled)

    def update_scale(self) -> bool:
        """Move the scale by what was seen since the last time; return whether to skip.

        A static scale never moves and never skips.
        """
        # Reading makes the host wait for the device: here, once, and not for each gradient.
        overflow = any(found.item() for found in self._found_inf.values())
        self._found_inf.clear()
        if overflow and self.dynamic:
            self._loss_scale = max(self._min, self._loss_scale / self._factor)
            self._unskipped = 0
            return True
        self._unskipped += 1
        if self.dynamic and self._unskipped == self._window:
            self._loss_scale = min(self._max, self._loss_scale * self._factor)
            self._unskipped = 0
        return False
