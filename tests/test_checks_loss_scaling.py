"""Right answers pass; each kind of wrong one is told what is wrong."""

import math

import numpy as np
import pytest

from amp_lab.checks import loss_scaling as checks
from amp_lab.experiments.loss_scaling import CORRECT


def update(scale, clean, found_inf, growth, backoff, interval):
    if found_inf:
        return scale * backoff, 0
    if clean + 1 < interval:
        return scale, clean + 1
    grown = scale * growth
    return (grown if grown < 2.0**128 else scale), 0


def forgets_to_reset(scale, clean, found_inf, growth, backoff, interval):
    new, count = update(scale, clean, found_inf, growth, backoff, interval)
    return new, clean if found_inf else count


def grows_to_infinity(scale, clean, found_inf, growth, backoff, interval):
    if not found_inf and clean + 1 == interval:
        return scale * growth, 0
    return update(scale, clean, found_inf, growth, backoff, interval)


def test_right():
    assert checks.skipped_at_first(7).passed
    assert checks.order(list(CORRECT)).passed
    result = checks.update(update)
    assert result.passed, result
    assert checks.static_scale(2**14).passed


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (checks.skipped_at_first(5), "still 65520"),
        (checks.skipped_at_first(8), "gone through"),
        (
            checks.order(["backward", "scale", "unscale_", "clip", "step", "update"]),
            "not be scaled",
        ),
        (checks.order(["scale", "backward", "clip", "unscale_", "step", "update"]), "norm"),
        (checks.order(["scale", "backward"]), "use each"),
        (checks.order("scale"), "list"),
        (checks.update(forgets_to_reset), "count becomes"),
        (checks.update(grows_to_infinity), "scale becomes inf"),
        (checks.update(lambda *a: a[0]), "two numbers"),
        (checks.static_scale(2**13), "flushed"),
        (checks.static_scale(2**15), "half of it"),
        (checks.static_scale(2**24), "overflows"),
        (checks.static_scale(10_000), "power of two"),
    ],
)
def test_wrong(result, says):
    assert not result.passed
    assert says in result.text


def test_float32_rounds_as_numpy():
    for x in (0.1, 65536 * 0.3, 1e-45, 3e38):
        assert checks._float32(x) == float(np.float32(x))
    assert checks._float32(1e39) == math.inf
