"""Checks for 04_loss_scaling."""

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import torch

from amp_lab.checks import WrongAnswer, call, demand, exercise, number
from amp_lab.experiments.loss_scaling import CORRECT, OVERFLOW, replay


@exercise(
    "Every skipped step halves the scale, so ask how often 2^24 must be halved.",
    "A step goes through when 0.25 times the scale stays below 65520.",
    "Go down from 2^24 in powers of two until a quarter of the scale is below 65520.",
    right="dynamic scaling pays for a start that is too high with one step for each power of two.",
)
def skipped_at_first(answer: Any) -> None:
    """How many steps are skipped from scale 2^24 when the largest gradient is always 0.25."""
    skipped = len(replay([0.25] * 40, init_scale=2.0**24, growth_interval=1000).skipped)
    said = number(answer)
    demand(said >= skipped, f"after {said:g} halvings 0.25 × scale is still 65520 or more.")
    demand(said <= skipped, f"one of the {said:g} steps would have gone through.")


@exercise(
    "The scaled gradients come from backward(), and clipping needs them unscaled.",
    "The loss is scaled before anything else happens to it; the scale changes at the very end.",
    "Between backward and step stand the two calls that touch the gradients: first divide.",
    right="each call finds what the one before it has left.",
)
def order(answer: Any) -> None:
    """The six calls of a training step in the right order."""
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise WrongAnswer("the answer is a list of names.")
    said = [str(name) for name in answer]
    demand(sorted(said) == sorted(CORRECT), f"use each of {', '.join(sorted(CORRECT))} once.")
    for before, after, why in (
        ("scale", "backward", "the gradients would not be scaled at all"),
        ("backward", "unscale_", "there is no gradient to unscale yet"),
        ("unscale_", "clip", "the norm would be that of the scaled gradients"),
        ("clip", "step", "the optimizer would see gradients that are not clipped"),
        ("step", "update", "the scale would change before the gradients are divided by it"),
    ):
        demand(said.index(before) < said.index(after), f"with {after!r} before {before!r} {why}.")


@exercise(
    "Three cases: something was infinite; enough good steps in a row; neither.",
    "After an infinity the count starts again, and after a growth as well.",
    "If growing gives infinity (in float32), keep the scale; the count starts again all the same.",
    right="compared with torch's own on 300 random sequences, bit for bit.",
)
def update(answer: Any) -> None:
    """A function (scale, clean, found_inf, growth, backoff, interval) -> (scale, clean)."""
    pick = random.Random(0)
    for _ in range(300):
        growth, backoff = pick.choice([2.0, 1.5]), pick.choice([0.5, 0.3])
        interval = pick.randint(1, 3)
        start = pick.choice([65536.0, 3.0, 2.0**127, 1.0, 2.0**-10])
        scale, clean = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
        mine, count = start, 0
        for _ in range(8):
            found = pick.random() < 0.3
            torch._amp_update_scale_(
                scale, clean, torch.tensor(float(found)), growth, backoff, interval
            )
            shown = f"scale {mine:g}, {count} good steps, found_inf {found}, interval {interval}"
            result = call(answer, mine, count, found, growth, backoff, interval)
            if not isinstance(result, tuple) or len(result) != 2:
                raise WrongAnswer("return two numbers: the scale and the count of good steps.")
            mine, count = _float32(number(result[0])), int(number(result[1]))
            demand(mine == scale.item(), f"for {shown} the scale becomes {mine:g}.")
            demand(count == clean.item(), f"for {shown} the count becomes {count}.")


def _float32(x: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.inf


@exercise(
    "A gradient survives when it is more than 2^-25 after scaling.",
    "So the scale has to be more than 2^-25 / 2^-38.",
    "Take the next power of two above that ratio; check that 2^-3 times it stays below 65520.",
    right="it lifts the small one above half the smallest subnormal, and spares the large one.",
)
def static_scale(answer: Any) -> None:
    """The smallest power of two that keeps gradients of 2^-38 and 2^-3 in float16."""
    scale = number(answer)
    demand(scale > 0 and math.log2(scale) % 1 == 0, "the answer is to be a power of two.")
    small, large = (torch.tensor(g * scale, dtype=torch.float64) for g in (2.0**-38, 2.0**-3))
    demand(small.half() != 0, f"at {scale:g} the small gradient is flushed to zero.")
    demand(large < OVERFLOW, f"at {scale:g} the large gradient overflows.")
    demand((small / 2).half() == 0, "it works, but half of it does, too.")
