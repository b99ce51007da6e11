"""A JupyterLab of our own on a copy of the notebooks, and a Chromium to look at it.

Autosave would write into a notebook under test, hence the copy. Settings and runtime files go to
a temporary folder; nothing of the user's Jupyter is read or changed.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CHROMIUM = (
    os.environ.get("AMP_LAB_CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
TOKEN = "amp-lab-browser-test"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-precise-memory-info",
    "--js-flags=--expose-gc",
]
# News and updates would ask the network; a windowed notebook does not render what is out of view.
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if CHROMIUM is None:
        reason = "no Chromium: install Debian's package chromium, or set AMP_LAB_CHROMIUM"
    else:
        try:
            import playwright  # noqa: F401
        except ImportError:
            reason = "no playwright: pip install -e '.[browser]' (make browser-test does)"
    if reason and os.environ.get("AMP_LAB_REQUIRE_BROWSER"):
        raise pytest.UsageError(reason)
    for item in items:
        item.add_marker("browser")
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def flipbook_notebook() -> nbformat.NotebookNode:
    """A notebook with a small view, the same view again, and one with two sliders."""
    sources = [
        """
from amp_lab.plots.style import axes_of, new_figure
from amp_lab.sliders import Flipbook, Slider
figure = new_figure()
def draw(height, other=5):
    [axes] = axes_of(figure)
    axes.bar([0, 1], [height, other])
    axes.set_ylim(0, 60)
    return f"The bars are {height} and {other} high."
""",
        "one = Flipbook(figure, draw, Slider('height', range(1, 51)))\none",
        "one",
        "sliders = Slider('left', range(1, 6)), Slider('right', range(5, 9))\n"
        "two = Flipbook(figure, draw, *sliders)\ntwo",
        "late = Flipbook(figure, draw, Slider('tall', range(1, 1001)), on_demand=True)\nlate",
    ]
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start JupyterLab and yield its address; `/lab/tree/<notebook>` opens one."""
    home = tmp_path_factory.mktemp("lab")
    notebooks = home / "notebooks"
    shutil.copytree(ROOT / "notebooks", notebooks, ignore=shutil.ignore_patterns(".*"))
    nbformat.write(flipbook_notebook(), notebooks / "flipbook.ipynb")
    for plugin, values in SETTINGS.items():
        package, name = plugin.split(":")
        file = home / "settings" / package / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port = free_port()
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", "--ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={notebooks}", "--LabApp.expose_app_in_browser=True"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    log = home / "jupyterlab.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/api/status?token={TOKEN}", server, log)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, f"JupyterLab ended:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not start in 120 s:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
