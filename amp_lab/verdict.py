"""From a model's numbers to a verdict: the window of loss scales, and what no scale can mend.

Gradients are judged by their *magnitude*, not their number. Late in training most gradients of a
network may be too small for float16 and be missed by nobody, because all of them together are a
thousandth of what the large ones are; when training did suffer in our experiments (notebook 06), a
tenth and more of the magnitude was gone.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from amp_lab.formats import FloatFormat
from amp_lab.histograms import Binades, Recording

Verdict = Literal["needed", "not needed", "not enough"]
LARGEST_SCALE = 127  # 2^127: the scale itself is a float32 number


@dataclass(frozen=True)
class Row:
    """The gradients of one module's outputs, or of one parameter.

    `half` tells whether autocast has them in half precision; others are not judged.
    `flushed`, `subnormal` and `overflowing` are shares (0 to 1) of the numbers that are not zero,
    in the report's format at loss scale 1; `lost` is the flushed share of the sum of magnitudes.
    """

    name: str
    largest: float
    nonzero: int
    flushed: float
    subnormal: float
    overflowing: float
    lost: float
    half: bool
    binades: Binades


@dataclass(frozen=True)
class Judgement:
    """What one format does to a model.

    Attributes:
        verdict: "needed", "not needed" or "not enough": is a gradient scaler?
        window: (a, b): the loss scales 2^a to 2^b are good; None if none is.
        reason: why, in a sentence.
        blame: the modules or parameters that decide: whose gradients are lost at scale 1, or which
            stand in the way of every scale.
    """

    verdict: Verdict
    window: tuple[int, int] | None
    reason: str
    blame: tuple[str, ...]


def judge(
    activation_gradients: list[Row],
    weight_gradients: list[Row],
    fmt: FloatFormat,
    tolerance: float,
    first_non_finite: str | None,
    too_large: Mapping[str, float],
) -> Judgement:
    """Decide whether a scaler is needed.

    Every module's activation gradients must be kept, because what comes before it in the network
    is computed from them. Of the weight gradients the sum over all parameters counts: a parameter
    on which the loss does not depend (a bias before batch normalization, that of the keys in
    attention) has a gradient of rounding errors alone, which nobody misses.
    """
    if first_non_finite is not None:
        reason = f"{first_non_finite} is not finite in float32 already; mend that first"
        return Judgement("not enough", None, reason, (first_non_finite,))
    if too_large:
        place, size = next(iter(too_large.items()))
        reason = (
            f"{place} reaches {size:.3g}, beyond {fmt.name}'s largest number {fmt.max:.5g}, and a "
            "loss scale does not change the forward pass"
        )
        return Judgement("not enough", None, reason, tuple(too_large))
    activation_gradients = [row for row in activation_gradients if row.half]
    weight_gradients = [row for row in weight_gradients if row.half]
    lowest = {row.name: lowest_scale([row], fmt, tolerance) for row in activation_gradients}
    lowest["all weight gradients"] = lowest_scale(weight_gradients, fmt, tolerance)
    highest = {r.name: highest_scale(r, fmt) for r in (*activation_gradients, *weight_gradients)}
    floor = max(lowest, key=lowest.__getitem__)
    ceiling = min(highest, key=highest.__getitem__, default="")
    window = (lowest[floor], highest.get(ceiling, LARGEST_SCALE))
    if window[0] > window[1]:
        reason = (
            f"the gradients of {floor} need a loss scale of 2^{window[0]} or more, those of "
            f"{ceiling} overflow beyond 2^{window[1]}"
        )
        return Judgement("not enough", None, reason, (floor, ceiling))
    if window[0] <= 0 <= window[1]:
        reason = f"at scale 1 nothing overflows and no gradient loses over {percent(tolerance)}"
        return Judgement("not needed", window, reason, ())
    if window[1] < 0:
        reason = f"the gradients of {ceiling} overflow without a scale below 1"
        return Judgement("needed", window, reason, (ceiling,))
    lost = {r.name: lost_share(r.binades, fmt) for r in activation_gradients if lowest[r.name] > 0}
    worst = max(lost, key=lost.__getitem__, default="")
    what = f"{percent(lost[worst])} of the gradient at {worst}" if lost else "weight gradients"
    reason = f"without one, {what} would be flushed to zero"
    return Judgement("needed", window, reason, tuple(lost))


def percent(share: float) -> str:
    """Write a share such that nothing is rounded to none and nothing to all."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{share:.1%}" if 0 < share < 0.1 or 0.9 < share < 1 else f"{share:.0%}"


