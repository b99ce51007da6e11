"""Do I need a GradScaler? `precision_report` answers for a model of your own.

It runs forward and backward in float32, changes nothing of the model, and says what half precision
would have done: float32's numbers are all there, so one pass answers for every format and every
loss scale. How the numbers are judged is in `amp_lab.verdict`.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from amp_lab.formats import FP32, FloatFormat
from amp_lab.forward_watch import Constant, ForwardWatch, constant
from amp_lab.histograms import Histogram, Recordings, record_gradients
from amp_lab.report_text import PrecisionReport, summarize
from amp_lab.weight_updates import Shadow, fresh_adam, shadows_of, swallowed

ShadowMaker = Callable[[nn.Parameter], Shadow | None] | None


def precision_report(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *batches: Any,
    dtype: torch.dtype | FloatFormat = torch.float16,
    optimizer: Optimizer | None = None,
    learning_rate: float | None = None,
    tolerance: float = 0.01,
) -> PrecisionReport:
    """Run `loss_fn(model, batch).backward()` in float32 for each batch, and report on `dtype`.

    Parameters, gradients, buffers, random state, training mode and hooks are afterwards as they
    were, also when an error is raised. Kept are a copy of the parameters, histograms and sums; the
    gradient of each parameter is given up as soon as it is counted.

    Judged are the gradients at the outputs of modules and of parameters; what a `forward` computes
    in between is looked at for overflow only. Other modules that loss_fn uses, such as a teacher,
    are used as in training, and changed by it.

    Args:
        model: in float32, on any device or several.
        loss_fn: `(model, batch) -> scalar tensor`, which it computes as in training, without
            autocast, scaling or backward.
        batches: whatever loss_fn takes. Gradients change in training: batches and weights of late
            training tell more than those of the first step.
        dtype: `torch.float16`, `torch.bfloat16`, or a format such as `amp_lab.FP8_E5M2`.
        optimizer: the one of this model: its next step is tried on copies of the weights, one at a
            time, to see which updates half-precision weights would swallow.
        learning_rate: instead of an optimizer; taken as that of a fresh `torch.optim.Adam`.
        tolerance: the share of the gradients' magnitude that may be flushed to zero.

    Raises:
        ValueError: no batches, a tolerance outside of (0, 1), both an optimizer and a learning
            rate, parameters that are not float32, none that requires a gradient, a loss that is no
            scalar with a gradient, or a dtype with a larger range than float32.
        TypeError: a data loader instead of batches, or a model that is not written in Python.
        RuntimeError: called in inference mode.
    """
    fmt = dtype if isinstance(dtype, FloatFormat) else FloatFormat.of(dtype)
    if fmt.max_exponent > FP32.max_exponent:
        raise ValueError(f"{fmt.name} reaches beyond float32, in which the report computes")
    _check(model, batches, tolerance, optimizer, learning_rate)
    shadow_of: ShadowMaker = None
    if optimizer is not None:
        shadow_of = shadows_of(optimizer, model)
    elif learning_rate is not None:
        shadow_of = fresh_adam(learning_rate)
    updates: dict[str, tuple[int, int]] = {}
    watch = ForwardWatch(fmt)
    losses: list[Tensor] = []
    with _as_it_was(model), record_gradients(model) as recordings:
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with _giving_up_gradients(model, shadow_of if last else None, fmt, updates):
                with watch.watching(model):
                    loss = loss_fn(model, batch)
                _check_loss(loss)
                losses.append(loss.detach())
                loss.backward()
            del loss
    if not recordings.weight_gradients:
        raise ValueError(
            "the loss depends on no parameter of the model: does loss_fn use the model it is given?"
        )
    return summarize(
        recordings,
        fmt,
        tolerance=tolerance,
        losses=[loss.item() for loss in losses],
        first_non_finite=_first_non_finite(watch.outputs, losses, recordings),
        activations={name: size.item() for name, size in watch.outputs.items()},
        in_half={place: size.item() for place, size in watch.in_half.items()},
        half=watch.half_modules | watch.half_parameters,
        constants=[*watch.constants, *_epsilons(optimizer, fmt)],
        updates=updates,
        weights_flushed=dict(_weights_flushed(model, fmt)),
    )


def _check(
    model: nn.Module,
    batches: tuple[Any, ...],
    tolerance: float,
    optimizer: Optimizer | None,
    learning_rate: float | None,
) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"the model is to be an nn.Module in Python, got a {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("in inference mode there are no gradients: call it outside")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient")
    if not batches:
        raise ValueError("pass at least one batch: precision_report(model, loss_fn, batch)")
    for batch in batches:
        if isinstance(batch, DataLoader | Iterator):
            raise TypeError(
                f"a {type(batch).__name__} is no batch: pass some of its batches, for example "
                "*itertools.islice(loader, 3)"
            )
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is a share between 0 and 1, got {tolerance}")
    if optimizer is not None and learning_rate is not None:
        raise ValueError("pass either optimizer= or learning_rate=")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the model once before the report")
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"{name} is {parameter.dtype}: pass the model in float32 (model.float()); the "
                "report says what another format would do to it"
            )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn(model, batch) is to return a scalar tensor, got {what}")
    if loss.is_complex():
        raise ValueError("the loss is complex: return a real one, for example its abs()")
    if not loss.requires_grad:
        raise ValueError("the loss depends on no parameter that requires a gradient")


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore, after the block, all that running a model changes; compute in float32 inside."""
    modules = list(model.modules())
    held = [(m, m.training, dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules]
    parameters = list(model.parameters())
    gradients = [(p, p.grad, p.requires_grad) for p in parameters]
    # Parameters, too: nn.Embedding(max_norm=...) writes into its weight when it is used.
    copies = [(t, t.detach().clone()) for t in (*parameters, *model.buffers())]
    # A user's hook that steps as soon as a gradient is there would train the model.
    hooks = [h for p in parameters if (h := p._post_accumulate_grad_hooks)]
    stepping = [(h, dict(h)) for h in hooks]
    devices = {t.device for t, _ in copies}
    cuda = [d.index for d in devices if d.type == "cuda"]
    with ExitStack() as stack:
        stack.enter_context(_random_state())
        stack.enter_context(torch.random.fork_rng(cuda))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # else nothing can be seen
        for kind in {d.type for d in devices}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            for p in parameters:
                p.grad = None
            for h in hooks:
                h.clear()
            yield
        finally:
            for p, gradient, requires_grad in gradients:
                p.requires_grad_(requires_grad)
                p.grad = gradient
            for h, before in stepping:
                h.update(before)
            for module, mode, buffers, non_persistent in held:
                module.training = mode
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set = non_persistent
            for t, copy in copies:
                if not torch.equal(t, copy):
                    _write_back(t, copy)


def _write_back(t: Tensor, copy: Tensor) -> None:
    with torch.inference_mode(t.is_inference()), torch.no_grad():  # in this order: it sets both
        if t.shape != copy.shape:
            t.resize_(copy.shape)
        t.copy_(copy)


@contextmanager
def _random_state() -> Iterator[None]:
    """Restore the random states of Python and, where it is in use, of NumPy."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def _giving_up_gradients(
    model: nn.Module, shadow_of: ShadowMaker, fmt: FloatFormat, updates: dict[str, tuple[int, int]]
) -> Iterator[None]:
    """Try the optimizer, if there is one, on each gradient as it arrives, and let it go."""

    def arrived(name: str, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if shadow_of is not None and gradient is not None and not parameter.is_complex():
            shadow = shadow_of(parameter)
            if shadow is not None:  # the optimizer holds it
                updates[name] = swallowed(parameter, gradient, shadow, fmt)

    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(arrived, name)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield


def _first_non_finite(
    outputs: dict[str, Tensor], losses: list[Tensor], recordings: Recordings
) -> str | None:
    """Say where an infinity or NaN appeared first, in the order in which things are computed.

    None if the loss and all gradients are finite: then an infinity in between was meant, as where
    scores are masked.
    """
    candidates = [
        *((f"the output of {name}", size) for name, size in outputs.items()),
        *(("the loss", loss) for loss in losses),
        *((f"the gradient at {n}", r.max) for n, r in recordings.activation_gradients.items()),
        *((f"the gradient of {n}", r.max) for n, r in recordings.weight_gradients.items()),
    ]
    found = [what for what, size in candidates if not size.isfinite()]
    harmless = all(what.startswith("the output of") for what in found)
    return None if harmless else found[0]


def _weights_flushed(model: nn.Module, fmt: FloatFormat) -> Iterator[tuple[str, float]]:
    """Yield the parameters of which a share becomes zero when they are cast, and this share."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            outcome = Histogram(parameter.device).add(parameter).outcome(fmt)
            if outcome.flushed:
                yield name, outcome.fraction(outcome.flushed)


def _epsilons(optimizer: Optimizer | None, fmt: FloatFormat) -> Iterator[Constant]:
    """Yield the optimizer's `eps` if the format does not hold it; a layer's is seen in use."""
    groups = [] if optimizer is None else optimizer.param_groups
    for value in dict.fromkeys(chain.from_iterable(_pair(group.get("eps")) for group in groups)):
        unheld = constant(f"eps of {type(optimizer).__name__}", value, fmt)
        if unheld is not None:
            yield unheld


def _pair(eps: Any) -> tuple[float, ...]:
    """Return the numbers in an option: one, none, or two, as Adafactor has."""
    values = eps if isinstance(eps, tuple | list) else (eps,)
    return tuple(value for value in values if isinstance(value, float))
