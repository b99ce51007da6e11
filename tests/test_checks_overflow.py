"""Right answers pass; each kind of wrong one is told what is wrong."""

import pytest
import torch

from amp_lab.checks import overflow as checks


def softmax(x):
    powers = (x - x.max()).exp()
    return powers / powers.sum()


def naive_softmax(x):
    return x.exp() / x.exp().sum()


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (checks.most_sixteens, 4094),
        (checks.first_square, 256),
        (checks.counter_stops, 2048),
        (checks.stable_softmax, softmax),
        (checks.safe_mean, lambda x, r: r(r(x / len(x)).sum())),
    ],
)
def test_right(check, right):
    result = check(right)
    assert result.passed, result


@pytest.mark.parametrize(
    ("check", "wrong", "says"),
    [
        (checks.most_sixteens, 4095, "inf"),
        (checks.most_sixteens, 4000, "one more"),
        (checks.most_sixteens, 4094.5, "whole number"),
        (checks.first_square, 255.97, "no FP16 number"),
        (checks.first_square, 255, "finite"),
        (checks.first_square, 300, "so is"),
        (checks.counter_stops, 1024, "moves on"),
        (checks.counter_stops, 65504, "never"),
        (checks.stable_softmax, naive_softmax, "inf or nan"),
        (checks.stable_softmax, lambda x: softmax(x.float()), "float32"),
        (checks.stable_softmax, lambda x: x * 0, "off by"),
        (checks.stable_softmax, lambda x: 1, "shape"),
        (checks.safe_mean, lambda x, r: r(r(x.sum()) / len(x)), "inf inside"),
        (checks.safe_mean, lambda x, r: x.mean(), "round every"),
        (checks.safe_mean, lambda x, r: r(x / len(x)).max(), "you get"),
    ],
)
def test_wrong(check, wrong, says):
    result = check(wrong)
    assert not result.passed
    assert says in result.text


def test_judges_compare_with_torch():
    assert torch.full((4094,), 16.0).half().sum().isfinite()
    assert torch.full((4095,), 16.0).half().sum().isinf()
