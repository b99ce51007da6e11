"""Right answers pass; each kind of wrong one is told what is wrong."""

import pytest
import torch

from amp_lab.checks import autocast as checks

DTYPES = {
    "weight": torch.float32,
    "weight.grad": torch.float32,
    "activation": torch.float16,
    "exp_avg": torch.float32,
}


def promote(dtypes):
    return torch.float32 if torch.float32 in dtypes else torch.float16


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (checks.promote, promote),
        (checks.unlisted, "normalize"),
        (checks.dtypes, DTYPES),
        (checks.casts_saved, 4),
    ],
)
def test_right(check, right):
    result = check(right)
    assert result.passed, result


@pytest.mark.parametrize(
    ("check", "wrong", "says"),
    [
        (checks.promote, lambda d: d[0], "you say"),
        (checks.promote, lambda d: torch.float32, "you say"),
        (checks.promote, lambda d: "float32", "return a dtype"),
        (checks.unlisted, "softmax", "is listed"),
        (checks.unlisted, "relu", "choose one"),
        (checks.unlisted, 3, "in quotes"),
        (checks.dtypes, DTYPES | {"weight": torch.float16}, "1 of the four"),
        (checks.dtypes, {"weight": torch.float32}, "name each"),
        (checks.dtypes, DTYPES | {"exp_avg": ...}, "not all"),
        (checks.dtypes, torch.float32, "dict"),
        (checks.casts_saved, 5, "without the cache"),
        (checks.casts_saved, 1, "left"),
    ],
)
def test_wrong(check, wrong, says):
    result = check(wrong)
    assert not result.passed
    assert says in result.text
