"""``torch.nn`` for tensors on device meshes.

A module that makes parameters is a subclass of torch's of the same name and takes two more arguments:
``nn.Linear(64, 64, device_mesh=mesh, placements=[Shard(0)])``. Everything else (``Module``, ``Parameter``,
containers, activations, losses) is torch's own: it works on dtorch tensors as it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn as _nn
from torch.nn import Buffer, Module, Parameter, UninitializedBuffer, UninitializedParameter

from . import functional, init, parallel, parameter, utils
from .parallel import DataParallel
from .placed import NAMES, module_class
from .placing import install

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "Buffer",
    "DataParallel",
    "Module",
    "Parameter",
    "UninitializedBuffer",
    "UninitializedParameter",
    "functional",
    "init",
    "parallel",
    "parameter",
    "utils",
    *(name for name in NAMES if name != "Module"),
]

install()


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(_nn, name):
        raise AttributeError(f"module 'dtorch.nn' has no attribute {name!r}")
    value = module_class(name) if name in NAMES else getattr(_nn, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_nn)})
