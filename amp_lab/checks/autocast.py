"""Checks for 05_autocast."""

from typing import Any

import torch
from torch import nn

from amp_lab.autocast import autocast
from amp_lab.checks import WrongAnswer, call, demand, exercise, number
from amp_lab.experiments.autocast import casts_of
from amp_lab.op_policy import Policy, table

_HALF, _SINGLE, _DOUBLE = torch.float16, torch.float32, torch.float64


@exercise(
    "If all tensors have one dtype there is nothing to do.",
    "torch.cat of a float16 and a float32 tensor is to happen in the wider of the two.",
    "Return torch.float32 if it occurs, else torch.float16.",
    right="as torch does for cat, stack and their like.",
)
def promote(answer: Any) -> None:
    """A function from a list of dtypes (float16, float32) to the dtype that all are cast to."""
    for dtypes in ([_HALF], [_SINGLE], [_HALF, _SINGLE], [_SINGLE, _HALF, _HALF], [_HALF] * 3):
        with autocast("cpu", _HALF, emulate=True):
            expected = torch.cat([torch.ones(1, dtype=d) for d in dtypes]).dtype
        said = call(answer, list(dtypes))
        demand(isinstance(said, torch.dtype), "return a dtype, such as torch.float32.")
        demand(said == expected, f"for {dtypes} you say {said}.")


@exercise(
    "Look the names up with amp_lab.op_policy.table('cuda').",
    "normalize is a function written in Python: it computes a norm and divides by it.",
    "Its row says 'its parts': of these it is the norm that is listed.",
    right="what is listed is the norm inside of it; the division runs in what it gets.",
)
def unlisted(answer: Any) -> None:
    """Which of matmul, conv2d, softmax, pow, normalize, sum is no listed operation on CUDA."""
    rows = {row.operation: row.policy for row in table("cuda")}
    demand(isinstance(answer, str), "the answer is a name, in quotes.")
    names = ("matmul", "conv2d", "softmax", "pow", "normalize", "sum")
    demand(answer in names, f"choose one of {', '.join(names)}.")
    policy = rows.get(answer)
    demand(policy in (None, Policy.PARTS), f"{answer} is listed, with the policy {policy!r}.")


@exercise(
    "Autocast never changes a parameter; it casts a copy for the operation.",
    "The optimizer sees parameters and their .grad, and both have one dtype.",
    "The activation's gradient has the activation's dtype; the cast back is a node of the graph.",
    right="only the activation and its gradient are in 16 bits.",
)
def dtypes(answer: Any) -> None:
    """A dict of the dtypes of weight, weight.grad, activation, and Adam's exp_avg after a step."""
    if not isinstance(answer, dict):
        raise WrongAnswer("the answer is a dict from names to dtypes.")
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    with autocast("cpu", _HALF, emulate=True):
        activation = layer(torch.ones(2, 3))
    activation.float().sum().backward()
    optimizer.step()
    truth = {
        "weight": layer.weight.dtype,
        "weight.grad": layer.weight.grad.dtype if layer.weight.grad is not None else None,
        "activation": activation.dtype,
        "exp_avg": optimizer.state[layer.weight]["exp_avg"].dtype,
    }
    demand(set(answer) == set(truth), f"name each of {', '.join(truth)}.")
    if ... in answer.values():
        raise WrongAnswer("not all dtypes are filled in.")
    wrong = [name for name, dtype in truth.items() if answer[name] != dtype]
    demand(not wrong, f"{len(wrong)} of the four are not so; one of them is {wrong[:1]}.")


@exercise(
    "The cache lives until the outermost region ends.",
    "With the cache a float32 weight is cast once, without it in each use.",
    "Count the casts of one weight that is used five times.",
    right="one cast is remembered; the others would each have made a copy of the weight.",
)
def casts_saved(answer: Any) -> None:
    """How many casts of a weight does the cache save that is used five times in a region."""
    truth = casts_of(5, cache_enabled=False) - casts_of(5, cache_enabled=True)
    said = number(answer)
    demand(said <= truth, f"without the cache there are {casts_of(5, False)} casts in all.")
    demand(said >= truth, f"with the cache there is {casts_of(5, True)} cast left.")
