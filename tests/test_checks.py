"""The frame of the checks."""

import pytest
import torch

from amp_lab.checks import WrongAnswer, call, demand, exercise, number


@exercise("think", "think harder", "it is even", right="that is the one.")
def four(answer):
    demand(number(answer) == 4, f"{answer} is not it.")


@exercise("a", "b", "c", right="it doubles.")
def double(function):
    for x in (1, 2.5):
        demand(call(function, x) == 2 * x, f"wrong at {x}")


@pytest.mark.parametrize("blank", [None, ...])
def test_blank_answers_are_not_answered(blank):
    for result in (four(blank), double(blank), double(lambda x: blank)):
        assert not result.passed
        assert repr(result).startswith("Not answered yet")


def test_right_and_wrong():
    assert four(4).passed
    assert repr(four(4)) == "Right: that is the one."
    assert repr(four(5)) == "Not yet: 5 is not it."
    assert repr(four("five")) == "Not yet: the answer is to be a number, got 'five'"
    assert double(lambda x: x + x).passed
    assert not double(lambda x: x * x).passed


def test_the_learners_errors_become_a_sentence():
    result = double(lambda x: 1 / 0)
    assert not result.passed
    assert "called with 1 it raised ZeroDivisionError" in repr(result)
    assert "keep the line that starts with def" in repr(double(3))


def test_the_judges_own_errors_are_not_hidden():
    @exercise("a", "b", "c", right="")
    def broken(answer):
        raise KeyError(answer)

    with pytest.raises(KeyError):
        broken(1)


@pytest.mark.parametrize(
    "strange", ["x", float("nan"), float("inf"), [4], {}, torch.ones(2), 10**400, object(), print]
)
def test_no_number_is_a_wrong_answer_and_no_traceback(strange):
    result = four(strange)
    assert not result.passed
    assert "the answer is to be a" in result.text


def test_a_hint_is_asked_for_the_next_one():
    """In a notebook `_` is what was shown last: the result first, then the hint."""

    @exercise("one", "two", "three", right="yes")
    def check(answer):
        demand(answer == 1, "no")

    shown = check(2)
    for wanted in ("Hint 1 of 3: one", "Hint 2 of 3: two", "Hint 3 of 3: three"):
        shown = shown.hint()
        assert shown == wanted
        assert repr(shown) == wanted


def test_three_hints_in_turn():
    result = four(5)
    assert [result.hint() for _ in range(4)] == [
        "Hint 1 of 3: think",
        "Hint 2 of 3: think harder",
        "Hint 3 of 3: it is even",
        "Hint 3 of 3: it is even",
    ]


def test_demand():
    demand(True, "no")
    with pytest.raises(WrongAnswer, match="no"):
        demand(0, "no")
