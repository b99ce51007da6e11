"""Drive one notebook in JupyterLab, through the application object that it exposes to tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .conftest import TOKEN

if TYPE_CHECKING:  # without playwright the tests are skipped, and say why
    from playwright.sync_api import Locator, Page

# "Run All" right after opening does nothing when the kernel is not connected yet, which is the
# stall that clicking on the menu runs into: wait for the session, then for the kernel's answer.
_RUN_ALL = """async () => {
    const panel = window.jupyterapp.shell.currentWidget;
    await panel.context.ready;
    await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
    await window.jupyterapp.commands.execute('notebook:run-all-cells');
    return panel.content.model.toJSON().cells.filter((c) => c.cell_type === 'code');
}"""

_EXECUTE = """async (code) => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const future = kernel.requestExecute({ code });
    let text = '';
    future.onIOPub = (message) => {
        if (message.header.msg_type === 'stream') text += message.content.text;
        if (message.header.msg_type === 'error') text += message.content.evalue;
    };
    await future.done;
    return text.trim();
}"""


class Notebook:
    """A notebook that is open in a page."""

    def __init__(self, page: Page, address: str, name: str) -> None:
        self.page = page
        page.set_default_timeout(120_000)
        page.goto(f"{address}/lab/workspaces/auto-x/tree/{name}?reset&token={TOKEN}")
        page.wait_for_function(
            "window.jupyterapp?.shell?.currentWidget?.content?.model?.cells?.length > 0"
        )

    def run_all(self) -> list[dict[str, Any]]:
        """Run every cell; return the code cells with their outputs."""
        return self.page.evaluate(_RUN_ALL)

    def execute(self, code: str) -> str:
        """Run code in the notebook's kernel, outside its cells; return what it prints."""
        return self.page.evaluate(_EXECUTE, code)

    def views(self) -> list[View]:
        """The flipbooks on the page, from top to bottom."""
        return [View(v) for v in self.page.locator(".amp-lab-flipbook").all()]

    def scroll(self) -> float:
        """How far the notebook is scrolled, in pixels."""
        return self.page.evaluate(
            "window.jupyterapp.shell.currentWidget.node"
            ".querySelector('.jp-WindowedPanel-outer').scrollTop"
        )


class View:
    """One flipbook on a page."""

    def __init__(self, root: Locator) -> None:
        self.root = root
        self.picture = root.locator("img")
        self.sentence = root.locator(".amp-lab-sentence")
        self.sliders = root.locator("input[type=range]").all()

    def shown(self) -> tuple[str | None, str]:
        """The picture's address and the sentence."""
        return self.picture.get_attribute("src"), self.sentence.inner_text()

    def height(self) -> float:
        """The view's height in pixels."""
        box = self.root.bounding_box()
        assert box is not None
        return box["height"]
