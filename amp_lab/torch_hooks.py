"""Two places where torch asks about its own autocast, made to ask about this one too."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint


def install(
    is_any_enabled: Callable[[], bool], in_current_regions: Callable[[Callable], Callable]
) -> None:
    """Install both. `in_current_regions(f)` is an `f` that enters again the regions of now."""
    _for_recurrent_networks(is_any_enabled)
    _for_checkpoint(in_current_regions)


def _for_recurrent_networks(is_any_enabled: Callable[[], bool]) -> None:
    """`nn.LSTM` and its kin refuse inputs of another dtype than their weights', unless it is on."""
    torchs = torch._C._is_any_autocast_enabled
    torch._C._is_any_autocast_enabled = lambda: torchs() or is_any_enabled()


def _for_checkpoint(in_current_regions: Callable[[Callable], Callable]) -> None:
    """`torch.utils.checkpoint` calls a function again in the backward pass.

    The region has ended then. torch's autocast is brought back; without this, the second forward
    pass of a region of ours would be in float32.
    """
    module = torch.utils.checkpoint
    reentrant, other = (
        module.CheckpointFunction.forward,
        module._checkpoint_without_reentrant_generator,
    )

    def forward(ctx: Any, func: Callable, *args: Any) -> Any:
        return reentrant(ctx, in_current_regions(func), *args)

    def generator(func: Callable, *args: Any, **kwargs: Any) -> Any:
        return other(in_current_regions(func), *args, **kwargs)

    module.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    module._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]
