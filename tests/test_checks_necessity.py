"""Right answers pass; each kind of wrong one is told what is wrong."""

import pytest
import torch
from torch import nn

from amp_lab import precision_report
from amp_lab.checks import necessity as checks

RIGHT = ["GradScaler", "float32 weights", "bfloat16", "nothing"]


def lost_magnitude(gradients):
    gone = gradients.half() == 0
    whole = gradients.abs().sum()
    return (gradients[gone].abs().sum() / whole).item() if whole else 0.0


def lost_count(gradients):
    return (gradients.half() == 0).double().mean()


def swallowed(weights, learning_rate):
    return (weights.half() - learning_rate == weights.half()).float().mean()


def swallowed_in_float32(weights, learning_rate):
    kept = weights.half()
    return ((kept.float() + learning_rate).half() == kept).double().mean().item()


def report():
    model = nn.Linear(2, 1)
    return precision_report(model, lambda m, b: m(b).sum(), torch.ones(3, 2))


def test_right():
    for result in (
        checks.remedies(RIGHT),
        checks.lost_magnitude(lost_magnitude),
        checks.swallowed(swallowed),
        checks.swallowed(swallowed_in_float32),
        checks.own_report(report()),
    ):
        assert result.passed, result


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (checks.remedies(RIGHT[:3]), "four names"),
        (checks.remedies(["Scaler", *RIGHT[1:]]), "none of"),
        (checks.remedies(["nothing", *RIGHT[1:]]), "run 1"),
        (checks.remedies([RIGHT[0], "GradScaler", *RIGHT[2:]]), "do not move"),
        (checks.remedies([*RIGHT[:2], "GradScaler", "nothing"]), "before there is any gradient"),
        (checks.remedies([*RIGHT[:3], "GradScaler"]), "as in float32"),
        (checks.lost_magnitude(lost_count), "number, not"),
        (checks.lost_magnitude(lambda g: (g.half() == 0).any().float()), "you say"),
        (checks.lost_magnitude(lambda g: lost_magnitude(g) if g.any() else 1), "three zeros"),
        (checks.swallowed(lambda w, lr: (w.abs() > lr).float().mean()), "you say"),
        (checks.own_report("needed"), "got a str"),
    ],
)
def test_wrong(result, says):
    assert not result.passed
    assert says in str(result)
