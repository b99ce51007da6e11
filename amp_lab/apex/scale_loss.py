"""The `with` block around backward: scale the loss, then unscale the gradients and look at them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_lab.apex.handle import clear_cast_cache
from amp_lab.apex.loss_scaler import LossScaler
from amp_lab.apex.optimizers import AmpOptimizerState
from amp_lab.apex.state import _amp_state


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | list[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield `loss.float() * loss_scale`, to call `.backward()` on, and unscale on the way out.

        with scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    On an overflow the scale is halved, and the next `step()` of each of these optimizers does
    nothing but say so. Gradients that were there before the block are added to, unscaled.

    Under master weights only the masters' gradients are unscaled. The low-precision parameters
    keep theirs scaled, so clip `master_params(optimizer)` and not `model.parameters()`.

    Args:
        loss: any shape; scalar, if `scaled_loss.backward()` is to work as it stands.
        optimizers: those that this backward pass makes gradients for.
        loss_id: which of the `num_losses` scalers to use.
        model: not used, as in Apex.
        delay_unscale: leave the gradients scaled, because another backward pass follows before the
            step. The last block before the step must not delay.
        delay_overflow_check: unscale, and leave looking for overflow to the next block with this
            `loss_id` that does not delay it.

    Raises:
        RuntimeError: before `initialize`, or for an optimizer that was not passed to it.
        IndexError: `loss_id` is not below `num_losses`.
    """
    properties = _amp_state.require_initialized("scale_loss")
    if not properties.enabled:
        yield loss
        return
    scaler = _scaler(loss_id)
    stashes = _stashes(optimizers)
    if not properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
        yield loss.float()  # nothing to unscale and nothing to look for
        clear_cast_cache()
        return

    for stash in stashes:
        if not stash.params_have_scaled_gradients:
            stash.prepare_backward()
    yield loss.float() * scaler.loss_scale()
    clear_cast_cache()
    if delay_unscale:
        for stash in stashes:
            stash.params_have_scaled_gradients = True
        return
    for stash in stashes:
        stash.post_backward(scaler)
    if not delay_overflow_check and scaler.update_scale():
        for stash in stashes:
            stash.skip_next_step(
                f"Gradient overflow: step skipped, loss scaler {loss_id} "
                f"reduces its loss scale to {scaler.loss_scale()}."
            )


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(
            f"loss_id={loss_id}, but there are {len(scalers)} loss scalers: "
            "pass num_losses to initialize."
        )
    return scalers[loss_id]


def _stashes(optimizers: Optimizer | list[Optimizer]) -> list[AmpOptimizerState]:
    listed = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    stashes: list[Any] = [getattr(optimizer, "_amp_stash", None) for optimizer in listed]
    if None in stashes:
        raise RuntimeError(
            "scale_loss got an optimizer that initialize has not seen: "
            "pass the optimizers that initialize returned."
        )
    return stashes
