"""DeviceMesh: which logical devices hold a tensor, and what the dims of that grid are called.

A mesh is a value: two meshes of the same devices, shape and names are one object (interned), so that the
hot path may compare them by identity. Rank `r` of a mesh is its r-th device in row-major order.

A slice, ``mesh["tp"]``, stands for some dims of its parent. There is no current rank here, so it names no
devices of its own: a tensor placed on a slice lives on the parent (:func:`dtorch.spec.resolve`). What torch
answers for the rank that asks (``get_rank``, ``get_group``, …) is refused with the call to write instead.
"""

from __future__ import annotations

import array
import importlib
import itertools
import math
import os
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ConfigError, DeviceMeshError
from .gpus import count as gpu_count
from .interning import Interned

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMesh", "MeshSlice", "as_mesh", "init_device_mesh", "simulated_gpus"]

DEVICE_TYPES = ("cpu", "cuda")
SIMULATE = "DTORCH_DTENSOR_IN_SAME_DEVICE"
SIMULATED_GPUS = "DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE"

_meshes: Interned[DeviceMesh] = Interned()


class DeviceMesh:
    """A grid of logical devices of one type.

    Args:
        device_type: "cpu" or "cuda"; with `mesh` left out also one device, such as "cuda:1".
        mesh: device ids as nested lists, a range, or an int tensor; None is the one-device mesh ``[0]``.
        mesh_dim_names: one name per dim.

    Attributes:
        device_type: "cpu" or "cuda".
        shape: number of devices along each dim.
        ids: the device id of every rank, in rank order.
        mesh_dim_names: the name of every dim, or None.
        parent: the mesh this is a slice of; None for a mesh of its own.
        parent_dims: for a slice, the dims of the parent it stands for.

    Raises:
        DeviceMeshError: an unknown device type, duplicate or negative ids, ragged rows, as many names as there
            are not dims, or CUDA ids of GPUs that the machine lacks.
    """

    device_type: str
    shape: tuple[int, ...]
    ids: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    parent: DeviceMesh | None = None
    parent_dims: tuple[int, ...] = ()

    def __new__(
        cls,
        device_type: str | torch.device,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        kind, index = _device_type(device_type)
        if mesh is not None and index is not None:
            raise DeviceMeshError(
                f"DeviceMesh({str(device_type)!r}, {mesh}): the ids say which devices; write DeviceMesh({kind!r}, …)"
            )
        shape, ids = _nested_shape([index or 0] if mesh is None else mesh)
        shape = shape or (1,)
        names = _names(mesh_dim_names, shape)
        call = f"DeviceMesh({kind!r}, {_short(ids)})"
        if len(set(ids)) != len(ids):
            twice = next(i for n, i in enumerate(ids) if i in ids[:n])
            raise DeviceMeshError(f"{call}: device id {twice} occurs twice; every rank needs a device of its own")
        if min(ids) < 0:
            raise DeviceMeshError(f"{call}: device ids must not be negative")
        if kind == "cuda":
            _check_gpus(call, max(ids))
        return _intern(kind, shape, tuple(ids), names)

    @property
    def ndim(self) -> int:
        """Number of mesh dims (1 for a single device)."""
        return len(self.shape)

    @cached_property
    def nranks(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of devices, of the whole mesh or along `mesh_dim` (index or name)."""
        return self.nranks if mesh_dim is None else self.shape[self.dim_index(mesh_dim)]

    def numel(self) -> int:
        """Number of devices."""
        return self.nranks

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one device."""
        return self.nranks > 1

    @property
    def mesh(self) -> torch.Tensor:
        """The device ids as a plain int32 tensor of the mesh's shape."""
        # frombuffer, because torch.tensor makes a dtorch tensor inside `with dtorch.device_mesh(…)`.
        torch = _torch()
        return torch.frombuffer(array.array("i", self.ids), dtype=torch.int32).reshape(self.shape)

    @property
    def first_device(self) -> torch.device:
        """The device of rank 0, index included."""
        return _torch().device(self.device_type, self.ids[0])

    @property
    def torch_device(self) -> torch.device:
        """A ``torch.device`` to hand to code that takes only one: what ``Tensor.device`` of this mesh says.

        A mesh of one device gives that device; a larger one its type, which inside
        ``with dtorch.device_mesh(mesh)`` means `mesh`.
        """
        return _torch().device(self.device_type) if self.is_distributed else self.first_device

    # Dim names.

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The names of the dims; empty where they have none."""
        return self.mesh_dim_names or ()

    def has_dim_name(self, name: str) -> bool:
        """Whether a dim is called `name`."""
        return name in self.dim_names

    def dim_name_index(self, name: str) -> int:
        """The index of the dim called `name`.

        Raises:
            DeviceMeshError: no dim has that name.
        """
        if name not in self.dim_names:
            have = f"its dims are {', '.join(self.dim_names)}" if self.dim_names else "its dims have no names"
            raise DeviceMeshError(f"{self!r} has no dim named {name!r}; {have}")
        return self.dim_names.index(name)

    def check_all_dim_names_in_set(self, names: Collection[str]) -> bool:
        """Whether the dims have names and each is one of `names`."""
        return bool(self.dim_names) and all(name in names for name in self.dim_names)

    def dim_index(self, dim: int | str) -> int:
        """The index of the mesh dim `dim`, given by index (from the end if negative) or by name."""
        if isinstance(dim, str):
            return self.dim_name_index(dim)
        if not -self.ndim <= dim < self.ndim:
            raise DeviceMeshError(f"mesh dim {dim} is out of range for {self!r} of {self.ndim} dims")
        return dim % self.ndim

    # Ranks.

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The coordinate of every rank, in rank order."""
        return tuple(itertools.product(*[range(n) for n in self.shape]))

    def get_coordinate(self, rank: int | None = None) -> tuple[int, ...]:
        """Where rank `rank` stands in the grid. For a slice: where that rank of the parent stands along its dims.

        Raises:
            DeviceMeshError: there is no such rank, or none was given (one process drives all ranks here).
        """
        if rank is None:
            _no_rank("get_coordinate()", "write mesh.get_coordinate(rank)")
        if not 0 <= rank < self.nranks:
            raise DeviceMeshError(f"rank {rank} is out of range for {self!r} of {self.nranks} ranks")
        return self.coordinates[rank]

    def get_rank(self) -> NoReturn:
        """Refused: there is no current rank."""
        _no_rank("get_rank()", "iterate over range(mesh.size()), or pass a function of the rank to from_local")

    def get_local_rank(self, mesh_dim: int | str | None = None) -> NoReturn:
        """Refused: there is no current rank."""
        _no_rank("get_local_rank()", "write mesh.get_coordinate(rank)[mesh.dim_index(dim)]")

    def is_current_rank_part_of_mesh(self) -> bool:
        """True: the process that asks drives every rank."""
        return True

    def get_group(self, mesh_dim: int | str | None = None) -> NoReturn:
        """Refused: collectives follow from placements, there is no process group to hand out."""
        raise DeviceMeshError(
            "DeviceMesh.get_group(): dtorch has no process groups; write t.redistribute(placements=…), which chooses"
            " the collective"
        )

    def get_all_groups(self) -> NoReturn:
        """Refused as :meth:`get_group` is."""
        self.get_group()

    # Parts.

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The slice that stands for the dims `names`; all dims in order are the mesh itself.

        Raises:
            DeviceMeshError: a name is unknown or given twice.
        """
        wanted: tuple[Any, ...] = names if isinstance(names, tuple) else (names,)
        if not wanted or not all(isinstance(name, str) for name in wanted):
            raise DeviceMeshError(f"mesh[{names!r}]: slice a mesh by the names of its dims, {list(self.dim_names)}")
        if len(set(wanted)) != len(wanted):
            raise DeviceMeshError(f"mesh[{', '.join(map(repr, wanted))}]: a name occurs twice")
        return MeshSlice.of(self, tuple(self.dim_name_index(name) for name in wanted))

    def unbind(self, dim: int | str = 0) -> tuple[DeviceMesh, ...]:
        """One mesh of its own for each position along `dim`, such as the stages of a pipeline.

        ``DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=["pp", "tp"]).unbind("pp")`` are the meshes of 0, 1
        and of 2, 3, each with the one dim "tp". Unbinding the only dim gives one-device meshes without names.
        """
        d = self.dim_index(dim)
        rest = tuple(n for i, n in enumerate(self.shape) if i != d)
        names = self.mesh_dim_names and tuple(n for i, n in enumerate(self.mesh_dim_names) if i != d)
        stages = []
        for i in range(self.shape[d]):
            ids = tuple(id for id, at in zip(self.ids, self.coordinates, strict=True) if at[d] == i)
            stages.append(_intern(self.device_type, rest or (1,), ids, (names or None) if rest else None))
        return tuple(stages)

    # As a value.

    def __repr__(self) -> str:
        ids = "" if self.ids == tuple(range(self.nranks)) else f", ids={_short(self.ids)}"
        return f"DeviceMesh({self.device_type!r}, ({self._dims()}){ids})"

    def describe(self) -> str:
        """Short form for messages: ``cpu(dp=2, tp=2)``."""
        return f"{self.device_type}({self._dims()})"

    def _dims(self) -> str:
        if self.mesh_dim_names is None:
            return ", ".join(map(str, self.shape))
        return ", ".join(f"{n}={s}" for n, s in zip(self.mesh_dim_names, self.shape, strict=True))

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: object) -> DeviceMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.device_type, self.shape, self.ids, self.mesh_dim_names)


class MeshSlice(DeviceMesh):
    """Some dims of a mesh, in the order they were named. Made by ``mesh["tp"]``; interned as meshes are."""

    parent: DeviceMesh  # pyright: ignore[reportIncompatibleVariableOverride]
    parent_dims: tuple[int, ...]

    @staticmethod
    def of(mesh: DeviceMesh, dims: tuple[int, ...]) -> DeviceMesh:
        """The slice of `mesh` (itself a slice, perhaps) that stands for its dims `dims`."""
        if mesh.parent is not None:
            dims = tuple(mesh.parent_dims[d] for d in dims)
            mesh = mesh.parent
        if dims == tuple(range(mesh.ndim)):
            return mesh
        key = (mesh, dims)
        found = _meshes.get(key)
        if found is None:
            made = object.__new__(MeshSlice)
            made.device_type, made.parent, made.parent_dims = mesh.device_type, mesh, dims
            made.shape = tuple(mesh.shape[d] for d in dims)
            made.mesh_dim_names = tuple(mesh.dim_names[d] for d in dims)
            found = _meshes.add(key, made)
        return found

    def __getattr__(self, name: str) -> Any:
        # Reached for `ids`, which a slice lacks, and for `mesh`, which is made of ids.
        if name in ("ids", "mesh"):
            raise AttributeError(
                f"{self!r} stands for dims of its parent and names no devices; use .parent, or .unbind() of the parent"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_coordinate(self, rank: int | None = None) -> tuple[int, ...]:
        whole = self.parent.get_coordinate(rank)
        return tuple(whole[d] for d in self.parent_dims)

    @property
    def first_device(self) -> torch.device:
        return self.parent.first_device

    @property
    def torch_device(self) -> torch.device:
        return self.parent.torch_device

    def unbind(self, dim: int | str = 0) -> tuple[DeviceMesh, ...]:
        """The stage meshes of the parent along `dim`, each sliced to the dims that this slice has left."""
        d = self.dim_index(dim)
        left = tuple(n for i, n in enumerate(self.dim_names) if i != d)
        if not left:
            raise DeviceMeshError(f"{self!r} has only the dim {self.dim_names[d]!r}; unbind its parent")
        return tuple(stage[left] for stage in self.parent.unbind(self.parent_dims[d]))

    def __repr__(self) -> str:
        return f"{self.parent!r}[{', '.join(map(repr, self.dim_names))}]"

    def describe(self) -> str:
        return f"{self.parent.describe()}[{', '.join(self.dim_names)}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshSlice.of, (self.parent, self.parent_dims)


def init_device_mesh(
    device_type: str | torch.device, mesh_shape: int | Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """The mesh of devices 0, 1, 2, … in the given shape; an int is a 1-D shape.

    Raises:
        DeviceMeshError: a size below 1, or what :class:`DeviceMesh` refuses.
    """
    shape: tuple[Any, ...] = tuple(mesh_shape) if isinstance(mesh_shape, Iterable) else (mesh_shape,)
    if not shape or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
        raise DeviceMeshError(f"init_device_mesh: mesh_shape={mesh_shape!r} must be one or more sizes of at least 1")
    return DeviceMesh(device_type, _nested(range(math.prod(shape)), shape), mesh_dim_names=mesh_dim_names)


def as_mesh(device: Any) -> DeviceMesh:
    """`device` as a mesh: a DeviceMesh as it is; "cuda:1" or a ``torch.device`` is that device alone; an int is a
    CUDA device, as in torch.
    """
    if isinstance(device, DeviceMesh):
        return device
    return DeviceMesh(f"cuda:{device}" if type(device) is int else device)


def simulated_gpus() -> int | None:
    """How many GPUs the simulation of the two environment variables pretends to have (8); None where it is off.

    Raises:
        ConfigError: one of the variables cannot be read.
    """
    switch = os.environ.get(SIMULATE, "").strip().lower()
    if switch in ("", "0", "false"):
        return None
    if switch not in ("1", "true"):
        raise ConfigError(f"{SIMULATE}={switch!r}: write 1 or true to simulate, 0 or false not to")
    count = os.environ.get(SIMULATED_GPUS, "").strip() or "8"
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"{SIMULATED_GPUS}={count!r}: give a number of GPUs of at least 1")
    return int(count)


def _torch() -> Any:
    # torch is slow to import, and whoever prestarts executors makes meshes before it is there.
    return importlib.import_module("torch")


def _check_gpus(call: str, highest: int) -> None:
    simulated = simulated_gpus()
    if simulated is not None:
        if highest >= simulated:
            raise DeviceMeshError(
                f"{call}: the simulation has {simulated} GPUs, cuda:0 to cuda:{simulated - 1}; "
                f"set {SIMULATED_GPUS}={highest + 1} for more"
            )
        return
    have = gpu_count()
    if highest >= have:
        there = {0: "no GPU", 1: "1 GPU, cuda:0"}.get(have, f"{have} GPUs, cuda:0 to cuda:{have - 1}")
        raise DeviceMeshError(
            f"{call}: device cuda:{highest} is not there, this machine has {there}. "
            f'Use a "cpu" mesh, which may have any size, or set {SIMULATE}=1 to simulate GPUs'
        )


def _no_rank(call: str, instead: str) -> NoReturn:
    raise DeviceMeshError(f"DeviceMesh.{call}: one process drives all ranks, so there is no current rank; {instead}")


def _nested_shape(x: Any) -> tuple[tuple[int, ...], list[int]]:
    """Shape and row-major values of an int, a range, nested sequences, or anything with ``tolist``."""
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, int) and not isinstance(x, bool):
        return (), [x]
    if not isinstance(x, Sequence) or isinstance(x, str | bytes):
        raise DeviceMeshError(f"DeviceMesh: {x!r} is no device id: give nested lists of ints, or an int tensor")
    parts = [_nested_shape(y) for y in x]
    if not parts:
        raise DeviceMeshError("DeviceMesh: a mesh needs at least one device")
    if any(p[0] != parts[0][0] for p in parts):
        raise DeviceMeshError(f"DeviceMesh: {x!r} is ragged: every row must have the same length")
    return (len(parts), *parts[0][0]), [v for _, vs in parts for v in vs]


def _names(given: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if given is None:
        return None
    names: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(name, str) and name for name in names):
        raise DeviceMeshError(f"mesh_dim_names={list(names)}: names are strings, and not empty")
    if len(names) != len(shape):
        raise DeviceMeshError(
            f"mesh_dim_names={list(names)}: {len(names)} names for a mesh of {len(shape)} dims, shape {shape}"
        )
    if len(set(names)) != len(names):
        raise DeviceMeshError(f"mesh_dim_names={list(names)}: a name occurs twice")
    return names


def _intern(
    device_type: str, shape: tuple[int, ...], ids: tuple[int, ...], names: tuple[str, ...] | None
) -> DeviceMesh:
    key = (device_type, shape, ids, names)
    found = _meshes.get(key)
    if found is None:
        made = object.__new__(DeviceMesh)
        made.device_type, made.shape, made.ids, made.mesh_dim_names = key
        found = _meshes.add(key, made)
    return found


def _rebuild(
    device_type: str, shape: tuple[int, ...], ids: tuple[int, ...], names: tuple[str, ...] | None
) -> DeviceMesh:
    """What a pickle calls: checked again, since another machine may lack the GPUs."""
    return DeviceMesh(device_type, _nested(ids, shape), mesh_dim_names=names)


def _nested(ids: Sequence[int], shape: tuple[int, ...]) -> list[Any]:
    nested: list[Any] = list(ids)
    for n in reversed(shape[1:]):
        nested = [nested[i : i + n] for i in range(0, len(nested), n)]
    return nested


def _device_type(device: Any) -> tuple[str, int | None]:
    text = str(device)
    kind, colon, index = text.partition(":")
    if kind not in DEVICE_TYPES or (colon and not index.isdecimal()):
        raise DeviceMeshError(f'{text!r} is no device type dtorch knows: write "cpu" or "cuda"')
    return kind, int(index) if colon else None


def _short(ids: Sequence[int]) -> str:
    """The ids, or of a long list its ends."""
    if len(ids) <= 16:
        return str(list(ids))
    return f"[{', '.join(map(str, ids[:4]))}, …, {', '.join(map(str, ids[-2:]))}]"
