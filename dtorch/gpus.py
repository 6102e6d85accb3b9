"""How many GPUs there are, asked without initialising CUDA.

A process that has initialised CUDA holds hundreds of megabytes of it and must not be forked. The client does neither:
it asks NVML, which ``nvidia-smi`` asks too, and the GPUs are opened by the executors that own them.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

__all__ = ["count"]

# One folder per GPU, made by the driver.
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def count() -> int:
    """The number of GPUs that torch can use in this environment, ``CUDA_VISIBLE_DEVICES`` considered."""
    # torch is slow to import, and whoever prestarts executors makes meshes before it is there.
    torch: Any = importlib.import_module("torch")
    if torch.version.cuda is None:
        return 0
    found: int = torch.cuda._device_count_nvml()
    if found >= 0:
        return found
    # No NVML: some containers have only the driver's devices.
    there = len(list(_DRIVER_GPUS.iterdir())) if _DRIVER_GPUS.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([v for v in visible.split(",") if v.strip()]))
