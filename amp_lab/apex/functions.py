"""Functions of your own that cast their arguments while O1's casts are on.

By a decorator (`half_function`), or by the name of a function in somebody else's module
(`register_half_function`, before `initialize`). torch's own functions need neither: autocast's
lists have them. Where you register one all the same, your word counts and not the list's.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from amp_lab.apex.nested import LOW_PRECISION, map_tensors
from amp_lab.apex.state import _amp_state, patch_function


def half_function(fn: Callable) -> Callable:
    """Decorator: cast floating-point tensor arguments to float16 while casts are on."""
    return _decorated(fn, _to_half)


def float_function(fn: Callable) -> Callable:
    """Decorator: cast floating-point tensor arguments to float32 while casts are on."""
    return _decorated(fn, _to_float)


def promote_function(fn: Callable) -> Callable:
    """Decorator: cast low-precision arguments to float32 where the arguments' dtypes differ."""
    return _decorated(fn, _to_widest)


def register_half_function(module: Any, name: str) -> None:
    """Let the coming `initialize` or `init` make `module.name` a `half_function`."""
    _register(module, name, _to_half)


def register_float_function(module: Any, name: str) -> None:
    """Let the coming `initialize` or `init` make `module.name` a `float_function`."""
    _register(module, name, _to_float)


def register_promote_function(module: Any, name: str) -> None:
    """Let the coming `initialize` or `init` make `module.name` a `promote_function`."""
    _register(module, name, _to_widest)


def patch_registered_functions() -> None:
    """Patch what was registered, until `reset`. The registrations are used up, as in Apex."""
    for module, name, cast in _amp_state.registered:
        patch_function(module, name, _casting(cast))
    _amp_state.registered.clear()


def _register(module: Any, name: str, cast: Callable) -> None:
    if not hasattr(module, name):
        raise ValueError(f"{module!r} has no function {name!r} to register.")
    _amp_state.registered.append((module, name, cast))


def _decorated(fn: Callable, cast: Callable) -> Callable:
    call = _casting(cast)

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(fn, *args, **kwargs)

    return wrapper


def _casting(cast: Callable) -> Callable:
    """Return what calls a function with arguments that went through `cast`."""

    def call(fn: Callable, *args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if handle is None or not handle.is_active():
            return fn(*args, **kwargs)
        args, kwargs = cast((args, kwargs))
        # A function of torch is on a list of autocast's too, which would cast once more.
        with handle.disable_casts() if _is_of_torch(fn) else nullcontext():
            return fn(*args, **kwargs)

    return call


def _is_of_torch(fn: Callable) -> bool:
    """Methods such as `Tensor.mm` have no module of their own, but their class has."""
    where = getattr(fn, "__module__", None) or getattr(fn, "__objclass__", type(fn)).__module__
    return where.partition(".")[0] == "torch"


def _is_castable(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.float32, *LOW_PRECISION)


def _to_float(arguments: Any) -> Any:
    return map_tensors(arguments, lambda x: x.float() if _is_castable(x) else x)


def _to_half(arguments: Any) -> Any:
    return map_tensors(arguments, _half)


def _half(item: Any) -> Any:
    """Cast to float16; remember the copy of a weight, because it is likely to be used again."""
    if not _is_castable(item):
        return item
    handle = _amp_state.handle
    if handle is None or not (handle.has_cache and item.is_leaf and item.requires_grad):
        return item.half()
    cached = handle.cache.get(item)
    # A copy made under no_grad has no way back to the weight, so it is of no use for training.
    if cached is None or cached.requires_grad != torch.is_grad_enabled():
        cached = handle.cache[item] = item.half()
    return cached


def _to_widest(arguments: Any) -> Any:
    dtypes = set()
    map_tensors(arguments, lambda x: dtypes.add(x.dtype) if _is_castable(x) else None)
    return _to_float(arguments) if len(dtypes) > 1 else arguments
