"""Right answers pass; each kind of wrong one is told what is wrong and not what is right."""

import pytest
import torch

from amp_lab.checks import rounding as checks


def in_half(weight, update):
    w, u = (torch.tensor(x, dtype=torch.float16) for x in (weight, update))
    return bool(w + u == w)


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (checks.tie, 1 + 2**-10),
        (checks.smallest_effective, 2**-11 + 2**-21),
        (checks.stops_at, 4),
        (checks.swallows, in_half),
    ],
)
def test_right(check, right):
    result = check(right)
    assert result.passed, result


@pytest.mark.parametrize(
    ("check", "wrong", "says"),
    [
        (checks.tie, 1, "above 1"),
        (checks.tie, 1 + 2**-9, "swallowed too"),
        (checks.tie, 1 + 3 * 2**-10, "smaller weight"),
        (checks.tie, 1.0001, "no FP16 number"),
        (checks.tie, "one", "number"),
        (checks.smallest_effective, 2**-11, "still 1"),
        (checks.smallest_effective, 2**-10, "so does"),
        (checks.smallest_effective, -(2**-10), "positive"),
        (checks.stops_at, 2, "still moves"),
        (checks.stops_at, 8, "never gets"),
        (checks.swallows, lambda w, u: u / w < 2**-11, "you say"),
        (checks.swallows, lambda w, u: w + u == w, "you say"),
        (checks.swallows, lambda w: True, "raised TypeError"),
    ],
)
def test_wrong(check, wrong, says):
    result = check(wrong)
    assert not result.passed
    assert says in result.text
