"""Right answers pass; each kind of wrong one is told what is wrong."""

import math

import pytest
import torch

from amp_lab.checks import gradients as checks
from amp_lab.histograms import Histogram

NUMBERS = Histogram().add(torch.cat([torch.full((98,), 2.0**-20), torch.full((2,), 2.0**-28)]))


def flushed(gradients, k):
    nonzero = gradients[gradients != 0]
    lost = ((nonzero * 2.0**k).half() == 0).sum().item()
    return lost / max(len(nonzero), 1)


def largest(magnitude):
    k = math.floor(math.log2(65520 / magnitude))
    return k if magnitude * 2.0**k < 65520 else k - 1


def test_right():
    assert checks.flush_limit(2**-25).passed
    assert checks.enough(4, NUMBERS).passed
    assert checks.flushed_fraction(flushed).passed
    assert checks.largest_scale(largest).passed


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (checks.flush_limit(2**-24), "not zero"),
        (checks.flush_limit(2**-26), "larger numbers"),
        (checks.flush_limit(-1), "positive"),
        (checks.enough(3, NUMBERS), "2.0% flushed"),
        (checks.enough(6, NUMBERS), "too"),
        (checks.enough(0.5, NUMBERS), "whole"),
        (checks.flushed_fraction(lambda g, k: (g.half() == 0).float().mean()), "you say"),
        (checks.flushed_fraction(lambda g, k: flushed(g, 0)), "log2_scale 3"),
        (checks.flushed_fraction(lambda g, k: "many"), "number"),
        (checks.largest_scale(lambda m: math.floor(math.log2(65536 / m))), "infinite"),
        (checks.largest_scale(lambda m: math.log2(65504 / m)), "whole"),
        (checks.largest_scale(lambda m: largest(m) - 1), "still be finite"),
    ],
)
def test_wrong(result, says):
    assert not result.passed
    assert says in result.text
