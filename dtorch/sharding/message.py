"""What a move costs, and the text of a PlacementError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..placement import Partial, Placement, Replicate, Shard
from ..spec import TensorSpec
from .plan import encode
from .rule import Call, Num

__all__ = ["SHOWN", "dim_bytes", "move_bytes", "move_kind", "piece_bytes", "placement_error"]

_OPEN = (1 << 63) - 1  # the end of a slice that has none

SHOWN = 6
"""Legal combinations listed in full; the rest are counted."""


def move_bytes(spec: TensorSpec, to: tuple[Placement, ...]) -> float:
    """Bytes that each rank receives, about, when `spec` is redistributed to `to` (ring algorithms).

    Replicate to Shard is free unless a later mesh dim cuts the same tensor dim.
    """
    if spec.placements == to:
        return 0.0
    have, total = [encode(p) for p in spec.placements], 0.0
    size = piece_bytes(spec, have)
    for j, (a, b, n) in enumerate(zip(have, [encode(p) for p in to], spec.mesh.shape, strict=True)):
        paid, size = dim_bytes(size, n, a, b, have[j + 1 :])
        total += paid
    return total


def piece_bytes(spec: TensorSpec, have: Sequence[int]) -> float:
    """Bytes of an even piece of `spec` under the placements `have`, as :mod:`~dtorch.sharding.plan` encodes them."""
    size = float(spec.numel * spec.dtype.itemsize)
    for n, code in zip(spec.mesh.shape, have, strict=True):
        if code > 0:
            size /= n
    return size


def dim_bytes(size: float, n: int, have: int, to: int, later: Sequence[int]) -> tuple[float, float]:
    """(bytes received, bytes of a piece afterwards) where one mesh dim of `n` ranks goes from `have` to `to`.

    Args:
        size: bytes of a piece before.
        later: what the later mesh dims have.
    """
    if have == to:
        return 0.0, size
    share = (n - 1) / n
    if have == 0:
        if to > 0:
            return size * share if to in later else 0.0, size / n
        return 0.0, size
    if have > 0:
        return (size * share, size) if to > 0 else (size * (n - 1), size * n)
    return (size * share, size / n) if to > 0 else (2 * size * share, size)


def move_kind(spec: TensorSpec, to: tuple[Placement, ...]) -> str:
    """The collectives that the move needs, for messages: "all_to_all", "all_gather + reduce_scatter"."""
    kinds = []
    for a, b in zip(spec.placements, to, strict=True):
        if a == b or type(a) is Replicate:
            continue
        if type(a) is Shard:
            kinds.append("all_to_all" if type(b) is Shard else "all_gather")
        else:
            kinds.append("reduce_scatter" if type(b) is Shard else "all_reduce")
    return " + ".join(dict.fromkeys(kinds)) or "all_to_all"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return ""


def _value(x: Any) -> str | None:
    """An argument for the first line of a message; None for those not worth showing."""
    if isinstance(x, Num):
        return repr(x.value)
    if x is None or isinstance(x, TensorSpec) or (type(x) is int and x == _OPEN):
        return None
    if isinstance(x, (list, tuple)):
        shown = [_value(v) for v in x]
        return None if not shown or any(v is None for v in shown) else f"[{', '.join(v for v in shown if v)}]"
    if isinstance(x, (bool, int, float, str)):
        return repr(x)
    return str(x).removeprefix("torch.")


def _title(call: Call) -> str:
    sig = call.sig
    shown = []
    for name, value in [*zip(sig.arguments, call.args, strict=False), *call.kwargs.items()]:
        if name == "half_to_float" or (name in sig.defaults and sig.defaults[name] == value):
            continue
        text = _value(value)
        if text is not None:
            shown.append(f"{name}={text}")
    return f"{_operator(call)}({', '.join(shown)})"


def _operator(call: Call) -> str:
    """The operator as a user knows it."""
    op = call.sig.op
    return op.split(".")[1].lstrip("_") if op.startswith("aten.") else op


def _names(call: Call) -> list[str]:
    """What to call each input: the schema's argument, numbered where several came in one list."""
    owners = ["input" if name == "self" else name for name in call.owners()]
    return [f"{n}[{owners[:i].count(n)}]" if owners.count(n) > 1 else n for i, n in enumerate(owners)]


def _legal_lines(legal: Sequence[Sequence[tuple[Placement, ...]]]) -> list[str]:
    shown = [", ".join(str(list(p)) for p in needs) for needs in legal[:SHOWN]]
    more = "    …" if len(legal) > SHOWN else ""
    if all(len(s) < 28 for s in shown) and sum(len(s) + 4 for s in shown) < 110:
        return ["    " + "    ".join(shown) + more]
    return ["    " + s for s in shown] + ([more] if more else [])


def _out_of_place(call: Call, name: str) -> str:
    to = [Replicate() if isinstance(p, Partial) else p for p in call.specs[0].placements]
    first = f"{name} = {name}.redistribute(placements={to})"
    if to != list(call.specs[0].placements):
        return f"{first}    # then {_operator(call)}"
    return f"{name} = {name}.{_operator(call).rstrip('_')}(…)    # the form that makes a new tensor"


def placement_error(
    call: Call, why: str, legal: Sequence[Sequence[tuple[Placement, ...]]], *, known: bool = True
) -> str:
    """The text of a PlacementError.

    Args:
        why: the rule's sentence, or "".
        legal: legal placements of all inputs, cheapest to reach first.
        known: whether the operator has a rule.
    """
    inputs = _names(call)
    lines = [f"{_title(call)} cannot run on these placements"]
    width = max(map(len, inputs), default=0)
    mesh = call.mesh.describe()
    for name, spec in zip(inputs, call.specs, strict=True):
        what = f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)} on {mesh}: {list(spec.placements)}"
        lines.append(f"    {name + ':':<{width + 1}} {what}")
    kinds = dict.fromkeys([str(p) for s in call.specs for p in s.placements if isinstance(p, Partial)])
    if not why and kinds:
        why = f"{' and '.join(kinds)} cannot pass through {_operator(call)} here."
    if not legal:
        lines.append(f"  {f'{why} ' if why else ''}It writes {inputs[0]} in place, which is never moved.")
        lines.append("  Write:  " + _out_of_place(call, inputs[0]))
        return "\n".join(lines)
    lines.append(f"  {why} Legal here:" if why else "  Legal here:")
    lines += _legal_lines(legal)
    moved = [(n, s, p) for n, s, p in zip(inputs, call.specs, legal[0], strict=True) if s.placements != p]
    paid = [m for m in moved if move_bytes(m[1], m[2])] or moved
    for k, (name, spec, to) in enumerate(paid):
        head = "  Write:  " if k == 0 else "          "
        cost = f"{move_kind(spec, to)}, {_size(move_bytes(spec, to))} per rank"
        lines.append(f"{head}{name} = {name}.redistribute(placements={list(to)})    # {cost}")
    lines.append("  or run under  with dtorch.auto_redistribute():")
    return "\n".join(lines)
