"""Figures of the overflow lesson. Each function draws one page and returns its sentence."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from amp_lab.experiments.overflow import Outcome
from amp_lab.formats import FP16, FloatFormat
from amp_lab.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, axes_of

_CELLS = {"right": (BLUE, "ok"), "off": (ORANGE, "off"), "inf": (VERMILLION, "inf")} | {
    "nan": (PURPLE, "NaN")
}


def sum_on_the_range(
    figure: Figure, value: float, count: int, result: float, fmt: FloatFormat = FP16
) -> str:
    """Draw where `count` times `value` lies in the format's range, on a scale of powers of two."""
    [axes] = axes_of(figure, left=0.3, bottom=0.4, top=0.2)
    exact = value * count
    top = math.log2(fmt.max)
    fits = math.isfinite(result)
    axes.barh(0, top + 2, left=-2, height=0.5, color=BLUE, alpha=0.25)
    axes.barh(0, 6, left=top, height=0.5, color=VERMILLION, alpha=0.25, hatch="//")
    axes.annotate(f"{fmt.name} has these", (6, -0.33), ha="center", va="top", color=BLUE)
    axes.annotate("rounds to inf", (top + 3, -0.33), ha="center", va="top", color=VERMILLION)
    axes.plot([top, top], [-0.25, 0.3], color="black", linewidth=1.2)
    axes.annotate(f"{fmt.max:g}", (top, -0.55), ha="center", va="top", fontsize=9)
    colour = BLUE if fits else VERMILLION
    axes.plot(math.log2(exact), 0, "D", color=colour, markeredgecolor="black", markersize=10)
    axes.annotate(
        f"{count} × {value:g} = {exact:g}", (math.log2(exact), 0.38), ha="center", color=colour
    )
    axes.set(xlim=(-2, top + 6), ylim=(-0.8, 0.8), yticks=[])
    axes.set_xticks(range(-2, 22, 2), [f"2^{k}" for k in range(-2, 22, 2)])
    axes.spines["left"].set_visible(False)
    return (
        f"{count} values of {value:g} sum to {exact:.7g} in FP32 and to {result:.7g} in {fmt.name}."
    )


def accumulators(
    figure: Figure,
    value: float,
    half: Sequence[float],
    pairs: Sequence[float],
    stopped: int | None,
    fmt: FloatFormat = FP16,
) -> str:
    """Draw the partial sums of equal values in three accumulators."""
    [axes] = axes_of(figure)
    count = len(half) - 1
    limit = 1.15 * fmt.max
    axes.axhspan(fmt.max, limit, color=VERMILLION, alpha=0.2, linewidth=0)
    axes.annotate("rounds to inf", (count * 0.01, fmt.max), va="bottom", color=VERMILLION)
    within = min(count, int(limit / value))
    axes.plot([0, within], [0, value * within], color=GREY)
    axes.annotate("float32 accumulator", (within * 0.55, value * within * 0.55), (-6, 4),
                  textcoords="offset points", ha="right", color=GREY)  # fmt: skip
    shown = [s for s in half if s <= limit]
    axes.plot(range(len(shown)), shown, color=ORANGE, linestyle="--")
    axes.annotate(f"{fmt.name} accumulator", (len(shown) * 0.97, shown[-1]), (0, -16),
                  textcoords="offset points", ha="right", color="#8a5a00")  # fmt: skip
    added = [(2**k, s) for k, s in enumerate(pairs) if 2**k <= count and s <= limit]
    axes.plot(*zip(*added, strict=True), "s", color=GREEN, markersize=7)
    axes.annotate(
        "added in pairs", added[-1], (-10, 6), textcoords="offset points", ha="right", color=GREEN
    )
    axes.set(xlim=(0, count), ylim=(0, limit), xlabel="values added", ylabel="partial sum")
    exact = value * count
    end = "never stops" if stopped is None else f"stops at {half[-1]:g} after {stopped} additions"
    return (
        f"Adding {value:g} again and again, the {fmt.name} accumulator {end}; the sum is {exact:g}."
    )


def verdicts(
    figure: Figure, outcomes: Mapping[str, Sequence[Outcome]], log2_scales: Sequence[int], at: int
) -> str:
    """Draw which operation works at which scale in half precision, and single out one scale."""
    [axes] = axes_of(figure, top=0.1)
    for row, name in enumerate(outcomes):
        for column, outcome in enumerate(outcomes[name]):
            colour, word = _CELLS[outcome.verdict]
            axes.add_patch(
                Rectangle((column, row), 0.94, 0.9, color=colour, alpha=0.3, linewidth=0)
            )
            axes.annotate(word, (column + 0.47, row + 0.45), ha="center", va="center", fontsize=8)
    position = list(log2_scales).index(at)
    axes.add_patch(Rectangle((position - 0.03, -0.05), 1, len(outcomes), fill=False, linewidth=2))
    axes.set(xlim=(-0.1, len(log2_scales)), ylim=(len(outcomes), -0.1), xlabel="largest input")
    axes.set_xticks([i + 0.47 for i in range(len(log2_scales))], [f"2^{k}" for k in log2_scales])
    axes.tick_params(axis="x", labelsize=8, length=0)
    axes.set_yticks([i + 0.45 for i in range(len(outcomes))], list(outcomes))
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    results = ", ".join(
        f"{name} {outcomes[name][position].naive:.4g} ({outcomes[name][position].exact:.4g})"
        for name in outcomes
    )
    return f"Inputs up to 2^{at}, half precision throughout (and the exact value): {results}."
