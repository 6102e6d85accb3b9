"""Copies that stand for views.

Under ``auto_redistribute`` a view may need its base moved, and a conjugate is a view in torch by a bit that dtorch
tensors have not. What these return reads like the view, but lies in memory of its own: a write to the one does not
reach the other. So its spec says what it stands for, a :class:`Standing`. A marked spec equals no other, hence no plan
is ever found for it and every use comes by here: before it is read it is brought up to date, and what is written to
it is written to its base as well (see `writeback`). Either moves values; where that is not allowed the use raises.

Writes to a base are seen by its version, as autograd counts it. What autograd does not count of the base, a write
by way of its ``.data`` or of its ``unsafe_chunk``, is not seen.

A view of a copy is a copy too, whose parent is the first. The parent at the end of the chain is no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from ..errors import PlacementError
from .client import client
from .dispatch import dispatch, wrap
from .plans import auto_redistribute_on, may_move
from .trees import flat

if TYPE_CHECKING:
    from .._tensor import Tensor
    from ..placement import Placement

__all__ = [
    "FREE", "UNTRACKED", "Standing", "any_copies", "bare", "mark", "refresh", "refuse_write", "settled", "untracked",
    "version_of", "written",
]  # fmt: skip

# Versions of copies whose base has none: each use of them takes the view again, unless nothing at all happened since;
# and of what torch does not call a view (`unsafe_chunk`), of which it says that only its base or only it is written.
UNTRACKED, FREE = -1, -2

_copy = torch.ops.aten.copy_.default


class _Writes:
    """How many writes to copies there were that no version tells of, and the copies there are, by id: threads add and
    take away without a lock."""

    unseen = 0
    copies: ClassVar[set[int]] = set()


class Standing:
    """What a copy stands for: result `at` of ``func(parent, *args, **kwargs)``.

    Attributes:
        parent: what was viewed; a proxy of its own, which nobody makes into something else.
        near: the placements of the parent at which the result is a true view of it; None for a conjugate.
        version: of the base when the copy held what the base does, as autograd counts; or UNTRACKED, or FREE.
        unseen: how many writes there had been by then that no version tells of.
        issued: how many commands there had been by then, of which any may have been a write.
    """

    __slots__ = ("args", "at", "func", "issued", "kwargs", "near", "parent", "unseen", "version")

    def __init__(
        self,
        parent: Tensor,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        at: int,
        near: tuple[Placement, ...] | None,
        version: int,
    ) -> None:
        self.parent, self.func, self.args, self.kwargs = parent, func, args, kwargs
        self.at, self.near = at, near
        _Writes.copies.add(id(self))
        self.agrees(version)

    def __del__(self, _writes: type[_Writes] = _Writes) -> None:
        _writes.copies.discard(id(self))

    def agrees(self, version: int) -> None:
        """The copy holds now what its base does, which is at `version`."""
        self.version, self.unseen = version, _Writes.unseen
        self.issued = client().writer.issued if version == UNTRACKED else 0

    def at_version(self, version: int) -> Standing:
        """The same of a copy that holds now what its base does, which is at `version`."""
        return Standing(self.parent, self.func, self.args, self.kwargs, self.at, self.near, version)

    @property
    def up(self) -> Standing | None:
        """What the parent stands for, where it is a copy itself."""
        return cast("Standing | None", self.parent._spec.copied)

    def chain(self) -> Iterator[Standing]:
        """This one, and what its parents stand for."""
        at: Standing | None = self
        while at is not None:
            yield at
            at = at.up

    @property
    def aliases(self) -> bool:
        """Whether the copy is a true view of its parent, and only the parent is a copy."""
        return self.near == self.parent._spec.placements

    def of(self, base: Tensor) -> Tensor:
        """The view, of another base."""
        return cast("Tensor", flat([dispatch(None, self.func, (), (base, *self.args), self.kwargs)], [])[self.at])

    def is_late(self, version: int) -> bool:
        """Whether the base may have been written since, `version` being what it is at now."""
        if self.version == FREE:
            return False
        if self.version == UNTRACKED:
            return self.issued != client().writer.issued
        return self.version != version or self.unseen != _Writes.unseen


def any_copies() -> bool:
    """Whether there are copies that stand for views, whose versions must be kept."""
    return bool(_Writes.copies)


def version_of(base: torch.Tensor) -> int:
    """How often the memory of `base` has been written, as autograd counts; views of it count along."""
    if torch.is_inference_mode_enabled() or base.is_inference():
        return UNTRACKED
    standing = cast("Tensor", base)._spec.copied
    # What torch does not call a view counts its own writes. Of others the mark says what their base is at.
    return base._version if standing is None or standing.version == FREE else standing.version


def mark(copy: Tensor, standing: Standing) -> Tensor:
    """`copy`, marked as one that stands for a view."""
    copy._spec = copy._spec.as_copy(standing)
    return copy


def bare(t: Tensor) -> Tensor:
    """A proxy of the value of `t`, without its mark."""
    return wrap(t._spec.as_copy(None), t._ref)


def untracked(t: Tensor) -> Tensor:
    """Another proxy of `t` that counts its writes anew, so that the base's version says nothing of it."""
    standing = t._spec.copied
    if standing is None:
        return wrap(t._spec, t._ref)
    settled(t)
    return wrap(t._spec.as_copy(standing.at_version(UNTRACKED)), t._ref)


