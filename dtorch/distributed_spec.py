"""Meshes, placements and what makes and moves tensors with them, under the import path of the first documents."""

from .distributed.tensor import DTensor, distribute_module, distribute_tensor
from .mesh import DeviceMesh, init_device_mesh
from .placement import Partial, Placement, Replicate, Shard
from .spec import TensorSpec

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "TensorSpec",
    "distribute_module",
    "distribute_tensor",
    "init_device_mesh",
]
