"""``torch.distributed.tensor``: same names, same arguments; one process drives every rank.

``DTensor`` is :class:`dtorch.Tensor`. There is no process group to initialise and no current rank: a tensor given
to :func:`distribute_tensor` is the whole value, ``from_local`` takes one tensor per rank or a function of the rank.
"""

from ..._tensor import Tensor as DTensor
from ...factories import distribute_tensor, empty, from_local, full, ones, rand, randn, zeros
from ...placement import Partial, Placement, Replicate, Shard
from . import debug, parallel, placement_types
from .debug import CommDebugMode, visualize_sharding
from .module import distribute_module

if not hasattr(DTensor, "from_local"):
    DTensor.from_local = staticmethod(from_local)  # type: ignore[attr-defined]

__all__ = [
    "CommDebugMode",
    "DTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "debug",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "from_local",
    "full",
    "ones",
    "parallel",
    "placement_types",
    "rand",
    "randn",
    "visualize_sharding",
    "zeros",
]
