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
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from amp_lab import op_policy
from amp_lab.composites import opened
from amp_lab.formats import FloatFormat
from amp_lab.op_policy import Policy

# Functions that put constants into a tensor, which are reported as such.
_FILLS = frozenset(
    ("__setitem__", "_threshold", "clamp", "clamp_", "clamp_max", "clamp_min", "clip", "fill_",
     "full", "full_like", "hardtanh", "index_fill", "index_fill_", "masked_fill", "masked_fill_",
     "nan_to_num", "new_full", "pad", "threshold", "where")
)  # fmt: skip
# Scalars of these are not cast: they are used in float32 (or are elements, not constants).
_EXACT = frozenset(
    ("__mul__", "__pow__", "__rdiv__", "__rmul__", "__rpow__", "__rtruediv__", "__truediv__",
     "as_tensor", "div", "div_", "float_power", "mul", "mul_", "pow", "pow_", "tensor",
     "true_divide")
)  # fmt: skip
# Their other arguments are float32 parameters and buffers, and the result has the input's dtype.
_OF_THE_FIRST = {"batch_norm", "instance_norm", "native_batch_norm"}


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


@dataclass
class _Known:
    """What is known of a tensor; all but `low` no longer holds when it is written to."""

    version: int
    low: bool = False  # autocast would have it in half precision
    extreme: Tensor | None = None  # its element of the largest magnitude
    module: str | None = None  # that returned it, or what it is a view of
    returned: bool = False  # by that module itself
    given: bool = False  # to a function, and looked at for constants


