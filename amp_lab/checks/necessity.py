"""Checks for 06_is_it_necessary."""

from typing import Any

import torch

from amp_lab.checks import NotAnswered, WrongAnswer, call, demand, exercise, number
from amp_lab.formats import FP16
from amp_lab.report_text import PrecisionReport

REMEDIES = ("GradScaler", "float32 weights", "bfloat16", "nothing")


@exercise(
    "Ask of each run: what is lost, gradients on their way back or updates of weights?",
    "A loss scale acts on gradients in the backward pass; it is divided out before the update.",
    "In the first run gradients vanish, in the second updates do, in the third the forward pass "
    "overflows, in the fourth what vanishes has no weight.",
    right="what is lost decides on the remedy; a loss scale mends one thing only.",
)
def remedies(answer: Any) -> None:
    """Four names, one for each of the runs described."""
    if not isinstance(answer, list | tuple) or len(answer) != 4:
        raise WrongAnswer("the answer is a list of four names.")
    if any(name is ... for name in answer):
        raise NotAnswered
    said = [str(name) for name in answer]
    unknown = [name for name in said if name not in REMEDIES]
    demand(not unknown, f"{', '.join(unknown)} is none of {', '.join(REMEDIES)}.")
    for which, (name, right, why) in enumerate(
        zip(
            said,
            ("GradScaler", "float32 weights", "bfloat16", "nothing"),
            (
                "gradients are zero that float32 has",
                "gradients arrive, and the weights do not move",
                "activations are infinite before there is any gradient",
                "the loss falls as in float32",
            ),
            strict=True,
        ),
        start=1,
    ):
        demand(name == right, f"in run {which} {why}; {name} does not fit.")


@exercise(
    "Which elements become zero? Cast, and compare with zero.",
    "Add up the magnitudes of those elements, in float32.",
    "Divide by the sum of all magnitudes; an all-zero tensor has lost nothing.",
    right="a gradient is missed by its size, not by its vote.",
)
def lost_magnitude(answer: Any) -> None:
    """A function of gradients (float32) -> share of their magnitude that float16 flushes."""
    generator = torch.Generator().manual_seed(0)
    for shift in (-30, -24, -20, -10):
        x = torch.randn(500, generator=generator)
        x = x * torch.exp2(torch.randint(-8, 8, (500,), generator=generator) + shift)
        gone = FP16.round(x) == 0
        right = (x[gone].double().abs().sum() / x.double().abs().sum()).item()
        said = number(call(answer, x))
        count = gone.double().mean().item()
        if abs(said - count) < 1e-3 < abs(right - count):
            raise WrongAnswer("that is the share of their number, not of their magnitude.")
        demand(abs(said - right) < 1e-3, f"for 500 gradients you say {said:.3f}, not {right:.3f}.")
    said = number(call(answer, torch.zeros(3)))
    demand(said == 0, "nothing is lost of three zeros: there the share is 0.")


@exercise(
    "Do as an optimizer would: add, in float16, and look whether anything changed.",
    "Adam's first step moves every weight by the learning rate.",
    "Compare (weights.half() - learning_rate) with weights.half(), and take the mean.",
    right="no loss scale appears in it, so none can help.",
)
def swallowed(answer: Any) -> None:
    """A function (weights, learning_rate) -> share of float16 weights that do not move."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2000, generator=generator) * 0.1
    kept = FP16.round(weights)
    for rate in (1e-6, 1e-5, 1e-4, 1e-2):
        right = (FP16.round(kept.double() - rate).float() == kept).double().mean().item()
        said = number(call(answer, weights, rate))
        # Subtracting or adding, in float16 or in float32 and rounded: all are good answers.
        demand(abs(said - right) < 0.02, f"at {rate:g} you say {said:.3f}, not {right:.3f}.")


@exercise(
    "Build a small model, a loss function (model, batch) -> loss, and one batch.",
    "amp_lab.precision_report(model, loss_fn, batch) returns what is wanted.",
    "Keep what it returns: my_report = precision_report(...).",
    right="and now you know what to do with your own model.",
)
def own_report(answer: Any) -> None:
    """A report on a model that the learner chose."""
    demand(
        isinstance(answer, PrecisionReport),
        f"the answer is what precision_report returns, got a {type(answer).__name__}.",
    )
    demand(answer.activation_gradients, "no module's gradient was recorded: is it an nn.Module?")
