"""What a forward pass in float32 can tell about one in half precision, seen call by call.

While a `ForwardWatch` is active every torch function that the model calls passes through it. It
computes nothing differently. It notes the constants that a format cannot hold, and the tensors that
autocast would have in half precision: results of the operations on its lower-precision list, what
is computed from them alone, and whatever else is cast because such an operation takes it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_lab import op_policy
from amp_lab.formats import FloatFormat
from amp_lab.op_policy import Policy

# Functions that put constants into a tensor, which are reported as such. Their whole numbers are
# values; those of other functions are sizes and indices.
_FILLS = {"masked_fill", "masked_fill_", "full", "full_like", "fill_", "where", "clamp", "clamp_"}


@dataclass(frozen=True)
class Constant:
    """A number in the code that the format does not hold.

    Attributes:
        place: what it is given to, for example "masked_fill in decoder.0".
        value: the number; of a tensor the one of the largest magnitude.
        becomes: 0.0, or an infinity.
        under_autocast: whether autocast computes it in the format; if not, only a model that is
            in the format as a whole (`model.half()`) does.
    """

    place: str
    value: float
    becomes: float
    under_autocast: bool

    def __str__(self) -> str:
        return f"{self.value:g} ({self.place}) becomes {self.becomes:g}"


def constant(
    place: str, value: float, fmt: FloatFormat, under_autocast: bool = False
) -> Constant | None:
    """Return the `Constant` if `value` is finite, not zero, and becomes infinite or zero in fmt."""
    if not math.isfinite(value) or value == 0:
        return None
    rounded = fmt.round(torch.tensor(value, dtype=torch.float64)).item()
    if math.isfinite(rounded) and rounded != 0:
        return None
    return Constant(place, float(value), rounded, under_autocast)


class ForwardWatch(TorchFunctionMode):
    """Collects constants, and the largest magnitudes of tensors that would be half precision.

    Attributes:
        constants: without repetitions, in the order of the calls.
        outputs: by module, the largest magnitude of its outputs (float32 scalar on its device),
            NaN once one occurs. What several modules return is noted once, for the innermost.
        in_half: by place, "result of conv2d in encoder.0" or "input of linear in head", the
            largest magnitude of what autocast would have in half precision.
    """

    def __init__(self, fmt: FloatFormat) -> None:
        super().__init__()
        self.fmt = fmt
        self.outputs: dict[str, Tensor] = {}
        self.in_half: dict[str, Tensor] = {}
        self._constants: dict[Constant, None] = {}
        self._tensors: list[tuple[str, Tensor, bool]] = []  # read at the end: reading waits
        self._policies = op_policy.policies("cuda")  # also on a CPU: its answer is for a GPU
        self._modules: list[str] = []  # those that are running, the innermost last
        self._low: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._measured: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
        self._extremes: dict[tuple[int, int], Tensor] = {}
        self._returned: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
        self._given: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    @property
    def constants(self) -> list[Constant]:
        found = [constant(place, x.item(), self.fmt, low) for place, x, low in self._tensors]
        return list(self._constants | dict.fromkeys(c for c in found if c is not None))

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch while the block runs; afterwards the hooks on the model are gone."""
        root = type(model).__name__
        with ExitStack() as stack:
            for name, module in model.named_modules():
                enter = module.register_forward_pre_hook(
                    lambda *_, name=name or root: self._modules.append(name), prepend=True
                )
                leave = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(self)
            yield

    def _leave(self, _module: nn.Module, _inputs: object, outputs: object) -> None:
        name = self._modules.pop()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for x in _flat(outputs):
                if not (isinstance(x, Tensor) and x.is_floating_point() and x.numel()):
                    continue
                if self._returned.get(_key(x)) is not x:
                    self._returned[_key(x)] = x
                    self._note(self.outputs, name, x)

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = list(_flat([args, tuple(kwargs.values())]))
        name = getattr(func, "__name__", "")
        if name != "__get__":  # reading an attribute such as Tensor.shape
            with torch.no_grad():
                self._look(name, self._policies.get(func), given, result)
        return result

    def _look(self, name: str, policy: Policy | None, given: list[Any], result: Any) -> None:
        place = f"{name} in {self._modules[-1]}" if self._modules else name
        tensors = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        arrays = [x for x in tensors if x.dim()]  # scalars do not decide on a dtype
        low = policy is Policy.LOWER or (
            policy in (None, Policy.WIDEST) and bool(arrays) and all(map(self._is_low, arrays))
        )
        for value in given:
            if isinstance(value, float) or (name in _FILLS and type(value) is int):
                found = constant(place, value, self.fmt, low)
                if found is not None:
                    self._constants[found] = None
        for x in tensors:
            if not x.numel():
                continue
            # No gradient: a mask, an input, a constant. Weights and activations are counted anyway.
            if not x.requires_grad and self._given.get(id(x)) is not x:
                self._given[id(x)] = x
                self._tensors.append((f"tensor given to {place}", self._extreme(x), low))
            if policy is Policy.LOWER and not self._is_low(x):
                self._note(self.in_half, f"input of {place}", x)
        for x in _flat(result):
            if isinstance(x, Tensor) and x.is_floating_point():
                if not low:
                    self._low.pop(id(x), None)  # a result written in place
                    continue
                self._low[id(x)] = x
                if x.numel() and not x._is_view() and name not in _FILLS:
                    self._note(self.in_half, f"result of {place}", x)

    def _note(self, sizes: dict[str, Tensor], name: str, x: Tensor) -> None:
        size = self._extreme(x).abs().float()
        sizes[name] = torch.maximum(size, sizes.get(name, size).to(size.device))

    def _extreme(self, x: Tensor) -> Tensor:
        """Return the element of the largest magnitude, as a scalar tensor; NaN if there is one."""
        key = _key(x)
        if self._measured.get(key) is not x:
            self._measured[key] = x
            low, high = (x.detach().coalesce().values() if x.is_sparse else x.detach()).aminmax()
            self._extremes[key] = torch.where(-low > high, low, high)
        return self._extremes[key]

    def _is_low(self, x: Tensor) -> bool:
        return self._low.get(id(x)) is x


def _key(x: Tensor) -> tuple[int, int]:
    """Tell tensors apart, and a tensor from itself before it was written to."""
    return id(x), 0 if x.is_inference() else x._version


def _flat(value: Any) -> Iterator[Any]:
    """Yield what is in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flat(part)
    else:
        yield value
