"""Every notebook in JupyterLab: all cells run, and every slider moves picture and sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .jupyterlab import Notebook, View

if TYPE_CHECKING:
    from playwright.sync_api import Locator

NOTEBOOKS = sorted(p.name for p in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    yield page
    page.close()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_and_its_sliders_move(page, lab, name):
    notebook = Notebook(page, lab, name)
    cells = notebook.run_all()
    counts = [cell["execution_count"] for cell in cells if "".join(cell["source"]).strip()]
    assert counts == list(range(1, len(counts) + 1))
    for cell in cells:
        errors = [o for o in cell["outputs"] if o["output_type"] == "error"]
        assert not errors or "raises-exception" in cell["metadata"].get("tags", []), errors
    views = notebook.views()
    assert views, "a notebook has at least one view"
    for view in views:
        for slider in view.sliders:
            move_by_keyboard(notebook, view, slider)
            move_by_mouse(notebook, view, slider)
    if name.startswith("01") and (target := os.environ.get("AMP_LAB_SCREENSHOT")):
        take_screenshot(notebook, target)


def position(slider: Locator) -> tuple[int, int]:
    return int(slider.input_value()), int(slider.get_attribute("max") or 0)


def moved(notebook: Notebook, view: View, slider: Locator, move) -> None:
    """Carry out `move`, and assert that all changed that should and nothing that should not."""
    slider.scroll_into_view_if_needed()
    before, height, scroll, at = view.shown(), view.height(), notebook.scroll(), position(slider)
    move()
    assert position(slider) != at
    picture, sentence = view.shown()
    assert picture != before[0]
    assert sentence != before[1]
    assert view.picture.get_attribute("alt") == sentence
    assert sentence in (slider.get_attribute("aria-valuetext") or "")
    assert view.height() == height
    assert notebook.scroll() == scroll


def move_by_keyboard(notebook: Notebook, view: View, slider: Locator) -> None:
    at, last = position(slider)
    slider.focus()
    moved(notebook, view, slider, lambda: slider.press("ArrowRight" if at < last else "ArrowLeft"))


def move_by_mouse(notebook: Notebook, view: View, slider: Locator) -> None:
    at, last = position(slider)
    box = slider.bounding_box()
    assert box is not None
    # The far end: its page differs from the one that is shown.
    x = box["width"] * (0.02 if at > last / 2 else 0.98)
    moved(notebook, view, slider, lambda: slider.click(position={"x": x, "y": box["height"] / 2}))


def take_screenshot(notebook: Notebook, target: str) -> None:
    """The picture at the top of the README: the first view of the rounding notebook."""
    view = notebook.views()[0]
    notebook.execute("line.value = (1.0, 0.0001)")
    view.root.get_by_text("1 + 0.0001 gives 1").wait_for()
    view.root.evaluate("x => x.scrollIntoView({ block: 'center' })")
    notebook.page.wait_for_timeout(500)
    notebook.page.screenshot(path=target)
