"""amp-lab: mixed-precision training, from scratch and in the open.

Every module is meant to be read. A good order: `formats` (what a half-precision number is),
`autocast` with `op_policy`, `grad_scaler`, then `histograms` and `report`.
"""

from amp_lab.autocast import (
    autocast,
    clear_autocast_cache,
    custom_bwd,
    custom_fwd,
    get_autocast_dtype,
    is_autocast_enabled,
)
from amp_lab.devices import default_device
from amp_lab.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from amp_lab.grad_scaler import GradScaler
from amp_lab.report import precision_report

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "TF32",
    "FloatFormat",
    "GradScaler",
    "autocast",
    "clear_autocast_cache",
    "custom_bwd",
    "custom_fwd",
    "default_device",
    "get_autocast_dtype",
    "is_autocast_enabled",
    "precision_report",
]
