"""What nbval cannot see: that notebooks are stored executed, and written as the design asks."""

import re
import statistics
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
NOTEBOOKS = {path.name: nbformat.read(path, as_version=4) for path in PATHS}
each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def code_cells(name: str) -> list:
    return [cell for cell in NOTEBOOKS[name].cells if cell.cell_type == "code"]


def prose(name: str) -> str:
    return "\n".join(cell.source for cell in NOTEBOOKS[name].cells if cell.cell_type == "markdown")


def text_outputs(name: str) -> list[str]:
    texts = []
    for cell in code_cells(name):
        for output in cell.outputs:
            texts.append(output.get("text", ""))
            texts.append(output.get("data", {}).get("text/plain", ""))
    return texts


def test_there_are_notebooks():
    assert PATHS


@each_notebook
def test_is_valid_and_stored_from_one_clean_run(name):
    """nbval compares nothing in a cell whose execution count is null, so that must not happen."""
    nbformat.validate(NOTEBOOKS[name])
    counts = [cell.execution_count for cell in code_cells(name)]
    assert counts == list(range(1, len(counts) + 1))


@each_notebook
def test_no_warnings_and_no_unexpected_errors(name):
    for cell in code_cells(name):
        kinds = [o.output_type for o in cell.outputs]
        assert "error" not in kinds or "raises-exception" in cell.metadata.get("tags", [])
        assert all(o.get("name") != "stderr" for o in cell.outputs)


@each_notebook
def test_text_outputs_are_the_same_on_any_machine(name):
    for text in text_outputs(name):
        assert not re.search(r"\bdevice[=(]|\b(cuda|mps|cpu):\d", text), text
        assert not re.search(r"\b0x[0-9a-f]{8,}\b", text), text
        assert not re.search(r"/(home|root|tmp|work|Users)/|ipykernel_\d+", text), text
        assert not re.search(r"\d\s?(ms|µs)\b|\bit/s\]", text.replace("?it/s]", "")), text


@each_notebook
def test_outputs_are_png_or_text(name):
    """SVG would be compared by nbval, and a stored widget id is another one in every run."""
    allowed = {"text/plain", "image/png", "text/html", "text/markdown"}
    for cell in code_cells(name):
        for output in cell.outputs:
            assert set(output.get("data", {})) <= allowed
    assert "widgets" not in NOTEBOOKS[name].metadata


@each_notebook
def test_code_cells_are_short(name):
    lengths = [len(cell.source.splitlines()) for cell in code_cells(name)]
    assert statistics.median(lengths) <= 5
    assert max(lengths) <= 15


@each_notebook
def test_has_the_parts_of_a_lesson(name):
    text = prose(name)
    assert text.startswith("# "), "a title"
    assert "?" in text.split("\n\n")[1], "the one-sentence question under the title"
    assert re.search(r"\b\d+ (to \d+ )?minutes", text), "the time needed"
    assert len(text.split()) > 300
    if name.startswith("00"):
        return
    for part in ("you will be able to", "Your turn", "What to remember", "Sources"):
        assert re.search(part, text, re.I), f"no {part!r}"
    assert re.search(r"predict", text, re.I), "no prediction before the experiment"


@each_notebook
def test_only_the_title_is_a_heading_of_the_first_level(name):
    title, *others = [
        c.source for c in nbformat.read(FOLDER / name, 4).cells if c.cell_type == "markdown"
    ]
    assert title.startswith("# ")
    for source in others:
        code = False
        for line in source.splitlines():
            code = code != line.startswith("```")
            assert code or not line.startswith("# "), line


@each_notebook
def test_every_picture_has_a_sentence(name):
    """It is the picture's alternative text: its own `text/plain`, or printed after it."""
    for cell in code_cells(name):
        pictures = [o for o in cell.outputs if "image/png" in o.get("data", {})]
        for picture in pictures:
            alternative = picture.data.get("text/plain", "")
            printed = "".join(o.get("text", "") for o in cell.outputs)
            sentence = printed if alternative.startswith(("<", "Figure")) else alternative
            assert len(sentence.split()) >= 5, cell.source


@each_notebook
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose(name)):
        assert (FOLDER / target).exists(), f"{name} links to {target}"


@each_notebook
def test_the_maps_name_it_with_its_time(name):
    """README and 00 list every notebook, with the time that the notebook itself states."""
    [minutes] = re.findall(r"\*\*Time:\*\* (\d+) minutes", prose(name))
    maps = [(FOLDER.parent / "README.md").read_text()]
    if not name.startswith("00"):
        maps.append(prose("00_start_here.ipynb"))
    for text in maps:
        [line] = [row for row in text.splitlines() if row.startswith(f"| {name[:2]} |")]
        assert name in line
        assert line.endswith(f"| {minutes} min |")
