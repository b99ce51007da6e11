"""The Apex front end: `amp.initialize` and `amp.scale_loss`, for code that was written for Apex.

Apex was NVIDIA's extension that brought mixed precision to PyTorch before `torch.amp`. Its `amp`
was removed in May 2025 (pull request 1896 of NVIDIA/apex). Write

    from amp_lab import apex as amp

where a program has `from apex import amp`, and it runs again, on a CPU, too:

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    ...
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

Signatures, behaviour and checkpoints are those of Apex's last `amp`. What differs:

- It runs on every device, `reset()` undoes everything, and wrong arguments are refused before
  anything is changed.
- `cast_model_type=torch.bfloat16` gets master weights, too. Batch normalization without weights of
  its own stays in float32 like any other under `keep_batchnorm_fp32`.
- `state_dict` of an O2 model holds the master weights and `load_state_dict` restores them, so that
  training resumes bit for bit; Apex saved the half weights as float32.
- An overflow whose check was delayed (`delay_overflow_check`) counts at the next check; Apex forgot
  it.
- O1 casts what torch's autocast casts on a GPU, not what Apex's own, older lists name.

A good order to read: `properties` (the four levels), `frontend` (`initialize`), `models`,
`optimizers` (master weights), `scale_loss` with `loss_scaler`, `handle` and `functions` (O1).
"""

from amp_lab.apex.frontend import initialize, load_state_dict, reset, state_dict
from amp_lab.apex.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_lab.apex.handle import AmpHandle, NoOpHandle, disable_casts, init
from amp_lab.apex.loss_scaler import LossScaler
from amp_lab.apex.optimizers import master_params
from amp_lab.apex.properties import Properties
from amp_lab.apex.scale_loss import scale_loss
from amp_lab.apex.state import _amp_state

__all__ = [
    "AmpHandle",
    "LossScaler",
    "NoOpHandle",
    "Properties",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "scale_loss",
    "state_dict",
]
