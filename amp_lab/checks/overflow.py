"""Checks for 02_overflow."""

from typing import Any

import torch

from amp_lab.checks import WrongAnswer, call, demand, exercise, number
from amp_lab.experiments.overflow import sequential, total
from amp_lab.formats import FP16


@exercise(
    "The sum is exact until it is rounded once, at the end.",
    "Everything below 65520 still rounds to a finite number.",
    "How many sixteens are less than 65520? Mind the case of exactly 65520.",
    right="one more makes 65520, which is the first number that rounds to infinity.",
)
def most_sixteens(answer: Any) -> None:
    """How many sixteens can be summed with a finite float16 result."""
    count = number(answer)
    demand(count == int(count) and count > 0, "the answer is to be a whole number.")
    demand(total(16, int(count)) != float("inf"), f"{count:.0f} × 16 = {16 * count:.0f}: inf.")
    demand(total(16, int(count) + 1) == float("inf"), "that is finite, but so is one more.")


@exercise(
    "x² overflows when it reaches 65520, not 65504.",
    "The root of 65520 is 255.97. Which half-precision numbers are near it?",
    "FP16.spacing(255) is the gap; go to the first number at or above 255.97.",
    right="from there on every square is infinite, and with it every norm and variance inside.",
)
def first_square(answer: Any) -> None:
    """The smallest FP16 number whose square overflows float16."""
    x = number(answer)
    half = torch.tensor(x, dtype=torch.float64)
    demand(FP16.round(half).item() == x, f"{x!r} is no FP16 number.")
    demand(FP16.round(half * half).isinf(), f"{x:g}² is {x * x:g}, which is finite in FP16.")
    below = half - FP16.spacing(x) / 2
    below = FP16.round(below - FP16.spacing(below.item()) / 2)
    demand(FP16.round(below * below).isfinite(), f"it is, but so is {below.item():g}².")


@exercise(
    "It stops where 1 is half an ulp of the sum, and the tie goes to even.",
    "FP16.spacing(sum) has to be 2.",
    "Where does the ulp become 2? Count in powers of two from 1, where it is 2^-10.",
    right="from there on adding 1 is a tie that goes back to the even number.",
)
def counter_stops(answer: Any) -> None:
    """Where a float16 counter stops that is increased by 1 again and again."""
    value = number(answer)
    end = sequential(1.0, 5000)[-1]
    demand(value >= end, f"FP16 has both {value:g} and {value + 1:g}, so the counter moves on.")
    demand(value <= end, f"it never reaches {value:g}.")


@exercise(
    "The ratio of two powers does not change when both exponents are lowered by the same amount.",
    "Choose the amount such that the largest exponent becomes 0.",
    "Subtract x.max() before taking exp.",
    right="no exponent is above 0, so no power is above 1, and the sum fits.",
)
def stable_softmax(answer: Any) -> None:
    """A function from a float16 vector to its softmax, in float16, without inf or nan."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1, 8, 12, 100, 6e4, -8, -100, -6e4):
        x = (torch.rand(64, generator=generator) * scale).half()
        result = call(answer, x)
        shown = f"for inputs up to {scale:g}"
        if not isinstance(result, torch.Tensor) or result.shape != x.shape:
            raise WrongAnswer(f"{shown} the result is to be a tensor of shape {tuple(x.shape)}.")
        demand(result.dtype == x.dtype, f"the result is {result.dtype}, not torch.float16.")
        demand(result.isfinite().all(), f"{shown} the result has inf or nan in it.")
        error = (result.double() - x.double().softmax(0)).abs().max().item()
        demand(error < 2e-3, f"{shown} the result is off by {error:.2g}.")


@exercise(
    "Both the order of the additions and the size of what is added can be changed.",
    "The mean is also the sum of the values each divided by their number.",
    "Divide first, then add: no partial sum exceeds the largest value.",
    right="dividing first keeps every partial sum in range (at the price of small values).",
)
def safe_mean(answer: Any) -> None:
    """A function from a float64 vector of FP16 numbers and a rounding to their mean."""
    for value, count in ((100.0, 1024), (30000.0, 512), (1.0, 64)):
        x = FP16.round(torch.linspace(0.4, 1.4, count, dtype=torch.float64) ** 2 * value)
        value = x.mean().item()
        largest = 0.0

        def rounded(t: Any) -> torch.Tensor:
            nonlocal largest
            largest = max(largest, FP16.round(torch.as_tensor(t).double()).abs().max().item())
            return FP16.round(torch.as_tensor(t).double())

        answered = call(answer, x, rounded)
        demand(largest > 0, "round every intermediate result with the function r that you get.")
        demand(largest != float("inf"), f"for {count} values of {value:g} something is inf inside.")
        result = number(answered)
        demand(
            abs(result - value) <= 0.01 * value,
            f"for {count} values of {value:g} you get {result:g}.",
        )
