"""Checks for 01_rounding."""

from typing import Any

import torch

from amp_lab.checks import call, demand, exercise, number
from amp_lab.experiments.rounding import apply_update, many_updates, rounded
from amp_lab.formats import FP16


def _half(answer: Any) -> float:
    value = number(answer)
    demand(
        rounded(value) == value,
        f"{value!r} is no FP16 number: write one exactly, with powers of two.",
    )
    return value


@exercise(
    "Use the view: set the update to 2^-11 and try weights a little above 1.",
    "At 1 the exact sum is a tie, and ties go to the neighbour whose last mantissa bit is 0.",
    "Which FP16 number next to 1 has a 1 as its last bit? FP16.fields shows the bits.",
    right="its last mantissa bit is 1, so the tie moves it to its even neighbour.",
)
def tie(answer: Any) -> None:
    """The smallest FP16 weight above 1 that an update of 2^-11 changes."""
    weight = _half(answer)
    demand(weight > 1, "the weight is to be above 1.")
    demand(not apply_update(weight, 2**-11).swallowed, "here the update is swallowed too.")
    demand(weight <= 1 + FP16.eps, "it is changed, yes, but a smaller weight is changed as well.")


@exercise(
    "The limit for weight 1 is a tie, and the tie is swallowed.",
    "So the answer is the FP16 number just above the limit. How far apart are numbers there?",
    "FP16.spacing(2**-11) is the gap to it.",
    right="half an ulp of the weight is swallowed, the next larger number is not.",
)
def smallest_effective(answer: Any) -> None:
    """The smallest positive FP16 number that changes weight 1 when it is added."""
    update = _half(answer)
    demand(update > 0, "the update is to be positive.")
    demand(not apply_update(1.0, update).swallowed, f"1 + {update!r} is still 1 in FP16.")
    smaller = update - FP16.spacing(update)
    demand(apply_update(1.0, smaller).swallowed, f"it works, but so does {smaller!r}.")


@exercise(
    "The weight stops where half an ulp first exceeds the update.",
    "The ulp doubles at every power of two, so it stops at one of them.",
    "Compare 0.001 with FP16.spacing(w) / 2 at w = 1, 2, 4, 8.",
    right="there half an ulp exceeds the update for the first time.",
)
def stops_at(answer: Any) -> None:
    """Where an FP16 weight stops that starts at 0 and gets 0.001 added again and again."""
    value = number(answer)
    end = many_updates(0.0, 0.001, 8000, 100).in_half[-1]
    demand(
        value >= end, f"at {value:g} half an ulp is {FP16.spacing(value) / 2:g}: it still moves."
    )
    demand(value <= end, f"it never gets as far as {value:g}.")


@exercise(
    "The addition is to happen in float16: make both numbers float16 tensors first.",
    "torch.tensor(weight, dtype=torch.float16) makes one; adding two of them rounds once.",
    "Compare the sum with the weight's tensor, and return a bool.",
    right="checked on every kind of pair: ties, powers of two, subnormal numbers, both signs.",
)
def swallows(answer: Any) -> None:
    """A function of weight and update, FP16 numbers: is the update swallowed?"""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(200, generator=generator).half()
    updates = (weights * 2.0 ** torch.randint(-14, -8, (200,), generator=generator)).half()
    pairs = [(1.0, 2**-11), (1 + 2**-10, 2**-11), (2.0, -(2**-11)), (2**-24, 2**-24), (1.0, 0.5)]
    pairs += list(zip(weights.tolist(), updates.tolist(), strict=True))
    for weight, update in pairs:
        if update == 0:
            continue
        said, truth = call(answer, weight, update), apply_update(weight, update).swallowed
        demand(bool(said) == truth, f"for weight {weight!r} and update {update!r} you say {said}.")
