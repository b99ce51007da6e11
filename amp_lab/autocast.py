"""autocast from scratch: every operation in the precision that suits it.

    with autocast("cuda", torch.float16):
        loss = loss_fn(model(inputs), targets)

A region puts a `TorchFunctionMode` on torch's stack of modes (`amp_lab.casting`). From then on
torch hands each call of its functions and methods to the mode, which looks the function up
(`amp_lab.op_policy`), casts the arguments and calls it. The casts are operations that autograd
records like any other, so the backward pass has the dtypes of the forward pass by itself.

The rules are those of `torch.amp.autocast`, and so are outputs and gradients, bit by bit, except:

- What torch builds in C++ from listed operations has to be taken apart (`amp_lab.composites`). Left
  whole are `affine_grid`, `corrcoef`, `cov`, `linalg.pinv`, `sparse.mm`, `sum_to_size` and
  `trapezoid`: they compute in their inputs' dtype.
- Code that leaves Python is not seen: TorchScript, C++ extensions, a backward pass inside a region.
- An active mode keeps `nn.TransformerEncoder` and `nn.MultiheadAttention` in eval mode from torch's
  fused fast path. Outputs are equal within rounding.
- Before its pull request 165068 (in torch 2.13, not yet in 2.6) a weight that torch had cast
  without grad mode got no gradient later in the region. Here it does.
- Under `torch.vmap` a biased `linear` is one operation, and so lower precision; to torch it is two.
- Regions that end in another order than they began (in generators) leave nothing switched on.
- `tensordot` and `linalg.multi_dot` cast inputs of two dtypes, where torch raises an error.
- Where regions of two dtypes are nested, torch's cache mixes them up. Here each has its own casts.
- `nn.DataParallel` carries torch's regions into its threads, not these: decorate `forward`.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import _pop_mode, _push_mode

from amp_lab import torch_hooks
from amp_lab.casting import NATIVE, Cache, CastMode, TracingMode
from amp_lab.formats import FloatFormat
from amp_lab.op_trace import Call, Tracer

_DEFAULT_DTYPES = {
    "cpu": torch.bfloat16,
    "cuda": torch.float16,
    "mps": torch.float16,
    "xpu": torch.float16,
}


class _State(threading.local):
    """What this thread's regions have set."""

    def __init__(self) -> None:
        self.regions: dict[str, Any] = {}  # by device type, the innermost
        self.modes: dict[str, CastMode | None] = {}  # theirs, None if not enabled
        self.cache_enabled = True
        self.cache: Cache = {}
        self.entered: list[tuple[autocast, CastMode | None]] = []


_state = _State()


class autocast:
    """A region in which operations run in the precision that their policy asks for.

    A context manager and a decorator, used as `torch.amp.autocast` is:

    Args:
        device_type: "cpu", "cuda", "mps" or "xpu". Tensors on other devices are left alone.
        dtype: `torch.float16` or `torch.bfloat16`; with `emulate`, also any `FloatFormat`. The
            default is the surrounding region's, else bfloat16 on the CPU and float16 elsewhere.
        enabled: False makes a region without autocast, for instance inside of one that has it.
        cache_enabled: whether a weight (a float32 leaf that requires grad) is cast only once until
            the outermost region ends. The default is the surrounding region's, else True.
        emulate: compute what a GPU with tensor cores computes, on any device: CUDA's op lists, and
            `Policy.LOWER` with float32 kernels as described in `amp_lab.emulation`.
        trace: record every operation in `region.trace`, `with autocast(...) as region`.

    Raises:
        ValueError: the device type is no string.
        RuntimeError: autocast does not know the device type, or the GPU has no bfloat16.
        TypeError: another argument has the wrong type, or a `FloatFormat` comes without `emulate`.

    A dtype that is not supported, and "cuda" on a machine without it, warn and disable the region.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | FloatFormat | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        emulate: bool = False,
        trace: bool = False,
    ) -> None:
        self.device_type = _known(device_type)
        if dtype is None:
            dtype = get_autocast_dtype(device_type)
            if isinstance(dtype, FloatFormat) and not emulate:
                dtype = _DEFAULT_DTYPES[self.device_type]
        if not isinstance(dtype, torch.dtype | FloatFormat):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        if isinstance(dtype, FloatFormat) and not emulate:
            raise TypeError(f"torch has no kernels for {dtype.name}: add emulate=True")
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be a bool, got {enabled!r}")
        if not isinstance(cache_enabled, bool | None):
            raise TypeError(f"cache_enabled must be a bool or None, got {cache_enabled!r}")
        problem = _problem(self.device_type, dtype, emulate) if enabled else None
        if problem:
            warnings.warn(f"{problem} Disabling autocast.", stacklevel=2)
        self.dtype = dtype
        self.enabled = enabled and not problem
        self.cache_enabled = _state.cache_enabled if cache_enabled is None else cache_enabled
        self.emulate = emulate
        self._tracer = Tracer() if trace else None

    def __enter__(self) -> "autocast":
        _state.entered.append((self, self._make_mode()))
        self._settle()
        return self

    def _make_mode(self) -> CastMode | None:
        if not self.enabled:
            return None
        cache = _state.cache if self.cache_enabled else None
        settings = self.device_type, self.dtype, self.emulate, cache
        if self._tracer is None:
            mode = CastMode(*settings)
        else:
            mode = TracingMode(self._tracer, *settings)
            self._tracer.start()
        mode.__enter__()
        return mode

    def __exit__(self, *error: Any) -> Literal[False]:
        mine = [i for i, (region, _) in enumerate(_state.entered) if region is self]
        if not mine:
            raise RuntimeError("this region was not entered in this thread")
        is_innermost = mine[-1] == len(_state.entered) - 1
        _, mode = _state.entered.pop(mine[-1])
        if mode is not None:
            if is_innermost:
                mode.__exit__(*error)
            else:  # regions in generators may end in any order
                _take_off(mode)
            if self._tracer is not None:
                self._tracer.stop()
        self._settle()
        if not _state.entered:
            clear_autocast_cache()
        return False

    def _settle(self) -> None:
        """Let the innermost region for the device type take effect."""
        entered = [e for e in _state.entered if e[0].device_type == self.device_type]
        region, mode = entered[-1] if entered else (None, None)
        _state.regions[self.device_type], _state.modes[self.device_type] = region, mode
        for _, other in entered:
            if other is not None:
                other.active = other is mode
        _state.cache_enabled = _state.entered[-1][0].cache_enabled if _state.entered else True

    def __call__(self, func: Callable) -> Callable:
        """Return `func` to run in this region each time."""
        if not callable(func):
            raise TypeError(
                f"autocast(...) decorates a callable, got {type(func).__name__}; as a context "
                "manager it is used as `with autocast(...):`"
            )

        @functools.wraps(func)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return decorated

    @property
    def trace(self) -> list[Call]:
        """The operations that ran in this region, in order."""
        if self._tracer is None:
            raise RuntimeError("this region keeps no trace: make it with autocast(..., trace=True)")
        return self._tracer.calls


def _take_off(mode: CastMode) -> None:
    """Take a mode off torch's stack from below others."""
    above = list(iter(_pop_mode, mode))
    for other in reversed(above):
        _push_mode(other)


