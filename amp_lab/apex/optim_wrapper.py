"""The optimizer of Apex's old handle form: `handle.wrap_optimizer(optimizer, num_loss)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from amp_lab.apex.loss_scaler import LossScaler
from amp_lab.apex.optimizers import AmpOptimizerState, master_params

if TYPE_CHECKING:
    from amp_lab.apex.handle import AmpHandle


class OptimWrapper:
    """An optimizer with one dynamic loss scaler for each of its losses.

        with optimizer.scale_loss(first_loss) as scaled_loss:
            scaled_loss.backward()
        with optimizer.scale_loss(second_loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Every other attribute is the wrapped optimizer's.
    """

    def __init__(self, optimizer: Optimizer, handle: "AmpHandle", num_loss: int) -> None:
        self._optimizer = optimizer
        self._handle = handle
        self._scalers = [LossScaler("dynamic") for _ in range(num_loss)]
        self._loss_index = 0
        self._stash = AmpOptimizerState(optimizer, master_weights=False)

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the scaled loss of this turn, and unscale the gradients on the way out.

        Raises a RuntimeError in the turn after the last of the `num_loss` before a step.
        """
        if not self._handle.is_active():
            yield loss
            return
        if self._loss_index == len(self._scalers):
            raise RuntimeError(
                f"More than num_loss={len(self._scalers)} losses before a step: "
                "pass the right number to wrap_optimizer."
            )
        scaler = self._scalers[self._loss_index]
        self._stash.prepare_backward()
        yield loss * scaler.loss_scale()
        self._stash.post_backward(scaler)
        if scaler.update_scale():
            self._stash.skip_next_step("Gradient overflow: the update is skipped.")
        self._loss_index += 1

    def step(self, closure: Any = None) -> Any:
        """Update the parameters, unless a gradient overflowed. Closures are not supported."""
        if self._handle.is_active() and closure is not None:
            raise NotImplementedError("A wrapped optimizer takes no closure: call step().")
        self._loss_index = 0
        for param in master_params(self._optimizer):
            self._handle.remove_cache(param)
        return self._optimizer.step(closure) if closure is not None else self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
