"""``torch.distributed.tensor.placement_types``: the three placements."""

from ...placement import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
