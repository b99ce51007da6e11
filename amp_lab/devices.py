"""Which device the lab computes on. Nothing else in the lab names one."""

import torch


def default_device() -> torch.device:
    """Return the device to compute on: `cuda`, else `mps`, else `cpu`."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
