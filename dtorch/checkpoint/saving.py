"""Saving: which executor writes which bytes of which file, and the commands that tell them so.

Every piece of a tensor is written once, by the executor with the least to write among those that hold it. A file of
safetensors has each tensor whole, in row-major order, so a tensor that is cut otherwise than by rows is first moved to
such a cut, in batches, since what is moved takes memory until it is written; summands are reduced on the way.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .._tensor import Tensor
from ..future import TensorFuture
from ..mesh import DeviceMesh
from ..placement import Placement, Replicate, Shard
from ..runtime import moves
from ..runtime.client import Client, client, on_close
from ..runtime.command import CheckpointPlan, SavePieces, SaveState
from ..runtime.copies import settled
from ..runtime.refs import Plan
from ..runtime.slots import Ticket
from ..spec import TensorSpec
from . import dcp, files
from .pieces import Piece
from .safetensors import Entry, FileLayout
from .tree import Leaf, encode

__all__ = ["ended_by", "next_token", "save_state", "unique_leaves"]

log = logging.getLogger("dtorch")

next_token = itertools.count(1).__next__

# Bytes of a file of safetensors, as Hugging Face cuts them; and below which all go to one.
_FILE, _SMALL = 5_000_000_000, 1 << 20
# Bytes that are moved to another cut before they are written and let go.
_BATCH = 256 << 20

# Saves of which nobody has asked yet whether they are done: the call, and what to ask.
_under_way: dict[int, tuple[str, _Work]] = {}

# Of every pool, the plan of the records that end a save or a load, and the executors that know it.
_plans: WeakKeyDictionary[Client, tuple[int, frozenset[int]]] = WeakKeyDictionary()


class _Value(NamedTuple):
    """A tensor that is saved, where it lies, and where it will when it is written."""

    name: str
    tensor: Tensor
    target: TensorSpec


def save_state(state: Any, path: str | os.PathLike[str], kind: str, *, is_directory: bool) -> TensorFuture[None]:
    """Have the executors save `state` as it is now, after all that was issued; a future of the end.

    Args:
        kind: "safetensors", "dcp" or "torch".

    Raises:
        CheckpointError: it cannot be saved at `path`.
        TypeError: something in it is no part of a checkpoint.
        TensorLostError: a tensor of it is of a pool that has ended.
    """
    text = f"dtorch.save({os.fspath(path)!r})"
    with torch.no_grad():
        tree, leaves = encode(state, lambda t: not isinstance(t, Tensor), stateful=kind != "torch")
        c = client()
        c.check()
        if kind == "dcp":
            dcp.flat_values(tree)  # refuses what it cannot hold
        unique, aliases = unique_leaves(leaves)
        _tie(tree, aliases)
        values = [_value(leaf, kind) for leaf in unique]
        for value in values:
            c.refuse_lost(value.tensor._ref)
        staging = files.stage(path, is_directory=is_directory)
        try:
            return _send(c, tree, values, aliases, kind, staging, text)
        except BaseException:
            staging.discard()
            raise


def unique_leaves(leaves: Sequence[Leaf]) -> tuple[list[Leaf], dict[str, str]]:
    """`leaves` without those that are tied to another, and name -> the other of these."""
    first: dict[Any, str] = {}
    unique: list[Leaf] = []
    aliases: dict[str, str] = {}
    for leaf in leaves:
        t = leaf.tensor
        if isinstance(t, Tensor):
            key: Any = (int(t._ref), t._spec)
        elif t.layout == torch.strided and not t.is_meta and not t.is_nested and t.numel():
            key = (t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride(), t.is_conj(), t.is_neg())
        else:
            key = id(t)
        if key in first:
            aliases[leaf.name] = first[key]
        else:
            first[key] = leaf.name
            unique.append(leaf)
    return unique, aliases


def _tie(tree: Any, aliases: dict[str, str]) -> None:
    """Let the nodes of tied tensors name the one that is stored."""
    if not aliases:
        return
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        if type(node) is dict:
            if "tensor" in node:
                node["tensor"] = aliases.get(node["tensor"], node["tensor"])
            else:
                todo += node.values()
        elif type(node) is list:
            todo += node


def _value(leaf: Leaf, kind: str) -> _Value:
    t = leaf.tensor
    if isinstance(t, Tensor):
        t = settled(t.detach())  # type: ignore[arg-type]
    else:
        if t.is_meta:
            raise TypeError(f"dtorch.save: {leaf.name!r} lies on the meta device, and has no values")
        if t.layout != torch.strided or t.is_quantized or t.is_nested:
            what = "quantized" if t.is_quantized else "nested" if t.is_nested else f"of layout {t.layout}"
            raise TypeError(
                f'dtorch.save: {leaf.name!r} is {what}, and a checkpoint holds dense tensors; write format="torch", '
                "which pickles"
            )
        t = moves.lift(t.detach().resolve_conj().resolve_neg(), DeviceMesh("cpu"))
    spec: TensorSpec = t._spec
    if kind == "torch":
        return _Value(leaf.name, t, spec.with_placements((Replicate(),), DeviceMesh("cpu")))
    return _Value(leaf.name, t, spec.with_placements(_cut(spec, kind)))


def _cut(spec: TensorSpec, kind: str) -> tuple[Placement, ...]:
    """Placements of which every piece can be written where it is."""

    def placed(p: Placement) -> Placement:
        if type(p) is Replicate or (type(p) is Shard and (p.dim == 0 or kind == "dcp")):
            return p
        return Shard(0) if spec.ndim and spec.numel else Replicate()

    return tuple(map(placed, spec.placements))


def _send(
    c: Client,
    tree: Any,
    values: Sequence[_Value],
    aliases: dict[str, str],
    kind: str,
    staging: files.Staging,
    text: str,
) -> TensorFuture[None]:
    token = next_token()
    c.ensure(1)
    for mesh in {v.target.mesh for v in values} | {v.tensor._spec.mesh for v in values}:
        c.mesh(mesh)
    root = min(c.writer.readers)
    if kind == "safetensors":
        pieces, owners, layouts = _safetensors(c, values, aliases, staging, tree)
    else:
        pieces, owners = _pieces(c, values, kind)
        layouts = ()
    executors = (root, *sorted({*owners.values()} - {root}))
    c.send(
        SaveState(
            token,
            executors,
            kind,
            staging.path,
            staging.target,
            staging.is_directory,
            tree,
            layouts,
            {v.name: (v.target.dtype, v.target.shape) for v in values} if kind == "dcp" else {},
            tuple(pieces) if kind == "dcp" else (),
            text,
        )
    )
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for batch in _batches(values):
        # What is moved is let go as soon as the message that has it written is on its way.
        where = dict(zip((v.name for v in batch), _moved(batch), strict=True))
        message: dict[int, list[Piece]] = {}
        for name, t in where.items():
            mesh = c.mesh(t._spec.mesh)[0]
            for piece in by_name.get(name, ()):
                message.setdefault(owners[piece.number], []).append(piece._replace(ref=int(t._ref), mesh=mesh))
        c.send(SavePieces(token, {e: tuple(found) for e, found in message.items()}))

    def end() -> None:
        _under_way.pop(token, None)
        staging.close()

    work = _Work(c, c.slots.take(executors), end)
    _under_way[token] = (text, work)
    return _issue(c, token, work)


def _on_close() -> None:
    """The pool ends. Its executors hold on to what they write as long as they live; this process no longer does."""
    while _under_way:
        text, work = _under_way.popitem()[1]
        work.on_end()
        if work.client.pid == os.getpid() and not work.ticket.answered():
            log.error("%s was not done when the pool ended: what was there before may be there still", text)


on_close(_on_close)


def _batches(values: Sequence[_Value]) -> Iterator[list[_Value]]:
    """`values`, so many at a time that what is moved stays small."""
    batch: list[_Value] = []
    moved = 0
    for value in values:
        if value.target is not value.tensor._spec:
            moved += value.target.numel * value.target.dtype.itemsize
        batch.append(value)
        if moved >= _BATCH:
            yield batch
            batch, moved = [], 0
    if batch:
        yield batch


def _moved(batch: Sequence[_Value]) -> list[Tensor]:
    """The tensors of `batch`, cut as they will be written."""
    return [
        v.tensor if v.target is v.tensor._spec else moves.redistribute(v.tensor, v.target.mesh, v.target.placements)
        for v in batch
    ]


def _owners(
    c: Client, spec: TensorSpec, load: dict[int, int], *, empty: bool
) -> Iterator[tuple[tuple[tuple[int, int], ...], int, int]]:
    """(region, rank, executor) of every distinct piece of a tensor: of those that hold it, whoever has least to write.

    `empty`: one piece of a tensor without elements, too.
    """
    hosts = c.mesh(spec.mesh)[1]
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(spec.mesh.nranks):
        region = spec.region(rank)
        if all(n for _, n in region):
            holders.setdefault(region, []).append(rank)
    if not holders and empty:
        holders[tuple((0, n) for n in spec.shape)] = [0]
    for region, ranks in sorted(holders.items()):
        rank = min(ranks, key=lambda r: load.get(hosts[r], 0))
        load[hosts[rank]] = load.get(hosts[rank], 0) + prod(n for _, n in region) * spec.dtype.itemsize
        yield region, rank, hosts[rank]


def _piece(number: int, v: _Value, region: Iterable[tuple[int, int]], rank: int, file: str, offset: int) -> Piece:
    spans = tuple(region)
    return Piece(number, 0, 0, rank, file, offset, v.name, tuple(s for s, _ in spans), tuple(n for _, n in spans))


def _pieces(c: Client, values: Sequence[_Value], kind: str) -> tuple[list[Piece], dict[int, int]]:
    """The pieces of tensors of which each lies in its executor's file; and piece -> executor."""
    pieces: list[Piece] = []
    owners: dict[int, int] = {}
    load: dict[int, int] = {}
    for v in values:
        for region, rank, executor in _owners(c, v.target, load, empty=True):
            number = len(pieces)
            pieces.append(_piece(number, v, region, rank, f"__{executor}_0.distcp", 0))
            owners[number] = executor
    return pieces, owners


