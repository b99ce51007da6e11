"""Rounding in numbers: neighbours, swallowed updates, and the band of ratios where they happen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from amp_lab.formats import FP16, FloatFormat


def rounded(x: float, fmt: FloatFormat = FP16) -> float:
    """Return one float64 number rounded to the format."""
    return fmt.round(torch.tensor(x, dtype=torch.float64)).item()


def neighbours(x: float, fmt: FloatFormat = FP16, count: int = 3) -> list[float]:
    """Return the `count` numbers of the format below and above the one x rounds to, and itself."""
    middle = rounded(x, fmt)
    below, above = [middle], [middle]
    for _ in range(count):
        below.append(_step(below[-1], -1, fmt))
        above.append(_step(above[-1], +1, fmt))
    return below[:0:-1] + above


def _step(x: float, direction: int, fmt: FloatFormat) -> float:
    """Return the next number of the format. Towards zero the gap may be half of `spacing`."""
    if direction * x >= 0:
        return x + direction * fmt.spacing(x)
    gap = fmt.spacing(x)
    candidate = rounded(x + direction * gap / 2, fmt)
    return candidate if candidate != x else x + direction * gap


@dataclass(frozen=True)
class Update:
    """What became of `weight + update` in a format."""

    weight: float
    update: float
    result: float

    @property
    def swallowed(self) -> bool:
        """The weight is what it was, although the update is not zero."""
        return self.result == self.weight and self.update != 0

    @property
    def applied(self) -> float:
        """The update that really took place."""
        return self.result - self.weight


def apply_update(weight: float, update: float, fmt: FloatFormat = FP16) -> Update:
    """Add in exact arithmetic and round once, as an addition in the format does.

    The weight is rounded to the format first; the update is not, so that its size can be chosen
    freely.
    """
    start = rounded(weight, fmt)
    return Update(start, update, rounded(start + update, fmt))


def largest_swallowed(weights: Tensor, fmt: FloatFormat = FP16) -> Tensor:
    """Return for every weight the largest number of the format that adding it swallows.

    `weights` are positive normal numbers of the format, as float64. Half an ulp is a tie, and ties
    go to the neighbour whose last mantissa bit is 0: half an ulp itself is swallowed where the
    weight's last bit is 0, else only the number below it.
    """
    half_ulps = torch.tensor([fmt.spacing(w) / 2 for w in weights.tolist()], dtype=torch.float64)
    below = torch.tensor([_step(h, -1, fmt) for h in half_ulps.tolist()], dtype=torch.float64)
    return torch.where(fmt.round(weights + half_ulps) == weights, half_ulps, below)


def binade(start: float = 1.0, fmt: FloatFormat = FP16) -> Tensor:
    """Return all numbers of the format in [start, 2 start), as float64; start is a power of two."""
    steps = torch.arange(2**fmt.mantissa_bits, dtype=torch.float64)
    return start * (1 + steps * fmt.eps)


@dataclass(frozen=True)
class Descent:
    """A weight after every one of many equal updates, kept in two ways."""

    steps: list[int]
    in_half: list[float]
    with_master: list[float]


def many_updates(
    weight: float, update: float, count: int, every: int, fmt: FloatFormat = FP16
) -> Descent:
    """Apply the same update `count` times, to a weight in the format and to a float32 master.

    `with_master` is the format's view of the float32 master weight, which is what the forward
    pass uses. One value is kept for every `every` updates.
    """
    half = rounded(weight, fmt)
    master = torch.tensor(weight, dtype=torch.float32, device="cpu")
    step = torch.tensor(update, dtype=torch.float32, device="cpu")
    kept = Descent([0], [half], [rounded(master.item(), fmt)])
    for i in range(1, count + 1):
        half = rounded(half + update, fmt)
        master = master + step
        if i % every == 0:
            kept.steps.append(i)
            kept.in_half.append(half)
            kept.with_master.append(rounded(master.item(), fmt))
    return kept