def is_autocast_enabled(device_type: str) -> bool:
    """Say whether this thread is in an enabled region for the device type."""
    return _state.modes.get(_known(device_type, TypeError)) is not None


def get_autocast_dtype(device_type: str) -> torch.dtype | FloatFormat:
    """Return what the region casts to or, outside of regions, what one would by default."""
    device_type = _known(device_type, TypeError)
    region = _state.regions.get(device_type)
    return _DEFAULT_DTYPES[device_type] if region is None else region.dtype


def clear_autocast_cache() -> None:
    """Forget the casts of weights, for instance after changing weights inside a region."""
    for casts in _state.cache.values():
        casts.clear()


def _known(device_type: str, error: type[Exception] = ValueError) -> str:
    if not isinstance(device_type, str):
        raise error(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
    name = torch.device(device_type).type  # names the known ones in its error
    if name not in _DEFAULT_DTYPES:
        raise RuntimeError(f"User specified an unsupported autocast device_type '{name}'")
    return name


def _problem(device_type: str, dtype: torch.dtype | FloatFormat, emulate: bool) -> str | None:
    """Say why autocast does not run there, if so."""
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return "CUDA is not available."
        if dtype is torch.bfloat16 and not emulate and not torch.cuda.is_bf16_supported():
            raise RuntimeError("this GPU does not compute in bfloat16: use dtype=torch.float16")
    elif not isinstance(dtype, FloatFormat) and dtype not in NATIVE.values():
        return f"autocast on {device_type} supports torch.bfloat16 and torch.float16, not {dtype}."
    return None


def custom_fwd(
    fwd: Callable | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable:
    """Decorate the `forward` of a `torch.autograd.Function`, as `torch.amp.custom_fwd` does.

    Inside a region, floating-point inputs are cast to `cast_inputs` and `forward` runs without
    autocast. Without `cast_inputs`, `forward` runs under the current region and `custom_bwd` lets
    `backward` run under the same.
    """
    device_type = _known(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        mode = _state.modes.get(device_type)
        if mode is None or cast_inputs is not None:
            region = autocast(device_type, enabled=False)
        else:
            region = _state.regions[device_type]
        ctx._region_of_forward = region  # for custom_bwd
        if mode is None or cast_inputs is None:
            return fwd(ctx, *args, **kwargs)

        def cast(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(cast_inputs) if mode.is_castable(value) else value
            if isinstance(value, Mapping):
                return {cast(key): cast(item) for key, item in value.items()}
            return type(value)(map(cast, value)) if isinstance(value, list | tuple) else value

        with region:
            return fwd(ctx, *cast(args), **cast(kwargs))

    return decorated


def custom_bwd(bwd: Callable | None = None, *, device_type: str) -> Callable:
    """Decorate the `backward` that belongs to a `custom_fwd`: it runs in the same region."""
    device_type = _known(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        with ctx._region_of_forward:
            return bwd(ctx, *args, **kwargs)

    return decorated


def _in_current_regions(func: Callable) -> Callable:
    regions = [region for region in _state.regions.values() if region and region.enabled]

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for region in regions:
                stack.enter_context(region)
            return func(*args, **kwargs)

    return again if regions else func


torch_hooks.install(lambda: any(_state.modes.values()), _in_current_regions)
