"""Figures of the training experiment. Each function draws one page and returns its sentence."""

import math
from collections.abc import Mapping

import torch
from matplotlib.figure import Figure

from amp_lab.experiments.necessity import Result
from amp_lab.plots.style import BLACK, FAINT, NORMAL, OVERFLOW, axes_of
from amp_lab.tasks import Task


def examples(figure: Figure, task: Task, count: int = 4) -> str:
    """Draw the first pictures of the counting task above the density maps to be answered."""
    axes = axes_of(figure, 2, count, left=0.9, bottom=0.1, top=0.4)
    for i, (picture, answer) in enumerate(zip(axes[:count], axes[count:], strict=True)):
        picture.imshow(task.inputs[i, 0], cmap="gray_r")
        answer.imshow(task.targets[i, 0], cmap="Blues")
        picture.set_title(f"{task.targets[i].sum():.0f}", loc="center")
        for ax in (picture, answer):
            ax.set(xticks=[], yticks=[])
    axes[0].set_ylabel("picture")
    axes[count].set_ylabel("answer")
    return "Each map sums to the number of digits above it."


def curves(figure: Figure, results: Mapping[str, Result], shown: str, title: str = "") -> str:
    """Draw the loss of every mode, that of `shown` in colour over float32's in black."""
    [axes] = axes_of(figure, right=1.0)
    reference, result = results["float32"], results[shown]
    window = len(reference.losses) // 10
    for other in results.values():
        axes.plot(*_smooth(other.losses, window), color=FAINT, linewidth=1.5)
    x, y = _smooth(reference.losses, window)
    axes.plot(x, y, color=BLACK, linewidth=1.2, label="float32")
    verdict = result.verdict(reference)
    if shown != "float32":
        colour = NORMAL if verdict == "as float32" else OVERFLOW
        x, y = _smooth(result.losses, window)
        marker = "o" if len(x) == 1 else ""  # one loss before NaN is a point, not a line
        axes.plot(x, y, color=colour, marker=marker, label=shown)
    falls_far = reference.after < reference.before / 10
    axes.set(xlabel="step", ylabel=f"loss (mean of {window} steps)")
    axes.set_yscale("log" if falls_far else "linear")
    axes.set_xlim(0, len(reference.losses))
    axes.set_title(f"{title}: {shown}")
    axes.legend(frameon=False, fontsize=9)
    return f"{title}, {shown}: {verdict}."


def _smooth(losses: list[float], window: int) -> tuple[list[int], list[float]]:
    """Return steps and losses averaged over the steps before each; what is finite of it."""
    finite = [x for x in losses if math.isfinite(x)]
    window = min(window, len(finite))
    if not window:
        return [], []
    means = torch.tensor(finite, dtype=torch.float64).unfold(0, window, 1).mean(1).tolist()
    return list(range(window - 1, len(finite))), means


def by_scale(
    figure: Figure,
    results: Mapping[int, Result],
    reference: Result,
    window: tuple[int, int] | None,
) -> str:
    """Draw the loss after training for each static loss scale 2^k, and the predicted window."""
    [axes] = axes_of(figure, right=1.0)
    if window:
        axes.axvspan(*window, color=NORMAL, alpha=0.15, linewidth=0, label="window")
    axes.plot(list(results), [r.after for r in results.values()], "o-", color=OVERFLOW)
    axes.axhline(reference.before, color=BLACK, linewidth=1, linestyle=":", label="untrained")
    axes.axhline(reference.after, color=BLACK, linewidth=1, label="float32")
    ticks = list(results)[::2]
    axes.set_xticks(ticks, [f"2^{k}" for k in ticks])
    axes.set(xlabel="static loss scale", ylabel="loss after training", yscale="log")
    axes.legend(frameon=False, fontsize=9)
    good = [k for k, r in results.items() if r.verdict(reference) == "as float32"]
    if not good:
        return "No static loss scale trains as float32 does."
    return f"Static loss scales from 2^{good[0]} to 2^{good[-1]} train as float32 does."
