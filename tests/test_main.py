"""The command line, as it is used: in a folder with the user's own module."""

import json
import subprocess
import sys

import pytest

from amp_lab.__main__ import main

USERS_MODULE = """
import torch
from torch import nn
from torch.nn import functional as F

def report_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = torch.randn(16, 4), torch.randint(0, 2, (16,))
    return {
        "model": model,
        "loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "batches": [batch, batch],
    }

def small():
    parts = report_on()
    loss = parts["loss_fn"]
    return {**parts, "loss_fn": lambda model, batch: loss(model, batch) * 1e-7}

def no_dict():
    return report_on()["model"]

def incomplete():
    parts = report_on()
    parts["data"] = parts.pop("batches")
    return parts

def optimizing():
    parts = report_on()
    return {**parts, "optimizer": torch.optim.SGD(parts["model"].parameters(), lr=1.0)}

def no_batches():
    return {**report_on(), "batches": []}

missing_import = "not a function"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    name = f"users_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USERS_MODULE)
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_as_a_user_runs_it(folder, tmp_path):
    command = [sys.executable, "-m", "amp_lab", "report", f"{folder}:report_on"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FP16 needs no GradScaler")
    assert done.stderr == ""


def test_options_and_files(folder, tmp_path, capsys):
    files = ["--json", "r.json", "--html", "r.html", "--figure", "r.png"]
    assert main(["report", f"{folder}:small", "--learning-rate", "1e-6", *files]) == 0
    text = capsys.readouterr().out
    assert text.startswith("FP16 needs a GradScaler")
    assert "swallow" in text
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert numbers["verdict"] == "needed"
    assert "FP16 needs a GradScaler" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", f"{folder}:small", "--dtype", "bfloat16", "--tolerance", "0.5"]) == 0
    assert capsys.readouterr().out.startswith("BF16 needs no GradScaler")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("{}", "module:function"),
        (":f", "module:function"),
        ("./{}.py:report_on", "module:function"),
        ("{}:no_batches", "at least one batch"),
        ("{}.b.c:f", "no module"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("{}:nothing", "no function 'nothing'"),
        ("{}:missing_import", "no function"),
        ("{}:no_dict", "a dict, got a Sequential"),
        ("{}:incomplete", "'batches' is missing, 'data' is not known"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(folder, capsys, target, says):
    assert main(["report", target.format(folder)]) == 2
    assert says in capsys.readouterr().err


def test_two_learning_rates(folder, capsys):
    assert main(["report", f"{folder}:optimizing", "--learning-rate", "1"]) == 2
    assert "leave out --learning-rate" in capsys.readouterr().err
    assert main(["report", f"{folder}:optimizing"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--tolerance", "2"],
        ["--tolerance", "nan"],
        ["--json", "no_such_folder/r.json"],
        ["--figure", "r.exe"],
        ["--dtype", "float64"],
    ],
)
def test_bad_options_are_refused_before_anything_runs(folder, options, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", "broken:f", *options])
    assert stopped.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_an_error_in_the_users_module_keeps_its_traceback(folder):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        main(["report", "broken:f"])
