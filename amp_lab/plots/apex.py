"""Figures of the Apex lesson. Each function draws one page and returns its sentence."""

from collections.abc import Mapping, Sequence
from math import log2

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from amp_lab.plots.style import BLUE, GREEN, GREY, ORANGE, VERMILLION, axes_of

_DTYPES = {
    "float32": (BLUE, "float32"),
    "float16": (ORANGE, "float16"),
    "bfloat16": (GREEN, "bfloat16"),
}


def casts(figure: Figure, dtypes: Mapping[str, Mapping[str, str]], level: str) -> str:
    """Draw the dtype of everything in a training step at every level, and single out one level."""
    [axes] = axes_of(figure, left=2.1, bottom=0.1)
    names = list(dtypes)
    things = list(dtypes[level])
    for column, name in enumerate(names):
        for row, thing in enumerate(things):
            colour, word = _DTYPES[dtypes[name][thing]]
            cell = Rectangle((column, row), 0.95, 0.9, color=colour, alpha=0.3, linewidth=0)
            axes.add_patch(cell)
            axes.annotate(
                word, (column + 0.47, row + 0.47), ha="center", va="center", fontsize=9,
                fontweight="bold" if name == level else "normal",
            )  # fmt: skip
    here = names.index(level)
    axes.add_patch(Rectangle((here - 0.03, -0.08), 1, len(things) + 0.1, fill=False, linewidth=2))
    axes.set(xlim=(-0.1, len(names) + 0.05), ylim=(len(things) + 0.1, -0.15))
    axes.set_xticks([i + 0.47 for i in range(len(names))], names)
    axes.set_yticks([i + 0.47 for i in range(len(things))], things)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    groups: dict[str, list[str]] = {}
    for thing in things:
        groups.setdefault(dtypes[level][thing], []).append(thing)
    listed = [f"{dtype} for {', '.join(group)}" for dtype, group in groups.items()]
    return f"{level}: {'; '.join(listed)}."


def power(scale: float | str) -> str:
    """Write a loss scale as a power of two, or as the word it is."""
    return scale if isinstance(scale, str) else f"2^{round(log2(scale))}"


def training(
    figure: Figure,
    level: str,
    loss_scale: float | str,
    losses: Sequence[float],
    reference: Sequence[float],
    verdict: str,
) -> str:
    """Draw the training curve at a level and loss scale over that of float32."""
    [axes] = axes_of(figure)
    axes.plot(reference, color=GREY, linewidth=5, alpha=0.5, label="O0, float32")
    colour = BLUE if verdict == "learns" else VERMILLION
    axes.plot(
        losses, color=colour, linestyle="--", label=f"{level}, loss scale {power(loss_scale)}"
    )
    axes.set(xlabel="step", ylabel="loss", ylim=(0, 3.2), xlim=(0, len(reference) - 1))
    axes.legend(frameon=False, loc="upper right")
    if verdict == "NaN":
        axes.annotate("the loss is NaN", (0.5, 0.5), xycoords="axes fraction", color=colour)
    return f"{level} with loss scale {power(loss_scale)}: {SENTENCES[verdict]}."


def same_curve(figure: Figure, with_torch: Sequence[float], with_apex: Sequence[float]) -> str:
    """Draw the training curves of both APIs, and count the steps in which they are equal."""
    [axes] = axes_of(figure)
    axes.plot(with_torch, color=ORANGE, linewidth=6, alpha=0.6, label="autocast and GradScaler")
    axes.plot(with_apex, color=BLUE, linestyle="--", label="amp.initialize and amp.scale_loss")
    axes.set(xlabel="step", ylabel="loss", ylim=(0, 3.2), xlim=(0, len(with_torch) - 1))
    axes.legend(frameon=False, loc="upper right")
    equal = sum(a == b for a, b in zip(with_torch, with_apex, strict=True))
    return (
        f"The losses of both APIs are equal to the last bit in {equal} of {len(with_apex)} steps."
    )


SENTENCES = {
    "learns": "it learns as float32 does",
    "does not learn": "it does not learn, its gradients flush to zero",
    "NaN": "the loss is NaN, its gradients overflow",
}


def shares_moved(figure: Figure, shares: Mapping[str, float], lr: float, steps: int = 50) -> str:
    """Draw what share of the weights training has changed, for each level."""
    [axes] = axes_of(figure, left=1.4)
    names = list(shares)
    for row, name in enumerate(names):
        colour = VERMILLION if shares[name] < 0.5 else BLUE
        axes.barh(row, 100 * shares[name], color=colour, height=0.6)
        axes.annotate(
            f"{shares[name]:.0%}", (100 * shares[name], row), (5, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    axes.set(xlim=(0, 108), xlabel="% of the weights that are not where they began")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(f"{steps} steps with learning rate {lr:g}", loc="left")
    stuck = [name for name in names if shares[name] < 0.5]
    end = f"all but those of {' and '.join(stuck)}" if stuck else "at every level"
    return f"After {steps} steps with learning rate {lr:g} most weights have moved, {end}."
