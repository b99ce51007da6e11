"""The casts around functions that O1 switches on, and the old way of switching them on yourself.

Apex replaced some hundred functions of torch by versions that cast their arguments. Here
`amp_lab.autocast` does that, and a handle keeps it switched on: from `initialize` or `init` on
until `reset`, and not only inside a `with` block, in the thread that called it. Apex cast CUDA
tensors only; on a CPU the casts are emulated, so that the same functions are cast as on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

from amp_lab.apex.functions import patch_registered_functions
from amp_lab.apex.nested import LOW_PRECISION, map_tensors
from amp_lab.apex.state import _amp_state, patch_function
from amp_lab.autocast import autocast, clear_autocast_cache
from amp_lab.devices import default_device

if TYPE_CHECKING:
    from amp_lab.apex.optim_wrapper import OptimWrapper

_MOVED = "is no longer supported: use initialize(...) and scale_loss(loss, optimizer)."


class AmpHandle:
    """The switch of the casts, and the cache of cast weights.

    Attributes:
        has_cache: whether a weight that is used several times in one iteration is cast once only.
        cache: the half copies that `half_function`s use. Autocast has a cache of its own. Both are
            emptied after each backward pass, because the step that follows changes the weights.
    """

    def __init__(self, device_types: set[str], enable_caching: bool = True) -> None:
        self.has_cache = enable_caching
        self.cache: dict[Tensor, Tensor] = {}
        self._device_types = sorted(device_types)
        self._is_active = True
        for kind in self._device_types:
            region = autocast(
                kind, torch.float16, cache_enabled=enable_caching, emulate=kind == "cpu"
            )
            _enter_until_reset(region)

    def is_active(self) -> bool:
        """Return whether functions cast their arguments now."""
        return self._is_active

    @contextmanager
    def disable_casts(self) -> Iterator[None]:
        """Run the block without casts."""
        with ExitStack() as stack:
            stack.callback(setattr, self, "_is_active", self._is_active)
            self._is_active = False
            for kind in self._device_types:
                stack.enter_context(autocast(kind, enabled=False))
            yield

    def remove_cache(self, param: Tensor) -> None:
        """Forget the half copy of one weight."""
        self.cache.pop(param, None)

    def clear_cache(self) -> None:
        """Forget all half copies, autocast's too."""
        self.cache.clear()
        clear_autocast_cache()

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> "OptimWrapper":
        """Return an optimizer with a `scale_loss` of its own, for `num_loss` losses a step."""
        from amp_lab.apex.optim_wrapper import OptimWrapper

        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> NoReturn:
        """Raise the RuntimeError that says what took its place."""
        raise RuntimeError(f"handle.scale_loss {_MOVED}")


class NoOpHandle(AmpHandle):
    """What `init(enabled=False)` returns: nothing is cast and nothing scaled."""

    def __init__(self) -> None:
        super().__init__(set(), enable_caching=False)
        self._is_active = False

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:  # type: ignore[override]
        """Yield the loss as it is."""
        yield loss


def init(
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Switch the casts on without touching models or optimizers: Apex's form before `initialize`.

    Args:
        enabled: False returns a handle that does nothing.
        enable_caching: cast a weight once per iteration, not once per use.
        verbose: print each call whose result has another dtype than its arguments.
        allow_banned: allow `binary_cross_entropy` on float16, where its gradient overflows easily;
            otherwise it raises a NotImplementedError.
    """
    if not enabled:
        return NoOpHandle()
    return switch_on({default_device().type}, enable_caching, verbose, allow_banned)


def switch_on(
    device_types: set[str],
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Switch the casts on for these kinds of device, until `reset`."""
    if _amp_state.handle is not None:
        device_types = device_types | set(_amp_state.handle._device_types)
    patch_registered_functions()
    patch_function(F, "binary_cross_entropy", _allowed if allow_banned else _banned)
    if verbose:
        _enter_until_reset(_PrintCasts())
    _amp_state.handle = AmpHandle(device_types, enable_caching)
    return _amp_state.handle


def _enter_until_reset(context: AbstractContextManager) -> None:
    """Enter a context that is a mode on torch's stack of modes, until `reset`.

    It goes below the blocks that are open now, such as `with torch.device(...)`. They end before
    `reset`, each by taking the top of the stack, and that has to be their own mode.
    """
    with _modes_off():
        context.__enter__()
        mode = _get_current_function_mode()

    def leave() -> None:
        with _modes_off(above=mode):
            context.__exit__(None, None, None)

    _amp_state.undo.callback(leave)


@contextmanager
def _modes_off(above: TorchFunctionMode | None = None) -> Iterator[None]:
    """Take the modes above this one, or all of them, off the stack for the block."""
    taken = []
    while (top := _get_current_function_mode()) is not above:
        taken.append(top)
        _pop_mode()
    yield
    for mode in reversed(taken):
        _push_mode(mode)


def disable_casts() -> AbstractContextManager[None]:
    """Return a context in which functions do not cast their arguments."""
    return nullcontext() if _amp_state.handle is None else _amp_state.handle.disable_casts()


def clear_cast_cache() -> None:
    """Forget the casts of weights, which are about to change."""
    if _amp_state.handle is not None:
        _amp_state.handle.clear_cache()


def _allowed(function: Callable, *args: Any, **kwargs: Any) -> Any:
    with disable_casts():  # autocast bans it as well
        return function(*args, **kwargs)


def _banned(function: Callable, *args: Any, **kwargs: Any) -> Any:
    if any(x.dtype in LOW_PRECISION for x in _tensors((args, kwargs))):
        raise NotImplementedError(
            "binary_cross_entropy does not work on float16: leave out the sigmoid before it and "
            "use binary_cross_entropy_with_logits, or pass float32. init(allow_banned=True) allows "
            "it all the same."
        )
    return _allowed(function, *args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Any] = []
    map_tensors(value, found.append)
    return [item for item in found if isinstance(item, Tensor)]


class _PrintCasts(TorchFunctionMode):
    """Print calls whose result has another floating-point dtype than one of their arguments."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = [x.dtype for x in _tensors((args, kwargs)) if x.is_floating_point()]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and before and {result.dtype} != set(before):
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in before)
            _amp_state.print(f"{func.__name__}({names}) -> {result.dtype}")
        return result
