"""The mode that casts: what `autocast` puts on torch's stack of modes while a region is entered."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amp_lab import op_policy
from amp_lab.composites import take_apart
from amp_lab.emulation import emulated_call, round_to
from amp_lab.formats import BF16, FP16, FloatFormat
from amp_lab.op_policy import Policy
from amp_lab.op_trace import Tracer

# The formats that torch computes in. Numbers of every other one are kept in float32 tensors.
NATIVE = {BF16: torch.bfloat16, FP16: torch.float16}

# By format, the id of a weight: the weight and its cast.
Cache = dict[torch.dtype | FloatFormat, dict[int, tuple[Tensor, Tensor]]]

_CASTABLE = {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype is not torch.float64
}
# The method of CastMode that carries a policy out is named like it.
_METHODS = {
    device_type: {
        func: policy.name.lower() for func, policy in op_policy.policies(device_type).items()
    }
    for device_type in op_policy.LISTS
}


class CastMode(TorchFunctionMode):
    """Carries out the policies, each time that a torch function or method is called.

    Args:
        device_type: the device whose tensors are cast.
        dtype: what `Policy.LOWER` casts to.
        emulate: whether `Policy.LOWER` is left to `amp_lab.emulation`, under CUDA's list.
        cache: where the casts of weights are kept; None to keep none.
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype | FloatFormat, emulate: bool, cache: Cache | None
    ) -> None:
        self.device_type = device_type
        self.is_on_device = f"is_{device_type}"  # Tensor.is_cuda, and so on
        self.emulate = emulate
        self.active = True  # until another region for this device is entered
        self.methods = _METHODS["cuda" if emulate else device_type]
        self.format = NATIVE.get(dtype, dtype) if isinstance(dtype, FloatFormat) else dtype
        self.low = self.format if isinstance(self.format, torch.dtype) else torch.float32
        self.round = _rounding(self.format)
        self.cache = None if cache is None else cache.setdefault(self.format, {})

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch, which has this mode off its stack until we return."""
        method = self.methods.get(func)
        if method is None or not self.active:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kwargs and (kwargs.get("out") is not None or kwargs.get("out_dtype") is not None):
            return func(*args, **kwargs)  # these variants are on no list
        return getattr(self, method)(func, args, kwargs or {})

    def lower(self, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
        if self.emulate:
            return emulated_call(func, args, kwargs, self.format, self.to_low)
        return _call(self.to_low, func, args, kwargs)

    def float32(self, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
        return _call(self.to_float32, func, args, kwargs)

    def float32_result(self, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
        asked = kwargs.get("dtype") or any(isinstance(arg, torch.dtype) for arg in args)
        if not asked and any(map(self.is_castable, _tensors([*args, *kwargs.values()]))):
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    def widest(self, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
        widest = self.low
        for x in _tensors([*args, *kwargs.values()]):
            if self.is_castable(x) and widest is not torch.float32:
                if x.dtype not in (torch.float32, self.low):
                    raise RuntimeError(
                        f"{func.__name__}: in a region of {self.low} inputs have that dtype or "
                        f"float32, got {x.dtype}: convert it first"
                    )
                widest = x.dtype
        if widest is torch.float32:
            return _call(self.to_float32, func, args, kwargs)
        return func(*args, **kwargs)

    def parts(self, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(take_apart)(self, func, args, kwargs)
        return take_apart(self, func, args, kwargs)

    def banned(self, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> NoReturn:
        raise RuntimeError(
            f"autocast does not run {func.__name__}: it takes probabilities, and those that come "
            "from a half-precision sigmoid can be exactly 0 or 1. Leave out the sigmoid and use "
            "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss."
        )

    def is_castable(self, x: Tensor) -> bool:
        return x.dtype in _CASTABLE and getattr(x, self.is_on_device)

    def to_float32(self, x: Tensor) -> Tensor:
        return x if x.dtype is torch.float32 or not self.is_castable(x) else x.float()

    def to_low(self, x: Tensor) -> Tensor:
        """Cast to the region's format; a weight only once."""
        dtype = x.dtype
        if dtype is self.format or dtype not in _CASTABLE or not getattr(x, self.is_on_device):
            return x
        is_weight = dtype is torch.float32 and x.requires_grad and x.is_leaf and x._base is None
        if not is_weight or self.cache is None or torch.compiler.is_compiling():
            return self.round(x)  # a compiled graph would be valid for this very tensor only
        known = self.cache.get(id(x))
        if known is None or (torch.is_grad_enabled() and not known[1].requires_grad):
            # With x, because an id is unique only while its object lives.
            known = self.cache[id(x)] = x, self.round(x)
        return known[1]


class TracingMode(CastMode):
    """A CastMode that records what it does."""

    def __init__(self, tracer: Tracer, *args: Any) -> None:
        super().__init__(*args)
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = len(self.tracer.calls)
        result = super().__torch_function__(func, types, args, kwargs)
        if self.active and len(self.tracer.calls) == known:  # neither it nor its parts are listed
            self.tracer.record(func, None, args, kwargs or {}, result)
        return result

    @staticmethod
    def _recorded(policy: Policy) -> Callable:
        carry_out = getattr(CastMode, policy.name.lower())

        def carry_out_and_record(
            self: "TracingMode", func: Callable, args: Sequence, kwargs: dict[str, Any]
        ) -> Any:
            result = carry_out(self, func, args, kwargs)
            self.tracer.record(func, policy, args, kwargs, result)
            return result

        return carry_out_and_record

    lower = _recorded(Policy.LOWER)
    float32 = _recorded(Policy.FLOAT32)
    float32_result = _recorded(Policy.FLOAT32_RESULT)
    widest = _recorded(Policy.WIDEST)


def _rounding(fmt: torch.dtype | FloatFormat) -> Callable[[Tensor], Tensor]:
    """Return the conversion to a format. `x.half()` takes half as long as `x.to(torch.float16)`."""
    if isinstance(fmt, FloatFormat):
        return partial(round_to, fmt=fmt)
    by_name = {torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half}
    return by_name.get(fmt) or (lambda x: x.to(fmt))


def _call(
    cast: Callable[[Tensor], Tensor], func: Callable, args: Sequence, kwargs: dict[str, Any]
) -> Any:
    """Call `func` with all tensors cast, those in lists and tuples too."""
    args = [cast(x) if isinstance(x, Tensor) else _cast_items(cast, x) for x in args]
    if kwargs:
        kwargs = {
            name: cast(x) if isinstance(x, Tensor) else _cast_items(cast, x)
            for name, x in kwargs.items()
        }
    return func(*args, **kwargs)


def _cast_items(cast: Callable[[Tensor], Tensor], x: Any) -> Any:
    if not isinstance(x, list | tuple):
        return x
    return [cast(item) if isinstance(item, Tensor) else item for item in x]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))