def lowest_scale(rows: Iterable[Row], fmt: FloatFormat, tolerance: float) -> int:
    """Return the smallest k such that scaling by 2^k loses at most `tolerance` of the magnitude.

    The sums are those of binades, each number taken as 1.5 times its power of two.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    for row in rows:
        for exponent, size in _sums(row.binades).items():
            sums[exponent] += size
    allowed = tolerance * sum(sums.values())
    below = 0.0
    for exponent in sorted(sums):
        below += sums[exponent]
        if below > allowed:
            return max(_first_kept(fmt) - exponent, -LARGEST_SCALE + 1)
    return -LARGEST_SCALE + 1


def _sums(binades: Binades) -> dict[int, float]:
    """Return the sum of magnitudes that are flushed together, by the power of two below them.

    2^e itself is half way between zero and the smallest number when what is above it is kept, and
    goes to zero, which is even. So it counts with the binade below.
    """
    # float32's subnormal numbers take part as if each were 2^-127.
    sums = defaultdict(float, {-127: math.ldexp(binades.subnormal, -127)})
    for e, count, power in zip(binades.exponents, binades.counts, binades.powers, strict=True):
        sums[e] += math.ldexp(1.5 * (count - power), e)
        sums[e - 1] += math.ldexp(power, e)
    return sums


def _first_kept(fmt: FloatFormat) -> int:
    """Return e such that all above 2^e is kept at scale 1, and what is not above is flushed."""
    return math.frexp(fmt.smallest_subnormal)[1] - 2


def highest_scale(row: Row, fmt: FloatFormat) -> int:
    """Return the largest k such that scaling by 2^k overflows nothing."""
    if row.largest == 0:
        return LARGEST_SCALE
    k = math.frexp(fmt.overflow_threshold)[1] - math.frexp(row.largest)[1]
    fits = math.ldexp(row.largest, k) < fmt.overflow_threshold
    return min(k if fits else k - 1, LARGEST_SCALE)


def overflows(in_half: Mapping[str, float], fmt: FloatFormat) -> dict[str, float]:
    """Return the places whose largest magnitude rounds to infinity in fmt, in their order."""
    limit = fmt.overflow_threshold
    return {place: size for place, size in in_half.items() if math.isfinite(size) and size >= limit}


def rows_of(
    recordings: Mapping[str, Recording], fmt: FloatFormat, half: Collection[str]
) -> list[Row]:
    """Return a row for each recording; `half` are the names of those in half precision."""
    return [_row(name, recording, fmt, name in half) for name, recording in recordings.items()]


def _row(name: str, recording: Recording, fmt: FloatFormat, half: bool) -> Row:
    outcome, binades = recording.histogram.outcome(fmt), recording.histogram.binades()
    return Row(
        name,
        recording.max.item(),
        outcome.nonzero,
        outcome.fraction(outcome.flushed),
        outcome.fraction(outcome.subnormal),
        outcome.fraction(outcome.overflowing),
        lost_share(binades, fmt),
        half,
        binades,
    )


def lost_share(binades: Binades, fmt: FloatFormat) -> float:
    """Return the share of the sum of magnitudes that fmt flushes to zero at scale 1."""
    sums = _sums(binades)
    whole = sum(sums.values())
    return sum(s for e, s in sums.items() if e < _first_kept(fmt)) / whole if whole else 0.0
