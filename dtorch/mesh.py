"""DeviceMesh: which logical devices hold a tensor, and what the dims of that grid are called.

A mesh is a value: two meshes of the same devices, shape and names are one object (interned), so that the
hot path may compare them by identity. Rank `r` of a mesh is its r-th device in row-major order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

from .errors import DeviceMeshError

__all__ = ["DeviceMesh", "init_device_mesh"]

_interned: WeakValueDictionary[tuple[Any, ...], DeviceMesh] = WeakValueDictionary()


def _nested_shape(x: Any) -> tuple[tuple[int, ...], list[int]]:
    """Shape and row-major values of an int, a range, nested sequences, or anything with ``tolist``."""
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, int) and not isinstance(x, bool):
        return (), [x]
    if not isinstance(x, Sequence) or isinstance(x, str):
        raise DeviceMeshError(f"DeviceMesh: {x!r} is no device id: give nested lists of ints, or an int tensor")
    parts = [_nested_shape(y) for y in x]
    if not parts:
        raise DeviceMeshError("DeviceMesh: a mesh needs at least one device")
    if any(p[0] != parts[0][0] for p in parts):
        raise DeviceMeshError(f"DeviceMesh: {x!r} is ragged: every row must have the same length")
    return (len(parts), *parts[0][0]), [v for _, vs in parts for v in vs]


class DeviceMesh:
    """A grid of logical devices of one type.

    Args:
        device_type: "cpu" or "cuda".
        mesh: device ids as nested lists, a range, or an int tensor; None is the one-device mesh ``[0]``.
        mesh_dim_names: one name per dim.

    Raises:
        DeviceMeshError: duplicate or negative ids, ragged rows, or as many names as there are not dims.
    """

    device_type: str
    shape: tuple[int, ...]
    ids: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None

    def __new__(
        cls, device_type: str, mesh: Any = None, *, mesh_dim_names: Sequence[str] | None = None
    ) -> DeviceMesh:
        device_type, index = _device_type(device_type)
        shape, ids = _nested_shape([index] if mesh is None else mesh)
        if not shape:
            shape = (1,)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        if isinstance(mesh_dim_names, str):
            names = (mesh_dim_names,)
        key = (device_type, shape, tuple(ids), names)
        found = _interned.get(key)
        if found is not None:
            return found
        if len(set(ids)) != len(ids):
            raise DeviceMeshError(f"DeviceMesh({device_type!r}, {mesh}): a device id occurs twice")
        if min(ids) < 0:
            raise DeviceMeshError(f"DeviceMesh({device_type!r}, {mesh}): device ids must not be negative")
        if names is not None:
            if len(names) != len(shape):
                raise DeviceMeshError(
                    f"mesh_dim_names={list(names)}: {len(names)} names for a mesh of {len(shape)} dims, shape {shape}"
                )
            if len(set(names)) != len(names):
                raise DeviceMeshError(f"mesh_dim_names={list(names)}: a name occurs twice")
        self = super().__new__(cls)
        self.device_type, self.shape, self.ids, self.mesh_dim_names = key
        _interned[key] = self
        return self

    @property
    def ndim(self) -> int:
        """Number of mesh dims (1 for a single device)."""
        return len(self.shape)

    @cached_property
    def nranks(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.shape)

    def size(self, dim: int | str | None = None) -> int:
        """Number of devices, of the whole mesh or along the mesh dim `dim` (index or name)."""
        return self.nranks if dim is None else self.shape[self.dim_index(dim)]

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one device."""
        return self.nranks > 1

    def dim_index(self, dim: int | str) -> int:
        """The index of the mesh dim `dim`, given by index or by name."""
        if isinstance(dim, str):
            if self.mesh_dim_names is None or dim not in self.mesh_dim_names:
                raise DeviceMeshError(f"{self!r} has no dim named {dim!r}; its names are {self.mesh_dim_names}")
            return self.mesh_dim_names.index(dim)
        if not -self.ndim <= dim < self.ndim:
            raise DeviceMeshError(f"mesh dim {dim} is out of range for {self!r} of {self.ndim} dims")
        return dim % self.ndim

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The coordinate of every rank, in rank order."""
        return tuple(itertools.product(*[range(n) for n in self.shape]))

    def get_coordinate(self, rank: int) -> tuple[int, ...]:
        """Where rank `rank` stands in the grid."""
        if not 0 <= rank < self.nranks:
            raise DeviceMeshError(f"rank {rank} is out of range for {self!r} of {self.nranks} ranks")
        return self.coordinates[rank]

    def __repr__(self) -> str:
        names = self.mesh_dim_names or [str(i) for i in range(self.ndim)]
        dims = ", ".join(f"{n}={s}" if self.mesh_dim_names else f"{s}" for n, s in zip(names, self.shape, strict=True))
        ids = "" if self.ids == tuple(range(self.nranks)) else f", ids={list(self.ids)}"
        return f"DeviceMesh({self.device_type!r}, ({dims}){ids})"

    def describe(self) -> str:
        """Short form for messages: ``cpu(dp=2, tp=2)``."""
        names = self.mesh_dim_names or ("",) * self.ndim
        dims = ", ".join(f"{n}={s}" if n else f"{s}" for n, s in zip(names, self.shape, strict=True))
        return f"{self.device_type}({dims})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.device_type, self.shape, self.ids, self.mesh_dim_names)


def _rebuild(
    device_type: str, shape: tuple[int, ...], ids: tuple[int, ...], names: tuple[str, ...] | None
) -> DeviceMesh:
    nested: Any = list(ids)
    for n in reversed(shape[1:]):
        nested = [nested[i : i + n] for i in range(0, len(nested), n)]
    return DeviceMesh(device_type, nested, mesh_dim_names=names)


def _device_type(device: Any) -> tuple[str, int]:
    text = str(device)
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise DeviceMeshError(f'{text!r} is no device type dtorch knows: write "cpu" or "cuda"')
    return kind, int(index or 0)


def init_device_mesh(
    device_type: str, mesh_shape: int | Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """The mesh of devices 0, 1, 2, … in the given shape; an int is a 1-D shape.

    Raises:
        DeviceMeshError: a size below 1, or as many names as there are not dims.
    """
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
        raise DeviceMeshError(f"init_device_mesh: mesh_shape={mesh_shape!r} must be one or more sizes of at least 1")
    mesh = _rebuild_checked(device_type, shape, mesh_dim_names)
    return mesh


def _rebuild_checked(device_type: str, shape: tuple[int, ...], names: Sequence[str] | None) -> DeviceMesh:
    return _rebuild(device_type, shape, tuple(range(math.prod(shape))), None if names is None else tuple(names))
