"""``torch.testing``, and the proof of sharding rules: :func:`check_sharding`."""

from __future__ import annotations

from torch.testing import FileCheck, assert_allclose, assert_close, make_tensor

from .pieces import Mismatch
from .proof import check_sharding

__all__ = ["FileCheck", "Mismatch", "assert_allclose", "assert_close", "check_sharding", "make_tensor"]
