"""Overflow in numbers: sums that do not fit, accumulators that stagnate, operations that break.

Everything is computed in float64 and rounded where the hardware or the naive program would round,
so that the numbers are the same on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_lab.formats import FP16, FloatFormat


def total(value: float, count: int, fmt: FloatFormat = FP16) -> float:
    """Return the sum of `count` equal values: accumulated without error, rounded once at the end.

    For `fmt` FP16 that is what PyTorch's kernels return, whose accumulator is float32, as long as
    the partial sums are exact in float32.
    """
    return fmt.round(torch.tensor(value * count, dtype=torch.float64)).item()


def sequential(value: float, count: int, fmt: FloatFormat = FP16) -> list[float]:
    """Return the partial sums 0, v, v + v, … of an accumulator that is kept in the format."""
    sums = [0.0]
    accumulator = torch.zeros((), dtype=torch.float64)
    for _ in range(count):
        accumulator = fmt.round(accumulator + value)
        sums.append(accumulator.item())
    return sums


def pairwise(value: float, doublings: int, fmt: FloatFormat = FP16) -> list[float]:
    """Return the sums of 1, 2, 4, … 2^doublings values, added in pairs, every sum rounded."""
    sums = [fmt.round(torch.tensor(value, dtype=torch.float64)).item()]
    for _ in range(doublings):
        sums.append(fmt.round(torch.tensor(2 * sums[-1], dtype=torch.float64)).item())
    return sums


def stagnation(sums: list[float]) -> int | None:
    """Return after how many additions the partial sums stopped growing, or None."""
    end = sums[-1]
    first = sums.index(end)
    return first if first < len(sums) - 1 and end != float("inf") else None


# The operations of the lesson: written as one would without thinking of overflow. `r` is applied to
# every intermediate result; with a rounding function the program runs in half precision, with the
# identity it is exact. x holds numbers of the format, as float64.
Program = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def _mean(x: Tensor, r: Callable) -> Tensor:
    return r(r(x.sum()) / len(x))


def _norm(x: Tensor, r: Callable) -> Tensor:
    return r(r(r(x * x).sum()).sqrt())


def _variance(x: Tensor, r: Callable) -> Tensor:
    deviation = r(x - _mean(x, r))
    return r(r(r(deviation * deviation).sum()) / len(x))


def _softmax(x: Tensor, r: Callable) -> Tensor:
    powers = r(x.exp())
    return r(powers / r(powers.sum()))[-1]


def _exp(x: Tensor, r: Callable) -> Tensor:
    return r(x.exp())[-1]


PROGRAMS: dict[str, Program] = {
    "mean": _mean,
    "norm": _norm,
    "variance": _variance,
    "softmax": _softmax,
    "exp": _exp,
}


@dataclass(frozen=True)
class Outcome:
    """One operation at one scale of its input.

    Attributes:
        naive: the result when every intermediate is rounded to the format.
        inside_float32: computed without rounding inside, rounded to the format at the end; what
            an operation on autocast's float32 list gives, once its result is cast.
        exact: not rounded at all.
    """

    naive: float
    inside_float32: float
    exact: float

    @property
    def verdict(self) -> str:
        """ "right", "off" (by more than 1%), "inf" or "nan": what the naive program did."""
        if self.naive != self.naive:
            return "nan"
        if abs(self.naive) == float("inf"):
            return "inf"
        return "right" if abs(self.naive - self.exact) <= 0.01 * abs(self.exact) else "off"


def inputs(scale: float, count: int = 1024, fmt: FloatFormat = FP16) -> Tensor:
    """Return `count` evenly spaced values from -scale/2 to scale, rounded to the format."""
    return fmt.round(torch.linspace(-scale / 2, scale, count, dtype=torch.float64))


def run(name: str, scale: float, fmt: FloatFormat = FP16) -> Outcome:
    """Run one of `PROGRAMS` on `inputs(scale)`, naively in the format and as it should be."""
    x, program = inputs(scale, fmt=fmt), PROGRAMS[name]
    exact = program(x, lambda t: t)
    return Outcome(program(x, fmt.round).item(), fmt.round(exact).item(), exact.item())
