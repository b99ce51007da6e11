"""Figures of the gradient lesson. Each function draws one page and returns its sentence."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.formats import FP16, FloatFormat
from amp_lab.histograms import Histogram, Outcome
from amp_lab.plots.style import FLUSHED, NORMAL, OVERFLOW, SUBNORMAL, axes_of


def percent(outcome: Outcome, count: int) -> str:
    """Write a count as a share of the non-zero numbers: "no", "under 0.1%", else rounded."""
    share = outcome.fraction(count)
    if count == 0:
        return "none"
    if share < 0.001:
        return "under 0.1%"
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def describe(outcome: Outcome) -> str:
    """Say what is flushed, subnormal and overflowing."""
    return (
        f"{percent(outcome, outcome.flushed)} flushed to zero, "
        f"{percent(outcome, outcome.subnormal)} subnormal, "
        f"{percent(outcome, outcome.overflowing)} overflowing"
    )


def _range(axes: Axes, fmt: FloatFormat, low: int, high: int, names: bool) -> None:
    """Colour the background by what becomes of a magnitude there."""
    edges = [
        (low, math.log2(fmt.smallest_subnormal) - 1, FLUSHED, "flushed to zero"),
        (math.log2(fmt.smallest_subnormal) - 1, math.log2(fmt.smallest_normal), SUBNORMAL,
         "subnormal"),
        (math.log2(fmt.smallest_normal), math.log2(fmt.max), NORMAL, f"{fmt.name} normal range"),
        (math.log2(fmt.max), high, OVERFLOW, "overflow"),
    ]  # fmt: skip
    for left, right, colour, name in edges:
        left, right = max(left, low), min(right, high)
        if right <= left:
            continue
        axes.axvspan(left, right, color=colour, alpha=0.13, linewidth=0)
        axes.axvline(right, color=colour, alpha=0.5, linewidth=1)
        if names and right - left > 5:
            axes.annotate(name, ((left + right) / 2, 1.02), xycoords=("data", "axes fraction"),
                          ha="center", fontsize=9)  # fmt: skip


def _bars(axes: Axes, histogram: Histogram, fmt: FloatFormat, log2_scale: int, label: str) -> None:
    """Draw one histogram, moved by the scale; the colour says what becomes of each binade."""
    binades = histogram.binades()
    # The binade 2^e holds magnitudes from 2^e up; half the smallest subnormal itself is flushed,
    # one binade above it is not.
    positions = [e + log2_scale for e in binades.exponents]
    everything = sum(binades.counts) or 1
    floor, normal = math.log2(fmt.smallest_subnormal) - 1, math.log2(fmt.smallest_normal)

    def colour(e: float) -> str:
        if e < floor:
            return FLUSHED
        if e < normal:
            return SUBNORMAL
        return NORMAL if e < math.log2(fmt.max) else OVERFLOW

    axes.bar(
        [p + 0.5 for p in positions],
        [100 * count / everything for count in binades.counts],
        width=0.9,
        color=[colour(p + 0.5) for p in positions],
        edgecolor="black",
        linewidth=0.3,
    )
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=9)


def against_the_range(
    figure: Figure,
    activations: Histogram,
    weights: Histogram,
    log2_scale: int,
    fmt: FloatFormat = FP16,
    title: str = "",
) -> str:
    """Draw both histograms, moved by the loss scale, over the format's range."""
    low, high = -50, 30
    upper, lower = axes_of(figure, 2, 1, sharex=True)
    _range(upper, fmt, low, high, names=True)
    _range(lower, fmt, low, high, names=False)
    _bars(upper, activations, fmt, log2_scale, "% of activation\ngradients")
    _bars(lower, weights, fmt, log2_scale, "% of weight\ngradients")
    lower.set(xlim=(low, high), xlabel="magnitude of gradient × loss scale")
    lower.set_xticks(range(low, high + 1, 10), [f"2^{k}" for k in range(low, high + 1, 10)])
    upper.set_title(f"{title}loss scale 2^{log2_scale}", loc="left", pad=18)
    acts, grads = (h.outcome(fmt, log2_scale) for h in (activations, weights))
    return (
        f"{title}{fmt.name}, loss scale 2^{log2_scale}: of the non-zero activation gradients "
        f"{describe(acts)}; of the weight gradients {describe(grads)}."
    )


def lost_by_scale(
    figure: Figure,
    activations: Histogram,
    weights: Histogram,
    window: tuple[int, int] | None,
    fmt: FloatFormat = FP16,
) -> str:
    """Draw, for every loss scale, the share of gradients flushed and the share overflowing."""
    [axes] = axes_of(figure)
    scales = list(range(-8, 41))
    for histogram, style, name in ((activations, "-", "activation"), (weights, "--", "weight")):
        outcomes = [histogram.outcome(fmt, k) for k in scales]
        flushed = [100 * o.fraction(o.flushed) for o in outcomes]
        over = [100 * o.fraction(o.overflowing) for o in outcomes]
        axes.plot(scales, flushed, style, color="#555555", label=f"{name} gradients flushed")
        axes.plot(scales, over, style, color=OVERFLOW, label=f"{name} gradients overflowing")
    if window:
        axes.axvspan(*window, color=NORMAL, alpha=0.15, linewidth=0)
        axes.annotate("window", (sum(window) / 2, 50), ha="center", color=NORMAL)
    axes.set(xlabel="loss scale", ylabel="% of non-zero gradients", ylim=(0, 100))
    axes.set_xticks(range(-8, 41, 8), [f"2^{k}" for k in range(-8, 41, 8)])
    axes.legend(frameon=False, fontsize=9, loc="upper center")
    if window is None:
        return f"{fmt.name}: no loss scale keeps all but 0.1% of the gradients without overflow."
    return (
        f"{fmt.name}: loss scales from 2^{window[0]} to 2^{window[1]} flush at most 0.1% of the "
        "gradients and overflow none."
    )
