"""Run notebooks top to bottom in a fresh kernel each and store them with their outputs.

    python tools/execute_notebooks.py [notebooks/01_rounding.ipynb ...]

A notebook is replaced only when every cell ran and its execution was clean, so a failing run
leaves the stored file as it was. Cell ids and metadata are normalised and widget state is left
out: a stored notebook changes only where its content does.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Drop what differs between two runs or two machines; number the cells' ids."""
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        for output in cell.get("outputs", []):
            # A view's model lives only in the kernel that made it; its id would differ every run.
            output.get("data", {}).pop(WIDGET_VIEW, None)
            output.get("metadata", {}).pop(WIDGET_VIEW, None)


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """What must not be stored: warnings on stderr, and errors where none are expected."""
    found = []
    for index, cell in enumerate(notebook.cells):
        expected = "raises-exception" in cell.metadata.get("tags", [])
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"cell {index} wrote to stderr: {output.text.strip()[:300]}")
            if output.output_type == "error" and not expected:
                found.append(f"cell {index} raised {output.ename}: {output.evalue[:300]}")
    return found


def execute(path: Path) -> float:
    """Execute `path` and store it; return the seconds it took.

    Raises:
        RuntimeError: a cell failed or warned; the stored notebook is untouched.
    """
    notebook = nbformat.read(path, as_version=4)
    started = time.perf_counter()
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
        allow_errors=True,
    ).execute()
    seconds = time.perf_counter() - started
    if found := complaints(notebook):
        raise RuntimeError(f"{path.name} was not stored:\n  " + "\n  ".join(found))
    normalise(notebook)
    nbformat.validate(notebook)
    # Written beside the target and moved over it, so that an interrupted run loses nothing.
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        nbformat.write(notebook, file)
    os.chmod(name, 0o644)
    os.replace(name, path)
    return seconds


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or sorted(
        NOTEBOOKS.glob("*.ipynb")
    )
    failed = False
    for path in paths:
        try:
            print(f"{path.name}: stored, {execute(path):.1f} s", flush=True)
        except RuntimeError as error:
            failed = True
            print(error, file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
