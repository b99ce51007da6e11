"""Checks for the exercises: they say what is wrong and never give the answer away.

An exercise sets an answer and asks its check:

    answer = ...  # your turn
    checks.rounding.tie(answer)

The result is one line of text. `.hint()` gives up to three hints, one a call, and `.passed` is
what a grader reads. Each lesson has a module of judges: functions that `demand` something of the
answer, made into a check by `@exercise`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any


class WrongAnswer(Exception):
    """What is wrong with an answer, as a sentence for the learner."""


class NotAnswered(Exception):
    """There is no answer yet."""


class Hint(str):
    """A hint, of which the next one can be asked: `_.hint()` in a notebook, again and again."""

    result: "Result"

    def hint(self) -> "Hint":
        """Return the next hint."""
        return self.result.hint()

    def __repr__(self) -> str:
        return str(self)


@dataclass
class Result:
    """What a check says of an answer."""

    passed: bool
    text: str
    hints: tuple[str, ...] = field(repr=False)
    shown: int = field(default=0, init=False, repr=False)

    def hint(self) -> "Hint":
        """Return the next hint; when there are no more, the last one again."""
        self.shown = min(self.shown + 1, len(self.hints))
        hint = Hint(f"Hint {self.shown} of {len(self.hints)}: {self.hints[self.shown - 1]}")
        hint.result = self
        return hint

    def __repr__(self) -> str:
        return self.text


def exercise(*hints: str, right: str) -> Callable[[Callable[..., None]], Callable[..., Result]]:
    """Make a check of a judge, a function that raises `WrongAnswer` unless the answer is right.

    Args:
        hints: three, each giving away more than the one before, none the answer itself.
        right: what a right answer means, shown after "Right: ".
    """

    def make(judge: Callable[..., None]) -> Callable[..., Result]:
        @wraps(judge)
        def check(*answers: Any) -> Result:
            try:
                for answer in answers:
                    if _is_blank(answer):
                        raise NotAnswered
                judge(*answers)
            except NotAnswered:
                return Result(False, "Not answered yet: replace the dots and run again.", hints)
            except WrongAnswer as wrong:
                return Result(False, f"Not yet: {wrong}", hints)
            return Result(True, f"Right: {right}", hints)

        return check

    return make


def demand(condition: object, otherwise: str) -> None:
    """Raise `WrongAnswer(otherwise)` unless the condition holds."""
    if not condition:
        raise WrongAnswer(otherwise)


def number(answer: Any) -> float:
    """Return the answer as a float; a text, NaN or the like is a wrong answer, with a reason."""
    try:
        value = float(answer)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise WrongAnswer(f"the answer is to be a number, got {answer!r}") from None
    demand(math.isfinite(value), f"the answer is to be a finite number, got {answer!r}")
    return value


def run(function: Any, *arguments: Any, brief: bool = False) -> Any:
    """Return what the learner's function returns, whatever it is; its errors become a sentence.

    With `brief`, of an error's message only what stands before its first colon.

    Raises:
        WrongAnswer: it is no function, or it raised.
    """
    _demand_function(function)
    try:
        return function(*arguments)
    except Exception as error:
        message = f"{str(error).split(':')[0]}." if brief else str(error)
        text = f"your function raised {type(error).__name__}: {message}"
        raise WrongAnswer(text) from error


def call(function: Any, *arguments: Any) -> Any:
    """Return what the learner's function returns; its errors become a sentence.

    Raises:
        NotAnswered: it returned None or `...`.
        WrongAnswer: it is no function, or it raised.
    """
    _demand_function(function)
    try:
        value = function(*arguments)
    except Exception as error:
        shown = ", ".join(map(repr, arguments))
        raise WrongAnswer(
            f"called with {shown} it raised {type(error).__name__}: {error}"
        ) from error
    if _is_blank(value):
        raise NotAnswered
    return value


def _demand_function(answer: Any) -> None:
    demand(callable(answer), "the answer is to be a function; keep the line that starts with def")


def _is_blank(answer: Any) -> bool:
    return answer is None or answer is ...
