"""Copies that stand for views.

Under ``auto_redistribute`` a view may need its base moved, and a conjugate is a view in torch by a bit that dtorch
tensors have not. What these return reads like the view, but lies in
memory of its own: a write to it would not reach the base, nor a write to the base reach it. So its spec is marked
with the version of the base at that moment. A marked spec equals no other, hence no plan is ever found for it and
every use comes by here: reading is allowed while the base is as it was; writing is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import PlacementError
from .dispatch import wrap

if TYPE_CHECKING:
    from .._tensor import Tensor

__all__ = ["UNTRACKED", "mark", "refuse_write", "settled", "version_of"]

# Of a copy whose base has no version: then only writes to the copy are refused.
UNTRACKED = -1


def version_of(base: torch.Tensor) -> int:
    """How often the memory of `base` has been written, as autograd counts; views of it count along."""
    if torch.is_inference_mode_enabled() or base.is_inference():
        return UNTRACKED
    return base._version


def mark(copy: Tensor, version: int) -> Tensor:
    """`copy`, marked as one of a base at `version`."""
    copy._spec = copy._spec.as_copy(version)
    return copy


def settled(t: Tensor) -> Tensor:
    """`t` to read from, without its mark.

    Raises:
        PlacementError: it is a copy that stands for a view, and what it was copied from has been written since.
    """
    spec = t._spec
    if spec.copied is None:
        return t
    if spec.copied != UNTRACKED and not t.is_inference() and t._version != spec.copied:
        raise PlacementError(
            f"{spec.describe()} is a copy that stands for a view (a conjugate, or of a tensor that auto_redistribute "
            "moved), and the tensor has been written since: the copy is out of date.\n"
            "  Write:  take the view again after the write, or redistribute the tensor before both"
        )
    return wrap(spec.as_copy(None), t._ref)


def refuse_write(name: str, t: Any) -> None:
    """Raise if `t`, which `name` would write, is a copy that stands for a view."""
    if t._spec.copied is not None:
        raise PlacementError(
            f"{name} of {t._spec.describe()}: it is a copy that stands for a view (a conjugate, or of a tensor "
            "that auto_redistribute moved), so the write would not reach that tensor.\n"
            "  Write:  x = x.clone()  to write to the copy alone, or redistribute the tensor before it is viewed"
        )
