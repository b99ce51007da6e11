"""Flipbooks without a browser: pages, values, sentences, and what a front end is given."""

import base64
import gc
import io
import re
import weakref

import matplotlib.pyplot
import pytest
from matplotlib.figure import Figure
from PIL import Image

from amp_lab.sliders import MAX_PAGES, Flipbook, Slider


def make(*sliders, draw=None, **options):
    figure = Figure(figsize=(4, 2))
    axes = figure.subplots()
    calls = []

    def bars(*values):
        calls.append(values)
        axes.clear()
        axes.bar(range(len(values)), values)
        axes.set_ylim(0, 10)
        return f"The bars are {', '.join(map(str, values))} high."

    return Flipbook(figure, draw or bars, *sliders, **options), calls


def test_every_page_is_drawn_ahead_once():
    view, calls = make(Slider("height", range(1, 8), start=3))
    assert calls == [(k,) for k in range(1, 8)]
    assert len(set(view._pages)) == 7
    view.value = 5
    assert len(calls) == 7


def test_value_and_text():
    view, _ = make(Slider("height", range(1, 8), start=3))
    assert (view.value, view.text) == (3, "The bars are 3 high.")
    view.value = 6
    assert (view.value, view.text) == (6, "The bars are 6 high.")
    assert repr(view) == view.text


def test_two_sliders_make_a_grid():
    view, calls = make(Slider("first", [1, 2, 3]), Slider("second", [4, 5], start=5))
    assert len(calls) == 6
    assert view.value == (1, 5)
    view.value = (3, 4)
    assert view.text == "The bars are 3, 4 high."
    assert view._pages[view._page([2, 0])] == view._pages[4]


def test_a_page_is_the_png_of_its_figure():
    view, _ = make(Slider("height", [2, 4]))
    image = Image.open(io.BytesIO(base64.b64decode(view._pages[0])))
    assert image.size == (400, 200)
    assert view._size == [384, 192]  # CSS pixels: 96 to the inch


@pytest.mark.parametrize("wrong", [3.4, 99, "three"])
def test_a_value_that_is_not_on_the_slider(wrong):
    view, _ = make(Slider("height", range(1, 8), start=2))
    with pytest.raises(ValueError, match=r"height: .* is not on the slider; try"):
        view.value = wrong
    assert view.value == 2


def test_the_nearest_values_are_named():
    with pytest.raises(ValueError, match=r"try 3 or 4"):
        Slider("height", range(1, 8)).index(3.4)
    with pytest.raises(ValueError, match=r"try 'O0' or 'O1'"):
        Slider("level", ["O0", "O1"]).index("O2")


def test_wrong_number_of_values():
    view, _ = make(Slider("first", [1, 2]), Slider("second", [3, 4]))
    for wrong in (1, (1,), (1, 3, 3)):
        with pytest.raises(ValueError, match="2 sliders"):
            view.value = wrong
    assert view.value == (1, 3)


def test_bad_arguments():
    with pytest.raises(ValueError, match="no values"):
        Slider("empty", [])
    with pytest.raises(ValueError, match="not on the slider"):
        Slider("height", [1, 2], start=3)
    with pytest.raises(ValueError, match="one slider or two"):
        make()
    with pytest.raises(ValueError, match="on_demand=True"):
        make(Slider("height", range(MAX_PAGES + 1)))


def test_errors_in_draw_name_the_page():
    def broken(value):
        return f"1 / {value} = {1 / value}"

    with pytest.raises(RuntimeError, match="draw failed at divisor = 0") as caught:
        make(Slider("divisor", [1, 0]), draw=broken)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(TypeError, match="return the sentence"):
        make(Slider("x", [1]), draw=lambda x: None)


def test_on_demand_draws_a_page_when_it_is_asked_for():
    view, calls = make(Slider("height", range(1, 2001)), on_demand=True)
    assert calls == [(1,)]
    view.value = 1500
    assert calls == [(1,), (1500,)]
    assert view.text == "The bars are 1500 high."
    assert view._late["page"] == 1499
    view.value = 1
    view.value = 1500
    assert len(calls) == 2


def test_a_page_that_cannot_be_drawn_is_not_shown():
    def draw(height):
        if height == 2:
            raise ValueError("no such bar")
        return f"The bar is {height} high."

    view = Flipbook(Figure(), draw, Slider("height", [1, 2, 3]), on_demand=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such bar"):
            view.value = 2
        assert view.value == 1
        assert view.text == "The bar is 1 high."
    view.value = 3
    assert view.text == "The bar is 3 high."


def test_front_ends_without_widgets_get_picture_and_sentence():
    view, _ = make(Slider("height", [2, 4]))
    data, metadata = view._repr_mimebundle_()
    assert data["text/plain"] == view.text
    assert data["image/png"] == view._pages[0]
    assert "application/vnd.jupyter.widget-view+json" in data
    assert metadata["image/png"] == {"width": 384, "height": 192}


def test_readouts():
    view, _ = make(Slider("scale", [1, 2], format="2^{}".format))
    assert view._axes == [{"label": "scale", "readouts": ["2^1", "2^2"]}]


def test_the_browser_moves_the_slider():
    """A message from the front end arrives as a change of the synchronised trait."""
    view, _ = make(Slider("height", range(1, 8)))
    view.set_state({"_position": [4]})
    assert (view.value, view.text) == (5, "The bars are 5 high.")


def test_nothing_is_left_in_pyplot_or_in_memory():
    view, _ = make(Slider("height", range(1, 8)))
    assert matplotlib.pyplot.get_fignums() == []
    figure = weakref.ref(view._canvas.figure)
    view.close()
    del view
    gc.collect()
    assert figure() is None


def test_the_text_has_no_address():
    view, _ = make(Slider("height", [1]))
    assert not re.search("0x[0-9a-f]+", repr(view))
