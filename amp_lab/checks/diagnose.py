"""Checks for 10_diagnose, first part: training loops. Each runs the learner's repair.

What comes out is compared with what float32 gives from the same weights and batches, so that every
right repair passes, however it is written.
"""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from amp_lab.checks import demand, exercise, run
from amp_lab.experiments.diagnose import Batch, batches, flat, movement, patient, train
from amp_lab.grad_scaler import GradScaler

attempt = partial(run, brief=True)  # the scaler's messages go on after a colon, with the remedy


def float32_steps(
    groups: Iterable[list[Batch]], max_norm: float | None = None, weight: float = 1.0
) -> nn.Module:
    """Return a patient after one float32 step a group, on its batches' mean loss times weight."""
    model, optimizer, _ = patient()
    for group in groups:
        optimizer.zero_grad()
        torch.stack([F.cross_entropy(model(x), y) for x, y in group]).mean().mul(weight).backward()
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


def output_dtypes(model: nn.Module) -> list[torch.dtype]:
    """Return a list to which each forward pass of the model will add the dtype of its output."""
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, arguments, output: seen.append(output.dtype))
    return seen


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


@exercise(
    "What is the norm of the gradients at the moment they are clipped?",
    "They are still multiplied by the scale; the limit is meant for the gradients themselves.",
    "Between backward() and clipping, let the scaler divide: there is a method for it.",
    right="the limit applies to the gradient of the loss, and not to that of the scaled loss.",
)
def clipped_step(answer: Any) -> None:
    """A function (model, optimizer, scaler, batch), one step with the norm clipped to 0.1."""
    few = batches(3)
    model, optimizer, scaler = patient(growth_interval=2)
    for batch in few:
        attempt(answer, model, optimizer, scaler, batch)
    demand_moved(model)
    reference = float32_steps([[batch] for batch in few], max_norm=0.1)
    share = movement(model) / movement(reference)
    demand(share > 0.1, "the weights hardly move: the gradients are still far too small.")
    demand(
        strayed(model, reference) < 0.02,
        "the weights move, but not as in float32 with clipped gradients.",
    )


@exercise(
    "What does the scaler remember of an optimizer, and when does it forget?",
    "update() ends an iteration of the scaler; here there are two of them.",
    "Each step is followed by an update of its own: look at the indentation.",
    right="for the scaler an iteration is one step; update() ends it.",
)
def two_steps(answer: Any) -> None:
    """A function (model, optimizer, scaler, first, second) that makes one step on each batch."""
    four = batches(4)
    model, optimizer, scaler = patient(growth_interval=1)
    for pair in (four[:2], four[2:]):
        attempt(answer, model, optimizer, scaler, *pair)
    demand_moved(model)
    mean = strayed(model, float32_steps([four[:2], four[2:]]))
    total = strayed(model, float32_steps([four[:2], four[2:]], weight=2.0))
    demand(min(mean, total) > 0.02, "that is one step on both batches; each is to make its own.")
    two = strayed(model, float32_steps([[batch] for batch in four]))
    demand(two < 0.02, "the weights are not those of two steps in float32.")


@exercise(
    "How many steps has the optimizer taken, and how many the schedule?",
    "A skipped step is none. Who knows whether a step was skipped?",
    "Ask scaler.step_was_skipped(optimizer), or see whether update() has lowered the scale.",
    right="the schedule counts the optimizer's steps, not the iterations.",
)
def epoch(answer: Any) -> None:
    """A function (model, optimizer, scaler, scheduler, batches) that trains on all batches."""
    model, optimizer, scaler = patient(init_scale=2.0**22, growth_interval=4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt(answer, model, optimizer, scaler, scheduler, batches(16))
    count = len(scaler.history)
    demand(count == 16, f"update() was called {count} times for 16 batches.")
    demand_moved(model)
    taken = sum(not update.skipped for update in scaler.history)
    ahead = scheduler.last_epoch - taken
    demand(ahead <= 0, "the schedule has counted steps that the optimizer has not taken.")
    demand(ahead == 0, "the optimizer has taken steps that the schedule has not counted.")


@exercise(
    "By which number was the second gradient multiplied, and by which was it divided?",
    "The first update() may change the scale that the second step() still needs.",
    "update() belongs after the loop in which all optimizers step.",
    right="every gradient is divided by the scale that it was multiplied with.",
)
def two_models(answer: Any) -> None:
    """A function (first, second, scaler, batch); the first two are pairs of model and optimizer."""
    few = batches(3)
    first, first_optimizer, scaler = patient(growth_interval=1)
    second, second_optimizer, _ = patient()
    for batch in few:
        attempt(answer, (first, first_optimizer), (second, second_optimizer), scaler, batch)
    reference = float32_steps([[batch] for batch in few])
    for name, model in (("first", first), ("second", second)):
        demand_moved(model)
        share = movement(model) / movement(reference)
        demand(
            strayed(model, reference) < 0.02,
            f"the {name} model moved {share:.1f} times as far as in float32, or elsewhere.",
        )


@exercise(
    "Three objects were made anew. Which of them has forgotten what it knew?",
    "The scaler has a scale and a count of good steps; both belong into the checkpoint.",
    "scaler.state_dict() is saved, and load_state_dict() called on the new one.",
    right="the run goes on as if nothing had happened.",
)
def interrupted(answer: Any) -> None:
    """A function (fresh, train, batches): ten batches, an interruption, and the other ten."""
    trained: list[tuple[nn.Module, GradScaler, int, float]] = []

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
        return patient(init_scale=2.0**22, growth_interval=8)

    def recorded(model: nn.Module, optimizer: Any, scaler: GradScaler, part: list[Batch]) -> None:
        trained.append((model, scaler, len(part), scaler.get_scale()))
        train(model, optimizer, scaler, part)

    model, optimizer, scaler = fresh()
    train(model, optimizer, scaler, batches(20))
    attempt(answer, fresh, recorded, batches(20))
    lengths = [length for _, _, length, _ in trained]
    demand(lengths == [10, 10], "train on the first ten batches, and resume with the other ten.")
    (old_model, old_scaler, _, _), (new_model, new_scaler, _, scale) = trained
    same = old_model is new_model or old_scaler is new_scaler
    demand(not same, "a new job has new objects: make them with fresh() and load their states.")
    demand(
        scale == old_scaler.get_scale(),
        "the resumed run does not begin with the scale that the first part ended with.",
    )
    demand(
        new_scaler.state_dict() == scaler.state_dict(),
        "the scale is right at first, but then it changes in other steps than without an "
        "interruption: what decides when it grows?",
    )
    end, goal = (flat(list(m.parameters())) for m in (new_model, model))
    demand(torch.allclose(end, goal, atol=1e-6), "the weights differ from those of a straight run.")
