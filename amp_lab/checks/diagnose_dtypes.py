"""Checks for 10_diagnose, third part: what runs in half precision and what does not."""

from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from amp_lab.autocast import is_autocast_enabled
from amp_lab.checks import demand, exercise
from amp_lab.checks.diagnose import (
    attempt,
    demand_moved,
    float32_steps,
    output_dtypes,
    strayed,
)
from amp_lab.experiments.diagnose import (
    KIND,
    batches,
    flat,
    normed,
    older_autocast,
    patient,
    prices,
)


@exercise(
    "Which dtype do the gradients have that the scaler is to unscale, and why?",
    "model.half() converts the weights themselves. Who casts them only where they are used?",
    "Leave model and inputs in float32, and compute the loss in a half-precision region.",
    right="the weights stay in float32, and half precision is where the products are.",
)
def train(answer: Any) -> None:
    """A function (model, optimizer, scaler, batches) that trains in mixed precision."""
    few = batches(5)
    model, optimizer, scaler = patient()
    seen = output_dtypes(model)
    attempt(answer, model, optimizer, scaler, few)
    dtypes = {p.dtype for p in model.parameters()}
    demand(dtypes == {torch.float32}, "the weights are in half precision and swallow updates.")
    demand_moved(model)
    weights = flat(list(model.parameters()))
    rounded = torch.equal(weights, weights.half().float())
    demand(not rounded, "the weights are float32, but were rounded to float16 on the way.")
    demand(torch.float16 in seen, "it trains, but nothing of it runs in half precision any more.")
    reference = float32_steps([[batch] for batch in few])
    demand(strayed(model, reference) < 0.02, "the weights are not those of float32.")


@exercise(
    "Where does the loss run, and in which dtype? What is 500 squared in float16?",
    "In the region autocast runs losses in float32; so the loss belongs into it.",
    "Forward pass and loss inside; scale, backward, step and update outside.",
    right="the loss is computed where autocast protects it, and backward where nothing interferes.",
)
def regress(answer: Any) -> None:
    """A function (model, optimizer, scaler, batch) that makes one step on the root mean square."""
    model, optimizer, scaler, batch = prices()
    reference, plain, _, _ = prices()
    seen = output_dtypes(model)
    inside = []
    original = torch.autograd.backward

    def backward(*arguments: Any, **options: Any) -> None:
        inside.append(is_autocast_enabled(KIND) or torch.is_autocast_enabled(KIND))
        original(*arguments, **options)

    with mock.patch.object(torch.autograd, "backward", backward):
        for _ in range(5):
            attempt(answer, model, optimizer, scaler, batch)
    for _ in range(5):
        plain.zero_grad()
        F.mse_loss(reference(batch[0]), batch[1]).sqrt().backward()
        plain.step()
    demand(model.weight.any(), "the weights have not moved: the gradient is zero or not finite.")
    demand(torch.float16 in seen, "the model does not run in half precision any more.")
    demand(not any(inside), "backward() runs inside the region.")
    goal, end = (flat(list(m.parameters())) for m in (reference, model))
    demand((end - goal).norm() < 0.02 * goal.norm(), "the weights are not those of float32.")


@exercise(
    "Which parameters have no gradient, and what happened to them before the loss?",
    "They were cast under no_grad, and a region keeps its casts until it ends.",
    "Let the cast be made anew: a region for each forward pass, or one that keeps nothing.",
    right="the loss uses casts that know which weights they come from.",
)
def consistency(answer: Any) -> None:
    """A function (model, inputs, region): a backward pass with the mirrored picture's output."""
    inputs = batches(1)[0][0]
    model, reference = normed(), normed()
    seen = output_dtypes(model)
    attempt(answer, model, inputs, older_autocast)
    with torch.no_grad():
        goal = reference(inputs.flip(-1)).softmax(-1)
    F.cross_entropy(reference(inputs), goal).backward()
    demand(torch.float16 in seen, "the model does not run in half precision any more.")
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    demand(not missing, f"without a gradient: {', '.join(missing)}.")
    goals = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        ours, theirs = flat([parameter.grad]), flat([goals[name].grad])
        demand(
            (ours - theirs).norm() < 0.03 * theirs.norm(),
            f"the gradient of {name} is not that of float32: is the goal constant?",
        )
