"""dtorch: one program drives many devices, in plain PyTorch.

    import dtorch
    a = dtorch.randn(4, 8)
    print((a @ a.T).relu().sum())

Names are loaded when they are first used, so that an executor, which starts inside this package, does not load the
client. What is not dtorch's own is torch's, under the same name.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import aliases

__version__ = "0.1.0"

# name -> module that defines it
_NAMES: dict[str, str] = {
    **dict.fromkeys(["DeviceMesh", "init_device_mesh"], "mesh"),
    **dict.fromkeys(["Partial", "Placement", "Replicate", "Shard"], "placement"),
    **dict.fromkeys(
        [
            "BlockingCallError",
            "BlockingCallWarning",
            "CheckpointError",
            "ConfigError",
            "DeviceMeshError",
            "DtorchError",
            "ExecutorDiedError",
            "OverloadedError",
            "PlacementError",
            "PoolError",
            "PoolRestartingError",
            "RemoteError",
            "RunAheadError",
            "TensorLostError",
        ],
        "errors",
    ),
    "TensorSpec": "spec",
    "on_restart": "runtime.restarting",
    "register_sharding": "sharding.register",
    **dict.fromkeys(["load", "save"], "checkpoint.api"),
    "Tensor": "_tensor",
    "DTensor": "distributed.tensor",
    **dict.fromkeys(["TensorFuture", "VoidFutureCollect"], "future"),
    **dict.fromkeys(["Graph", "GraphOption", "auto_redistribute", "device_mesh"], "graph"),
    **dict.fromkeys(
        [
            "arange",
            "as_tensor",
            "distribute_tensor",
            "empty",
            "eye",
            "from_local",
            "from_numpy",
            "from_torch",
            "full",
            "get_rng_state",
            "linspace",
            "logspace",
            "manual_seed",
            "ones",
            "rand",
            "randint",
            "randn",
            "randperm",
            "set_rng_state",
            "tensor",
            "zeros",
        ],
        "factories",
    ),
    **dict.fromkeys(
        [
            "asarray",
            "bartlett_window",
            "blackman_window",
            "empty_permuted",
            "empty_strided",
            "from_dlpack",
            "from_file",
            "frombuffer",
            "hamming_window",
            "hann_window",
            "kaiser_window",
            "normal",
            "range",
            "scalar_tensor",
            "tril_indices",
            "triu_indices",
        ],
        "constants",
    ),
    **dict.fromkeys(
        ["clear_errors", "configure", "default_graph", "device_mesh_guard", "get_default_device_mesh", "restart",
         "shutdown", "tensors_redistribute_by_dict"],
        "control",
    ),
    **dict.fromkeys(["cond", "where", "while_loop"], "control_flow"),
    **dict.fromkeys(["fork_rng", "initial_seed", "seed"], "random"),
    **dict.fromkeys(["distribute_module"], "distributed.tensor"),
    **dict.fromkeys(["CommDebugMode", "visualize_sharding"], "distributed.tensor.debug"),
    **dict.fromkeys(
        [
            "ColwiseParallel",
            "PrepareModuleInput",
            "PrepareModuleInputOutput",
            "PrepareModuleOutput",
            "RowwiseParallel",
            "SequenceParallel",
            "parallelize_module",
        ],
        "distributed.tensor.parallel",
    ),
}  # fmt: skip
_MODULES = frozenset(
    (
        "aio autograd distributed distributed_spec errors fft graph linalg mesh "
        "nn optim placement random signal special testing utils"
    ).split()
)


# Modules whose names say nothing of a tensor yet: they start nothing.
_QUIET = frozenset(["errors", "mesh", "placement", "spec"])


def _warm_up() -> None:
    """Have the pool's warden import torch while this process does; each takes a second."""
    if "torch" not in sys.modules:
        importlib.import_module("dtorch.executor.pool").prestart()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
    module = _NAMES.get(name)
    if module not in _QUIET and name not in _QUIET:
        _warm_up()
    if module == "mesh":
        # model.to(mesh) is to work in a program that has used nothing else of dtorch.
        importlib.import_module("dtorch.nn")
    if module is not None:
        found = getattr(importlib.import_module(f"dtorch.{module}"), name)
    elif name in _MODULES:
        found = importlib.import_module(f"dtorch.{name}")
    else:
        # torch's own functions work on dtorch tensors once the proxy class is known to torch's dispatcher.
        importlib.import_module("dtorch.factories")
        try:
            found = getattr(importlib.import_module("torch"), name)
        except AttributeError:
            raise AttributeError(f"module 'dtorch' has no attribute {name!r}, and torch has none either") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*_NAMES, *_MODULES, *dir(importlib.import_module("torch"))})


aliases.install()

# `from dtorch import *`: dtorch's own names, as each is needed.
__all__ = sorted({*_NAMES, *_MODULES})  # pyright: ignore[reportUnsupportedDunderAll]
