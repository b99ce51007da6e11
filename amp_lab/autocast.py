"""autocast from scratch: each operation in the precision that its policy asks for."""

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amp_lab import composites, op_policy
from amp_lab.emulation import emulated_call, round_to
from amp_lab.formats import FloatFormat
from amp_lab.op_policy import Policy

_LOW = (torch.bfloat16, torch.float16)


class _State(threading.local):
    """What the regions of one thread have set."""

    def __init__(self) -> None:
        self.mode: dict[str, _CastMode] = {}  # of the innermost region of each device, if enabled
        self.dtype: dict[str, Any] = {
            "cpu": torch.bfloat16,
            "cuda": torch.float16,
            "mps": torch.float16,
            "xpu": torch.float16,
        }
        self.cache_enabled = True
        self.depth = 0
        self.cache: dict[tuple[int, Any], tuple[Tensor, Tensor]] = {}


_state = _State()


class _CastMode(TorchFunctionMode):
    def __init__(self, device_type: str, dtype: Any, cache: dict | None, emulate: bool) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.low = (
            dtype
            if isinstance(dtype, torch.dtype)
            else (dtype.dtype if dtype.dtype in _LOW else torch.float32)
        )
        self.cache = cache
        self.emulate = emulate
        self.active = True
        self.handlers = _handlers(device_type, emulate)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        handler = self.handlers.get(func)
        if handler is None or not self.active:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs or {})

    def is_eligible(self, x: Tensor) -> bool:
        return (
            x.is_floating_point()
            and x.dtype is not torch.float64
            and x.device.type == self.device_type
        )

    def to_lower(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if dtype is self.low and dtype is not torch.float32 or not self.is_eligible(x):
            return x
        if (
            self.cache is None
            or dtype is not torch.float32
            or not x.requires_grad
            or not x.is_leaf
            or x._is_view()
        ):
            return self.round(x)
        key = id(x), self.dtype
        known = self.cache.get(key)
        if known is not None and (known[1].requires_grad or not torch.is_grad_enabled()):
            return known[1]
        cast = self.round(x)
        self.cache[key] = x, cast
        return cast

    def round(self, x: Tensor) -> Tensor:
        if isinstance(self.dtype, torch.dtype):
            return x.to(self.dtype)
        return round_to(x, self.dtype)

    def to_float32(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype is not torch.float32 and self.is_eligible(x) else x


def _map(cast, values):
    return [
        cast(v)
        if isinstance(v, Tensor)
        else [cast(t) for t in v]
        if isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor)
        else v
        for v in values
    ]


def _map_all(cast, func, args, kwargs):
    args = _map(cast, args)
    if kwargs:
        return func(*args, **dict(zip(kwargs, _map(cast, kwargs.values()), strict=True)))
    return func(*args)


def _unlisted(kwargs):
    return kwargs and (kwargs.get("out") is not None or kwargs.get("out_dtype") is not None)


def _lower(mode, func, args, kwargs):
    if _unlisted(kwargs):
        return func(*args, **kwargs)
    return _map_all(mode.to_lower, func, args, kwargs)


def _emulated(mode, func, args, kwargs):
    if _unlisted(kwargs):
        return func(*args, **kwargs)
    return emulated_call(func, args, kwargs, mode.dtype, mode.to_lower)


def _float32(mode, func, args, kwargs):
    if _unlisted(kwargs):
        return func(*args, **kwargs)
    return _map_all(mode.to_float32, func, args, kwargs)


def _float32_result(mode, func, args, kwargs):
    first = args[0] if args else next(iter(kwargs.values()))
    asked = kwargs.get("dtype") or any(isinstance(a, torch.dtype) for a in args)
    if _unlisted(kwargs) or asked or not mode.is_eligible(first):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "dtype": torch.float32})


def _widest(mode, func, args, kwargs):
    if _unlisted(kwargs):
        return func(*args, **kwargs)
    dtypes = set()

    def note(x):
        if mode.is_eligible(x):
            dtypes.add(x.dtype)

    _map(note, [*args, *kwargs.values()])
    if torch.float32 in dtypes:
        return _map_all(mode.to_float32, func, args, kwargs)
    if dtypes - {mode.low}:
        raise RuntimeError(
            f"{func.__name__}: autocast to {mode.low} promotes this dtype and float32 only, got "
            f"{', '.join(map(str, dtypes))}; convert the inputs first"
        )
    return func(*args, **kwargs)


def _banned(mode, func, args, kwargs):
    raise RuntimeError(
        "binary_cross_entropy is unsafe in half precision: use binary_cross_entropy_with_logits"
    )


def _open(mode, func, args, kwargs):
    with mode:
        return composites.opened(func)(*args, **kwargs)


def _taken_apart(replacement):
    def handler(mode, func, args, kwargs):
        with mode:
            return replacement(*args, **kwargs)

    return handler


