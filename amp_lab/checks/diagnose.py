"""Checks for 10_diagnose, first part: training loops. Each runs the learner's repair.

What comes out is compared with what float32 gives from the same weights and batches, so that every
right repair passes, however it is written.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from amp_lab.checks import WrongAnswer, demand, exercise
from amp_lab.experiments.diagnose import Batch, batches, flat, patient


def attempt(answer: Any, *arguments: Any) -> Any:
    """Call the learner's function; an error of its becomes a sentence."""
    if not callable(answer):
        raise WrongAnswer("the answer is to be a function; keep the line that starts with def")
    try:
        return answer(*arguments)
    except Exception as error:
        text = f"your function raised {type(error).__name__}: {str(error).split(':')[0]}."
        raise WrongAnswer(text) from error


def float32_steps(groups: Iterable[list[Batch]], max_norm: float | None = None) -> nn.Module:
    """Return a patient after one float32 step for each group, on the mean loss of its batches."""
    model, optimizer, _ = patient()
    for group in groups:
        optimizer.zero_grad()
        torch.stack([F.cross_entropy(model(x), y) for x, y in group]).mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def strayed(model: nn.Module, reference: nn.Module) -> float:
    """Return the distance of the two models' weights, relative to how far the reference moved."""
    start, end, goal = (flat(list(m.parameters())) for m in (patient()[0], model, reference))
    return ((end - goal).norm() / (goal - start).norm()).item()


def demand_moved(model: nn.Module) -> None:
    """Refuse a model whose weights are those it began with."""
    start, end = (flat(list(m.parameters())) for m in (patient()[0], model))
    demand(not torch.equal(start, end), "the weights have not moved.")


@exercise(
    "Who looks for infinities, and has it been called when update() asks for the result?",
    "step() looks at the gradients (and unscale_() does), and both change what they look at.",
    "One step for all micro-batches means: step() and update() both once, after the loop.",
    right="all micro-batches carry the same scale, and it changes when their sum has been used.",
)
def accumulate(answer: Any) -> None:
    """A function (model, optimizer, scaler, micro_batches) that makes one step for all of them."""
    micro = batches(4)
    model, optimizer, scaler = patient(growth_interval=1)
    attempt(answer, model, optimizer, scaler, micro)
    demand_moved(model)
    demand(
        strayed(model, float32_steps([micro])) < 0.02,
        "no error any more, but the step is not that of the mean loss in float32: some "
        "micro-batches count more than others.",
    )
    demand(len(scaler.history) == 1, f"update() was called {len(scaler.history)} times, not once.")
