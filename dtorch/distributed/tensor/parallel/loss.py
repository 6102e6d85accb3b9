"""loss_parallel: a cross entropy of logits whose classes are sharded."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ....graph import auto_redistribute

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Generator[None]:
    """Inside, softmax and cross entropy run on a sharded class dim: each rank keeps its classes, and only the
    maximum and the sum of each row move between ranks.

    This is :func:`dtorch.auto_redistribute` under torch's name, so other calls whose placements do not fit are moved
    as well. The backward moves what it needs, inside or outside.
    """
    with auto_redistribute():
        yield
