"""Loading: what is read for whom, onto fresh tensors or into those of an existing state.

Whoever loads has opened the checkpoint (:func:`open_checkpoint`): headers and indexes are read and checked in the
process of the program, and tensors by the executors, each what its ranks need. Nothing of an existing state is
written before all has been read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch

from .._tensor import Tensor
from ..errors import CheckpointError
from ..future import TensorFuture, VoidFutureCollect
from ..graph import default_device_mesh
from ..mesh import DeviceMesh
from ..nn.placing import plain_factories
from ..placement import Partial, Placement, Replicate
from ..runtime import moves
from ..runtime.client import Client, client
from ..runtime.command import LoadTensors
from ..runtime.dispatch import wrap
from ..runtime.refs import next_ref, ref_type
from ..spec import TensorSpec, resolve
from . import dcp, files, safetensors
from .pieces import Source, Stored, Wanted
from .saving import ended_by, next_token
from .tree import decode, encode, is_stateful, shown

__all__ = ["TRIES", "is_replaced", "load_state", "open_checkpoint", "open_state"]

TRIES = 10
"""How often a checkpoint is read that is replaced by the next one meanwhile."""

Path = tuple[Any, ...]
Placing = Callable[[str, tuple[int, ...]], tuple[DeviceMesh, Any]]


def open_checkpoint(path: str | os.PathLike[str]) -> Source | None:
    """The checkpoint at `path`, its structure read and checked; None for a file that is none of safetensors.

    Raises:
        FileNotFoundError: there is nothing.
        CheckpointError: it is damaged, or no checkpoint.
    """
    for _ in range(TRIES):
        where = files.locate(path)
        before = files.stamp(where)
        try:
            source = _open(where)
        except (CheckpointError, FileNotFoundError):
            # Headers of two checkpoints do not fit each other, and are no damage.
            if files.stamp(where) == before:
                raise
            continue
        if source is None:
            return None
        names = {chunk.file for stored in source.tensors.values() for chunk in stored.chunks}
        stamps = {name: files.stamp(name) for name in names}
        if files.stamp(where) == before:
            return replace(source, stamps=stamps)
    raise CheckpointError(f"{os.fspath(path)}: replaced while it was read, {TRIES} times in a row")


def is_replaced(source: Source) -> bool:
    """Whether something else has taken the place of a file of `source` since it was opened."""
    return any(files.stamp(name) != stamp for name, stamp in source.stamps.items())


def _open(where: str) -> Source | None:
    if not os.path.isdir(where):
        if os.path.exists(where) and not os.path.isfile(where):
            # A pipe that nobody writes to would be waited for, and a device may have no end.
            raise CheckpointError(f"{where}: no checkpoint: it is neither a file nor a directory")
        return safetensors.open_file(where) if safetensors.is_file(where) else None
    try:
        names = os.listdir(where)
    except OSError as error:
        raise CheckpointError(f"{where}: {files.said(error)}") from None
    if dcp.METADATA in names:
        return dcp.open_directory(where)
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        what = f"it holds {sorted(names)[0]!r}" if names else "it is empty"
        raise CheckpointError(
            f"{where}: no checkpoint: neither {safetensors.INDEX} nor {dcp.METADATA} is in the directory; {what}"
        )
    return safetensors.open_directory(where, names)


def open_state(state: Any, path: str, *, plain: bool) -> Source:
    """What was read as a whole from a file of torch's, as a checkpoint; `plain`: of plain tensors.

    Raises:
        CheckpointError: it holds what is no part of one.
    """
    try:
        tree, leaves = encode(state, lambda t: plain)
    except TypeError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix('dtorch.save: ')}") from None
    return Source(path, tree, {f.name: Stored(f.tensor.dtype, tuple(f.tensor.shape), value=f.tensor) for f in leaves})


def load_state(
    source: Source,
    into: Any = None,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
) -> TensorFuture[Any]:
    """Have the executors read `source`; a future of the state.

    Args:
        into: a state, modules and optimizers in it, to be filled: it is checked now and written when all is read.
        device_mesh, placements: as `dtorch.load` has them.

    Raises:
        CheckpointError: the checkpoint is not of the state `into`; the message names the key.
    """
    load = _Load(source, _placing(device_mesh, placements, source))
    with torch.no_grad():
        filling = None if into is None else _Filling(load)
        if filling is None:
            outcome = load.fresh(source.tree)
        else:
            outcome = filling.node(source.tree, into, ())
        fetched = load.send()

    def finish() -> Any:
        with torch.no_grad(), plain_factories():
            made = outcome()
            if filling is not None:
                for write in filling.writes:
                    write()
            return made

    return _After(fetched, finish)


class _After(VoidFutureCollect):
    """Futures as one, whose value is made when all are there."""

    def __init__(self, futures: list[TensorFuture[Any]], finish: Callable[[], Any]) -> None:
        self._finish = finish
        super().__init__(futures, client().waiting)

    def _collect(self) -> Any:
        super()._collect()
        return self._finish()


def _placing(mesh: DeviceMesh | None, placements: Any, source: Source) -> Placing:
    """Where a tensor goes that is named so and of that shape."""
    whole = mesh or default_device_mesh()
    if isinstance(placements, Mapping):
        given = cast("Mapping[str, Any]", placements)
        unknown = next((name for name in given if name not in source.tensors), None)
        if unknown is not None:
            raise CheckpointError(
                f"{source.path}: placements of {unknown!r}, and the checkpoint has no tensor of that name; it has "
                + ", ".join(list(source.tensors)[:4])
            )
        return lambda name, shape: (whole, given.get(name))
    if callable(placements) and not isinstance(placements, Placement):
        return lambda name, shape: (whole, placements(name, shape))
    return lambda name, shape: (whole, placements)


class _Load:
    """The tensors that one call loads; each is read once for every place that it goes to."""

    def __init__(self, source: Source, placing: Placing) -> None:
        self.source, self.placing = source, placing
        self.client: Client = client()
        self._wanted: list[Wanted] = []
        self._made: dict[tuple[str, TensorSpec], Callable[[], Tensor]] = {}
        self._plain: dict[str, tuple[Callable[[], Tensor], list[TensorFuture[Any]]]] = {}
        self._tied: dict[Any, Any] = {}

    def stored(self, name: str) -> Stored:
        """What the checkpoint has of the tensor `name`."""
        return self.source.tensors[name]

    def tensor(self, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Callable[[], Tensor]:
        """The tensor `name` on `mesh`, once all is there."""
        stored = self.stored(name)
        spec = TensorSpec.of(stored.shape, None, stored.dtype, mesh, placements)
        found = self._made.get((name, spec))
        if found is not None:
            return found
        get: Callable[[], Tensor]
        if spec.is_partial:
            placed = tuple(Replicate() if type(p) is Partial else p for p in placements)
            whole = self.tensor(name, mesh, placed)
            get = cache(lambda: moves.redistribute(whole(), mesh, placements))
        else:
            made = self._read(name, stored, spec)

            def get() -> Tensor:
                return made

        self._made[name, spec] = get
        return get

    def _read(self, name: str, stored: Stored, spec: TensorSpec) -> Tensor:
        """A tensor of `spec` whose value will be read."""
        mesh = spec.mesh
        if stored.value is not None:
            made = moves.lift(stored.value.detach(), mesh, spec.placements)
        else:
            ref = ref_type(spec)(next_ref())
            ranks = range(mesh.nranks)
            regions, strides = tuple(map(spec.region, ranks)), tuple(map(spec.local_stride, ranks))
            id = self.client.mesh(mesh)[0]
            self._wanted.append(Wanted(int(ref), id, name, spec.dtype, regions, strides, stored.chunks))
            made = wrap(spec, ref)
        return made

    def plain(self, name: str) -> Callable[[], torch.Tensor]:
        """The tensor `name` as a plain one, once it is there."""
        stored = self.stored(name)
        if stored.value is not None:
            return lambda: cast("torch.Tensor", stored.value)
        if name not in self._plain:
            mesh = DeviceMesh("cpu")
            self._plain[name] = (self.tensor(name, mesh, (Replicate(),)), [])
        futures = self._plain[name][1]
        return lambda: futures[0].get()

    def send(self) -> list[TensorFuture[Any]]:
        """Have all of it read; futures of the end."""
        futures: list[TensorFuture[Any]] = []
        c, wanted = self.client, self._wanted
        if wanted:
            meshes = {w.mesh for w in wanted}
            executors = tuple(sorted({e for id, _, held in tuple(c._meshes.values()) if id in meshes for e in held}))
            token = next_token()
            c.send(
                LoadTensors(token, executors, tuple(wanted), self.source.stamps, f"dtorch.load({self.source.path!r})")
            )
            futures.append(ended_by(c, token, executors))
        for t, fetched in self._plain.values():
            fetched.append(moves.fetch(t()))
            futures += fetched
        return futures

    def fresh(self, tree: Any, places: Mapping[str, tuple[DeviceMesh, Any]] | None = None) -> Callable[[], Any]:
        """A new state of `tree`, once it is there; `places` say where some of its tensors go, plain ones too."""
        known = places or {}

        def start(node: dict[str, Any]) -> Callable[[], torch.Tensor]:
            name = node["tensor"]
            grad, parameter = bool(node.get("grad")), bool(node.get("parameter"))
            get: Callable[[], torch.Tensor]
            if node.get("plain") and name not in known:
                get = self.plain(name)
            else:
                shape = self.stored(name).shape
                mesh, placed = known.get(name) or self.placing(name, shape)
                get = self.tensor(name, *_resolved(mesh, placed, name, shape))
            return lambda: self._dressed(get(), grad, parameter)

        started: list[Callable[[], torch.Tensor]] = []
        decode(tree, lambda node: started.append(start(node)))

        def outcome() -> Any:
            made = iter(started)
            return decode(tree, lambda node: next(made)())

        return outcome

    def _dressed(self, t: torch.Tensor, grad: bool, parameter: bool) -> torch.Tensor:
        """`t` as what was saved of it; what is tied is one object."""
        key = (id(t), grad, parameter)
        found = self._tied.get(key)
        if found is None:
            made = t
            if parameter:
                made = torch.nn.Parameter(t, grad)
            elif grad:
                made = t.detach().requires_grad_()
            self._tied[key] = found = (t, made)
        return cast("torch.Tensor", found[1])


def _resolved(
    mesh: DeviceMesh, placements: Any, name: str, shape: tuple[int, ...]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    try:
        return resolve(mesh, placements, len(shape))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"placements of {name!r} {list(shape)}: {error}") from None


class _Filling:
    """An existing state that is filled. Everything is compared first; `writes` change it, when all has been read."""

    def __init__(self, load: _Load) -> None:
        self.load = load
        self.writes: list[Callable[[], object]] = []

    def refuse(self, path: Path, problem: str) -> CheckpointError:
        """The error of what does not fit, at `path`."""
        return CheckpointError(f"{self.load.source.path}: {shown(path) or 'the state'}: {problem}")

    def node(self, tree: Any, target: Any, path: Path) -> Callable[[], Any]:
        """What stands where `target` does, once it is filled with `tree`: itself, where it can be."""
        kind = next(iter(tree)) if type(tree) is dict else ""
        if isinstance(target, torch.nn.Module):
            return self._module(tree, target, path)
        if is_stateful(target) and not isinstance(target, Mapping):
            return self._stateful(tree, target, path)
        if isinstance(target, torch.Tensor):
            if kind != "tensor":
                raise self.refuse(path, f"the checkpoint has {_shown_kind(tree)} where the state has a tensor")
            return self._tensor(tree, target, path)
        if isinstance(target, MutableMapping):
            return self._mapping(tree, cast("MutableMapping[Any, Any]", target), path)
        if isinstance(target, MutableSequence):
            return self._list(tree, cast("MutableSequence[Any]", target), path)
        if kind == "tensor" and target is not None:
            raise self.refuse(path, f"the checkpoint has a tensor where the state has a {type(target).__name__}")
        return self.load.fresh(tree)

    def _mapping(self, tree: Any, target: MutableMapping[Any, Any], path: Path) -> Callable[[], Any]:
        saved = self._items(tree, path)
        for key, value in list(target.items()):
            at = (*path, key)
            # What torch's own checkpoints have as strings may have been numbers.
            node = saved[key] if key in saved else saved.get(str(key), _MISSING)
            if node is _MISSING:
                raise self.refuse(at, "the checkpoint has no such key")
            made = self.node(node, value, at)
            self.writes.append(lambda k=key, v=value, m=made: _replace(target, k, v, m()))
        return lambda: target

    def _items(self, tree: Any, path: Path) -> dict[Any, Any]:
        for kind in ("dict", "odict"):
            if type(tree) is dict and kind in tree:
                return {decode(k, lambda n: None): v for k, v in tree[kind]}
        raise self.refuse(path, f"the checkpoint has {_shown_kind(tree)} where the state has a dict")

    def _list(self, tree: Any, target: MutableSequence[Any], path: Path) -> Callable[[], Any]:
        saved: Any = tree.get("list", tree.get("tuple")) if type(tree) is dict else None
        if saved is None:
            raise self.refuse(path, f"the checkpoint has {_shown_kind(tree)} where the state has a list")
        if len(saved) != len(target):
            raise self.refuse(path, f"the checkpoint has a list of {len(saved)} where the state has {len(target)}")
        for i, (node, value) in enumerate(zip(saved, list(target), strict=True)):
            made = self.node(node, value, (*path, i))
            self.writes.append(lambda i=i, v=value, m=made: _replace(target, i, v, m()))
        return lambda: target

    def _module(self, tree: Any, module: torch.nn.Module, path: Path) -> Callable[[], Any]:
        # Parameters themselves, and not what state_dict() detaches of them.
        state = dict(module.state_dict(keep_vars=True))
        others = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        self._mapping(tree, {k: v for k, v in state.items() if k not in others}, path)
        if others:
            saved = self._items(tree, path)
            made = {k: self.load.fresh(saved[k]) for k in others if k in saved}
            self.writes.append(
                lambda: module.load_state_dict({k: m() for k, m in made.items()}, strict=False) if made else None
            )
        return lambda: module

    def _stateful(self, tree: Any, target: Any, path: Path) -> Callable[[], Any]:
        made = self.load.fresh(tree, _beside_parameters(self.load, tree, target))
        groups = hasattr(target, "param_groups")
        self.writes.append(lambda: target.load_state_dict(_with_numbers(made()) if groups else made()))
        return lambda: target

    def _tensor(self, node: dict[str, Any], target: torch.Tensor, path: Path) -> Callable[[], Any]:
        name = node["tensor"]
        stored = self.load.stored(name)
        if stored.shape != tuple(target.shape):
            raise self.refuse(
                path, f"the checkpoint has shape {list(stored.shape)}, and the state {list(target.shape)}"
            )
        if stored.dtype is not target.dtype:
            raise self.refuse(path, f"the checkpoint has {stored.dtype}, and the state {target.dtype}")
        if isinstance(target, Tensor):
            spec = target._spec
            placed = spec.placements
            read = self.load.tensor(name, spec.mesh, placed)
            self.writes.append(lambda: target.copy_(read()))
        else:
            value = self.load.plain(name)
            self.writes.append(lambda: target.copy_(value()))
        return lambda: target


_MISSING = object()


def _with_numbers(state: Any) -> Any:
    """An optimizer's state, whose parameters are numbered by strings in a checkpoint that torch wrote."""
    if isinstance(state, dict) and isinstance(inner := cast("Any", state).get("state"), dict):
        named = cast("dict[Any, Any]", inner)
        return {**cast("Any", state), "state": {int(k) if str(k).isdigit() else k: v for k, v in named.items()}}
    return state


