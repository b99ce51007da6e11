"""The ways to install the lab say the same thing: pyproject.toml, environment.yml, the lock."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
CONDA_PACKAGES = {
    match["name"]: SpecifierSet(match["bounds"])
    for entry in CONDA
    if isinstance(entry, str)
    and (match := re.fullmatch(r"(?P<name>[\w-]+)(?P<bounds>.*)", entry.replace(" ", "")))
}
[PIP_PART] = [entry["pip"] for entry in CONDA if isinstance(entry, dict)]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [
        Requirement(text) for group in (PROJECT["dependencies"], *extras.values()) for text in group
    ]


def test_environment_yml_takes_the_same_python():
    assert CONDA_PACKAGES["python"] == SpecifierSet(PROJECT["requires-python"])


def test_environment_yml_takes_the_same_torch():
    [torch] = [r for r in requirements() if r.name == "torch"]
    assert CONDA_PACKAGES["pytorch"] == torch.specifier


def test_environment_yml_leaves_the_rest_to_pyproject():
    assert set(CONDA_PACKAGES) == {"python", "pytorch", "pip"}
    [line] = PIP_PART
    match = re.fullmatch(r"-e \.\[([\w,]+)\]", line)
    assert match, f"the pip part installs this package with extras, got {line!r}"
    assert set(match[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_lock_pins_every_dependency_inside_its_range():
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        pin = Requirement(line)
        pins.setdefault(pin.name.replace("_", "-"), []).append(pin)
    for wanted in requirements():
        for pin in pins[wanted.name.replace("_", "-")]:
            [version] = [s.version for s in pin.specifier]
            assert wanted.specifier.contains(version), f"{pin} is outside {wanted}"


def test_the_setup_script_names_the_same_pythons():
    script = (ROOT / "tools" / "setup_env.sh").read_text()
    low, high = re.search(
        r"\((\d, \d+)\) <= sys.version_info\[:2\] <= \((\d, \d+)\)", script
    ).groups()
    allowed = SpecifierSet(PROJECT["requires-python"])
    versions = [f"3.{minor}" for minor in range(8, 20) if allowed.contains(f"3.{minor}")]
    assert (low.replace(", ", "."), high.replace(", ", ".")) == (versions[0], versions[-1])


def test_a_python_that_is_too_old_is_named_in_one_line(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.20 && exit 0\nexit 1\n')
    old.chmod(0o755)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    result = subprocess.run(
        ["sh", "tools/setup_env.sh", "test"],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "needs Python 3.11, 3.12 or 3.13" in line
    assert "3.8.20" in line
    assert not (tmp_path / ".venv").exists()


def copy_of_the_tree(target: Path) -> Path:
    ignore = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "notebooks", "docs")
    return Path(shutil.copytree(ROOT, target, ignore=ignore))


def test_without_a_network_one_line_says_so(tmp_path):
    tree = copy_of_the_tree(tmp_path / "clone")
    nowhere = "http://127.0.0.1:9"  # the discard port: nothing listens there
    result = subprocess.run(
        ["sh", "tools/setup_env.sh", "test"],
        cwd=tree,
        env={k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        | {
            "PYTHON": sys.executable,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": nowhere,
            "PIP_RETRIES": "0",
            "PIP_NO_CACHE_DIR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("amp-lab: no network")


def test_the_pip_part_of_environment_yml_installs_into_a_fresh_environment(tmp_path):
    tree = copy_of_the_tree(tmp_path / "clone")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    # The lock keeps this run repeatable; conda itself would bring torch.
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", "requirements.lock"]
    result = subprocess.run(
        [*install, *PIP_PART[0].split()], cwd=tree, capture_output=True, text=True, check=False
    )
    if result.returncode and re.search("connection|resolution|unreachable", result.stderr, re.I):
        pytest.skip("no network: the package index could not be reached")
    assert result.returncode == 0, result.stderr
    check = subprocess.run(
        [
            python,
            "-c",
            "import amp_lab, jupyterlab, anywidget, nbval, sklearn; print(amp_lab.__file__)",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert check.stdout.strip().startswith(str(tree))
