"""What a `GradScaler` remembers: its settings, its checkpoint, and what became of its steps.

The algorithm is in `amp_lab.grad_scaler`; nothing here changes a gradient or decides on a step.
"""

import warnings
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Stage(Enum):
    """Where an optimizer stands between two updates."""

    READY = "no unscale_() or step() since the last update()"
    UNSCALED = "unscale_() was called"
    STEPPED = "step() was called"


# 0-dimensional float32 tensors, not 0 where an infinity or NaN was found, one a device.
Found = dict[torch.device, Tensor]


@dataclass
class Iteration:
    """What happened to one optimizer since the last update."""

    stage: Stage = Stage.READY
    found_inf: Found = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One entry of `GradScaler.history`: the scale of a step, the next one, was it skipped?"""

    scale: float
    new_scale: float
    skipped: bool


class ScalerState:
    """The part of `GradScaler` that is asked and told, saved and loaded."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        process_group: Any = None,
        history_size: int = 0,
    ) -> None:
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                "GradScaler is disabled: its device is 'cuda' and CUDA is not available. "
                "Pass the device that you train on, as in GradScaler('cpu').",
                stacklevel=2,
            )
            enabled = False
        if enabled and growth_factor <= 1.0:
            raise AssertionError(f"growth_factor must be > 1, got {growth_factor}")
        if enabled and backoff_factor >= 1.0:
            raise AssertionError(f"backoff_factor must be < 1, got {backoff_factor}")
        if min_scale is not None and not 0 < min_scale <= init_scale:
            raise ValueError(f"min_scale must be above 0 and at most init_scale, got {min_scale}")
        self._device, self._enabled = device, enabled
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._min_scale, self._floor_was_reported = min_scale, False
        self._process_group = process_group
        # Scale and tracker become tensors on the device of the first scaled loss.
        self._init_scale, self._init_growth_tracker = init_scale, 0
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._iterations: defaultdict[int, Iteration] = defaultdict(Iteration)
        self._last_found_inf: WeakKeyDictionary[Optimizer, Found] = WeakKeyDictionary()
        # Tensors, until somebody looks: reading them at once would make the host wait.
        self._history: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=history_size)

    def is_enabled(self) -> bool:
        """Tell whether the scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale (1.0 when disabled); waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else self._scale.item()

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale is raised."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale is raised."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale is lowered."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale is lowered."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Return after how many good steps in a row the scale is raised."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many good steps in a row the scale is raised."""
        self._growth_interval = new_interval

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        tracker = self._growth_tracker
        return self._init_growth_tracker if tracker is None else int(tracker.item())

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with torch's five keys; empty when disabled. Call it after update()."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's; does nothing when disabled.

        Raises:
            RuntimeError: the state is empty.
            KeyError: one of the five keys is missing. Nothing was changed.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "the state dict is empty, as that of a disabled GradScaler is: there is no scale "
                "to resume from; leave out load_state_dict to start with init_scale"
            )
        scale, tracker = state_dict["scale"], state_dict["_growth_tracker"]
        growth, backoff = state_dict["growth_factor"], state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_factor, self._backoff_factor = growth, backoff
        self._init_scale, self._init_growth_tracker = scale, tracker
        if self._scale is not None:
            self._scale.fill_(scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(tracker)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._enabled and self._iterations:
            raise AssertionError(
                "a GradScaler can be pickled before the first step of an iteration or after "
                "update(), not in between"
            )
        # What lives on a device or in this process stays here.
        state["_init_scale"] = self.get_scale()
        state["_init_growth_tracker"] = self._get_growth_tracker()
        state["_scale"] = state["_growth_tracker"] = state["_process_group"] = None
        state["_last_found_inf"] = None
        entries = [tuple(t.cpu() for t in entry) for entry in self._history]
        state["_history"] = deque(entries, maxlen=self._history.maxlen)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _last_found_inf=WeakKeyDictionary())

    # What torch's class does not tell

    @property
    def history(self) -> list[Update]:
        """The last `history_size` updates, oldest first; waits for the device."""
        return [Update(a.item(), b.item(), bool(found)) for a, b, found in self._history]

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Tell whether the last `step(optimizer)` was skipped; waits for the device.

        For what counts optimizer steps: `if not scaler.step_was_skipped(optimizer):
        scheduler.step()` (asked for in PyTorch's issue 67590). False before the first step.
        """
        return any(found.item() for found in self._last_found_inf.get(optimizer, {}).values())

    def non_finite_parameters(
        self, optimizer: Optimizer, model: nn.Module | None = None
    ) -> list[str]:
        """Name the parameters whose gradients hold an infinity or NaN now.

        To be called after a skipped step and before `zero_grad`. Without `model`, parameters go
        by their position in the optimizer: "group 0, parameter 3".
        """
        names = {p: name for name, p in model.named_parameters()} if model else {}
        found = []
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                gradient = parameter.grad
                if gradient is None:
                    continue
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                if not values.isfinite().all():
                    found.append(names.get(parameter, f"group {g}, parameter {i}"))
        return found
