"""From a call to a plan: which placements, which local calls, which free moves.

Mesh dims are decided in order; each sees the earlier cuts of the same factor and the later shards of the same
tensor dim. The cost is a sum over mesh dims, not a product. Several legal strategies: fewest moved inputs, then
the rule's order.

Inside, a placement is a small int (0 Replicate, 1 + d for Shard(d), negative for Partial): comparing and hashing
those is several times faster than comparing placements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import PlacementError
from ..mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate, Shard
from ..spec import TensorSpec, contiguous_stride, cuts
from . import families as _families  # registers the rules  # noqa: F401
from . import message
from .rule import Call, Flow, In, Local, OutMeta, Recipe, Rule, always, find, piece, untied

__all__ = ["LocalCall", "Plan", "propagate"]

Code = int
Codes = tuple[Code, ...]

_KINDS = ("sum", "avg", "max", "min")
_PARTIAL: dict[str, Code] = {kind: -1 - i for i, kind in enumerate(_KINDS)}
_SUM = _PARTIAL["sum"]
_DECODED: dict[Code, Placement] = {0: Replicate(), **{c: Partial(k) for k, c in _PARTIAL.items()}}
_INS = tuple(In(i) for i in range(64))


def encode(p: Placement) -> Code:
    kind = type(p)
    if kind is Replicate:
        return 0
    if kind is Shard:
        return p.dim + 1  # type: ignore[attr-defined]
    return _PARTIAL[p.reduce_op]  # type: ignore[attr-defined]


def decode(code: Code) -> Placement:
    found = _DECODED.get(code)
    if found is None:
        found = _DECODED[code] = Shard(code - 1)
    return found


def placements(codes: Codes) -> tuple[Placement, ...]:
    return tuple([decode(c) for c in codes])


class Strategy(NamedTuple):
    """One legal reading of a rule on one mesh dim."""

    tag: str | Flow | None  # the sharded factor, the flow, or None where all is Replicate
    needs: Codes
    outs: Codes


Pre = tuple[str, tuple[tuple[int, int, int], ...]] | None
"""What happens to an input before the call: None; ("narrow", ((dim, start, length), ...)); or ("zero", the same):
zeros of the shape that the narrow would have (Replicate to Partial("sum"), off the lead rank)."""


@dataclass(slots=True)
class LocalCall:
    """What one rank, or several alike, run.

    Attributes:
        func: "aten.add.Tensor", or "dtorch.<name>" for a function of :mod:`dtorch.executor.kernels`.
        args, kwargs: with In(i) for input i, and the call's Num objects or constants.
        pre: per input, the free move before the call; None where no input is moved.
        empty: all outputs are empty: do not run the kernel, make empties of `outs`.
        outs: local shape, stride and dtype per output; None for an undefined output. The stride is None where
            the global tensor is not dense (any will do).
    """

    func: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pre: tuple[Pre, ...] | None
    empty: bool
    outs: tuple[OutMeta | None, ...]


@dataclass(slots=True)
class Plan:
    """A decided call.

    Attributes:
        outs: specs of the outputs, flat over the returns; None for an undefined one.
        needs: per input, the placements it has when the local calls run (after all moves).
        moves: (input, placements) that must be redistributed first, with communication; only with `auto`.
        frees: inputs that a local call narrows or zeroes, without communication.
        calls: distinct local calls.
        which: rank -> index in `calls`.
    """

    outs: tuple[TensorSpec | None, ...]
    needs: tuple[tuple[Placement, ...], ...]
    moves: tuple[tuple[int, tuple[Placement, ...]], ...]
    frees: tuple[int, ...]
    calls: tuple[LocalCall, ...]
    which: tuple[int, ...]


def propagate(call: Call, *, auto: bool = False) -> Plan | Recipe:
    """Decide a call.

    Args:
        call: the call, with the outputs that :func:`dtorch.sharding.infer.infer` found.
        auto: allow moves that need communication (``auto_redistribute``, backward).

    Returns:
        A plan; or a Recipe, which the caller runs with the real arguments.

    Raises:
        PlacementError: no strategy is legal for the placements at hand; the message lists the legal ones.
    """
    mesh = call.mesh
    have = [tuple([encode(p) for p in s.placements]) for s in call.specs]
    want = None if call.placements is None else tuple([encode(p) for p in call.placements])
    if not any(map(any, have)) and not (want and any(want)) and not always(call):
        return _replicated(call)
    found = find(call)
    if isinstance(found, Recipe):
        return found
    strict = found
    if found is None:
        found = _no_rule(call)
    choices = strategies(found)
    limits = _Limits.of(call, have, want)
    picks = _decide(found, choices, call, have, limits)
    if picks is not None:
        return _build(call, found, picks, have, ())
    if found.recipe is not None and (found.recipe.strict or auto):
        return found.recipe
    if auto:
        for needs in _candidates(found, choices, call, have, limits):
            again = _Limits.of(call, needs, want)
            picks = _decide(found, choices, call, needs, again)
            if picks is not None:
                moves = tuple((i, placements(n)) for i, (h, n) in enumerate(zip(have, needs, strict=True)) if h != n)
                return _build(call, found, picks, needs, moves)
    raise PlacementError(_explain(found, choices, call, have, limits, known=strict is not None))


# ---- strategies -------------------------------------------------------------------------------------


def strategies(rule: Rule) -> list[Strategy]:
    """All strategies of a rule on one mesh dim, in the order in which they are preferred."""
    ins, outs = rule.ins, rule.outs
    zeros = (0,) * len(ins)
    found = [Strategy(None, zeros, (0,) * len(outs))]
    factors = dict.fromkeys([f for dims in ins for f in dims if f])
    factors.update(dict.fromkeys([f for dims in outs if dims for f in dims if f]))
    for f in factors:
        if f in rule.whole:
            continue
        codes: list[Code] = []
        addend = 0
        for o, dims in enumerate(outs):
            if dims is None:
                codes.append(0)
            elif f in dims:
                codes.append(dims.index(f) + 1)
            else:
                kind = rule.reduce.get(f)
                if type(kind) is tuple:
                    kind = kind[o]
                if kind is None:
                    break
                codes.append(0 if kind == "same" else _PARTIAL[kind])  # type: ignore[index]
                if o == 0:
                    addend = codes[0]
        else:
            needs = [dims.index(f) + 1 if f in dims else 0 for dims in ins]
            if addend:
                for i in rule.addend:
                    if not needs[i]:
                        needs[i] = addend
            found.append(Strategy(f, tuple(needs), tuple(codes)))
    for flow in rule.flows:
        op = _PARTIAL[flow.op]
        kinds = flow.out if type(flow.out) is tuple else (flow.out or flow.op,) * len(outs)
        found.append(
            Strategy(
                flow,
                tuple([op if i in flow.ins else 0 for i in range(len(ins))]),
                tuple([0 if k == "same" or outs[o] is None else _PARTIAL[k] for o, k in enumerate(kinds)]),  # type: ignore[index]
            )
        )
    return found


class _Limits(NamedTuple):
    """What may not change: inputs that may not be moved at all, and outputs that must be placed so."""

    fixed: frozenset[int]
    keep: tuple[tuple[int, Codes], ...]  # (output, its placements)
    still: frozenset[int]  # inputs that communication may not move either: they are written

    @staticmethod
    def of(call: Call, have: Sequence[Codes], want: Codes | None) -> _Limits:
        keep: list[tuple[int, Codes]] = [] if want is None else [(0, want)]
        sig = call.sig
        if not sig.aliased:
            return _NO_LIMITS if not keep else _Limits(frozenset(), tuple(keep), frozenset())
        owners = call.owners()
        fixed = frozenset([i for i, name in enumerate(owners) if name in sig.aliased])
        still = set()
        written = {name for name in sig.writes if name is not None} | ({"self"} if sig.inplace else set())
        for i, name in enumerate(owners):
            if name in written:
                still.add(i)
        if not sig.inplace_view:
            for o, name in enumerate(sig.writes):
                if name is not None and name in owners and o < len(call.outs):
                    keep.append((o, have[owners.index(name)]))
        return _Limits(fixed, tuple(keep), frozenset(still))


_NO_LIMITS = _Limits(frozenset(), (), frozenset())


def _sizes(rule: Rule, call: Call, factor: str) -> set[int]:
    """The global sizes of all dims that carry the factor."""
    found = {s.shape[d.index(factor)] for s, d in zip(call.specs, rule.ins, strict=True) if factor in d}
    for meta, dims in zip(call.outs, rule.outs, strict=True):
        if meta is not None and dims is not None and factor in dims:
            found.add(meta.shape[dims.index(factor)])
    return found


def _aligned(rule: Rule, call: Call, factor: str, ns: list[int]) -> bool:
    """Whether tied dims of different lengths are cut in proportion by these mesh dims, outer first."""
    sizes = _sizes(rule, call, factor)
    if factor in rule.even and any(s % math.prod(ns) for s in sizes):
        return False
    if len(sizes) == 1:
        return True
    first, *rest = sizes
    base = cuts(first, tuple(ns))
    return all([c * first for c in cuts(s, tuple(ns))] == [b * s for b in base] for s in rest)


def _commute(codes: Codes) -> bool:
    """Whether the Partial kinds of one tensor may stand together."""
    kinds = {c for c in codes if c < 0}
    return len(kinds) < 2 or kinds == {_SUM, _PARTIAL["avg"]}


def _decide(
    rule: Rule, choices: list[Strategy], call: Call, have: Sequence[Codes], limits: _Limits
) -> list[Strategy] | None:
    """One strategy per mesh dim that needs no communication, or None."""
    shape = call.mesh.shape
    picks: list[Strategy] = []
    for j, n in enumerate(shape):
        now = [h[j] for h in have]
        best, fewest = None, 1 << 30
        for choice in choices:
            moved = 0
            for i, (h, w) in enumerate(zip(now, choice.needs, strict=True)):
                if h != w:
                    # Only Replicate moves freely, and not into a cut that a later mesh dim has already made.
                    if h or i in limits.fixed or (w > 0 and w in have[i][j + 1 :]):
                        break
                    moved += 1
            else:
                if moved >= fewest or any([choice.outs[o] != codes[j] for o, codes in limits.keep]):
                    continue
                if type(choice.tag) is str:
                    ns = [m for m, p in zip(shape, picks, strict=False) if p.tag == choice.tag]
                    if not _aligned(rule, call, choice.tag, [*ns, n]):
                        continue
                best, fewest = choice, moved
                if not moved:
                    break
        if best is None:
            return None
        picks.append(best)
    if len(shape) > 1:
        for i in range(len(have)):
            if not _commute(tuple([p.needs[i] for p in picks])):
                return None
        for o in range(len(rule.outs)):
            if not _commute(tuple([p.outs[o] for p in picks])):
                return None
    return picks


def _no_rule(call: Call) -> Rule:
    return Rule(
        tuple([untied(s.ndim) for s in call.specs]),
        tuple([None if m is None else untied(len(m.shape)) for m in call.outs]),
        why=f"dtorch has no sharding rule for {call.sig.op}: it runs on Replicate inputs only.",
    )


def _candidates(
    rule: Rule, choices: list[Strategy], call: Call, have: Sequence[Codes], limits: _Limits, width: int = 6
) -> list[list[Codes]]:
    """Placements of the inputs for which a strategy may be legal, cheapest to reach first.

    A beam over mesh dims. Not every one is legal: the caller decides each.
    """
    ndim = call.mesh.ndim
    beam: list[tuple[float, list[Strategy]]] = [(0.0, [])]
    for j in range(ndim):
        longer = []
        for _, picks in beam:
            for choice in choices:
                if any(choice.outs[o] != codes[j] for o, codes in limits.keep):
                    continue
                if any(choice.needs[i] != have[i][j] for i in limits.still):
                    continue
                if type(choice.tag) is str:
                    ns = [m for m, p in zip(call.mesh.shape, picks, strict=False) if p.tag == choice.tag]
                    if not _aligned(rule, call, choice.tag, [*ns, call.mesh.shape[j]]):
                        continue
                path = [*picks, choice]
                needs = [tuple([p.needs[i] for p in path]) + have[i][j + 1 :] for i in range(len(have))]
                if all(_commute(c) for c in needs):
                    cost = sum(message.move_bytes(s, placements(n)) for s, n in zip(call.specs, needs, strict=True))
                    longer.append((cost, path))
        longer.sort(key=lambda x: x[0])
        beam = longer[: width if j + 1 < ndim else None]
    return [[tuple([p.needs[i] for p in path]) for i in range(len(have))] for _, path in beam]


def _explain(
    rule: Rule, choices: list[Strategy], call: Call, have: Sequence[Codes], limits: _Limits, *, known: bool
) -> str:
    """The text of a PlacementError."""
    legal = []
    for needs in _candidates(rule, choices, call, have, limits, width=16):
        if len(legal) == message.SHOWN + 1:
            break
        if _decide(rule, choices, call, needs, _Limits.of(call, needs, None)) is not None:
            legal.append([placements(n) for n in needs])
    return message.placement_error(call, rule.why, legal, known=known)


# ---- local calls ------------------------------------------------------------------------------------


def _template(value: Any, counter: list[int]) -> Any:
    """`value` with In(i) in place of the i-th TensorSpec."""
    kind = type(value)
    if kind is TensorSpec:
        i = counter[0]
        counter[0] = i + 1
        return _INS[i] if i < 64 else In(i)
    if kind is list or kind is tuple:
        return kind([_template(v, counter) for v in value])
    return value


def _arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    counter = [0]
    args = [_template(v, counter) for v in call.args]
    return args, {k: _template(v, counter) for k, v in call.kwargs.items()}


def _replicated(call: Call) -> Plan:
    """The plan where everything is Replicate: all ranks run the call as it is."""
    mesh = call.mesh
    args, kwargs = _arguments(call)
    whole = (decode(0),) * mesh.ndim
    return Plan(
        outs=tuple([None if m is None else TensorSpec.of(m.shape, m.stride, m.dtype, mesh, whole) for m in call.outs]),
        needs=(whole,) * len(call.specs),
        moves=(),
        frees=(),
        calls=(LocalCall(call.sig.op, tuple(args), kwargs, None, _all_empty(call.outs), call.outs),),
        which=(0,) * mesh.nranks,
    )


def _all_empty(outs: Sequence[OutMeta | None]) -> bool:
    return bool(outs) and all([m is None or 0 in m.shape for m in outs])


class _Classes:
    """Which ranks run the same local call.

    Ranks differ by the lengths of their pieces of each sharded factor; by the offsets too, where a rule asks
    for one or an input is cut on the way; and by who is the lead, where that is asked.
    """

    def __init__(self, rule: Rule, call: Call, picks: list[Strategy], cut_freely: set[str], zeroed: set[int]) -> None:
        self.rule, self.call, self.picks = rule, call, picks
        self.cut_freely, self.zeroed = cut_freely, zeroed
        self.along: dict[str, list[int]] = {}
        for j, p in enumerate(picks):
            if type(p.tag) is str:
                self.along.setdefault(p.tag, []).append(j)
        self.summed = [j for j, p in enumerate(picks) if _SUM in p.outs]

    def chains(self, coord: tuple[int, ...]) -> dict[str, tuple[tuple[int, int], ...]]:
        """Per sharded factor: (ranks, our index) along each mesh dim that shards it."""
        shape = self.call.mesh.shape
        return {f: tuple([(shape[j], coord[j]) for j in js]) for f, js in self.along.items()}

    def group(self, *, offsets: bool, lead: bool) -> tuple[list[int], list[int]]:
        """(rank -> class, class -> its first rank)."""
        mesh = self.call.mesh
        groups: list[tuple[list[int], dict[tuple[int, ...], Any]]] = []
        for f, js in self.along.items():
            sizes = sorted(_sizes(self.rule, self.call, f))
            exact = offsets or f in self.cut_freely
            table: dict[tuple[int, ...], Any] = {}
            for c in _grid([mesh.shape[j] for j in js]):
                chain = tuple([(mesh.shape[j], i) for j, i in zip(js, c, strict=True)])
                pieces = [piece(s, chain) for s in sizes]
                table[c] = tuple(pieces) if exact else tuple([p[1] for p in pieces])
            groups.append((js, table))
        for j in self.summed if lead else sorted(self.zeroed):
            groups.append(([j], {(c,): c == 0 for c in range(mesh.shape[j])}))
        if not groups:
            return [0] * mesh.nranks, [0]
        seen: dict[tuple[Any, ...], int] = {}
        which, first = [], []
        for rank, coord in enumerate(mesh.coordinates):
            key = tuple([table[tuple([coord[j] for j in js])] for js, table in groups])
            k = seen.get(key)
            if k is None:
                k = seen[key] = len(first)
                first.append(rank)
            which.append(k)
        return which, first


def _grid(shape: list[int]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for n in shape:
        out = [(*c, i) for c in out for i in range(n)]
    return out


def _build(
    call: Call,
    rule: Rule,
    picks: list[Strategy],
    have: Sequence[Codes],
    moves: tuple[tuple[int, tuple[Placement, ...]], ...],
) -> Plan:
    mesh = call.mesh
    needs = [tuple([p.needs[i] for p in picks]) for i in range(len(have))]
    outs = tuple(
        [
            None
            if m is None
            else TensorSpec.of(m.shape, m.stride, m.dtype, mesh, placements(tuple([p.outs[o] for p in picks])))
            for o, m in enumerate(call.outs)
        ]
    )
    frees = tuple([i for i, (h, w) in enumerate(zip(have, needs, strict=True)) if h != w])
    cut_freely, zeroed = set[str](), set[int]()
    for i in frees:
        for j, (h, w) in enumerate(zip(have[i], needs[i], strict=True)):
            if h != w:
                if w > 0:
                    cut_freely.add(picks[j].tag)  # type: ignore[arg-type]
                elif w == _SUM:
                    zeroed.add(j)
    classes = _Classes(rule, call, picks, cut_freely, zeroed)
    use_local = rule.local is not None and (any([p.tag is not None for p in picks]) or always(call))
    offsets = lead = False
    while True:
        which, first = classes.group(offsets=offsets, lead=lead)
        calls = []
        asked_offset = asked_lead = False
        for rank in first:
            local = _local(call, rule, picks, classes, mesh.coordinates[rank], use_local)
            if local is not None:
                asked_offset |= local.asked_offset
                asked_lead |= local.asked_lead
            metas = _local_outs(call, rule, outs, classes, rank)
            # A random operator runs for an empty piece too: every rank's generator must pass as many draws.
            empty = _all_empty(metas) and not always(call)
            if local is None:
                args, kwargs = _arguments(call)
                func = call.sig.op
            else:
                args, kwargs, func = local.args, local.kwargs, local.func
            pre = _pre(call, have, needs, mesh, rank, frees) if frees else None
            calls.append(LocalCall(func, tuple(args), kwargs, pre, empty, metas))
        if asked_offset <= offsets and asked_lead <= lead:
            break
        offsets, lead = offsets or asked_offset, lead or asked_lead
    return Plan(outs, tuple([placements(n) for n in needs]), moves, frees, tuple(calls), tuple(which))


def _local(
    call: Call, rule: Rule, picks: list[Strategy], classes: _Classes, coord: tuple[int, ...], use: bool
) -> Local | None:
    """The rule's local call, edited; None where the global call serves."""
    if not use:
        return None
    leads = tuple(
        [all([c == 0 for p, c in zip(picks, coord, strict=True) if p.outs[o] == _SUM]) for o in range(len(rule.outs))]
    )
    args, kwargs = _arguments(call)
    local = Local(call, rule, classes.chains(coord), leads, args, kwargs)
    assert rule.local is not None
    rule.local(local)
    return local


