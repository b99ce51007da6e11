"""Flipbooks: figures whose pages are drawn ahead, and a slider that turns them in the browser.

A lesson supplies a matplotlib figure and `draw(value) -> sentence`, which redraws that figure for
one value and says what is seen. `Flipbook` draws every page once, as PNG, and hands all of them
to the browser, where moving the slider only swaps the picture: no message to the kernel stands
between a learner's hand and what it moves, and a page saved with its widget state keeps working
without a kernel. The sentence is at once the picture's alternative text, what a screen reader
says of the slider, the line under the picture, and the text that nbval compares.
"""

import base64
import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MAX_PAGES = 400
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Slider:
    """One axis of a flipbook.

    Attributes:
        label: what the slider changes; read aloud as its name.
        values: the values it can take, in order; any objects.
        start: the value it starts at; the first one if it is left out.
        format: `value -> str`, the readout beside the slider.
    """

    label: str
    values: Sequence[Any]
    start: Any = field(default=None, kw_only=True)
    format: Callable[[Any], str] = field(default=str, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ValueError(f"slider {self.label!r} has no values; give it at least one")
        if self.start is None:
            object.__setattr__(self, "start", self.values[0])
        self.index(self.start)

    def index(self, value: Any) -> int:
        """Return the position of `value`.

        Raises:
            ValueError: it is none of the slider's values; the message names the nearest ones.
        """
        if value in self.values:
            return self.values.index(value)
        near: Sequence[Any] = self.values
        try:
            near = sorted(sorted(self.values, key=lambda v: abs(v - value))[:2])
        except TypeError:  # not numbers: there is no nearest one
            near = self.values[:6]
        raise ValueError(
            f"{self.label}: {value!r} is not on the slider; try {' or '.join(map(repr, near))}"
        )


class Flipbook(anywidget.AnyWidget):
    """A figure with one slider or two, every page of it drawn ahead.

    Args:
        figure: a `matplotlib.figure.Figure` (made directly, not by pyplot, which would keep it).
        draw: called as `draw(value)` or `draw(first, second)`; redraws `figure` from scratch and
            returns the sentence that says what is seen.
        sliders: one `Slider` or two; two make a grid of pages.
        on_demand: draw a page when it is first asked for. For views with more than 400 pages;
            it needs a running kernel.

    `value` is the slider's value (a tuple of two with two sliders) and can be set in a cell;
    `text` is the sentence of the page that is shown.

    Raises:
        ValueError: too many pages, or a value that is not on the slider.
        TypeError: `draw` returned no sentence.
        RuntimeError: `draw` failed; the message names the page, the cause is chained.
    """

    # As text: given a path, anywidget watches the file, and the watcher keeps every view alive.
    _esm = (_HERE / "flipbook.js").read_text(encoding="utf-8")
    _css = (_HERE / "flipbook.css").read_text(encoding="utf-8")

    # What the browser is given: the pages as PNG in base 64 with their sentences (empty: not drawn
    # yet), what the sliders say, and where they stand. Only `_position` changes, and `_late` when
    # a page is drawn on demand.
    _axes: traitlets.List = traitlets.List().tag(sync=True)
    _size: traitlets.List = traitlets.List().tag(sync=True)
    _pages: traitlets.List = traitlets.List().tag(sync=True)
    _sentences: traitlets.List = traitlets.List().tag(sync=True)
    _position: traitlets.List = traitlets.List().tag(sync=True)
    _late: traitlets.Dict = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        figure: Figure,
        draw: Callable[..., str],
        *sliders: Slider,
        on_demand: bool = False,
    ) -> None:
        if len(sliders) not in (1, 2):
            raise ValueError(f"a flipbook has one slider or two, got {len(sliders)}")
        self._sliders = sliders
        self._counts = [len(slider.values) for slider in sliders]
        pages = prod(self._counts)
        if pages > MAX_PAGES and not on_demand:
            raise ValueError(
                f"{pages} pages are too many to draw ahead (at most {MAX_PAGES}): "
                "give the sliders fewer values, or pass on_demand=True"
            )
        self._draw, self._on_demand = draw, on_demand
        self._canvas = FigureCanvasAgg(figure)
        start = [slider.index(slider.start) for slider in sliders]
        drawn = [("", "")] * pages
        wanted = [start] if on_demand else itertools.product(*map(range, self._counts))
        for position in wanted:
            drawn[self._page(position)] = self._drawn(position)
        width, height = figure.get_size_inches() * 96
        super().__init__(
            _axes=[
                {"label": s.label, "readouts": [s.format(v) for v in s.values]} for s in sliders
            ],
            _size=[round(width), round(height)],
            _pages=[png for png, _ in drawn],
            _sentences=[sentence for _, sentence in drawn],
            _position=start,
        )

    @property
    def value(self) -> Any:
        """The slider's value; with two sliders, both in a tuple."""
        values = self._values(self._position)
        return values[0] if len(values) == 1 else values

    @value.setter
    def value(self, value: Any) -> None:
        values = (value,) if len(self._sliders) == 1 else value
        if not isinstance(values, tuple) or len(values) != len(self._sliders):
            raise ValueError(f"this view has 2 sliders: set both, as a tuple, not {value!r}")
        self._position = [s.index(v) for s, v in zip(self._sliders, values, strict=True)]

    @property
    def text(self) -> str:
        """The sentence that says what the shown page shows."""
        return self._sentences[self._page(self._position)]

    def _values(self, position: Sequence[int]) -> tuple:
        return tuple(s.values[i] for s, i in zip(self._sliders, position, strict=True))

    def _page(self, position: Sequence[int]) -> int:
        return position[0] if len(position) == 1 else position[0] * self._counts[1] + position[1]

    def _drawn(self, position: Sequence[int]) -> tuple[str, str]:
        """Draw one page; return its PNG in base 64 and its sentence."""
        values = self._values(position)
        try:
            sentence = self._draw(*values)
        except Exception as error:
            where = ", ".join(
                f"{s.label} = {v!r}" for s, v in zip(self._sliders, values, strict=True)
            )
            raise RuntimeError(f"draw failed at {where}: {error}") from error
        if not isinstance(sentence, str):
            raise TypeError(
                f"draw must return the sentence that says what is seen, got {sentence!r}"
            )
        png = io.BytesIO()
        self._canvas.print_png(png)
        return base64.b64encode(png.getvalue()).decode(), sentence

    @traitlets.observe("_position")
    def _draw_if_needed(self, change: Any) -> None:
        page = self._page(change["new"])
        if not self._pages[page]:
            try:
                self._pages[page], self._sentences[page] = self._drawn(change["new"])
            except RuntimeError:
                self._position = change["old"]  # whose page is there
                raise
        if self._on_demand:
            self._late = {"page": page, "png": self._pages[page], "sentence": self._sentences[page]}

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict, dict]:
        """The widget, and for front ends without widgets the picture and its sentence."""
        bundle = super()._repr_mimebundle_(**kwargs)
        assert bundle is not None, "a widget has a view"
        data, metadata = bundle
        width, height = self._size
        data["image/png"] = self._pages[self._page(self._position)]
        metadata["image/png"] = {"width": width, "height": height}
        return data, metadata

    def __repr__(self) -> str:
        return self.text
