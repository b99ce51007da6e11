"""Reach the tensors inside the arguments and results of a function."""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

LOW_PRECISION = (torch.float16, torch.bfloat16)


def map_tensors(value: Any, function: Callable) -> Any:
    """Return `value` with `function` applied to each tensor in it.

    Tensors are found inside lists, tuples, sets and mutable mappings. What else has a `.to` method,
    such as a batch class of your own, is handed to `function` as well. All else stays as it is.
    """
    if isinstance(value, Tensor) or (hasattr(value, "to") and not isinstance(value, nn.Module)):
        return function(value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # keeps the class, with its other attributes
        for key, item in value.items():
            result[key] = map_tensors(item, function)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every floating-point tensor in it cast to `dtype`."""

    def cast(item: Any) -> Any:
        is_other_tensor = isinstance(item, Tensor) and not item.is_floating_point()
        return item if is_other_tensor else item.to(dtype)

    return map_tensors(value, cast)
