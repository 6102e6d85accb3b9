"""``torch.distributed.tensor.parallel``: tensor parallelism by a plan of styles.

A style changes one mesh dim and keeps the others, so ``parallelize_module(model, mesh["tp"], plan)`` composes with
what lies on ``mesh["dp"]``. Tensors keep their global shape: what torch calls a local output is here the same
tensor, placed as `output_layouts` says.
"""

from .api import parallelize_module
from .loss import loss_parallel
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .style import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
