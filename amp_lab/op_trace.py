"""A record of what ran in which precision: `with autocast(..., trace=True) as region`.

Kept apart from the casting, which pays nothing for it when it is off.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from amp_lab.op_policy import Policy


class Call(NamedTuple):
    """One operation that ran in a traced region."""

    op: str
    """The name of the function."""
    policy: Policy | None
    """None: it is on no list and ran in the dtypes of its inputs."""
    inputs: tuple[torch.dtype, ...]
    """Dtypes of the tensors it was called with, before any cast."""
    output: torch.dtype
    """Dtype of the tensor it returned, the first if there are several."""
    module: str
    """Path of the module whose `forward` called it, as `named_modules` of the outermost module has
    it; "" for that module itself, and outside of any."""


class Tracer:
    """Collects calls between `start` and `stop`, and knows which module is running."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._hooks: list = []
        self._thread = 0
        self._running: list[str] = []
        self._paths: dict[nn.Module, str] = {}

    def start(self) -> None:
        self._thread = threading.get_ident()  # the hooks are called in all threads
        self._hooks += [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        self._hooks.pop().remove()
        self._hooks.pop().remove()

    def record(
        self,
        func: Callable,
        policy: Policy | None,
        args: Iterable,
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Note a call, unless it takes or returns no tensor, or reads or sets an attribute."""
        name = getattr(func, "__name__", "")
        inputs = tuple(x.dtype for x in _tensors([*args, *kwargs.values()]))
        output = next(iter(_tensors([result])), None)
        if inputs and output is not None and name not in ("__get__", "__set__"):
            module = self._running[-1] if self._running else ""
            self.calls.append(Call(name.strip("_"), policy, inputs, output.dtype, module))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            if not self._running:
                self._paths = {part: path for path, part in module.named_modules()}
            self._running.append(self._paths.get(module, ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()


def _tensors(values: Iterable) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