def _replace(container: Any, key: Any, old: Any, new: Any) -> None:
    if new is not old:
        container[key] = new


def _shown_kind(tree: Any) -> str:
    if type(tree) is dict:
        return f"a {next(iter(tree)).replace('odict', 'dict')}"
    return f"the value {str(tree)[:40]!r}"


def _beside_parameters(load: _Load, tree: Any, target: Any) -> dict[str, tuple[DeviceMesh, Any]]:
    """Of an optimizer's state, what is shaped as its parameter goes where that lies."""
    places: dict[str, tuple[DeviceMesh, Any]] = {}
    groups: Any = getattr(target, "param_groups", None)
    if isinstance(groups, list):
        parameters: list[Any] = [p for group in cast("list[dict[str, Any]]", groups) for p in group["params"]]
        try:
            saved = {decode(k, lambda n: None): v for k, v in tree["dict"]}
            states = {decode(k, lambda n: None): v for k, v in saved["state"]["dict"]}
            for index, state in states.items():
                p = parameters[int(index)]
                for _, node in state["dict"]:
                    if isinstance(p, Tensor) and type(node) is dict and "tensor" in node:
                        if load.stored(node["tensor"]).shape == tuple(p.shape):
                            places[node["tensor"]] = (p._spec.mesh, p._spec.placements)
        except (KeyError, TypeError, ValueError, IndexError):
            pass  # of another kind: load_state_dict says what it lacks
    return places
