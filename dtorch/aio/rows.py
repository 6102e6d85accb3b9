"""Rows of many calls in one: what calls may share a batch, how it is built, and who gets which rows of the result.

Functions from values to values: no event loop here.

    pack    a call's arguments → its tensors, each with dim 0 as rows, and a key; calls of one key may share a batch
    join    packs of one key → the arguments of one call, padded to a shape from a short list
    split   the result of that call → each pack's own rows
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._tensor import Tensor

__all__ = [
    "Pack",
    "Padding",
    "check_lengths",
    "default_lengths",
    "join",
    "next_size",
    "pack",
    "padding_of",
    "rejoin",
    "split",
]


@dataclass(frozen=True, slots=True)
class Padding:
    """How a tensor is made longer: with `value`, in `dims`, none of which is 0."""

    value: float
    dims: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Pack:
    """The arguments of one call, or some of its rows.

    Attributes:
        key: equal for calls that may share a batch.
        rows: the size of dim 0 of every tensor.
        tensors: the tensors among the arguments, in their order.
        shapes: what each is padded to, without dim 0.
        fills: what each is padded with.
        padded: (length, padded length) of the first dim that is padded; ``None`` where there is none.
        rest: the other leaves of the arguments, with ``None`` where a tensor goes.
        places: where the tensors go among the leaves.
        tree: how leaves make arguments.
    """

    key: Hashable
    rows: int
    tensors: tuple[torch.Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    fills: tuple[float, ...]
    padded: tuple[int, int] | None
    rest: tuple[Any, ...]
    places: tuple[int, ...]
    tree: Any

    def parts(self, size: int) -> list[Pack]:
        """Itself, or as many packs of at most `size` rows as hold its rows in order."""
        if self.rows <= size:
            return [self]
        starts = range(0, self.rows, size)
        return [
            replace(self, rows=min(size, self.rows - s), tensors=tuple(t[s : s + size] for t in self.tensors))
            for s in starts
        ]


def padding_of(pad: Any) -> Padding | dict[str, Padding] | None:
    """`pad=` as the user wrote it, checked: a number, (number, dims), or a dict of either by argument name.

    Raises:
        TypeError: it is something else.
        ValueError: dim 0, the rows, is among the dims.
    """
    if pad is None:
        return None
    if isinstance(pad, Mapping):
        return {str(name): _padding(value) for name, value in pad.items()}
    return _padding(pad)


def _padding(pad: Any) -> Padding:
    value, dims = pad if isinstance(pad, tuple) and len(pad) == 2 else (pad, 1)
    dims = (dims,) if isinstance(dims, int) else dims
    if (
        not isinstance(value, (int, float))
        or not isinstance(dims, (tuple, list))
        or not all(isinstance(d, int) for d in dims)
    ):
        raise TypeError(f"pad={pad!r}: write a number, (number, dims), or a dict of those by argument name")
    if any(d < 1 for d in dims):
        raise ValueError(f"pad={pad!r}: dims are counted from 1, for dim 0 holds the rows")
    return Padding(value, tuple(dims))


def check_lengths(lengths: Any) -> None:
    """Check `pad_lengths=` as the user wrote it.

    Raises:
        TypeError, ValueError: it is no list of lengths.
    """
    wanted = "write a list of lengths, as in [128, 256, 512]"
    if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Sequence):
        raise TypeError(f"pad_lengths={lengths!r}: {wanted}")
    if not lengths:
        raise ValueError(f"pad_lengths={lengths!r} leaves no length to pad to; {wanted}")
    for n in lengths:
        if type(n) is not int:
            raise TypeError(f"pad_lengths={lengths!r}: {n!r} is no whole number; {wanted}")
        if n < 1:
            raise ValueError(f"pad_lengths={lengths!r}: {n!r} is less than 1; {wanted}")


def next_size(n: int, sizes: Sequence[int]) -> int:
    """The first of `sizes`, ascending, that `n` fits into.

    Raises:
        ValueError: it fits into none.
    """
    for size in sizes:
        if n <= size:
            return size
    raise ValueError(f"a length of {n} is more than the longest that is padded to, {sizes[-1]}")


def pack(
    name: str,
    arguments: Mapping[str, Any],
    padding: Padding | Mapping[str, Padding] | None,
    lengths: Sequence[int],
    state: Hashable = None,
) -> Pack:
    """One call's `arguments` by name, made ready for a batch.

    Args:
        name: of the function, for messages.
        padding: for all tensors that have its dims, or by argument name or dict key.
        lengths: what padded dims are padded to, ascending.
        state: part of the key.

    Raises:
        TypeError: there is no tensor, or one has no dim 0, requires grad, or is a dtorch tensor.
        ValueError: tensors differ in their rows, `padding` names none of the arguments, or one is too long.
    """
    leaves, tree = pytree.tree_flatten(dict(arguments))
    names = _names(name, leaves, tree, arguments, padding) if isinstance(padding, Mapping) else None
    tensors: list[torch.Tensor] = []
    shapes: list[tuple[int, ...]] = []
    fills: list[float] = []
    places: list[int] = []
    key: list[Hashable] = [tree, state]
    padded: tuple[int, int] | None = None
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            key.append(_constant(leaf))
            continue
        _check(name, leaf)
        if tensors and leaf.shape[0] != tensors[0].shape[0]:
            shown = ", ".join(str(list(t.shape)) for t in (tensors[0], leaf))
            raise ValueError(f"{name}: dim 0 of every tensor is the batch, and these differ in it: {shown}")
        rule = padding if names is None else names[i]
        shape = list(leaf.shape)
        for d in rule.dims if isinstance(rule, Padding) else ():
            if d < len(shape):
                shape[d] = next_size(shape[d], lengths)
                padded = padded or (leaf.shape[d], shape[d])
        tensors.append(leaf)
        shapes.append(tuple(shape[1:]))
        fills.append(rule.value if isinstance(rule, Padding) else 0)
        places.append(i)
        key.append((leaf.dtype, leaf.device, shapes[-1]))
    if not tensors:
        raise TypeError(f"{name}: none of its arguments is a tensor, so there are no rows to make a batch of")
    rest = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Pack(
        tuple(key), tensors[0].shape[0], tuple(tensors), tuple(shapes), tuple(fills), padded, rest, tuple(places), tree
    )


def _check(name: str, leaf: torch.Tensor) -> None:
    if isinstance(leaf, Tensor):
        raise TypeError(
            f"{name}: a batch is made of plain torch tensors, and this one is a dtorch tensor.\n"
            f"  Write:  await {name}(await t), or await {name}.unbatched(t)"
        )
    if leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
        raise TypeError(f"{name}: a batch is made of dense tensors, and this one is {leaf.type()}, {leaf.layout}")
    if leaf.ndim == 0:
        raise TypeError(
            f"{name}: dim 0 of every tensor is the batch, and this one has no dims.\n"
            f"  Write:  {name}(t[None]), or pass a Python number, which must then be equal across a batch"
        )
    if leaf.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name}: a tensor that requires grad would lose its gradient in a batch.\n  Write:  {name}(t.detach())"
        )


def _names(
    name: str, leaves: list[Any], tree: Any, arguments: Mapping[str, Any], padding: Mapping[str, Padding]
) -> list[Padding | None]:
    """The padding of each leaf: by the innermost name on the way to it."""
    found: list[Padding | None] = []
    seen = set(arguments)
    for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(range(len(leaves)), tree))[0]:
        steps = [str(step.key) for step in path if isinstance(step, pytree.MappingKey)]
        seen.update(steps)
        found.append(next((padding[step] for step in reversed(steps) if step in padding), None))
    if unknown := sorted(padding.keys() - seen):
        raise ValueError(f"{name}: pad= names {', '.join(unknown)}, but this call has {', '.join(sorted(seen))}")
    return found


def _constant(leaf: Any) -> Hashable:
    """Something equal for leaves that mean the same to any function: 1, 1.0 and True do not, nor do 0.0 and -0.0."""
    if isinstance(leaf, float):
        return float, leaf.hex()
    if isinstance(leaf, complex):
        return complex, leaf.real.hex(), leaf.imag.hex()
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def join(packs: Sequence[Pack], rows: int) -> dict[str, Any]:
    """The arguments, by name, of one call with the rows of all `packs`, of one key, in order; then padding to `rows`.

    Rows of padding are copies of the last row: whatever holds for every row holds for them too. No tensor shares memory
    with a caller's.
    """
    first = packs[0]
    leaves = list(first.rest)
    for n, place in enumerate(first.places):
        leaves[place] = _joined([p.tensors[n] for p in packs], (rows, *first.shapes[n]), first.fills[n])
    return pytree.tree_unflatten(leaves, first.tree)  # type: ignore[no-any-return]


def _joined(pieces: Sequence[torch.Tensor], shape: tuple[int, ...], fill: float) -> torch.Tensor:
    if len(pieces) == 1 and tuple(pieces[0].shape) == shape:
        # A function may write to its arguments, and keep them: they are never a caller's own tensor.
        return pieces[0].detach().clone()
    out = pieces[0].new_full(shape, fill)
    at = 0
    for piece in pieces:
        out[at : at + piece.shape[0]][tuple(slice(n) for n in piece.shape)] = piece.detach()
        at += piece.shape[0]
    if 0 < at < shape[0]:
        out[at:] = out[at - 1]
    return out


def split(name: str, result: Any, packs: Sequence[Pack], rows: int, unpad: Any = None) -> list[Any]:
    """The rows of each of `packs` in `result`, whose tensors are plain and have `rows` rows; as plain copies.

    Args:
        name: of the function, for messages.
        unpad: the dim of results that follows the padded length of arguments: an int for all, or a dict, list or
            tuple of ints and Nones like the result. It is cut back to the length that the call had.

    Raises:
        TypeError: something in `result` is neither a tensor nor None.
        ValueError: a tensor has other rows, or not the padded length in the dim that `unpad` says.
    """
    leaves, tree = pytree.tree_flatten(result)
    cuts = pytree._broadcast_to_and_flatten(unpad, tree, is_leaf=lambda x: x is None) if unpad is not None else None
    if unpad is not None and cuts is None:
        raise ValueError(f"{name}: unpad={unpad!r} is not like its result, {tree}")
    for i, leaf in enumerate(leaves):
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{name}: a batched function returns tensors, alone or in tuples, lists and dicts; "
                f"this one returned {type(leaf).__name__}, and whose rows are in it cannot be known"
            )
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise ValueError(
                f"{name}: dim 0 of every result is the batch, {rows} rows here, and one has the shape "
                f"{list(leaf.shape)}; keep the batch dim, in place"
            )
        if cuts is not None and cuts[i] is not None and packs[0].padded is not None:
            _check_cut(name, leaf, cuts[i], packs[0].padded[1])
    out: list[Any] = []
    at = 0
    for p in packs:
        mine: list[Any] = []
        for i, leaf in enumerate(leaves):
            if leaf is None:
                mine.append(None)
                continue
            piece = leaf[at : at + p.rows]
            if cuts is not None and cuts[i] is not None and p.padded is not None:
                piece = piece.narrow(cuts[i], 0, p.padded[0])
            # A view would keep everyone's rows alive, and share memory with what the function keeps: a buffer it
            # writes to again, a table, its own argument. That holds for a call that has the batch to itself too.
            mine.append(piece.detach().clone())
        out.append(pytree.tree_unflatten(mine, tree))
        at += p.rows
    return out


def _check_cut(name: str, leaf: torch.Tensor, dim: int, length: int) -> None:
    if not 0 < dim < leaf.ndim or leaf.shape[dim] != length:
        raise ValueError(
            f"{name}: unpad= says that dim {dim} of a result has the padded length, {length} here, but its shape is "
            f"{list(leaf.shape)}.\n  Write:  unpad= with None for results that have no such dim, as in (1, None)"
        )


def default_lengths(limit: int = 1 << 20) -> tuple[int, ...]:
    """8, 16, 32, … up to `limit`: few enough that a plan for each is nothing."""
    return tuple(1 << i for i in range(3, int(math.log2(limit)) + 1))


def rejoin(results: Sequence[Any]) -> Any:
    """The results of the parts of one pack, in order, as one."""
    if len(results) == 1:
        return results[0]
    flat = [pytree.tree_flatten(r) for r in results]
    pieces = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([None if p[0] is None else torch.cat(p) for p in pieces], flat[0][1])
