"""What the Apex front end remembers between its calls, and the list of what `reset` must undo.

Apex's calls know of each other through one global object; so do these. Everything that is changed
in a model, an optimizer or a module of functions is entered in `undo` at the moment it is changed.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_lab.apex.loss_scaler import LossScaler
from amp_lab.apex.properties import Properties

if TYPE_CHECKING:
    from amp_lab.apex.handle import AmpHandle
    from amp_lab.apex.optimizers import AmpOptimizerState


class AmpState:
    """The state before `initialize`, and after `reset`.

    Attributes:
        opt_properties: of the last `initialize`, `None` before it.
        loss_scalers: one for each of its `num_losses`.
        handle: what switches the casts of O1, `None` where nothing is cast around functions.
        stashes: what was added to each optimizer.
        masters: the float32 master weight of each low-precision parameter that has one.
        registered: module, name and cast of the functions to patch at the next `initialize`.
        verbosity: 0 keeps quiet.
        undo: what `reset` runs, last change first.
    """

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[LossScaler] = []
        self.handle: AmpHandle | None = None
        self.stashes: list[AmpOptimizerState] = []
        self.masters: dict[Tensor, Tensor] = {}
        self.registered: list[tuple[Any, str, Callable]] = []
        self.verbosity = 1
        self.undo = ExitStack()

    def print(self, message: str, rank0: bool = False) -> None:
        """Print unless verbosity is 0; with `rank0` only in the first of several processes."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.verbosity > 0 and not (rank0 and distributed and torch.distributed.get_rank()):
            print(message)

    def require_initialized(self, call: str) -> Properties:
        """Return the properties, or raise the RuntimeError that says what to call first."""
        if self.opt_properties is None:
            raise RuntimeError(
                f"{call} was called before initialize: call "
                "model, optimizer = initialize(model, optimizer, opt_level=...) first."
            )
        return self.opt_properties


_amp_state = AmpState()


def patch_method(owner: Any, name: str, around: Callable) -> None:
    """Make `owner.name(...)` call `around(original, ...)` until `reset`; `owner` is an instance.

    A deep copy of the instance calls its own method, not that of the instance it was copied from.
    """
    before = vars(owner).get(name)
    undo = _amp_state.undo

    @wraps(_plain(getattr(owner, name)))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = before or getattr(type(self), name).__get__(self)
        if undo is not _amp_state.undo:  # reset, but wrapped by somebody else since
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    _replace(owner, name, MethodType(method, owner))


def patch_function(owner: Any, name: str, around: Callable) -> None:
    """Make `owner.name(...)` call `around(original, ...)` until `reset`; `owner` is no instance."""
    original = getattr(owner, name)
    undo = _amp_state.undo

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if undo is not _amp_state.undo:
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    _replace(owner, name, function)


def _plain(function: Callable) -> Callable:
    """Return the function of a bound method, so that its signature keeps all parameters."""
    return getattr(function, "__func__", function)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set the attribute, and on `reset` bring back what was there.

    Except where others wrapped it in the meantime, as learning-rate schedulers do with
    `optimizer.step`: their wrapper stays.
    """
    absent = object()
    before = vars(owner).get(name, absent)
    setattr(owner, name, value)

    def restore() -> None:
        if vars(owner).get(name) is not value:
            return
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    _amp_state.undo.callback(restore)
