"""The look of every figure: colours that colour-blind readers can tell apart, and the figure."""

from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design", 2008.
BLACK = "#000000"
ORANGE = "#e69f00"
SKY = "#56b4e9"
GREEN = "#009e73"
YELLOW = "#f0e442"
BLUE = "#0072b2"
VERMILLION = "#d55e00"
PURPLE = "#cc79a7"
GREY = "#8c8c8c"
FAINT = "#e6e6e6"

# What becomes of a number in a format, in the order of its magnitude: one colour each, everywhere.
FLUSHED, SUBNORMAL, NORMAL, OVERFLOW = GREY, ORANGE, BLUE, VERMILLION

_RC: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.axisbelow": True,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "lines.linewidth": 2.0,
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
}


def new_figure(width: float = 8.0, height: float = 3.6) -> Figure:
    """Return a `Figure` of `width` by `height` inches in the lab's look.

    It is made without pyplot, which would keep every figure alive.
    """
    with rc_context(_RC):
        return Figure(figsize=(width, height))


def axes_of(figure: Figure, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """Clear the figure and return fresh axes in the lab's look, in reading order.

    What a page-drawing function starts with: nothing of the page before is left.
    """
    figure.clear()
    with rc_context(_RC):
        return list(figure.subplots(rows, columns, squeeze=False, **options).flat)
