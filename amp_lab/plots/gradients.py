"""Figures of the gradient lesson. Each function draws one page and returns its sentence."""

import math

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
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


def _edges(fmt: FloatFormat) -> list[tuple[float, str, str]]:
    """Return, from small to large, where each fate of a magnitude ends, its colour and name."""
    return [
        (math.log2(fmt.smallest_subnormal) - 1, FLUSHED, "flushed to zero"),
        (math.log2(fmt.smallest_normal), SUBNORMAL, "subnormal"),
        (math.ceil(math.log2(fmt.max)), NORMAL, f"{fmt.name} normal range"),
        (math.inf, OVERFLOW, "overflow"),
    ]


def _bars(axes: Axes, histogram: Histogram, fmt: FloatFormat, log2_scale: int, sign: int) -> None:
    """Draw one histogram, moved by the scale; the colour says what becomes of each binade."""
    binades = histogram.binades()
    share = [100 * sign * count / (sum(binades.counts) or 1) for count in binades.counts]
    left = [exponent + log2_scale for exponent in binades.exponents]
    colours = [next(c for end, c, _ in _edges(fmt) if x < end) for x in left]
    boxes = [
        [(x + 0.05, 0), (x + 0.05, height), (x + 0.95, height), (x + 0.95, 0)]
        for x, height in zip(left, share, strict=True)
    ]
    # One collection, not a patch for each bar: a page is drawn in a third of the time.
    axes.add_collection(
        PolyCollection(boxes, facecolors=colours, edgecolors="black", linewidths=0.3)
    )


def against_the_range(
    figure: Figure,
    activations: Histogram,
    weights: Histogram,
    log2_scale: int,
    fmt: FloatFormat = FP16,
    title: str = "",
) -> str:
    """Draw both histograms, moved by the loss scale, over the format's range.

    Activation gradients point up, weight gradients down.
    """
    low, high, tall = -50, 30, 20
    [axes] = axes_of(figure, top=0.7)
    start: float = low
    for end, colour, name in _edges(fmt):
        left, right = max(start, low), min(end, high)
        if left < right:
            axes.axvspan(left, right, color=colour, alpha=0.13, linewidth=0)
        if right - left > 7:
            axes.annotate(name, ((left + right) / 2, tall + 1), ha="center", fontsize=9)
        start = end
    _bars(axes, activations, fmt, log2_scale, +1)
    _bars(axes, weights, fmt, log2_scale, -1)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.annotate("activation gradients", (high - 0.5, 1), ha="right", fontsize=9)
    axes.annotate("weight gradients", (high - 0.5, -1), ha="right", va="top", fontsize=9)
    axes.set(xlim=(low, high), ylim=(-tall, tall), ylabel="% in each power of two")
    axes.set_xticks(range(low, high + 1, 10), [f"2^{k}" for k in range(low, high + 1, 10)])
    axes.set_yticks([-20, -10, 0, 10, 20], ["20", "10", "0", "10", "20"])
    axes.set_xlabel(f"magnitude of gradient × 2^{log2_scale}")
    axes.set_title(f"{title}loss scale 2^{log2_scale}", loc="left", pad=20)
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
