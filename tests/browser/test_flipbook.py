"""The flipbook itself in a browser: speed, stillness, access, synchrony, life without a kernel."""

import base64
import statistics

import pytest

from amp_lab.sliders import Flipbook

from .jupyterlab import Notebook, View

_TIME_MOVES = """(range) => {
    // From the input event to the first frame with the new picture decoded.
    const picture = range.closest('.amp-lab-flipbook').querySelector('img');
    window.moves = [];
    range.addEventListener('input', () => {
        const start = performance.now();
        setTimeout(async () => {
            await picture.decode();
            requestAnimationFrame(() => window.moves.push(performance.now() - start));
        });
    }, { capture: true });
}"""


@pytest.fixture(scope="module")
def notebook(browser, lab):
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    notebook = Notebook(page, lab, "flipbook.ipynb")
    notebook.run_all()
    yield notebook
    page.close()


def press(view: View, key: str, times: int = 1, slider: int = 0) -> None:
    for _ in range(times):
        view.sliders[slider].press(key)


def test_a_move_is_shown_in_under_100_ms(notebook):
    view = notebook.views()[0]
    view.sliders[0].evaluate(_TIME_MOVES)
    view.sliders[0].press("Home")
    notebook.page.wait_for_timeout(300)  # until that move, if it is one, has been counted
    notebook.page.evaluate("window.moves = []")
    height, scroll = view.height(), notebook.scroll()
    for i in range(30):
        view.sliders[0].press("ArrowRight")
        # One at a time: a picture that is replaced while it is decoded is never reported.
        notebook.page.wait_for_function("count => window.moves.length >= count", arg=i + 1)
    moves = sorted(notebook.page.evaluate("window.moves"))
    p95 = moves[int(0.95 * len(moves))]
    print(f"30 moves: median {statistics.median(moves):.0f} ms, p95 {p95:.0f} ms")
    assert p95 < 100
    assert (view.height(), notebook.scroll()) == (height, scroll)


def test_200_moves_leave_nothing_behind(notebook):
    view = notebook.views()[0]

    def memory() -> float:
        return notebook.page.evaluate("gc(), gc(), performance.memory.usedJSHeapSize / 2 ** 20")

    def moves(count: int) -> None:
        for i in range(count):
            view.sliders[0].press("ArrowRight" if i // 40 % 2 == 0 else "ArrowLeft")

    view.sliders[0].press("Home")
    moves(40)
    before = memory()
    moves(200)
    assert memory() < before + 3
    assert notebook.execute("import matplotlib.pyplot as p; print(p.get_fignums())") == "[]"


def test_the_kernel_follows_the_browser_and_the_browser_the_kernel(notebook):
    view = notebook.views()[0]
    view.sliders[0].press("End")
    assert notebook.execute("print(one.value)") == "50"
    notebook.execute("one.value = 7")
    view.root.get_by_text("The bars are 7 and 5 high.").wait_for()


def test_the_same_view_twice_stays_in_step(notebook):
    first, second, *_ = notebook.views()
    press(first, "Home")
    press(first, "ArrowRight", 3)
    assert first.shown() == second.shown()
    assert second.shown()[1] == "The bars are 4 and 5 high."


def test_two_sliders(notebook):
    view = notebook.views()[2]
    press(view, "End", slider=0)
    press(view, "End", slider=1)
    assert view.shown()[1] == "The bars are 5 and 8 high."


def test_pages_on_demand_arrive(notebook):
    view = notebook.views()[3]
    press(view, "End")
    view.root.get_by_text("The bars are 1000 and 5 high.").wait_for()
    assert view.picture.get_attribute("alt") == "The bars are 1000 and 5 high."


def test_buttons_step_and_play(notebook):
    view = notebook.views()[0]
    press(view, "Home")
    view.root.get_by_role("button", name="Step forward").click()
    assert view.shown()[1] == "The bars are 2 and 5 high."
    view.root.get_by_role("button", name="Step back").click()
    assert view.shown()[1] == "The bars are 1 and 5 high."
    view.root.get_by_role("button", name="Play").click()
    view.root.get_by_text("The bars are 3 and 5 high.").wait_for()
    view.root.get_by_role("button", name="Play").click()
    stopped = view.shown()
    notebook.page.wait_for_timeout(900)
    assert view.shown() == stopped


def test_keys_do_not_reach_jupyterlab(notebook):
    """The left arrow would collapse a heading, and letters are commands of the notebook."""
    cells = "window.jupyterapp.shell.currentWidget.content.model.cells.length"
    before = notebook.page.evaluate(cells)
    view = notebook.views()[0]
    for key in ("ArrowLeft", "ArrowUp", "ArrowDown", "PageUp", "PageDown", "a", "b", "x"):
        view.sliders[0].press(key)
    assert notebook.page.evaluate(cells) == before
    assert view.sliders[0].evaluate("x => document.activeElement === x")


def test_name_role_and_focus_for_assistive_technology(notebook):
    view = notebook.views()[0]
    slider = view.root.get_by_role("slider", name="height")
    assert slider.count() == 1
    slider.focus()
    notebook.page.keyboard.press("ArrowRight")
    assert slider.evaluate("x => getComputedStyle(x).outlineStyle") == "solid"
    assert view.root.locator("[aria-live=polite]").count() == 1
    for button in view.root.get_by_role("button").all():
        assert button.get_attribute("aria-label")


def test_turns_its_pages_without_a_kernel(browser):
    """What a static page with embedded widget state does: the same module, a plain model."""
    page = browser.new_page()
    png = base64.b64encode(b"not looked at").decode()
    state = {
        "_axes": [{"label": "height", "readouts": ["1", "2", "3"]}],
        "_size": [200, 100],
        "_pages": [png + str(i) for i in range(3)],
        "_sentences": ["one", "two", "three"],
        "_position": [0],
        "_late": {},
    }
    page.evaluate(
        """async ([source, state]) => {
            const url = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
            const module = await import(url);
            const listeners = {};
            const model = {
                get: (name) => state[name],
                set: (name, value) => {
                    state[name] = value;
                    (listeners['change:' + name] ?? []).forEach((f) => f());
                },
                on: (event, f) => (listeners[event] ??= []).push(f),
                off: () => {},
                save_changes: () => {},
            };
            module.default.render({ model, el: document.body });
        }""",
        [Flipbook._esm, state],
    )
    slider = page.get_by_role("slider", name="height")
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    assert page.locator("img").get_attribute("alt") == "three"
    assert page.locator("img").get_attribute("src") == f"data:image/png;base64,{png}2"
    page.close()
