"""What `initialize` does to a model under O0, O2 and O3: cast it, its inputs and its outputs.

The module casts its weights and never asks its user to call `.half()`: `forward` is patched so that
floating-point tensors are cast on the way in and cast back to float32 on the way out. `state_dict`
shows float32 too, and where there are master weights it shows those, so that a checkpoint holds the
numbers which the optimizer works on and any other program can load it.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_lab.apex.handle import clear_cast_cache
from amp_lab.apex.nested import LOW_PRECISION, cast_floats
from amp_lab.apex.properties import Properties
from amp_lab.apex.state import _amp_state, patch_method


def check_models(models: list[nn.Module]) -> None:
    """Raise a RuntimeError for models that are wrapped for parallel training or cast already."""
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise RuntimeError(
                f"The model is wrapped in {type(model).__name__} already: initialize the bare "
                "model first and wrap what initialize returns."
            )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dtype in LOW_PRECISION:
                raise RuntimeError(
                    f"{name} is {tensor.dtype} already: pass the model in float32, "
                    "whatever the opt_level. initialize casts it where the level asks for it."
                )


def cast_model(
    model: nn.Module, properties: Properties, cast_model_outputs: torch.dtype | None
) -> None:
    """Cast weights, buffers, inputs and outputs as the properties say."""
    dtype = properties.cast_model_type
    if not isinstance(dtype, torch.dtype):
        _patch_forward(model, None, cast_model_outputs)
        return
    _cast_weights(model, dtype, keep_batchnorm_fp32=bool(properties.keep_batchnorm_fp32))
    _patch_forward(model, dtype, cast_model_outputs or torch.float32)
    for module in model.modules():
        save = module.register_state_dict_post_hook(_show_float32)
        load = module.register_load_state_dict_pre_hook(_load_master_weights)
        _amp_state.undo.callback(save.remove)
        _amp_state.undo.callback(load.remove)


def _cast_weights(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool) -> None:
    """Cast floating-point parameters and buffers; they stay the same objects."""
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, _BatchNorm):
            continue
        for name, tensor in _own_tensors(module):
            if tensor.is_floating_point() and tensor.dtype != dtype:
                _amp_state.undo.callback(_cast_back, module, name, tensor.detach().cpu(), dtype)
                tensor.data = tensor.data.to(dtype)
                tensor.grad = None
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _cast_back(module: nn.Module, name: str, original: Tensor, dtype: torch.dtype) -> None:
    """Undo the cast. Values that have not changed since get their old bits back, too.

    By now the optimizer has put its master weights in the place of the low-precision ones.
    """
    tensor = getattr(module, name)
    now = tensor.data.to(original.dtype)
    original = original.to(tensor.device)
    unchanged = torch.equal(original.to(dtype).to(original.dtype), now)
    tensor.data = original if unchanged else now
    tensor.grad = None


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the name and tensor of each parameter and buffer that the module itself holds."""
    own = chain(module._parameters.items(), module._buffers.items())
    return [(name, tensor) for name, tensor in own if tensor is not None]


def _show_float32(module: nn.Module, state_dict: dict, prefix: str, _metadata: Any) -> None:
    for name, tensor in _own_tensors(module):
        # Buffers that are not persistent are not in the state dict.
        if prefix + name in state_dict and tensor.dtype in LOW_PRECISION:
            state_dict[prefix + name] = _amp_state.masters.get(tensor, tensor).detach().float()


def _load_master_weights(module: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
    """Copy float32 weights to the master weights before the module rounds them for itself."""
    for stash in _amp_state.stashes:
        stash.lazy_init()
    for name, tensor in _own_tensors(module):
        master, saved = _amp_state.masters.get(tensor), state_dict.get(prefix + name)
        if master is not None and saved is not None and saved.shape == master.shape:
            master.data.copy_(saved)


def _patch_forward(
    model: nn.Module, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None
) -> None:
    def cast_around(forward: Callable, *args: Any, **kwargs: Any) -> Any:
        clear_cast_cache()  # the weights may have changed since the last call
        if input_dtype is not None:
            args, kwargs = cast_floats((args, kwargs), input_dtype)
        outputs = forward(*args, **kwargs)
        return outputs if output_dtype is None else cast_floats(outputs, output_dtype)

    patch_method(model, "forward", cast_around)
