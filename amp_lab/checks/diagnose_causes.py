"""Checks for 10_diagnose, before any repair: the learner's diagnosis of each case."""

from typing import Any

from amp_lab.checks import WrongAnswer, demand, exercise

CAUSES = {
    "overflow": "a number beyond 65504 becomes infinite",
    "rounding": "a number is rounded to zero or to its neighbour, and what it said is lost",
    "the model": "float32 fails in the same way",
    "two scales": "gradients are multiplied by one number and divided, or judged, by another",
    "order": "a method of the scaler is called too often, or one that it needs was not called",
    "memory": "something counts, keeps or forgets what it should not",
    "dtype": "a weight or an operation is in another precision than it should be",
}

# By case: the causes that its evidence shows, and where to look for it.
_CASES: dict[int, tuple[set[str], str]] = {
    1: ({"overflow"}, "which operation is the first whose result is not finite?"),
    2: ({"the model"}, "is the gradient finite in float32, without any scaler?"),
    3: ({"order"}, "who looks for infinities, and when does update() ask?"),
    4: ({"two scales", "order"}, "which norm do the gradients have when they are clipped?"),
    5: ({"order"}, "what does the message say was already called?"),
    6: ({"memory"}, "how many steps has the optimizer taken, and how many the schedule?"),
    7: ({"overflow"}, "what is the lowest number plus itself?"),
    8: ({"rounding"}, "what is 1e-8 in float16?"),
    9: ({"rounding", "dtype"}, "what is the probability, and what should it be?"),
    10: ({"dtype", "rounding"}, "which dtype do the gradients have, and why?"),
    11: ({"overflow", "dtype"}, "what is the loss inside of the region, and what outside?"),
    12: ({"two scales", "order"}, "which scale did the second gradient get, and which now?"),
    13: ({"memory"}, "with which scale does the resumed run begin?"),
    14: ({"memory"}, "what does a region do with a weight that it has cast before?"),
    15: ({"overflow"}, "what is the square of the largest gradient?"),
    16: ({"rounding"}, "what are the weights of the rare words in float16?"),
}


@exercise(
    "Does float32 fail as well? Then it is the model. Is something infinite? Then overflow.",
    "Nothing infinite, but zero, one or unchanged where it should not be: rounding.",
    "All numbers in range: then see who was called when, which scale was used, what was kept.",
    right="that is what the evidence shows. Now repair it.",
)
def diagnosis(answer: Any, case: Any) -> None:
    """The cause of a case: one of the names in CAUSES."""
    if not isinstance(case, int) or case not in _CASES:
        raise WrongAnswer(f"the cases are numbered from 1 to {len(_CASES)}.")
    if not isinstance(answer, str) or answer not in CAUSES:
        raise WrongAnswer(f"the answer is one of {', '.join(map(repr, CAUSES))}.")
    right, look = _CASES[case]
    demand(answer in right, f"the evidence shows something else: {look}")
