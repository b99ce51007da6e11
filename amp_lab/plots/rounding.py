"""Figures of the rounding lesson. Each function draws one page and returns its sentence."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.figure import Figure
from torch import Tensor

from amp_lab.experiments.rounding import Descent, Update
from amp_lab.formats import FP16, FloatFormat
from amp_lab.plots.style import BLUE, FAINT, GREY, ORANGE, VERMILLION, axes_of


def power(x: float) -> str:
    """Write a number as a power of two where it is one, else with six digits."""
    mantissa, exponent = float(x).hex().removeprefix("-").split("p")
    sign = "-" if x < 0 else ""
    return f"{sign}2^{int(exponent)}" if mantissa == "0x1.0000000000000" else f"{x:.6g}"


def number_line(
    figure: Figure, numbers: Sequence[float], update: Update, fmt: FloatFormat = FP16
) -> str:
    """Draw the format's numbers around a weight, where the exact sum lies and where it lands."""
    [axes] = axes_of(figure, left=0.1, bottom=0.1)
    exact = update.weight + update.update
    colour = VERMILLION if update.swallowed else BLUE
    below, above = numbers[0], numbers[-1]
    for lower, upper in pairwise(numbers):
        below = (lower + upper) / 2 if upper == update.result else below
        above = (lower + upper) / 2 if lower == update.result else above
    axes.axvspan(below, above, ymin=0.33, ymax=0.62, color=colour, alpha=0.2, linewidth=0)
    middle = (below + above) / 2
    axes.annotate(
        f"all of this rounds to {update.result:.7g}",
        (middle, 0.85),
        ha="center",
        color=colour,
        fontweight="bold",
    )
    axes.annotate(
        "", (middle, 0.42), (middle, 0.8), arrowprops={"arrowstyle": "-", "color": colour}
    )
    axes.axhline(0, color=GREY, linewidth=1)
    for x in numbers:
        axes.plot([x, x], [-0.15, 0.15], color=GREY, linewidth=1.2)
        axes.annotate(
            f"{x:.6f}".rstrip("0").rstrip("."), (x, -0.5), ha="center", va="top", fontsize=9
        )
    axes.plot(update.weight, 0, "o", color="black", markersize=9, zorder=3)
    axes.plot(exact, 0, "D", color=ORANGE, markeredgecolor="black", markersize=8, zorder=4)
    axes.annotate(
        "● weight   ◆ weight + update, exactly",
        (1, -0.95),
        xycoords=("axes fraction", "data"),
        ha="right",
        fontsize=9,
    )
    margin = numbers[1] - numbers[0]
    axes.set(xlim=(numbers[0] - margin, numbers[-1] + margin), ylim=(-1.1, 1.2))
    axes.set_axis_off()
    axes.set_title(f"The {fmt.name} numbers around {update.weight:.7g}", loc="left")
    ulps = update.update / fmt.spacing(update.weight)
    fate = "swallowed" if update.swallowed else f"rounded to {power(update.applied)}"
    return (
        f"{fmt.name}: {update.weight:.7g} + {power(update.update)} gives {update.result:.7g}; "
        f"the update is {ulps:.4g} ulp and is {fate}."
    )


def swallowing_band(
    figure: Figure, weights: Tensor, largest: Tensor, log2_ratio: float, fmt: FloatFormat = FP16
) -> str:
    """Draw the largest swallowed update over a binade, and one ratio of update to weight."""
    [axes] = axes_of(figure)
    safe, sure = -fmt.mantissa_bits - 1, -fmt.mantissa_bits - 2
    ratios = (largest / weights).log2()
    swallowed = ratios >= log2_ratio
    axes.axhspan(sure, safe, color=FAINT, zorder=0)
    axes.plot(weights, ratios, color=BLUE)
    axes.annotate("swallowed below the curve", (1.08, sure - 0.5), color=BLUE)
    axes.axhline(log2_ratio, color=VERMILLION, linestyle="--")
    axes.annotate("this ratio", (1.99, log2_ratio), ha="right", va="bottom", color=VERMILLION)
    axes.set(
        xlabel="weight (all numbers of one binade)",
        ylabel="update / weight",
        ylim=(sure - 1.1, safe + 1.1),
        xlim=(float(weights[0]), 2 * float(weights[0])),
    )
    ticks = [sure - 1, sure, safe, safe + 1]
    axes.set_yticks(ticks, [f"2^{t}" for t in ticks])
    axes.set_title("The largest update that an addition swallows", loc="left")
    share = swallowed.double().mean().item()
    return (
        f"{fmt.name}: an update of 2^{log2_ratio:g} times the weight is swallowed at "
        f"{share:.1%} of the weights in a binade."
    )


def descent(figure: Figure, run: Descent, update: float, fmt: FloatFormat = FP16) -> str:
    """Draw a weight over many equal updates, kept in the format and as float32 master weight."""
    [axes] = axes_of(figure)
    axes.plot(run.steps, run.with_master, color=BLUE)
    axes.plot(run.steps, run.in_half, color=VERMILLION, linestyle="--")
    axes.annotate(
        "float32 master weight",
        (run.steps[-1], run.with_master[-1]),
        (-4, 4),
        textcoords="offset points",
        ha="right",
        color=BLUE,
    )
    axes.annotate(
        f"weight kept in {fmt.name}",
        (run.steps[-1], run.in_half[-1]),
        (-4, 6),
        textcoords="offset points",
        ha="right",
        color=VERMILLION,
    )
    axes.set(xlabel="number of updates", ylabel="weight", ylim=(0, 1.15 * run.with_master[-1]))
    axes.set_title(f"The same update of {power(update)}, over and over", loc="left")
    stuck = run.in_half[-1] == run.in_half[-2]
    end = "stands still" if stuck else "still moves"
    return (
        f"After {run.steps[-1]:,} updates of {power(update)} the {fmt.name} weight is "
        f"{run.in_half[-1]:g} and {end}; with a float32 master weight it is "
        f"{run.with_master[-1]:.3g}."
    )
