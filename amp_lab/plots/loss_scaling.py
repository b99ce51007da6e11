"""Figures of the loss-scaling lesson. Each function draws one page and returns its sentence."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from amp_lab.experiments.loss_scaling import Trace
from amp_lab.plots.style import BLUE, FAINT, GREY, VERMILLION, axes_of


def scale_trace(figure: Figure, trace: Trace, ceilings: Sequence[float] = ()) -> str:
    """Draw the scale over training, the skipped steps, and what each step could have borne."""
    [axes] = axes_of(figure)
    steps = range(len(trace.scales))
    if ceilings:
        axes.fill_between(steps, [math.log2(c) for c in ceilings], 40, color=VERMILLION, alpha=0.12,
                          linewidth=0)  # fmt: skip
        axes.plot(steps, [math.log2(c) for c in ceilings], color=GREY, linewidth=1)
        axes.annotate("overflows", (0.99, 0.93), xycoords="axes fraction", ha="right",
                      color=VERMILLION)  # fmt: skip
    heights = [math.log2(s) for s in trace.scales]
    axes.step(steps, heights, where="mid", color=BLUE)
    axes.plot(trace.skipped, [heights[s] for s in trace.skipped], "X", color=VERMILLION,
              markeredgecolor="black", markersize=8)  # fmt: skip
    axes.annotate("✕ skipped step", (0.99, 0.05), xycoords="axes fraction", ha="right", fontsize=9)
    low = min(0, 6 * math.floor(min(heights) / 6))
    axes.set(
        xlim=(0, len(trace.scales)), ylim=(low, 30), xlabel="training step", ylabel="loss scale"
    )
    ticks = range(low, 31, 6 if low > -30 else 12)
    axes.set_yticks(ticks, [f"2^{k}" for k in ticks])
    axes.grid(axis="y", color=FAINT)
    return (
        f"From 2^{heights[0]:.0f}, {len(trace.skipped)} of {len(heights)} steps are skipped; "
        f"the scale ends at 2^{heights[-1]:.0f}."
    )