def _now(t: Tensor) -> int:
    """What the base of `t`, a copy, is at, where that is known."""
    return UNTRACKED if t._spec.copied.version < 0 or t.is_inference() else t._version


def refresh(t: Tensor, *, to_write: bool = False) -> Tensor:
    """The value of `t`, a copy, holding what its base does; before a write, all that it is a copy of does.

    Raises:
        PlacementError: its base has been written, and nothing may be moved here.
    """
    standing, version = t._spec.copied, _now(t)
    late = standing.is_late(version)
    if late and not may_move():
        if version == UNTRACKED:
            # Nobody can say whether it was. What could be moved when the view was taken can be now.
            token = auto_redistribute_on.set(True)
            try:
                return refresh(t)
            finally:
                auto_redistribute_on.reset(token)
        raise PlacementError(
            f"{t._spec.describe()} is a copy that stands for a view (a conjugate, or of a tensor that "
            "auto_redistribute moved), and the tensor has been written since: the copy is out of date.\n"
            "  Write:  take the view again after the write, or redistribute the tensor before both; under "
            "dtorch.auto_redistribute() it is brought up to date by itself"
        )
    # A copy that is up to date was made, or brought there, from parents that were. Without versions nobody knows.
    if late or (to_write and version == UNTRACKED):
        _refresh(standing, t, version)
    return bare(t)


def _refresh(standing: Standing, t: Tensor, version: int) -> bool:
    """Bring `t`, the copy, up to date, its parents first; whether anything was written."""
    above = standing.up is not None and _refresh(standing.up, standing.parent, version)
    if not above and version != UNTRACKED and not standing.is_late(version):
        return False
    if standing.version == FREE and not above:
        return False
    if not standing.aliases:
        own, fresh = bare(t), bare(standing.of(bare(standing.parent)))
        # Of a dim that is expanded, one row stands for all.
        for dim, (size, stride) in enumerate(zip(own._spec.shape, own._spec.stride, strict=True)):
            if not stride and size > 1:
                own, fresh = (dispatch(None, torch.ops.aten.slice.Tensor, (), (x, dim, 0, 1)) for x in (own, fresh))
        dispatch(None, _copy, (), (own, fresh))
    standing.agrees(standing.version if UNTRACKED in (standing.version, version) else version)
    return True


def settled(t: Tensor) -> Tensor:
    """`t` to read from, without its mark.

    Raises:
        PlacementError: it is a copy that stands for a view, what it was copied from has been written since, and
            nothing may be moved here.
    """
    return t if t._spec.copied is None else refresh(t)


def written(t: Tensor, *, alone: bool) -> None:
    """`t` has been written; if it is a copy, then all its parents alike.

    autograd counts that when the call has returned: once, if the call writes nothing else (`alone`).
    """
    if t._spec.copied is None:
        _Writes.unseen += not alone
        return
    version = _now(t)
    counted = alone and version != UNTRACKED and not torch.is_inference_mode_enabled()
    _Writes.unseen += not counted
    for standing in t._spec.copied.chain():
        if counted or standing.version < 0:
            standing.agrees(version + 1 if standing.version >= 0 else standing.version)


def refuse_write(name: str, t: Any) -> None:
    """Raise if `t`, which `name` would write, is a copy that stands for a view."""
    if t._spec.copied is not None:
        base = list(t._spec.copied.chain())[-1].parent._spec
        whole = ", ".join(["Replicate()"] * base.mesh.ndim)
        raise PlacementError(
            f"{name} of {t._spec.describe()}: it is a copy that stands for a view (a conjugate, or of a tensor "
            f"that auto_redistribute moved), so the write would not reach the {base.describe()} that it views.\n"
            "  Write:  x[...] = value  inside dtorch.auto_redistribute(), where writes to such copies reach x; or "
            f"x = x.redistribute(placements=[{whole}])  before x is viewed"
        )
