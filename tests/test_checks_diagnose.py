"""The broken runs of 10_diagnose are refused, right repairs pass, and wrong ones are told why."""

import ast
from pathlib import Path

import nbformat
import pytest
import torch
from torch.nn import functional as F

from amp_lab.checks import diagnose as loops
from amp_lab.checks import diagnose_range as ranges
from amp_lab.experiments.diagnose import loss_in_half

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "10_diagnose.ipynb"
CHECKS = {
    name: check
    for module in (loops, ranges)
    for name, check in vars(module).items()
    if hasattr(check, "__wrapped__") and check.__module__ == module.__name__
}


def broken() -> dict:
    """The functions that the notebook defines, and what it imports for them."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    tree = ast.parse("\n".join(c.source for c in cells if c.cell_type == "code"))
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kept)]
    names: dict = {}
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return names


@pytest.mark.parametrize("name", CHECKS)
def test_broken(name):
    result = CHECKS[name](broken()[name])
    assert not result.passed
    assert result.text.startswith("Not yet: ")


# 1. NaN at once


def standardise_wide(x):
    x = x.float()
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / (variance + 1e-5).sqrt()


def standardise_centred(x):
    x = x - x.mean(-1, keepdim=True)
    return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()


def standardise_function(x):
    return F.layer_norm(x, x.shape[-1:])


def standardise_masked(x):
    return broken()["standardise"](x).nan_to_num()


# 2. The scale falls to zero


def distance_eps(outputs, targets):
    return ((outputs - targets).square().sum(-1) + 1e-9).sqrt().mean()


def distance_norm(outputs, targets):
    return torch.linalg.vector_norm(outputs - targets, dim=-1).mean()


def distance_rows(outputs, targets):
    squares = (outputs - targets).square().sum(-1)
    return squares[squares > 0].sqrt().sum() / len(squares)


def distance_eps_outside(outputs, targets):
    return ((outputs - targets).square().sum(-1).sqrt() + 1e-6).mean()


# 3. No inf checks were recorded


def accumulate_once(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for batch in micro_batches:
        scaler.scale(loss_in_half(model, batch) / len(micro_batches)).backward()
    scaler.step(optimizer)
    scaler.update()


def accumulate_sum(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    total = sum(loss_in_half(model, batch) for batch in micro_batches) / len(micro_batches)
    scaler.scale(total).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def accumulate_unscaling(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for batch in micro_batches:
        scaler.scale(loss_in_half(model, batch) / len(micro_batches)).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    optimizer.step()


def accumulate_not_mean(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for batch in micro_batches:
        scaler.scale(loss_in_half(model, batch)).backward()
    scaler.step(optimizer)
    scaler.update()


RIGHT = [
    ("standardise", standardise_wide),
    ("standardise", standardise_centred),
    ("standardise", standardise_function),
    ("distance_loss", distance_eps),
    ("distance_loss", distance_norm),
    ("distance_loss", distance_rows),
    ("accumulate", accumulate_once),
    ("accumulate", accumulate_sum),
]
WRONG = [
    ("standardise", standardise_masked, "not what float32 computes"),
    ("distance_loss", distance_eps_outside, "its gradient is not"),
    ("distance_loss", lambda outputs, targets: targets.sum(), "made from the outputs"),
    ("accumulate", accumulate_unscaling, "count more than others"),
    ("accumulate", accumulate_not_mean, "not that of the mean loss"),
]


@pytest.mark.parametrize(("name", "repair"), RIGHT)
def test_right(name, repair):
    result = CHECKS[name](repair)
    assert result.passed, result


@pytest.mark.parametrize(("name", "repair", "says"), WRONG)
def test_wrong(name, repair, says):
    result = CHECKS[name](repair)
    assert not result.passed
    assert says in result.text


def test_every_case_has_two_right_repairs_and_a_wrong_one():
    for name in CHECKS:
        assert sum(case[0] == name for case in RIGHT) >= 2, name
        assert any(case[0] == name for case in WRONG), name
