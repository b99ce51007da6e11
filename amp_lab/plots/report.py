"""The figure of a `PrecisionReport`: every module's gradients against the format's range."""

import math
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from amp_lab.plots.style import BLUE, FLUSHED, OVERFLOW, SUBNORMAL, Picture, axes_of, new_figure
from amp_lab.report_text import PrecisionReport

_SHADES = LinearSegmentedColormap.from_list("share", ["white", BLUE])
MODULES = 40  # rows that are still legible; of a larger model the worst ones are shown


def figure(report: PrecisionReport) -> Picture:
    """Draw one row for each module: how its output's gradients spread over the powers of two.

    The first module is on top, as in the model. Lines mark where the format flushes, becomes
    subnormal, and overflows at loss scale 1; a loss scale of 2^k moves all rows k to the right.
    """
    fmt = report.format
    rows = report.activation_gradients
    if len(rows) > MODULES:
        keep = {r.name for r in sorted(rows, key=lambda r: r.lost, reverse=True)[:MODULES]}
        rows = [row for row in rows if row.name in keep]
    rows = rows[::-1]  # recorded in the backward pass, the last module first
    flushed = math.log2(fmt.smallest_subnormal) - 1
    low, high = int(flushed) - 16, math.ceil(math.log2(fmt.max)) + 4
    shares = np.zeros((max(len(rows), 1), high - low))
    for line, row in zip(shares, rows, strict=False):
        for exponent, count in zip(row.binades.exponents, row.binades.counts, strict=True):
            line[min(max(exponent, low), high - 1) - low] += count / max(row.nonzero, 1)
    names = [_label(row.name) for row in rows]
    longest = max(map(len, names), default=0)
    picture = new_figure(8, 1.6 + 0.25 * len(shares))
    [axes] = axes_of(picture, left=0.4 + 0.085 * longest, top=0.75)
    edges = (low, high, len(shares) - 0.5, -0.5)
    axes.imshow(np.sqrt(shares), cmap=_SHADES, vmin=0, vmax=1, aspect="auto", extent=edges)
    for x, colour, label in (
        (flushed, FLUSHED, "flushed ←"),
        (math.log2(fmt.smallest_normal), SUBNORMAL, "subnormal ←"),
        (math.log2(fmt.max), OVERFLOW, "→ overflow"),
    ):
        axes.axvline(x, color=colour)
        side = "left" if colour == OVERFLOW else "right"
        at: Any = {"ha": side, "va": "bottom", "annotation_clip": False}
        axes.annotate(label, (x, -0.6), color=colour, fontsize=9, **at)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    ticks = range(-(-low // 8) * 8, high + 1, 8)
    axes.set_xticks(list(ticks), [f"2^{k}" for k in ticks])
    axes.set_xlabel("magnitude of the gradient of the module's output")
    window = report.judgement.window
    scales = (
        "no loss scale does" if window is None else f"good scales 2^{window[0]} to 2^{window[1]}"
    )
    axes.set_title(f"{fmt.name}, GradScaler {report.verdict} ({scales})", pad=22)
    return picture


def _label(name: str) -> str:
    """Shorten a module's path from the left; a dollar sign would begin a formula."""
    return (name if len(name) <= 40 else f"…{name[-39:]}").replace("$", r"\$")
