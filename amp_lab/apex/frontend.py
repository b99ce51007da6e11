"""`initialize`, its undoing, and what goes into a checkpoint."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_lab.apex.handle import switch_on
from amp_lab.apex.loss_scaler import LossScaler
from amp_lab.apex.models import cast_model, check_models
from amp_lab.apex.optimizers import AmpOptimizerState, check_optimizers, recast_state
from amp_lab.apex.properties import BRIEFS, Properties, level_with_overrides
from amp_lab.apex.state import _amp_state
from amp_lab.devices import default_device


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for mixed precision, and return them in the shape given.

        model, optimizer = initialize(model, optimizer, opt_level="O2")

    Call it once, after models and optimizers are made and before a model is wrapped for parallel
    training; load checkpoints after it. `reset()` undoes it.

    Args:
        models, optimizers: one or a list of each; without optimizers only the models come back.
        enabled: False changes nothing and turns all other calls into no-ops.
        opt_level: "O0" float32; "O1" casts around functions; "O2" half model with float32 batch
            normalization and master weights; "O3" half model.
        cast_model_type ... loss_scale: overrides of the level's defaults (see `Properties`);
            "True", "False", "dynamic" and "128.0" are accepted too. Other than in Apex,
            `cast_model_type=torch.bfloat16` gets master weights as well.
        cast_model_outputs: dtype of the models' floating-point outputs, in place of float32.
        num_losses: loss scalers to make, told apart by `loss_id` in `scale_loss`.
        verbosity: 0 prints nothing.
        min_loss_scale, max_loss_scale: bounds of a dynamic loss scale.

    Raises, before anything is changed:
        RuntimeError: unknown level; overrides that contradict it; a model in low precision or
            wrapped already; an optimizer that has been here before.
        TypeError, ValueError: arguments that are not what they should be.

    Source: Apex documentation, page "apex.amp".
    """
    if not enabled:
        _amp_state.opt_properties = Properties()
        return models if optimizers is None else (models, optimizers)
    properties = level_with_overrides(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    model_list = _as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else _as_list(optimizers, Optimizer, "optimizers")
    check_models(model_list)
    check_optimizers(optimizer_list)
    _check_numbers(num_losses, min_loss_scale, max_loss_scale)
    _check_outputs(cast_model_outputs)

    _amp_state.verbosity = verbosity
    _amp_state.opt_properties = properties
    _amp_state.print(f"Apex {opt_level}: {BRIEFS[opt_level]}\n{properties.describe()}", rank0=True)
    for optimizer in optimizer_list:
        _amp_state.undo.callback(recast_state, optimizer)  # last of all, after the weights
    for model in model_list:
        cast_model(model, properties, cast_model_outputs)
    for optimizer in optimizer_list:
        if not properties.master_weights:  # the masters' state stays float32
            recast_state(optimizer)
        AmpOptimizerState(optimizer, bool(properties.master_weights))
    _amp_state.loss_scalers = [
        LossScaler(
            properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
        )
        for _ in range(num_losses)
    ]
    if properties.patch_torch_functions:
        kinds = {p.device.type for model in model_list for p in model.parameters()}
        switch_on(kinds or {default_device().type}, verbose=verbosity == 2)
    return models if optimizers is None else (models, optimizers)


def reset() -> None:
    """Undo everything: models, optimizers and functions are as before `initialize`.

    What was trained stays trained. The models' weights are float32 again: the master weights, or
    where there were none the low-precision values. A weight tensor that was not changed since gets
    back the very bits it had. Gradients of weights that were cast are dropped: they may be scaled.
    """
    undo = _amp_state.undo
    _amp_state.__init__()  # type: ignore[misc]
    undo.close()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `{"loss_scaler0": {"loss_scale": float, "unskipped": int}, "loss_scaler1": ...}`.

    `unskipped` counts the clean backward passes since the scale last moved.
    """
    _amp_state.require_initialized("state_dict")
    destination = {} if destination is None else destination
    for i, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{i}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Set the loss scalers to a state that `state_dict` returned.

    A number of entries other than `num_losses` is reported; those that fit are loaded.

    Raises:
        RuntimeError: before `initialize`, or for a key that is no loss scaler's.
    """
    _amp_state.require_initialized("load_state_dict")
    unexpected = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unexpected:
        raise RuntimeError(f"Not keys of a loss scaler's state: {', '.join(unexpected)}.")
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        _amp_state.print(
            f"The state has {len(state_dict)} loss scalers, num_losses is {len(scalers)}."
        )
    for scaler, saved in zip(scalers, state_dict.values(), strict=False):
        scaler._loss_scale = saved["loss_scale"]
        scaler._unskipped = saved["unskipped"]


def _as_list(value: Any, kind: type, name: str) -> list:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, kind):
            raise TypeError(
                f"{name} must be one {kind.__name__} or a list of them, not {type(item).__name__}."
            )
    return values


def _check_outputs(dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"cast_model_outputs must be a floating-point dtype, not {dtype!r}.")


def _check_numbers(num_losses: int, low: float | None, high: float) -> None:
    if num_losses < 1:
        raise ValueError(f"num_losses must be at least 1, not {num_losses}.")
    if not 0 < (low or high) <= high:
        raise ValueError(f"min_loss_scale={low} and max_loss_scale={high} leave no loss scale.")
