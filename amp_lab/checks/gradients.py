"""Checks for 03_gradient_histograms."""

import math
from typing import Any

import torch

from amp_lab.checks import call, demand, exercise, number
from amp_lab.formats import FP16
from amp_lab.histograms import Histogram


@exercise(
    "Zero is the nearest number to everything below half of the smallest positive number.",
    "The smallest positive half is the smallest subnormal number, 2^-24.",
    "Half of it is a tie between 0 and 2^-24. Which of the two is even?",
    right="half the smallest subnormal number is a tie, and zero is its even neighbour.",
)
def flush_limit(answer: Any) -> None:
    """The largest magnitude that float16 rounds to zero."""
    x = number(answer)
    demand(x > 0, "the answer is to be a positive magnitude.")
    above = math.nextafter(x, 1)
    kept, still_flushed = (
        FP16.round(torch.tensor(v, dtype=torch.float64)).item() for v in (x, above)
    )
    demand(kept == 0, f"{x:.4g} becomes {kept:.4g}, not zero.")
    demand(still_flushed != 0, f"{x:.4g} becomes zero, but so do larger numbers.")


@exercise(
    "Move the slider of the second network and read the sentence.",
    "You want the first scale at which less than 1% of the activation gradients are flushed.",
    "It lies between 2^4 and 2^12. One step below it, more than 1% are flushed.",
    right="fewer than one gradient in a hundred is lost from there on.",
)
def enough(answer: Any, activations: Histogram) -> None:
    """The smallest k such that loss scale 2^k flushes less than 1% of `activations`."""
    k = number(answer)
    demand(k == int(k), "k is a whole number; the scale is 2^k.")

    def flushed(log2_scale: int) -> float:
        outcome = activations.outcome(FP16, log2_scale)
        return outcome.fraction(outcome.flushed)

    demand(abs(k) < 100, f"2^{k:g} is no scale that anyone would use.")
    demand(flushed(int(k)) < 0.01, f"at 2^{k:g} there are {flushed(int(k)):.1%} flushed.")
    demand(flushed(int(k) - 1) >= 0.01, f"at 2^{k:g} it is less than 1%, but at 2^{k - 1:g} too.")


@exercise(
    "Multiply by 2.0 ** log2_scale first, then cast with .half(), then compare with zero.",
    "Gradients that are zero already are not lost: leave them out of both counts.",
    "Where there is no non-zero gradient at all, the fraction is 0 and not 0 / 0.",
    right="that is what the slider of this notebook shows.",
)
def flushed_fraction(answer: Any) -> None:
    """A function (gradients, log2_scale) -> fraction of the non-zero gradients flushed."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(1000, generator=generator) * 2.0**-26
    cases = [
        (small, 0),
        (small, 3),
        (torch.cat([small, torch.zeros(500)]), 0),
        (torch.tensor([2.0**-25, 2.0**-25 * 1.001, -(2.0**-30), 1.0]), 0),
        (torch.tensor([2.0**-30, 2.0**20]), 10),
        (torch.zeros(3), 5),
    ]
    for gradients, k in cases:
        outcome = Histogram().add(gradients).outcome(FP16, k)
        truth = outcome.fraction(outcome.flushed)
        said = number(call(answer, gradients.clone(), k))
        zeros = int((gradients == 0).sum())
        shown = f"{len(gradients)} gradients ({zeros} of them zero) and log2_scale {k}"
        demand(abs(said - truth) < 1e-6, f"for {shown} you say {said:.4g}.")


@exercise(
    "The scaled magnitude must stay below 65520, the first number that rounds to infinity.",
    "log2 of 65520 / magnitude is the exact exponent; you need a whole one that is not above it.",
    "math.floor rounds down. What if 2^k times the magnitude is exactly 65520?",
    right="one power of two more and this gradient is infinite.",
)
def largest_scale(answer: Any) -> None:
    """A function from a gradient's magnitude to the largest k such that 2^k keeps it finite."""
    for magnitude in (1.0, 65504.0, 65520.0, 2.0**-20, 0.1, 3e-7, 65520 * 2.0**-10, 123.0):
        k = number(call(answer, magnitude))
        shown = f"for magnitude {magnitude:.6g} you say k = {k:g}:"
        demand(k == int(k), f"{shown} k is to be a whole number.")
        scaled = torch.tensor([magnitude * 2.0**k, magnitude * 2.0 ** (k + 1)]).double()
        fits, also = FP16.round(scaled).isfinite().tolist()
        demand(fits, f"{shown} {magnitude * 2.0**k:.6g} is infinite in half precision.")
        demand(not also, f"{shown} k + 1 would still be finite.")
