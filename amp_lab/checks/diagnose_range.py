"""Checks for 10_diagnose, second part: numbers that leave the format's range."""

from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.checks import WrongAnswer, demand, exercise
from amp_lab.checks.diagnose import attempt
from amp_lab.devices import default_device
from amp_lab.experiments.diagnose import KIND
from amp_lab.experiments.loss_scaling import half_precision
from amp_lab.grad_scaler import GradScaler


def normal(*shape: int) -> Tensor:
    """Return the same normally distributed numbers in every call, on the default device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(default_device())


def result(answer: Any, shape: torch.Size, *arguments: Any) -> Tensor:
    """Return the tensor of this shape that the learner's function returns in half precision."""
    with half_precision():
        output = attempt(answer, *arguments)
    if not isinstance(output, Tensor) or output.shape != shape:
        raise WrongAnswer(f"return a tensor of shape {tuple(shape)}.")
    return output


def demand_finite_gradient(output: Tensor, *inputs: Tensor) -> None:
    """Refuse an output that cannot be differentiated, or with infinities or NaN on the way back."""
    demand(output.requires_grad, "the output does not depend on the input any more.")
    gradients = torch.autograd.grad(output.float().square().sum(), inputs, allow_unused=True)
    for gradient in gradients:
        if gradient is None:
            raise WrongAnswer("the output does not depend on all of the inputs any more.")
        demand(gradient.isfinite().all(), "the output is finite, but its gradient is not.")


@exercise(
    "Which number in the function is the largest, and what is 65504 to it?",
    "300 × 300 is more than 65504, so both terms of the variance are infinite.",
    "Subtract before you square, or leave half precision before you square.",
    right="a variance is a difference of large numbers: take it where there is room for them.",
)
def standardise(answer: Any) -> None:
    """A function from temperatures `(n, features)` in kelvin, half, to mean 0 and deviation 1."""
    kelvin = (300 + 20 * normal(32, 64)).half().requires_grad_()
    expected = kelvin.detach().float()
    expected = expected - expected.mean(-1, keepdim=True)
    expected = expected / expected.square().mean(-1, keepdim=True).sqrt()
    output = result(answer, kelvin.shape, kelvin)
    demand(output.isfinite().all(), "the result is not finite.")
    far = (output.float() - expected).abs().max().item()
    demand(far < 0.1, "the result is finite, but it is not what float32 computes.")
    demand_finite_gradient(output, kelvin)


@exercise(
    "The gradients are NaN at any scale, so the scale is not the cause: which step makes NaN?",
    "A row is matched exactly. What is the derivative of the square root at zero?",
    "Keep the root away from zero: from inside of it, or leave out the rows that are at zero.",
    right="no scale cures a NaN; the scaler only kept it from reaching the weights.",
)
def distance_loss(answer: Any) -> None:
    """A function (outputs, targets), both `(n, 2)`, that returns the mean distance."""
    model = nn.Linear(3, 2, bias=False).to(default_device())
    inputs = normal(16, 3)
    inputs[12:] = 0
    weight = normal(2, 3)
    with torch.no_grad():
        model.weight.copy_(weight.flip(0))
    targets = inputs @ weight.t()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(KIND, 2.0**10, history_size=100)
    distances = []
    for _ in range(40):
        optimizer.zero_grad()
        with half_precision():
            outputs = model(inputs)
            loss = attempt(answer, outputs, targets)
        if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
            raise WrongAnswer("return the loss as a tensor with one number, made from the outputs.")
        demand(loss.isfinite(), "the loss is not finite.")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        demand(
            not scaler.history[-1].skipped,
            "the loss is finite, but its gradient is not: the step was skipped.",
        )
        distances.append((outputs.detach().float() - targets).norm(dim=-1).mean().item())
    demand(distances[-1] < distances[0] / 4, "the model does not learn from this loss.")
