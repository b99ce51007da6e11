"""Figures of the autocast lesson. Each function draws one page and returns its sentence."""

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.experiments.autocast import Flow
from amp_lab.plots.style import BLUE, FAINT, GREY, ORANGE, VERMILLION, axes_of

_COLOURS = {torch.float16: ORANGE, torch.bfloat16: ORANGE, torch.float32: BLUE}


def name_of(dtype: torch.dtype) -> str:
    """Write a dtype without its module: "float16"."""
    return str(dtype).removeprefix("torch.")


def dtype_flow(figure: Figure, flow: Flow, at: int) -> str:
    """Draw the operations of a training step from top to bottom, with the dtypes between them."""
    [axes] = axes_of(figure, left=0.1, right=0.1, bottom=0.1, top=0.4)
    count = len(flow.calls)
    for title, x in (("operation", 0.1), ("policy", 2.6), ("inputs", 4.6), ("output", 6.3)):
        axes.annotate(title, (x, -0.8), fontsize=9, fontweight="bold")
    axes.annotate("gradient", (7.4, -0.8), fontsize=9, fontweight="bold")
    axes.axhspan(at - 0.45, at + 0.45, color=FAINT)
    for row, call in enumerate(flow.calls):
        where = f"{call.op}  ({call.module})" if call.module else call.op
        axes.annotate(where, (0.1, row), va="center", fontsize=9)
        axes.annotate(call.policy or "not listed", (2.6, row), va="center", fontsize=9, color=GREY)
        _boxes(axes, 4.6, row, call.inputs)
        _boxes(axes, 6.3, row, [call.output])
        if call.module in flow.gradients:
            _boxes(axes, 7.4, row, [flow.gradients[call.module]])
    axes.set(xlim=(0, 9), ylim=(count - 0.4, -1.2))
    axes.set_axis_off()
    call = flow.calls[at]
    inputs = " and ".join(dict.fromkeys(map(name_of, call.inputs)))
    gradient = flow.gradients.get(call.module)
    back = f"; its gradient comes back in {name_of(gradient)}" if gradient else ""
    return (
        f"Step {at + 1} of {count}: {call.op}, policy: {call.policy or 'not listed'}; {inputs} in, "
        f"{name_of(call.output)} out{back}."
    )


def _boxes(axes: Axes, x: float, row: int, dtypes: Sequence[torch.dtype]) -> None:
    """Write one letter-and-number box for each dtype: 16 or 32 bits."""
    for i, dtype in enumerate(dtypes[:3]):
        bits = str(dtype.itemsize * 8) if dtype.is_floating_point else "int"
        box = {"boxstyle": "round,pad=0.2", "facecolor": _COLOURS.get(dtype, FAINT), "alpha": 0.6}
        axes.annotate(bits, (x + 0.42 * i, row), va="center", fontsize=8, bbox=box)


def error_by_scale(
    figure: Figure, operation: str, errors: Mapping[int, float], log2_scale: int
) -> str:
    """Draw an operation's error in half precision over the size of its input."""
    [axes] = axes_of(figure)
    finite = {k: max(e, 2.0**-13) for k, e in errors.items() if math.isfinite(e)}
    axes.plot(list(finite), [100 * e for e in finite.values()], "o-", color=BLUE)
    broken = [k for k, e in errors.items() if not math.isfinite(e)]
    axes.plot(broken, [200.0] * len(broken), "X", color=VERMILLION, markersize=9)
    axes.axhline(1, color=GREY, linestyle=":")
    axes.annotate("1%", (min(errors), 1), va="bottom", color=GREY)
    axes.axvline(log2_scale, color="black", linewidth=1)
    axes.annotate("✕ inf, NaN or lost", (0.01, 0.9), xycoords="axes fraction",
                  color=VERMILLION)  # fmt: skip
    axes.set(yscale="log", ylim=(0.008, 400), ylabel="error in %", xlabel="largest input")
    ticks = list(errors)[::2]
    axes.set_xticks(ticks, [f"2^{k}" for k in ticks])
    axes.set_title(f"{operation} with half-precision input and result", loc="left")
    error = errors[log2_scale]
    if not math.isfinite(error):
        what = "is infinite, NaN or lost"
    else:
        what = "is off by more than 1%" if error > 0.01 else "is right within 1%"
    return f"{operation}, inputs up to 2^{log2_scale}: the half-precision result {what}."