def _local_outs(
    call: Call, rule: Rule, outs: tuple[TensorSpec | None, ...], classes: _Classes, rank: int
) -> tuple[OutMeta | None, ...]:
    chains = classes.chains(call.mesh.coordinates[rank])
    found: list[OutMeta | None] = []
    for spec, dims in zip(outs, rule.outs, strict=True):
        if spec is None or dims is None:
            found.append(None)
            continue
        shape = tuple([piece(s, chains[f])[1] if f in chains else s for s, f in zip(spec.shape, dims, strict=True)])
        stride = contiguous_stride(shape) if spec.is_contiguous else spec.local_stride(rank)
        found.append(OutMeta(shape, stride, spec.dtype))  # type: ignore[arg-type]
    return tuple(found)


def _pre(
    call: Call, have: Sequence[Codes], needs: list[Codes], mesh: DeviceMesh, rank: int, frees: tuple[int, ...]
) -> tuple[Pre, ...]:
    """The free moves of one rank."""
    coord = mesh.coordinates[rank]
    out: list[Pre] = [None] * len(have)
    for i in frees:
        cuts_, zero = [], False
        shape = call.specs[i].shape
        for d in range(len(shape)):
            before = _chain(have[i], d, mesh.shape, coord)
            after = _chain(needs[i], d, mesh.shape, coord)
            if before != after:
                start, _ = piece(shape[d], before)
                offset, length = piece(shape[d], after)
                # Ranks whose piece is empty share one local call, wherever it would begin.
                cuts_.append((d, offset - start if length else 0, length))
        for h, w, c in zip(have[i], needs[i], coord, strict=True):
            zero |= h != w and w == _SUM and c != 0
        if zero or cuts_:
            out[i] = ("zero" if zero else "narrow", tuple(cuts_))
    return tuple(out)


def _chain(codes: Codes, d: int, shape: tuple[int, ...], coord: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple([(n, c) for code, n, c in zip(codes, shape, coord, strict=True) if code == d + 1])