def _safetensors(
    c: Client, values: Sequence[_Value], aliases: dict[str, str], staging: files.Staging, tree: Any
) -> tuple[list[Piece], dict[int, int], tuple[tuple[FileLayout, tuple[int, ...]], ...]]:
    """The pieces of files of safetensors; piece -> executor; and the files, each with its pieces in order."""
    load: dict[int, int] = {}
    held = [list(_owners(c, v.target, load, empty=False)) for v in values]
    sizes = [v.target.numel * v.target.dtype.itemsize for v in values]
    total = sum(sizes)
    count = 1
    if staging.is_directory and total > _SMALL:
        # A file takes one writer at a time: so there are as many as writers.
        count = min(max(len(load), -(-total // _FILE)), len(values))
    groups: list[list[int]] = [[] for _ in range(count)]
    done = 0
    for i, size in enumerate(sizes):
        groups[min(done * count // max(total, 1), count - 1)].append(i)
        done += size
    groups = [g for g in groups if g] or [[]]
    pieces: list[Piece] = []
    owners: dict[int, int] = {}
    layouts: list[tuple[FileLayout, tuple[int, ...]]] = []
    metadata = {name: other for name, other in aliases.items() if name != "format" and "dtorch." not in name}
    if not staging.is_directory:
        metadata["dtorch.tree"] = json.dumps(tree, separators=(",", ":"))
    for k, group in enumerate(groups):
        name = f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors"
        if not staging.is_directory:
            name = os.path.basename(staging.target)
        # The largest elements first: so all lie at multiples of their size.
        group.sort(key=lambda i: -values[i].target.dtype.itemsize)
        entries: list[Entry] = []
        for i in group:
            spec = values[i].target
            runs = tuple(prod(n for _, n in region) * spec.dtype.itemsize for region, _, _ in held[i])
            entries.append(Entry(values[i].name, spec.dtype, spec.shape, runs))
        layout = FileLayout.of(name, entries, metadata)
        first = len(pieces)
        for i, entry in zip(group, entries, strict=True):
            at = layout.offset(entry.name)
            for (region, rank, executor), n in zip(held[i], entry.runs, strict=True):
                number = len(pieces)
                pieces.append(_piece(number, values[i], region, rank, name, at))
                owners[number] = executor
                at += n
        layouts.append((layout, tuple(range(first, len(pieces)))))
    return pieces, owners, tuple(layouts)


# -- waiting for the executors ----------------------------------------------------------------------------------------


def ended_by(c: Client, token: int, executors: tuple[int, ...]) -> TensorFuture[None]:
    """End load `token`, which `executors` answer; a future of the end."""
    return _issue(c, token, _Work(c, c.slots.take(executors)))


def _issue(c: Client, token: int, work: _Work) -> TensorFuture[None]:
    executors = work.ticket.executors
    id, known = _plans.get(c, (0, frozenset[int]()))
    if not known.issuperset(executors):
        # An executor knows what was sent since it began to read.
        id, known = id or c.plan_id(), frozenset(c.writer.readers)
        c.send(CheckpointPlan(id))
        c.pool.name_plan(id, "a checkpoint")
        _plans[c] = (id, known)
    c.issue(Plan(id, "3Q", executors), (token, work.base, work.ticket.generation))
    c.writer.wake(executors, sync=True)
    return TensorFuture(work.is_done, work.resolve, c.waiting, work.abandon)


class _Work:
    """A save or load that executors are at; `on_end` is called once it is known how it ended."""

    __slots__ = ("base", "client", "on_end", "ticket")

    def __init__(self, c: Client, ticket: Ticket, on_end: Callable[[], None] = lambda: None) -> None:
        self.client, self.ticket, self.on_end = c, ticket, on_end
        self.base = c.state.slot_word(ticket.slot, 0)

    def is_done(self) -> bool:
        return self.ticket.is_done() or self.client.closed

    def resolve(self) -> None:
        c, ticket = self.client, self.ticket
        if c.closed or not ticket.answered():
            # Not done, and yet resolved: the pool has ended, and no answer will come.
            c.slots.give(ticket)
            self.on_end()
            c.check()
        failed = ticket.failed()
        error = c.failures.of_slot(self.base, ticket.generation) if failed else None
        c.slots.give(ticket)
        self.on_end()
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Nobody waits for it any longer; it goes on."""
        self.client.slots.give(self.ticket, self._arrived)

    def _arrived(self) -> None:
        self.on_end()
        if self.ticket.failed():
            self.client.failures.unread(self.base, self.ticket.generation)
