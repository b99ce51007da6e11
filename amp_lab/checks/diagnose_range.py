"""Checks for 10_diagnose, second part: numbers that leave the format's range."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_lab.checks import WrongAnswer, demand, exercise
from amp_lab.checks.diagnose import attempt, output_dtypes
from amp_lab.devices import default_device
from amp_lab.experiments.diagnose import KIND, sure_and_wrong, two_texts, words_and_texts
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
    attempt(output.float().square().sum().backward)
    for tensor in inputs:
        gradient = tensor.grad
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
    distances: list[float] = []
    for _ in range(40):
        optimizer.zero_grad()
        with half_precision():
            outputs = model(inputs)
            loss = attempt(answer, outputs, targets)
        if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
            raise WrongAnswer("return the loss as a tensor with one number, made from the outputs.")
        demand(loss.isfinite(), "the loss is not finite.")
        attempt(scaler.scale(loss).backward)
        demand(model.weight.grad is not None, "the loss does not depend on the outputs.")
        scaler.step(optimizer)
        scaler.update()
        demand(
            not scaler.history[-1].skipped,
            "the loss is finite, but its gradient is not: the step was skipped.",
        )
        if not distances:
            ordinary = (outputs.detach().float() - targets)[:12].norm(dim=-1).sum() / 16
            demand(
                abs(loss.item() - ordinary) < 0.02 * ordinary + 0.01,
                "that is another loss: it is to be the mean distance.",
            )
        distances.append((outputs.detach().float() - targets).norm(dim=-1).mean().item())
    demand(distances[-1] < distances[0] / 4, "the model does not learn from this loss.")


@exercise(
    "In which rows is the output NaN, and what do their scores look like after both masks?",
    "The lowest number plus anything below -15 is -inf, and a row of nothing but -inf has no "
    "softmax.",
    "Join the two masks into one and fill in the lowest number, where adding it would overflow.",
    right="a number at the edge of the range is for filling in, and not for adding.",
)
def attention(answer: Any) -> None:
    """A function (q, k, v, padding, other_text) -> attention with two masks in half precision."""
    q, k, v, padding, other_text = two_texts()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    output = result(answer, q.shape, q, k, v, padding, other_text)
    forbidden = padding | other_text
    scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(forbidden, -torch.inf)
    expected = (scores.softmax(-1) @ v)[0]
    demand(output[0].isfinite().all(), "the rows that may look at something are not finite.")
    demand(
        torch.allclose(output[0].float(), expected, atol=0.05),
        "a token looks where it may not, or not where it may: the output is not float32's.",
    )
    demand(output.isfinite().all(), "the rows of the empty example are not finite.")
    demand_finite_gradient(output, q, k, v)


@exercise(
    "Which numbers in the function are so small that float16 rounds them to zero?",
    "It is 1e-8, and the squares of all that is below 2^-12 as well.",
    "Convert to float32 before you square, or use an epsilon that float16 knows.",
    right="an epsilon protects only where the format has it.",
)
def rms_norm(answer: Any) -> None:
    """A function from rows of half-precision numbers to rows whose mean square is 1."""
    x = normal(3, 64)
    x[1], x[2] = 0.0, x[2] * 2.0**-14
    half = x.half().requires_grad_()
    output = result(answer, half.shape, half)
    for row, name in enumerate(("ordinary", "empty", "small")):
        demand(output[row].isfinite().all(), f"a row of {name} numbers is not finite.")
    expected = x[0] / x[0].square().mean().sqrt()
    demand(
        torch.allclose(output[0].float(), expected, atol=0.02),
        "a row of ordinary numbers is not what float32 computes.",
    )
    demand(not output[1].any(), "an empty row is to stay empty.")
    demand_finite_gradient(output, half)


@exercise(
    "What does the sigmoid of 12 become in float16, and what is the derivative there?",
    "The loss has to see the logit itself: there is a loss function that takes it.",
    "Leave out the sigmoid, and use the function whose name ends in _with_logits.",
    right="a logit fits into half precision where its probability does not.",
)
def yes_or_no(answer: Any) -> None:
    """A function (model, inputs, targets) -> binary cross entropy, the model in half precision."""
    model, inputs, targets = sure_and_wrong()
    seen = output_dtypes(model)
    loss = attempt(answer, model, inputs, targets)
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
        raise WrongAnswer("return the loss as a tensor with one number, made from the outputs.")
    demand(torch.float16 in seen, "the model does not run in half precision any more.")
    demand(abs(loss.item() - 12) < 0.1, f"the loss is {loss.item():.4g}; in float32 it is 12.")
    attempt(loss.backward)
    gradient = 0.0 if model.weight.grad is None else model.weight.grad.item()
    demand(abs(gradient - 3) < 0.1, f"the gradient is {gradient:.4g}; in float32 it is 3.")


@exercise(
    "Which number is it that leaves the range: a gradient, or something made of them?",
    "The square of 1000 is beyond 65504, the norm infinite, and max_norm / inf is 0.",
    "Compute the norm in float32; the gradients may stay what they are.",
    right="a norm is larger than what it is the norm of, and needs the room.",
)
def clip(answer: Any) -> None:
    """A function (gradients, max_norm) -> float16 gradients whose joint norm is at most that."""
    shapes = ((20, 30), (40,))
    for size, limit, name in (
        (4000.0, 1.0, "large"),
        (2.0**-14, 2.0**-14, "tiny"),
        (1.0, 1000.0, "small enough"),
    ):
        gradients = [(size * normal(*shape)).half() for shape in shapes]
        exact = torch.cat([g.cpu().double().flatten() for g in gradients])
        expected = exact * min(1.0, limit / exact.norm().item())
        clipped = attempt(answer, [g.clone() for g in gradients], limit)
        if not isinstance(clipped, list | tuple) or not all(isinstance(g, Tensor) for g in clipped):
            raise WrongAnswer("return a list of tensors.")
        demand([g.shape for g in clipped] == [g.shape for g in gradients], "the shapes differ.")
        ours = torch.cat([g.detach().cpu().double().flatten() for g in clipped])
        demand(ours.isfinite().all(), f"{name} gradients are not finite after clipping.")
        demand(ours.any(), f"{name} gradients are zero after clipping.")
        ratio = (ours.norm() / expected.norm()).item()
        demand(
            (ours - expected).norm() < 0.02 * expected.norm(),
            f"the norm of {name} gradients is {ratio:.3g} times what it should be, or their "
            "direction has changed.",
        )


@exercise(
    "Which rows of the matrix never have a gradient, and what acts on them all the same?",
    "Weight decay shrinks them below 2^-25, and the float16 copy of that is zero.",
    "Take decay away from what is not used, or see to it that no row becomes so short.",
    right="what has no gradient is at the mercy of weight decay.",
)
def learn(answer: Any) -> None:
    """A function (words, batches) that trains the matrix of word vectors in place."""
    words, texts = words_and_texts()
    start = words.detach().clone()
    attempt(answer, words, texts)
    counts, goal = texts[-1]
    same = words.dtype == start.dtype and words.shape == start.shape
    demand(same, "the matrix is to stay a float32 matrix of that shape.")
    demand(words.isfinite().all(), "the vectors are not finite.")
    rare = words.detach()[32:].half().float()
    demand(rare.any(dim=1).all(), "in float16 the vectors of the rare words are zero.")
    demand(
        F.cosine_similarity(rare, start[32:]).min() > 0.99,
        "the vectors of the rare words have lost their direction in float16.",
    )
    likeness = F.cosine_similarity(counts @ words.detach(), goal).mean()
    demand(likeness > 0.85, "the words in use are not learned.")
