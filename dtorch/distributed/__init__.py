"""``torch.distributed`` where one process drives every device.

There are no peers to meet, so what sets up and tears down process groups does nothing, and this process is rank 0
of 1. There are no local tensors to send either: a tensor is one global value, and moving it between placements
chooses the collective. So torch's collectives are refused, each with the line to write instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..mesh import DeviceMesh, init_device_mesh
from . import device_mesh, fsdp, tensor

__all__ = [
    "DeviceMesh",
    "barrier",
    "destroy_process_group",
    "device_mesh",
    "fsdp",
    "get_backend",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "init_process_group",
    "is_available",
    "is_initialized",
    "new_group",
    "tensor",
]

INSTEAD = {
    "all_reduce": "t.redistribute(placements=[Replicate()]) of a Partial() tensor",
    "reduce": "t.redistribute(placements=[Replicate()]) of a Partial() tensor",
    "all_gather": "t.full_tensor(), or t.redistribute(placements=[Replicate()])",
    "gather": "t.full_tensor(), or t.redistribute(placements=[Replicate()])",
    "reduce_scatter": "t.redistribute(placements=[Shard(0)]) of a Partial() tensor",
    "scatter": "distribute_tensor(t, mesh, [Shard(0)])",
    "broadcast": "distribute_tensor(t, mesh, [Replicate()])",
    "all_to_all": "t.redistribute(placements=[Shard(1)]) of a Shard(0) tensor",
    "send": "t.redistribute(other_mesh, placements)",
    "recv": "t.redistribute(other_mesh, placements)",
}


def is_available() -> bool:
    """True."""
    return True


def is_initialized() -> bool:
    """True: there is nothing to initialise, now or later."""
    return True


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Accepted and ignored: the executors are started when a mesh needs them."""


def destroy_process_group(*args: Any, **kwargs: Any) -> None:
    """Accepted and ignored: the executors stop with the program, or by ``dtorch.shutdown()``."""


def new_group(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: a mesh says which devices work together."""
    raise NotImplementedError("dtorch.distributed.new_group: make a DeviceMesh of those devices instead")


def barrier(*args: Any, **kwargs: Any) -> None:
    """Accepted and ignored: all work is in one order. To wait for it, ``dtorch.Graph.default_graph().sync()``."""


def get_rank(*args: Any, **kwargs: Any) -> int:
    """0: there is one process. Ranks of a mesh are positions in it, ``mesh.get_coordinate(rank)``."""
    return 0


def get_world_size(*args: Any, **kwargs: Any) -> int:
    """1: there is one process. The number of devices is ``mesh.size()``."""
    return 1


def get_backend(*args: Any, **kwargs: Any) -> str:
    """Which collectives move tensors is chosen for each move."""
    return "dtorch"


def _refuse(name: str) -> Any:
    stem = name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_object").removesuffix("_list")
    key = next((k for k in sorted(INSTEAD, key=len, reverse=True) if stem.removeprefix("i").startswith(k)), None)
    write = f"write {INSTEAD[key]}" if key else "say with placements where tensors lie"

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"dtorch.distributed.{name}: one process drives all ranks, and a tensor is one global value; {write}"
        )

    refused.__name__ = refused.__qualname__ = name
    return refused


def __getattr__(name: str) -> Any:
    theirs = getattr(torch.distributed, name, None)  # noqa: TID251 - to look a name up, not to use a process group
    if name.startswith("_") or theirs is None:
        raise AttributeError(f"module 'dtorch.distributed' has no attribute {name!r}")
    # Types and constants (ReduceOp, Backend) are values to pass around; what acts is refused.
    return theirs if isinstance(theirs, type) or not callable(theirs) else _refuse(name)
