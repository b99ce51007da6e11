"""Would weights kept in half precision take an optimizer's updates, or swallow them?

An update smaller than half an ulp of the weight rounds away. The loss scale has no part in it: an
update is what remains after unscaling. The remedy is to keep the weights in float32 (*master
weights*), which is what autocast does.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_lab.formats import FloatFormat


def shadow(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[Optimizer, nn.Parameter]:
    """Return a copy of the optimizer for a copy of one of its parameters.

    Stepping on the copy changes nothing of the original. Its options and state are those of the
    parameter's group; the memory is that of one parameter and its state.

    Raises:
        ValueError: the parameter is none of the optimizer's, or the class cannot be made anew from
            its defaults (then pass a learning rate instead).
    """
    found = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    group = next(found, None)
    if group is None:
        raise ValueError("the optimizer does not hold this parameter: was it made of this model?")
    twin = nn.Parameter(parameter.detach().clone())
    options = {
        name: value for name, value in group.items() if name not in ("params", "param_names")
    }
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        made = kind([{"params": [twin], **options}], **defaults)
    except TypeError as error:
        raise ValueError(
            f"a {kind.__name__} cannot be made from its defaults ({error}): pass learning_rate= "
            "instead of optimizer="
        ) from error
    state = optimizer.state.get(parameter)
    if state:
        made.state[twin] = copy.deepcopy(state)
    return made, twin


def swallowed(
    parameter: nn.Parameter,
    gradient: Tensor,
    optimizer: Optimizer | Callable[[Any], Optimizer],
    fmt: FloatFormat,
) -> tuple[int, int]:
    """Count the elements that the next step would change, and those whose change fmt swallows.

    Args:
        parameter: any shape, float32; not changed.
        gradient: its unscaled gradient, dense or sparse.
        optimizer: the one that holds the parameter, or what makes one from parameters.
        fmt: the format in which the weights would be kept.

    Returns:
        (swallowed, moved): swallowed elements and all whose update is not zero. What overflows
        fmt is not counted as swallowed.
    """
    if isinstance(optimizer, Optimizer):
        stepper, twin = shadow(optimizer, parameter)
    else:
        twin = nn.Parameter(parameter.detach().clone())
        stepper = optimizer([twin])
        if gradient.is_sparse:
            gradient = gradient.to_dense()  # which every optimizer takes
    twin.grad = gradient
    stepper.step()
    with torch.no_grad():
        update = twin.double() - parameter.double()
        kept = fmt.round(parameter.double())
        same = fmt.round(kept + update) == kept
        moves = update != 0
        return int((same & moves).sum()), int(moves.sum())
