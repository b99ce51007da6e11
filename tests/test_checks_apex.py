"""Right answers pass; each kind of wrong one is told what is wrong."""

import pytest
import torch
from torch import nn

from amp_lab import apex as amp
from amp_lab.checks import apex as checks

LEVELS = {"A": "O2", "B": "O1", "C": "O3"}


def clip(model, optimizer, max_norm):
    return nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)


def clip_the_model(model, optimizer, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clip_signs(model, optimizer, max_norm):
    for p in amp.master_params(optimizer):
        p.grad = p.grad.sign()
    return clip(model, optimizer, max_norm)


def clip_to_nothing(model, optimizer, max_norm):
    return clip(model, optimizer, max_norm / 100)


def master_step(half, master, grad, loss_scale, lr):
    master = master - lr * (grad.float() / loss_scale)
    return master.half(), master


def convert(state):
    saved = torch.amp.GradScaler("cpu").state_dict()
    saved["scale"] = state["loss_scaler0"]["loss_scale"]
    saved["_growth_tracker"] = state["loss_scaler0"]["unskipped"]
    return saved


def divides_in_half(half, master, grad, loss_scale, lr):
    master = master - lr * (grad / loss_scale).float()
    return master.half(), master


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (checks.which_level, LEVELS),
        (checks.scale_after, 14),
        (checks.clip, clip),
        (checks.master_step, master_step),
        (checks.convert, convert),
    ],
)
def test_right(check, right):
    result = check(right)
    assert result.passed, result


def half_update(half, master, grad, loss_scale, lr):
    half = half - lr * (grad / loss_scale)
    return half, half.float()


def lossy(half, master, grad, loss_scale, lr):
    low, _ = master_step(half, master, grad, loss_scale, lr)
    return low, low.float()


@pytest.mark.parametrize(
    ("check", "wrong", "says"),
    [
        (checks.which_level, "O2", "dict"),
        (checks.which_level, {"A": "O2"}, "B has no level"),
        (checks.which_level, {**LEVELS, "B": "O4"}, "no opt level"),
        (checks.which_level, {**LEVELS, "A": "O3"}, "does not look like that under O3"),
        (checks.scale_after, 13, "too many overflows"),
        (checks.scale_after, 15, "too few overflows"),
        (checks.scale_after, 14.5, "whole number"),
        (checks.scale_after, "two", "number"),
        (checks.clip, 3, "function"),
        (checks.clip, clip_the_model, "still uses gradients of norm"),
        (checks.clip, clip_signs, "direction"),
        (checks.clip, clip_to_nothing, "too small"),
        (checks.clip, lambda m, o, n: 1 / 0, "ZeroDivisionError"),
        (checks.master_step, divides_in_half, "master weights are off"),
        (checks.master_step, half_update, "master weights are off"),
        (checks.master_step, lossy, "master weights are off"),
        (checks.master_step, lambda *a: a[0], "two tensors"),
        (checks.master_step, lambda *a: master_step(*a)[::-1], "first result is torch.float32"),
        (checks.master_step, lambda *a: (a[0], master_step(*a)[1]), "not master.half()"),
        (checks.master_step, lambda *a: (a[0], a[0]), "second result is torch.float16"),
        (checks.convert, lambda s: 3, "dict"),
        (checks.convert, lambda s: {"scale": 1.0}, "also wants"),
        (checks.convert, lambda s: {**convert(s), "unskipped": 0}, "does not know unskipped"),
        (checks.convert, lambda s: torch.amp.GradScaler("cpu").state_dict(), "the scale is"),
        (checks.convert, lambda s: {**convert(s), "_growth_tracker": 0}, "after 1234 clean"),
        (checks.convert, lambda s: {**convert(s), "growth_factor": 4.0}, "neither's rule"),
    ],
)
def test_wrong(check, wrong, says):
    result = check(wrong)
    assert not result.passed
    assert says in result.text


def test_no_level_at_all_is_not_answered():
    assert checks.which_level({"A": ..., "B": ..., "C": ...}).text.startswith("Not answered")
    assert checks.which_level({}).text.startswith("Not answered")


def stub(*arguments):
    return ...


@pytest.mark.parametrize("check", [checks.clip, checks.master_step, checks.convert])
def test_stub_is_not_answered(check):
    assert check(stub).text.startswith("Not answered")


def test_hints_do_not_run_out():
    for check in (
        checks.which_level,
        checks.scale_after,
        checks.clip,
        checks.master_step,
        checks.convert,
    ):
        result = check(...)
        assert [result.hint()[:11] for _ in range(4)] == [
            "Hint 1 of 3",
            "Hint 2 of 3",
            "Hint 3 of 3",
            "Hint 3 of 3",
        ]