_HANDLER = {
    Policy.LOWER: _lower,
    Policy.FLOAT32: _float32,
    Policy.FLOAT32_RESULT: _float32_result,
    Policy.WIDEST: _widest,
    Policy.BANNED: _banned,
}


@functools.cache
def _handlers(device_type: str, emulate: bool) -> dict[Callable, Callable]:
    table = {}
    for policy, names in op_policy.LISTS["cuda" if emulate else device_type].items():
        for name in names.split():
            for func in op_policy.functions(name):
                table[func] = _emulated if emulate and policy is Policy.LOWER else _HANDLER[policy]
    F = torch.nn.functional
    for f in [F.multi_head_attention_forward]:
        table[f] = _open
    for name in ["lstm", "gru", "rnn_tanh", "rnn_relu"]:
        table[getattr(torch, name)] = (
            _emulated
            if emulate
            else _lower
            if device_type == "cuda"
            else _taken_apart(composites.recurrent(name))
        )
    if device_type == "cpu" and not emulate:
        for name in ["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"]:
            table[getattr(torch, name)] = _taken_apart(composites.recurrent(name))
        table[F.cross_entropy] = table[F.nll_loss] = _float32
    return table


class autocast:
    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None, *, emulate=False):
        if not isinstance(device_type, str):
            raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
        if device_type not in _state.dtype:
            raise RuntimeError(f"unsupported autocast device_type '{device_type}'")
        dtype = _state.dtype[device_type] if dtype is None else dtype
        if isinstance(dtype, FloatFormat) and not emulate:
            raise TypeError("a FloatFormat needs emulate=True")
        if enabled and device_type == "cuda" and not torch.cuda.is_available():
            warnings.warn("CUDA is not available. Disabling autocast.", stacklevel=2)
            enabled = False
        elif enabled and dtype not in _LOW and not isinstance(dtype, FloatFormat):
            warnings.warn(
                f"autocast to {dtype} is not supported. Disabling autocast.", stacklevel=2
            )
            enabled = False
        self.device_type, self.dtype, self.enabled = device_type, dtype, enabled
        self.cache_enabled = _state.cache_enabled if cache_enabled is None else cache_enabled
        self.emulate = emulate
        self._entered = []

    def __enter__(self):
        device = self.device_type
        outer = _state.mode.get(device)
        self._entered.append((outer, _state.dtype[device], _state.cache_enabled))
        if outer:
            outer.active = False
        _state.dtype[device] = self.dtype
        _state.cache_enabled = self.cache_enabled
        _state.depth += 1
        mode = None
        if self.enabled:
            cache = _state.cache if self.cache_enabled else None
            mode = _CastMode(device, self.dtype, cache, self.emulate)
            mode.__enter__()
        _state.mode[device] = mode
        return self

    def __exit__(self, *exc):
        device = self.device_type
        outer, dtype, cache_enabled = self._entered.pop()
        mode = _state.mode[device]
        if mode:
            mode.__exit__(*exc)
        if outer:
            outer.active = True
        _state.mode[device] = outer
        _state.dtype[device] = dtype
        _state.cache_enabled = cache_enabled
        _state.depth -= 1
        if _state.depth == 0:
            clear_autocast_cache()

    def __call__(self, func):
        if not callable(func):
            raise TypeError(f"autocast()(func) requires a callable, got {type(func).__name__}")

        @functools.wraps(func)
        def decorated(*args, **kwargs):
            with self:
                return func(*args, **kwargs)

        return decorated


def is_autocast_enabled(device_type):
    return _state.mode.get(device_type) is not None


def get_autocast_dtype(device_type):
    return _state.dtype[device_type]


def clear_autocast_cache():
    _state.cache.clear()


def custom_fwd(fwd=None, *, device_type: str, cast_inputs=None):
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorated(ctx, *args, **kwargs):
        mode = _state.mode.get(device_type)
        ctx._amp_lab_region = autocast(
            device_type,
            get_autocast_dtype(device_type),
            mode is not None and cast_inputs is None,
            emulate=mode is not None and mode.emulate,
        )
        if cast_inputs is None or mode is None:
            return fwd(ctx, *args, **kwargs)

        def cast(value):
            if isinstance(value, Tensor):
                return value.to(cast_inputs) if mode.is_eligible(value) else value
            if isinstance(value, dict):
                return {cast(k): cast(v) for k, v in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(map(cast, value))
            return value

        with autocast(device_type, enabled=False):
            return fwd(ctx, *cast(args), **cast(kwargs))

    return decorated


def custom_bwd(bwd=None, *, device_type: str):
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx, *args, **kwargs):
        with ctx._amp_lab_region:
            return bwd(ctx, *args, **kwargs)

    return decorated
