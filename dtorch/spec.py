"""TensorSpec: all that is known of a tensor without holding its values.

Specs are interned: equal specs are one object, so keys of the dispatch cache compare and hash by identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .interning import Interned
from .placement import REPLICATE, Partial, Placement, Replicate, Shard, as_placements

if TYPE_CHECKING:
    import torch

    from .mesh import DeviceMesh

__all__ = ["TensorSpec", "chunk_sizes", "contiguous_stride", "cut", "cuts", "resolve"]


@lru_cache(maxsize=65536)
def chunk_sizes(size: int, n: int) -> tuple[int, ...]:
    """Lengths of the pieces of ``torch.chunk(size, n)``, padded with zeros to `n` pieces."""
    c = -(-size // n) if size else 0
    return tuple(max(0, min(c, size - i * c)) for i in range(n))


@lru_cache(maxsize=65536)
def cut(size: int, n: int, i: int) -> tuple[int, int]:
    """(offset, length) of piece `i` of `size` cut into `n`."""
    c = -(-size // n) if size else 0
    start = min(i * c, size)
    return start, min(c, size - start)


def cuts(size: int, ns: tuple[int, ...]) -> list[int]:
    """Lengths of all pieces of `size` cut by each of `ns` in turn, outer cut first."""
    out = [size]
    for n in ns:
        out = [c for s in out for c in chunk_sizes(s, n)]
    return out


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, as torch gives them (sizes of 0 count as 1)."""
    out, step = [], 1
    for s in reversed(shape):
        out.append(step)
        step *= max(s, 1)
    return tuple(reversed(out))


class TensorSpec:
    """Global shape, stride (in elements), dtype, mesh and placements. Immutable and interned.

    Make one with :meth:`of`; never call the constructor.
    """

    __slots__ = ("__weakref__", "_regions", "copied", "dtype", "mesh", "numel", "placements", "shape", "stride")

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    numel: int
    copied: Any
    """None; or, of a copy that stands for a view, what it stands for: see runtime.copies."""

    @staticmethod
    def of(
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
    ) -> TensorSpec:
        """The one spec of these values; `stride` None is contiguous. `placements` must be resolved."""
        if stride is None:
            stride = contiguous_stride(shape)
        key = (shape, stride, dtype, mesh, placements)
        return _interned.get(key) or _interned.add(key, _made(*key, None))

    def as_copy(self, standing: Any) -> TensorSpec:
        """The spec of a copy that stands for a view, as `standing` says; with None, the ordinary one."""
        key = (self.shape, self.stride, self.dtype, self.mesh, self.placements)
        if standing is None:
            return TensorSpec.of(*key)
        marked = (*key, standing)
        return _interned.get(marked) or _interned.add(marked, _made(*key, standing))

    def __copy__(self) -> TensorSpec:
        return self

    def __deepcopy__(self, memo: object) -> TensorSpec:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # What a copy was made of stays behind: elsewhere it is a tensor like any other.
        return TensorSpec.of, (self.shape, self.stride, self.dtype, self.mesh, self.placements)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_partial(self) -> bool:
        return any(type(p) is Partial for p in self.placements)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return all(type(p) is Replicate for p in self.placements)

    @property
    def is_contiguous(self) -> bool:
        return self.stride == contiguous_stride(self.shape) or self.numel == 0

    def region(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(offset, length) in the global tensor, per tensor dim, of what `rank` holds."""
        found = self._regions.get(rank)
        if found is None:
            spans = [(0, s) for s in self.shape]
            for p, n, c in zip(self.placements, self.mesh.shape, self.mesh.coordinates[rank], strict=True):
                if type(p) is Shard:
                    start, length = spans[p.dim]
                    offset, length = cut(length, n, c)
                    spans[p.dim] = (start + offset, length)
            found = self._regions[rank] = tuple(spans)
        return found

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the piece `rank` holds; uneven and empty pieces included."""
        return tuple(length for _, length in self.region(rank))

    def local_offset(self, rank: int) -> tuple[int, ...]:
        """Where the piece of `rank` starts in the global tensor."""
        return tuple(start for start, _ in self.region(rank))

    def local_stride(self, rank: int) -> tuple[int, ...] | None:
        """Strides of the piece: dims in the global tensor's memory order, packed. None where the global
        strides are not those of a dense tensor (a view with holes, an expanded dim): then any will do."""
        if self.is_contiguous:
            return contiguous_stride(self.local_shape(rank))
        order = sorted(range(self.ndim), key=lambda d: (self.stride[d], self.shape[d]))
        step = 1
        for d in order:
            if self.shape[d] != 1 and self.stride[d] != step:
                return None
            step *= self.shape[d]
        local, out, step = self.local_shape(rank), [0] * self.ndim, 1
        for d in order:
            out[d] = step
            step *= max(local[d], 1)
        return tuple(out)

    def with_placements(self, placements: tuple[Placement, ...], mesh: DeviceMesh | None = None) -> TensorSpec:
        """The same tensor placed otherwise."""
        return TensorSpec.of(self.shape, self.stride, self.dtype, mesh or self.mesh, placements)

    def describe(self) -> str:
        """Short form for messages: ``float32[4, 128] [Shard(1)]``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} {list(self.placements)}"

    def __repr__(self) -> str:
        return f"TensorSpec({self.describe()} on {self.mesh.describe()})"


_interned: Interned[TensorSpec] = Interned()


def _made(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    copied: Any,
) -> TensorSpec:
    made = TensorSpec()
    made.shape, made.stride, made.dtype, made.mesh, made.placements = shape, stride, dtype, mesh, placements
    made.copied = copied
    made.numel = math.prod(shape)
    made._regions = {}
    return made


def resolve(
    mesh: DeviceMesh,
    placements: Sequence[Any] | Placement | None,
    ndim: int,
    keep: TensorSpec | None = None,
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Where a tensor of `ndim` dims lies that was asked for on `mesh`: a mesh of its own, and resolved placements.

    A slice such as ``mesh["tp"]`` stands for dims of its parent: the tensor lives on the parent, with
    `placements` on those dims. On the others it keeps what `keep` has there, the spec of the tensor that is
    moved, where that already lives on the parent; else Replicate.

    Raises:
        ValueError: as :func:`~dtorch.placement.as_placements`.
    """
    resolved = as_placements(placements, mesh.ndim, ndim)
    parent = mesh.parent
    if parent is None:
        return mesh, resolved
    whole: list[Placement] = [REPLICATE] * parent.ndim
    if keep is not None and keep.mesh is parent:
        whole = list(keep.placements)
    for dim, placement in zip(mesh.parent_dims, resolved, strict=True):
        whole[dim] = placement
    return parent, as_placements(whole, parent.ndim, ndim)
