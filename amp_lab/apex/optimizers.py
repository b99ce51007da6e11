"""What `initialize` adds to an optimizer: master weights, unscaled gradients, the skipped step.

Without master weights (O0, O1, O3) the optimizer updates the model's own parameters. With them (O2)
each low-precision parameter has a float32 twin, the master weight, and the twins are what the
optimizer holds:

    gradients of the scaled loss        half     parameter.grad, stays scaled
    unscaled                            float32  master.grad  = parameter.grad.float() / loss_scale
    optimizer.step()                    float32  updates the master weights
    copied back                         half     parameter    = master.half()

(Micikevicius et al., "Mixed Precision Training", section 3.1.) An update of 1/10,000 of a weight is
lost in half precision; the master weight keeps it, and after enough of them the half weight moves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_lab.apex.handle import clear_cast_cache, disable_casts
from amp_lab.apex.loss_scaler import LossScaler
from amp_lab.apex.nested import LOW_PRECISION
from amp_lab.apex.state import _amp_state, patch_method

_NO_CLOSURE = (
    "optimizer.step(closure) is not supported here: call backward inside scale_loss, then "
    "optimizer.step() without a closure."
)


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Raise for an optimizer that comes twice, or holds parameters that cannot be trained."""
    for optimizer in optimizers:
        if hasattr(optimizer, "_amp_stash") or optimizers.count(optimizer) > 1:
            raise RuntimeError(
                "An optimizer goes through initialize once only: make a new one, or call reset() "
                "first."
            )
        for group in optimizer.param_groups:
            _check_params(group["params"])


def _check_params(params: list[Tensor]) -> None:
    for param in params:
        if param.dtype not in (torch.float32, *LOW_PRECISION):
            raise TypeError(f"Optimizers must hold float32 or half parameters, not {param.dtype}.")


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what the optimizer updates: the master weights, where there are some.

    This is what to clip: the gradients of these are unscaled.
    """
    for group in optimizer.param_groups:
        yield from group["params"]


@dataclass
class _Pair:
    """A parameter of the model and what the optimizer updates: its master, or itself.

    `kept` is the gradient that was there before the running backward pass.
    """

    param: Tensor
    master: Tensor
    kept: Tensor | None = None


class AmpOptimizerState:
    """Everything that `initialize` adds to one optimizer; it is found as `optimizer._amp_stash`."""

    def __init__(self, optimizer: Optimizer, master_weights: bool) -> None:
        self.optimizer = optimizer
        self.master_weights = master_weights
        self.pairs: list[_Pair] = []
        self.lazy_init_called = False
        self.params_have_scaled_gradients = False
        self.skip_message: str | None = None

        optimizer._amp_stash = self  # type: ignore[attr-defined]
        optimizer._lazy_init_maybe_master_weights = self.lazy_init  # type: ignore[attr-defined]
        _amp_state.stashes.append(self)
        _amp_state.undo.callback(self._remove)
        patch_method(optimizer, "step", self._step)
        patch_method(optimizer, "add_param_group", self._add_param_group)
        if master_weights:
            patch_method(optimizer, "zero_grad", self._zero_grad)
            patch_method(optimizer, "load_state_dict", self._load_state_dict)

    def lazy_init(self) -> None:
        """Make the master weights, once, when they are first needed.

        Not in `initialize`: weights that are loaded or broadcast after it must still count.
        """
        if self.lazy_init_called:
            return
        self.lazy_init_called = True
        for group in self.optimizer.param_groups:
            self._adopt(group)

    def _adopt(self, group: dict[str, Any]) -> None:
        """Put master weights into a parameter group, and hand them the optimizer's state."""
        state = self.optimizer.state
        for i, param in enumerate(group["params"]):
            master = param
            if self.master_weights and param.dtype in LOW_PRECISION:
                master = param.detach().float().requires_grad_()
                group["params"][i] = _amp_state.masters[param] = master
                if param in state:
                    state[master] = state.pop(param)
            self.pairs.append(_Pair(param, master))

    def prepare_backward(self) -> None:
        """Put aside the gradients that are there: they are unscaled, the coming ones are not."""
        self.lazy_init()
        for pair in self.pairs:
            pair.kept = pair.master.grad
            pair.param.grad = None

    def post_backward(self, scaler: LossScaler) -> None:
        """Unscale what backward has left, into the masters' dtype, and add what was put aside."""
        for pair in self.pairs:
            if pair.param.grad is None:
                pair.master.grad = pair.kept
            else:
                pair.master.grad = scaler.unscale(pair.param.grad, pair.master.dtype, pair.kept)
            pair.kept = None
        self.params_have_scaled_gradients = False

    def skip_next_step(self, message: str) -> None:
        """Let the next step do nothing but print the message; the first message stays."""
        self.skip_message = self.skip_message or message

    def _twins(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield low-precision parameter and master weight."""
        return ((p.param, p.master) for p in self.pairs if p.master is not p.param)

    def _step(self, step: Callable, closure: Callable | None = None) -> Any:
        if closure is not None and (self.master_weights or self.skip_message):
            raise RuntimeError(_NO_CLOSURE)
        result = None
        if self.skip_message:
            _amp_state.print(self.skip_message)
            self.skip_message = None
        else:
            with disable_casts():
                result = step() if closure is None else step(closure)
            for param, master in self._twins():
                param.data.copy_(master)
            clear_cast_cache()
        for _, master in self._twins():
            master.grad = None  # model.zero_grad() does not know them
        return result

    def _zero_grad(self, zero_grad: Callable, set_to_none: bool = True) -> None:
        """Clear the model's gradients too: the optimizer holds the masters in their place."""
        self.lazy_init()
        zero_grad(set_to_none)
        for param, master in self._twins():
            master.grad = None
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = torch.zeros_like(param)

    def _add_param_group(self, add_param_group: Callable, param_group: dict[str, Any]) -> None:
        self.lazy_init()
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]  # named or not
        _check_params(tensors)
        if any(param in _amp_state.masters for param in tensors):
            raise ValueError("some parameters appear in more than one parameter group")
        add_param_group({**param_group, "params": params})
        self._adopt(self.optimizer.param_groups[-1])

    def _load_state_dict(self, load_state_dict: Callable, state_dict: dict[str, Any]) -> None:
        """Load into the masters' state: torch casts what it loads to the parameters' dtype."""
        self.lazy_init()
        load_state_dict(state_dict)

    def _remove(self) -> None:
        """Give the optimizer back the model's parameters, with the master weights in them."""
        optimizer = self.optimizer
        for param, master in self._twins():
            param.data = master.data
            param.grad = None
            if master in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(master)
        param_of = {pair.master: pair.param for pair in self.pairs}
        for group in optimizer.param_groups:
            group["params"] = [param_of.get(p, p) for p in group["params"]]
        del optimizer._amp_stash, optimizer._lazy_init_maybe_master_weights  # type: ignore[attr-defined]


def recast_state(optimizer: Optimizer) -> None:
    """Cast the optimizer's state to the dtypes of its parameters, which may have changed."""
    if optimizer.state:  # loading a state dict casts
        optimizer.load_state_dict(optimizer.state_dict())
