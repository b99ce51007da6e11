"""The four optimization levels of Apex, and how overrides change them.

A level is a set of defaults for five properties; every property can be overridden where the result
makes sense. The source is the documentation page "apex.amp" (section "Opt levels and Properties").
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Properties:
    """What `initialize` does.

    Attributes:
        enabled: False turns every call into a no-op.
        opt_level: "O0", "O1", "O2" or "O3".
        cast_model_type: dtype of the parameters, buffers and inputs of the model; `None` or
            `False` leaves them as they are.
        patch_torch_functions: run torch's functions under autocast.
        keep_batchnorm_fp32: leave batch normalization out when the model is cast.
        master_weights: let the optimizer update float32 copies of low-precision parameters.
        loss_scale: a number, or "dynamic".
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0

    def describe(self) -> str:
        """Return one line for each property."""
        return "\n".join(f"    {f.name:<22}: {getattr(self, f.name)}" for f in fields(self))


LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}

BRIEFS = {
    "O0": "float32 everywhere",
    "O1": "float32 weights, functions cast their inputs to half or to float32",
    "O2": "half model, float32 batch normalization and float32 master weights",
    "O3": "half everywhere",
}


def level_with_overrides(opt_level: str, **overrides: Any) -> Properties:
    """Return the level's properties with every override that is not `None` applied.

    Strings as a command line gives them ("True", "128.0", "dynamic") are accepted.

    Raises:
        RuntimeError: unknown level, or an override that contradicts the level.
        ValueError: an override that is no value of this property.
    """
    if opt_level not in LEVELS:
        raise RuntimeError(
            f"Unknown opt_level {opt_level!r}: choose 'O0', 'O1', 'O2' or 'O3' "
            "(a capital letter O and a digit)."
        )
    given: dict[str, Any] = {
        name: _READ[name](name, value) for name, value in overrides.items() if value is not None
    }
    if opt_level == "O1":
        _refuse_for_o1(given)
    elif given.get("patch_torch_functions"):
        raise RuntimeError(
            f"patch_torch_functions=True contradicts opt_level={opt_level!r}: only 'O1' patches "
            "functions. Choose opt_level='O1', or leave patch_torch_functions out."
        )
    return replace(LEVELS[opt_level], **given)


def _refuse_for_o1(given: dict[str, Any]) -> None:
    """O1 leaves the model in float32 and casts around functions: the other levels' parts clash."""
    if given.get("cast_model_type") not in (None, False, torch.float32):
        raise RuntimeError(
            f"cast_model_type={given['cast_model_type']} contradicts opt_level='O1', which casts "
            "around functions and leaves the weights in float32. To cast the model choose "
            "opt_level='O2' or 'O3'."
        )
    if "keep_batchnorm_fp32" in given:
        raise RuntimeError(
            "keep_batchnorm_fp32 contradicts opt_level='O1': batch normalization's weights stay in "
            "float32 there in any case. Leave keep_batchnorm_fp32 as None."
        )
    if "master_weights" in given:
        raise RuntimeError(
            "master_weights contradicts opt_level='O1': the model's own weights are float32 there. "
            "Leave master_weights as None."
        )


def _read_bool(name: str, value: Any) -> bool:
    words = {"True": True, "False": False}
    if isinstance(value, bool) or (isinstance(value, str) and value in words):
        return words[str(value)]
    raise ValueError(f"{name} must be True, False, 'True', 'False' or None, not {value!r}.")


def _read_cast_model_type(name: str, value: Any) -> torch.dtype | bool:
    if value is False or (isinstance(value, torch.dtype) and value.is_floating_point):
        return value
    raise ValueError(
        f"{name} must be a floating-point dtype such as torch.float16, False or None, "
        f"not {value!r}."
    )


def _read_loss_scale(name: str, value: Any) -> float | str:
    if value == "dynamic":
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if 0 < number < float("inf"):
        return number
    raise ValueError(f"{name} must be 'dynamic' or a positive number, not {value!r}.")


_READ = {
    "cast_model_type": _read_cast_model_type,
    "patch_torch_functions": _read_bool,
    "keep_batchnorm_fp32": _read_bool,
    "master_weights": _read_bool,
    "loss_scale": _read_loss_scale,
}
