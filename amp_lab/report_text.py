"""`PrecisionReport`: what was found, and how it reads as text and as HTML in a notebook."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from amp_lab.formats import BF16, FP16, FloatFormat
from amp_lab.forward_watch import Constant
from amp_lab.histograms import Recordings
from amp_lab.verdict import Judgement, Row, Verdict, judge, overflows, percent, rows_of

SHOWN = 8  # rows of each table in the text; the HTML has all of them
START = 16  # 2^16 = 65536, with which GradScaler starts

_OPENING = {
    "needed": "{} needs a GradScaler",
    "not needed": "{} needs no GradScaler",
    "not enough": "A GradScaler is not enough for {}",
}


@dataclass(frozen=True)
class PrecisionReport:
    """What `amp_lab.precision_report` found. `str(report)` is its text.

    Attributes:
        format: the format reported on.
        tolerance: the share of the gradients' magnitude that may be lost.
        judgement: the verdict and its reason.
        beside: the same for bfloat16 (for float16, where the report is on bfloat16).
        losses: of every batch.
        first_non_finite: where float32 itself ran into an infinity or NaN, or None.
        activations: by module, the largest magnitude of its outputs.
        activation_gradients, weight_gradients: a `Row` for each module or parameter.
        overflows: places where autocast would have a number beyond the format's largest, with its
            magnitude, in the order of the forward pass.
        constants: numbers in the code that the format does not hold.
        updates: by parameter, how many elements of a weight kept in this format would swallow the
            optimizer's next update, and how many are updated.
        weights_flushed: by parameter, the share of its non-zero elements that the format rounds to
            zero; those of which it rounds none are left out.
    """

    format: FloatFormat
    tolerance: float
    judgement: Judgement
    beside: tuple[FloatFormat, Judgement]
    losses: list[float]
    first_non_finite: str | None
    activations: dict[str, float]
    activation_gradients: list[Row]
    weight_gradients: list[Row]
    overflows: dict[str, float]
    constants: list[Constant]
    updates: dict[str, tuple[int, int]]
    weights_flushed: dict[str, float]

    @property
    def verdict(self) -> Verdict:
        """Is a gradient scaler "needed", "not needed", or "not enough"?"""
        return self.judgement.verdict

    @property
    def scale_window(self) -> tuple[float, float] | None:
        """The smallest and the largest good loss scale, both powers of two; None if none is."""
        window = self.judgement.window
        return None if window is None else (2.0 ** window[0], 2.0 ** window[1])

    @property
    def headroom(self) -> dict[str, float]:
        """By module, how many times its largest activation could double before it overflows."""
        return {name: _doublings(self.format.max, size) for name, size in self.activations.items()}

    @property
    def swallowed(self) -> float | None:
        """Share of the updates that weights in this format would swallow; None if unknown."""
        moved = sum(m for _, m in self.updates.values())
        return sum(s for s, _ in self.updates.values()) / moved if moved else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it; infinities and NaN as "inf", "-inf", "nan"."""
        beside, judgement = self.beside
        return {
            "format": self.format.name,
            "verdict": self.verdict,
            "scale_window": self.scale_window,
            "swallowed": self.swallowed,
            **_plain({f: getattr(self, f) for f in self.__dataclass_fields__ if f != "format"}),
            "beside": {"format": beside.name, **asdict(judgement)},
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return f"PrecisionReport({self.format.name}: GradScaler {self.verdict})"

    def figure(self) -> Any:
        """Draw every module's gradients against the format's range (needs matplotlib)."""
        from amp_lab.plots.report import figure

        return figure(self)

    def _repr_html_(self) -> str:
        return _html(self)


def summarize(
    recordings: Recordings,
    fmt: FloatFormat,
    *,
    tolerance: float,
    losses: list[float],
    first_non_finite: str | None,
    activations: dict[str, float],
    in_half: Mapping[str, float],
    half: Collection[str],
    constants: list[Constant],
    updates: dict[str, tuple[int, int]],
    weights_flushed: dict[str, float],
) -> PrecisionReport:
    """Make the report from what was recorded.

    `in_half` is `ForwardWatch.in_half` in numbers, `half` the names of the modules and parameters
    whose gradients are in half precision.
    """
    beside = FP16 if fmt == BF16 else BF16
    outputs = rows_of(recordings.activation_gradients, fmt, half)
    parameters = rows_of(recordings.weight_gradients, fmt, half)

    def judged(fmt: FloatFormat) -> Judgement:
        too_large = overflows(in_half, fmt)
        return judge(outputs, parameters, fmt, tolerance, first_non_finite, too_large)

    return PrecisionReport(
        format=fmt,
        tolerance=tolerance,
        judgement=judged(fmt),
        beside=(beside, judged(beside)),
        losses=losses,
        first_non_finite=first_non_finite,
        activations=activations,
        activation_gradients=outputs,
        weight_gradients=parameters,
        overflows=overflows(in_half, fmt),
        constants=constants,
        updates=updates,
        weights_flushed=weights_flushed,
    )


def sentence(fmt: FloatFormat, judgement: Judgement) -> str:
    """Return the verdict in one sentence."""
    return f"{_OPENING[judgement.verdict].format(fmt.name)}: {judgement.reason}."


def _html(report: PrecisionReport) -> str:
    """Return the report as an HTML fragment: the findings, and a table of every row to open."""
    opening, *findings = _findings(report)
    parts = [f"<p><b>{escape(opening)}</b></p>"]
    parts.append("<ul>" + "".join(f"<li>{escape(finding)}</li>" for finding in findings) + "</ul>")
    for title, rows in _tables(report):
        heads = "".join(f"<th>{head}</th>" for head in ("", *_COLUMNS))
        body = "".join(
            f"<tr><td style='text-align:left'>{escape(row.name)}</td>"
            + "".join(f"<td>{cell}</td>" for cell in _cells(row))
            + "</tr>"
            for row in rows
        )
        parts.append(
            f"<details><summary>{escape(title)}</summary><table><tr>{heads}</tr>{body}</table>"
            "</details>"
        )
    heads = "<th></th><th>largest</th><th>doublings left</th>"
    body = "".join(
        f"<tr><td style='text-align:left'>{escape(name)}</td>"
        f"<td>{report.activations[name]:.3g}</td><td>{room:.1f}</td></tr>"
        for name, room in report.headroom.items()
    )
    title = f"Activations below {report.format.name}'s largest number"
    parts.append(f"<details><summary>{title}</summary><table>{heads}{body}</table></details>")
    return f"<div class='amp-lab-report'>{''.join(parts)}</div>"


_COLUMNS = ("lost", "flushed", "subnormal", "overflow", "largest", "autocast")


def _cells(row: Row) -> tuple[str, ...]:
    shares = (row.lost, row.flushed, row.subnormal, row.overflowing)
    return (*map(percent, shares), f"{row.largest:.2g}", "half" if row.half else "float32")


def _tables(report: PrecisionReport) -> Iterator[tuple[str, list[Row]]]:
    """Yield title and rows of the tables, the worst rows first."""
    for what, rows in (
        ("Gradients of the modules' outputs", report.activation_gradients),
        ("Gradients of the parameters", report.weight_gradients),
    ):
        title = f"{what} in {report.format.name} at loss scale 1 (lost: share of the magnitude)"
        yield title, sorted(rows, key=_badness, reverse=True)


def _badness(row: Row) -> tuple[float, ...]:
    return row.half, row.overflowing, row.lost, row.flushed


def _findings(report: PrecisionReport) -> Iterator[str]:
    """Yield the verdict and what else there is to say, a sentence each."""
    fmt, judgement = report.format, report.judgement
    yield sentence(fmt, judgement)
    if judgement.window is not None:
        low, high = judgement.window
        yield (
            f"Loss scales from 2^{low} to 2^{high} overflow nothing and lose at most "
            f"{percent(report.tolerance)} of any gradient's magnitude." + _start(low, high)
        )
    yield sentence(*report.beside)
    for place, size in list(report.overflows.items())[1:]:
        yield f"Another overflow: {place} reaches {size:.3g}."
    near = {n: room for n, room in report.headroom.items() if 0 <= room < 3}
    for name, room in sorted(near.items(), key=lambda item: item[1]):
        yield f"Little headroom: the output of {name} overflows when it grows {2**room:.2g} times."
    for constant in report.constants:
        also = "under autocast too" if constant.under_autocast else "not under autocast"
        if constant.under_autocast and constant.becomes:
            also += " (some functions raise an error instead)"
        yield f"Where the whole model is {fmt.name}, {constant}; {also}."
    for name, share in report.weights_flushed.items():
        if share > report.tolerance:
            yield f"{percent(share)} of {name} is zero in {fmt.name}, under autocast too."
    if report.swallowed is not None:
        yield (
            f"Weights kept in {fmt.name} would swallow {percent(report.swallowed)} of the next "
            "update; float32 weights, as under autocast, swallow none of it."
        )


def _start(low: int, high: int) -> str:
    if low <= START <= high:
        return f" GradScaler's start of 2^{START} is one of them."
    if high < START:
        return (
            f" GradScaler starts at 2^{START} and will skip its first {START - high} steps or so."
        )
    return f" GradScaler starts at 2^{START}: pass init_scale=2.0**{low}."


def _lines(report: PrecisionReport) -> Iterator[str]:
    yield from _findings(report)
    for title, rows in _tables(report):
        if not rows:
            continue
        width = max(len(row.name) for row in rows[:SHOWN])
        yield ""
        yield title
        yield " " * width + "".join(f"{head:>11s}" for head in _COLUMNS)
        for row in rows[:SHOWN]:
            yield f"{row.name:{width}s}" + "".join(f"{cell:>11s}" for cell in _cells(row))
        if len(rows) > SHOWN:
            yield f"… and {len(rows) - SHOWN} more, with less lost"
    tight = sorted(report.headroom.items(), key=lambda item: item[1])[:SHOWN]
    if tight:
        yield ""
        yield f"Activations: how often they could double before {report.format.name} overflows"
        width = max(len(name) for name, _ in tight)
        for name, room in tight:
            shown = f"{room:10.1f}" if math.isfinite(room) else "    always"
            yield f"{name:{width}s} {shown}"


def _doublings(limit: float, size: float) -> float:
    if not math.isfinite(size):
        return -math.inf
    return math.log2(limit / size) if size else math.inf


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
