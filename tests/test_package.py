"""Rules that hold over the whole package: what importing costs, who may import whom, lengths."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "amp_lab"
MODULES = sorted(PACKAGE.rglob("*.py"))
SHOWN = {"matplotlib", "ipywidgets", "anywidget", "IPython"}
# What each layer must not import; numbers <- plots <- sliders <- notebooks.
FORBIDDEN = {
    "numbers": SHOWN | {"amp_lab.plots", "amp_lab.sliders", "amp_lab.checks"},
    "checks": SHOWN | {"amp_lab.plots", "amp_lab.sliders"},
    # A report draws itself when asked to; importing it loads no matplotlib, as tested below.
    "report_text": SHOWN | {"amp_lab.sliders", "amp_lab.checks"},
    "plots": {"ipywidgets", "anywidget", "IPython", "amp_lab.sliders", "amp_lab.checks"},
    "sliders": {"amp_lab.checks"},
}


def layer(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return first if first in FORBIDDEN else "numbers"


def imports(path: Path) -> set[str]:
    """Every module that `path` imports anywhere in it, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write imports in full, amp_lab.…"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def reaches(imported: str, forbidden: str) -> bool:
    return imported == forbidden or imported.startswith(forbidden + ".")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    for imported in imports(path):
        for forbidden in FORBIDDEN[layer(path)]:
            assert not reaches(imported, forbidden), f"{path.name} must not import {imported}"


@pytest.mark.parametrize(
    "name",
    [
        "autocast.py",
        "composites.py",
        "emulation.py",
        "finite.py",
        "grad_scaler.py",
        "op_policy.py",
        "recurrent.py",
        "scaler_state.py",
    ],
)
def test_core_classes_contain_their_own_mathematics(name):
    """They do not call the classes and operators that the tests compare them with."""
    for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            assert not text.startswith(("torch.amp", "torch.autocast", "torch.cuda.amp")), text
            assert "_amp_" not in text, text


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_is_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 300


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_the_package_imports_nothing_that_draws():
    added = loaded_by("import amp_lab") - loaded_by("import torch")
    assert "amp_lab" in added
    assert added.isdisjoint(SHOWN | {"sklearn", "tqdm"})


def test_public_names_are_there_and_documented():
    import amp_lab

    for name in amp_lab.__all__:
        value = getattr(amp_lab, name)
        assert getattr(value, "__doc__", None), f"{name} has no docstring"
