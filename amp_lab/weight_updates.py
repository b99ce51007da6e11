"""Would weights kept in half precision take an optimizer's updates, or swallow them?

An update smaller than half an ulp of the weight rounds away. The loss scale has no part in it: an
update is what remains after unscaling. The remedy is to keep the weights in float32 (*master
weights*), which is what autocast does.
"""

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_lab.formats import FloatFormat

Shadow = tuple[Optimizer, nn.Parameter]
"""An optimizer that holds one copy of a parameter, and this copy: stepping changes nothing else."""


def shadows_of(optimizer: Optimizer, model: nn.Module) -> Callable[[nn.Parameter], Shadow | None]:
    """Return a function that copies the optimizer for a copy of one of its parameters.

    Options and state are those of the parameter; the memory is that of one parameter and its state.
    The function returns None for a parameter that the optimizer does not hold.

    Raises:
        ValueError: the optimizer holds none of the model's parameters, its class cannot be made
            anew from its defaults, or its `step` wants a closure (then pass a learning rate
            instead).
    """
    kind = type(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}

    def shadow(parameter: nn.Parameter) -> Shadow | None:
        if id(parameter) not in groups:
            return None
        group = groups[id(parameter)]
        twin = nn.Parameter(parameter.detach().clone())
        options = {n: value for n, value in group.items() if n not in ("params", "param_names")}
        made = kind([{"params": [twin], **options}], **defaults)
        if state := optimizer.state.get(parameter):
            made.state[twin] = copy.deepcopy(state)
        return made, twin

    held = next((p for p in model.parameters() if id(p) in groups), None)
    if held is None:
        raise ValueError("the optimizer holds none of the parameters: was it made of this model?")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{kind.__name__} needs a closure: pass learning_rate= instead")
    try:
        shadow(held)
    except TypeError as error:
        raise ValueError(
            f"a {kind.__name__} cannot be made from its defaults ({error}): pass learning_rate= "
            "instead of optimizer="
        ) from error
    return shadow


def fresh_adam(learning_rate: float) -> Callable[[nn.Parameter], Shadow]:
    """Return a function that makes an Adam, not yet stepped, for a copy of a parameter."""

    def shadow(parameter: nn.Parameter) -> Shadow:
        twin = nn.Parameter(parameter.detach().clone())
        return torch.optim.Adam([twin], lr=learning_rate), twin

    return shadow


def swallowed(
    parameter: nn.Parameter, gradient: Tensor, shadow: Shadow, fmt: FloatFormat
) -> tuple[int, int]:
    """Count the elements that the next step would change, and those whose change fmt swallows.

    Args:
        parameter: any shape, real; not changed.
        gradient: its unscaled gradient, dense or sparse.
        shadow: what makes the step.
        fmt: the format in which the weights would be kept.

    Returns:
        (swallowed, moved): swallowed elements and all whose update is not zero. What overflows
        fmt is not counted as swallowed.
    """
    stepper, twin = shadow
    if gradient.is_sparse and isinstance(stepper, torch.optim.Adam):
        gradient = gradient.to_dense()
    twin.grad = gradient
    stepper.step()
    with torch.no_grad():
        update = twin.double() - parameter.double()
        kept = fmt.round(parameter.double())
        same = fmt.round(kept + update) == kept
        moves = update != 0
        return int((same & moves).sum()), int(moves.sum())
