"""The look of every figure: colours that colour-blind readers can tell apart, and the figure."""

import io
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
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
}


class Picture(Figure):
    """A figure that shows itself as PNG, with no pyplot behind it that would keep it alive."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        FigureCanvasAgg(self).print_png(png)
        return png.getvalue()


def new_figure(width: float = 8.0, height: float = 3.6) -> Picture:
    """Return an empty figure of `width` by `height` inches in the lab's look."""
    with rc_context(_RC):
        return Picture(figsize=(width, height))


def axes_of(
    figure: Figure,
    rows: int = 1,
    columns: int = 1,
    *,
    left: float = 1.0,
    right: float = 0.25,
    bottom: float = 0.6,
    top: float = 0.5,
    **options: Any,
) -> list[Axes]:
    """Clear the figure and return fresh axes in the lab's look, in reading order.

    What a page-drawing function starts with: nothing of the page before is left. The margins are
    in inches and fixed, so that nothing moves from page to page (and because a layout engine
    would draw every page twice).
    """
    figure.clear()
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    with rc_context(_RC):
        return list(figure.subplots(rows, columns, squeeze=False, **options).flat)