class ForwardWatch(TorchFunctionMode):
    """Collects constants, and the largest magnitudes of tensors that would be half precision.

    Attributes:
        constants: without repetitions, in the order of the calls.
        outputs: by module, the largest magnitude of its outputs (float32 scalar on its device),
            NaN once one occurs. What several modules return is noted once, for the innermost.
        in_half: by place, "result of conv2d in encoder.0" or "input of linear in head", the
            largest magnitude of what autocast would have in half precision.
        half_modules, half_parameters: names of those whose gradients autocast would have in half
            precision, because they are in it or are cast to it.
    """

    def __init__(self, fmt: FloatFormat) -> None:
        super().__init__()
        self.fmt = fmt
        self.outputs: dict[str, Tensor] = {}
        self.in_half: dict[str, Tensor] = {}
        self.half_modules: set[str] = set()
        self.half_parameters: set[str] = set()
        self._constants: dict[Constant, None] = {}
        self._tensors: list[tuple[str, Tensor, bool]] = []  # read at the end: reading waits
        self._policies = op_policy.policies("cuda")  # also on a CPU: its answer is for a GPU
        self._modules: list[str] = []  # those that are running, the innermost last
        self._parameters: dict[int, str] = {}
        self._known = WeakTensorKeyDictionary()  # _Known, by tensor, as long as there is one

    @property
    def constants(self) -> list[Constant]:
        found = self._constants.copy()
        seen = {c.value for c in found}
        for place, x, low in self._tensors:
            c = constant(place, x.item(), self.fmt, low)
            if c is not None and c.value not in seen:  # one tensor is given on and on
                seen.add(c.value)
                found[c] = None
        return list(found)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch while the block runs; afterwards the hooks on the model are gone."""
        root = type(model).__name__
        self._parameters = {id(p): name for name, p in model.named_parameters()}
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
                if not _is_counted(x) or self._of(x).returned:
                    continue
                known = self._of(x)
                known.returned, known.module = True, name
                self._note(self.outputs, name, x)
                if known.low:
                    self.half_modules.add(name)

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, policy = kwargs or {}, self._policies.get(func)
        if policy is Policy.PARTS and isinstance(func, FunctionType):
            with self:  # which is off while it is at work
                return opened(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name != "__get__":  # reading an attribute such as Tensor.shape
            with torch.no_grad():
                self._look(name, policy, args, kwargs, result)
        return result

    def _look(
        self, name: str, policy: Policy | None, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        place = f"{name} in {self._modules[-1]}" if self._modules else name
        tensors = [x for x in _flat([args, kwargs]) if _is_counted(x)]
        arrays = [x for x in tensors if x.dim()]  # scalars do not decide on a dtype
        if name in _OF_THE_FIRST or _is_in_place(name):
            arrays = arrays[:1]
        low = policy is Policy.LOWER or (
            policy in (None, Policy.WIDEST)
            and bool(arrays)
            and all(self._of(x).low for x in arrays)
        )
        for value in _scalars(name, args, kwargs):
            found = constant(place, value, self.fmt, low)
            if found is not None:
                self._constants[found] = None
        for i, x in enumerate(tensors):
            self._look_at(x, name, place, low)
            is_mask = name == "scaled_dot_product_attention" and i > 2
            if policy is Policy.LOWER and not is_mask:
                self._cast(x, place)
        for x in _flat(result):
            if _is_counted(x):
                self._result(x, low, tensors[0] if tensors else None)
                # A view has the numbers of what it is a view of, if that was seen.
                computed = policy is Policy.LOWER or not x._is_view()
                if low and computed and name not in _FILLS:
                    self._note(self.in_half, f"result of {place}", x)

    def _look_at(self, x: Tensor, name: str, place: str, low: bool) -> None:
        """Note a mask, an input, a constant; weights and activations are counted anyway."""
        root = x._base if x._base is not None else x
        if not x.requires_grad and not self._of(root).given:
            self._of(root).given = True
            self._tensors.append((f"tensor given to {place}", self._extreme(x), low))

    def _cast(self, x: Tensor, place: str) -> None:
        """Note what an operation takes that computes in half precision."""
        if id(x) in self._parameters:
            self.half_parameters.add(self._parameters[id(x)])
        known = self._of(x)
        if known.module is not None:
            self.half_modules.add(known.module)
        if not known.low:
            self._note(self.in_half, f"input of {place}", x)

    def _result(self, x: Tensor, low: bool, first: Tensor | None) -> None:
        """Keep track of a result, `first` being the first tensor that the function was given."""
        known = self._of(x)
        known.low = low
        if x._is_view() and first is not None:
            known.module = self._of(first).module

    def _note(self, sizes: dict[str, Tensor], name: str, x: Tensor) -> None:
        size = self._extreme(x).abs().float()
        sizes[name] = torch.maximum(size, sizes.get(name, size).to(size.device))

    def _extreme(self, x: Tensor) -> Tensor:
        """Return the element of the largest magnitude, as a scalar tensor; NaN if there is one."""
        known = self._of(x)
        if known.extreme is None:
            low, high = (x.detach().coalesce().values() if x.is_sparse else x.detach()).aminmax()
            known.extreme = torch.where(-low > high, low, high)
        return known.extreme

    def _of(self, x: Tensor) -> _Known:
        known = self._known.get(x)
        version = 0 if x.is_inference() else x._version
        if known is None or known.version != version:
            known = _Known(version, low=known is not None and known.low)
            self._known[x] = known
        return known


def _is_counted(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0


def _is_in_place(name: str) -> bool:
    """Tell whether the function writes into its first argument, whose dtype then stays."""
    written = name.endswith("_") and not name.endswith("__")
    return written or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")


def _scalars(name: str, args: Any, kwargs: dict[str, Any]) -> Iterator[float]:
    """Yield the numbers in a call that a tensor's dtype has to hold."""
    if name in _EXACT:
        return
    if name == "__setitem__":
        args = args[2:]  # what is before is an index
    yield from (value for value in _flat([args, kwargs]) if isinstance(value, float))
    if name in _FILLS:  # elsewhere, and before the last, whole numbers are sizes and indices
        named = [kwargs.get(key) for key in ("value", "fill_value", "min", "max")]
        yield from (value for value in [*args[-1:], *named] if type(value) is int)


def _flat(value: Any) -> Iterator[Any]:
    """Yield what is in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flat(part)
    else:
        yield value
