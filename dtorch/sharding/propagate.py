"""From a call to a plan: which placements, which local calls, which free moves.

Mesh dims are decided in order; each sees the earlier cuts of the same factor and the later shards of the same
tensor dim. The cost is a sum over mesh dims, not a product. Several legal strategies: fewest moved inputs, then
the rule's order.

Inside, a placement is a small int (0 Replicate, 1 + d for Shard(d), negative for Partial): comparing and hashing
those is several times faster than comparing placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import PlacementError
from ..spec import TensorSpec, cuts
from . import families, forms, forms_nn, forms_view, message
from .plan import (
    AVG,
    PARTIAL,
    SUM,
    Code,
    Codes,
    LocalCall,
    Plan,
    Strategy,
    build,
    decode,
    encode,
    placements,
    replicated,
)
from .rule import NONE, Call, Each, Flow, Recipe, Rule, always, find, sizes_of, untied

__all__ = ["FAMILIES", "LocalCall", "Plan", "decode", "propagate", "strategies"]

FAMILIES = (*families.__all__, forms.__name__, forms_nn.__name__, forms_view.__name__)
"""The modules of rules and of closed forms; importing them has registered what they define."""


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
    have = [tuple([encode(p) for p in s.placements]) for s in call.specs]
    want = None if call.placements is None else tuple([encode(p) for p in call.placements])
    if not any(map(any, have)) and not (want and any(want)) and not always(call):
        return replicated(call)
    found = find(call)
    if isinstance(found, Recipe):
        return found
    if isinstance(found, Each):
        return found.join(_each(found.parts, auto))
    strict = found
    if found is None:
        found = _no_rule(call)
    choices = strategies(found)
    limits = _Limits.of(call, have, want)
    picks = _decide(found, choices, call, have, limits)
    if picks is None and 1 in call.mesh.shape:
        alone = _where_ranks_are_many(call, have, limits)
        if alone != have:
            have, limits = alone, _Limits.of(call, alone, want)
            picks = _decide(found, choices, call, have, limits)
    if picks is not None:
        return build(call, found, picks, have, ())
    if found.recipe is not None and (found.recipe.strict or auto):
        return found.recipe
    if auto:
        for needs in _candidates(found, choices, call, have, limits):
            again = _Limits.of(call, needs, want)
            picks = _decide(found, choices, call, needs, again)
            if picks is not None:
                moves = tuple((i, placements(n)) for i, (h, n) in enumerate(zip(have, needs, strict=True)) if h != n)
                return build(call, found, picks, needs, moves)
    raise PlacementError(_explain(found, choices, call, have, limits, known=strict is not None))


def _where_ranks_are_many(call: Call, have: Sequence[Codes], limits: _Limits) -> list[Codes]:
    """`have` with Replicate on the mesh dims of one rank, where every placement means the same: a program runs on
    ``tp=1`` as it does on ``tp=2``, and with a batch of one row. What is written keeps its placements.
    """
    many = [n > 1 for n in call.mesh.shape]
    return [
        codes if i in limits.still else tuple([c if m else 0 for c, m in zip(codes, many, strict=True)])
        for i, codes in enumerate(have)
    ]


def _each(parts: Sequence[Call], auto: bool) -> list[Plan | Recipe]:
    """The plan of every part; parts whose specs and other arguments are the same objects have one."""
    seen: dict[Any, Plan | Recipe] = {}
    found = []
    for part in parts:
        key = (
            part.func,
            *[v if type(v) is TensorSpec else id(v) for v in part.args],
            *[(k, v if type(v) is TensorSpec else id(v)) for k, v in part.kwargs.items()],
        )
        plan = seen.get(key)
        if plan is None:
            plan = seen[key] = propagate(part, auto=auto)
        found.append(plan)
    return found


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
                codes.append(0 if kind == "same" else PARTIAL[kind])  # type: ignore[index]
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
        op = PARTIAL[flow.op]
        kinds = flow.out if type(flow.out) is tuple else (flow.out or flow.op,) * len(outs)
        found.append(
            Strategy(
                flow,
                tuple([op if i in flow.ins else 0 for i in range(len(ins))]),
                tuple([0 if k == "same" or outs[o] is None else PARTIAL[k] for o, k in enumerate(kinds)]),  # type: ignore[index]
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
        # Also what is written and not returned, as the state of a fused optimizer is.
        written = sig.written | ({"self"} if sig.inplace else NONE)
        for i, name in enumerate(owners):
            if name in written:
                still.add(i)
        if not sig.inplace_view:
            for o, name in enumerate(sig.writes):
                if name is not None and name in owners and o < len(call.outs):
                    keep.append((o, have[owners.index(name)]))
        return _Limits(fixed, tuple(keep), frozenset(still))


_NO_LIMITS = _Limits(frozenset(), (), frozenset())


def _aligned(rule: Rule, call: Call, factor: str, ns: list[int]) -> bool:
    """Whether tied dims of different lengths are cut in proportion by these mesh dims, outer first."""
    sizes = sizes_of(rule, call, factor)
    if factor in rule.even and any(s % math.prod(ns) for s in sizes):
        return False
    if len(sizes) == 1:
        return True
    first, *rest = sizes
    base = cuts(first, tuple(ns))
    return all([c * first for c in cuts(s, tuple(ns))] == [b * s for b in base] for s in rest)


def _commute(codes: Sequence[Code]) -> bool:
    """Whether the Partial kinds of one tensor may stand together."""
    kinds = {c for c in codes if c < 0}
    return len(kinds) < 2 or kinds == {SUM, AVG}


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


class _Path(NamedTuple):
    """The strategies of the first mesh dims, and what it costs to reach them."""

    cost: float
    sizes: tuple[float, ...]  # per input, bytes of a piece after the moves so far
    picks: tuple[Strategy, ...]


def _candidates(
    rule: Rule, choices: list[Strategy], call: Call, have: Sequence[Codes], limits: _Limits, width: int = 6
) -> Iterator[list[Codes]]:
    """Placements of the inputs for which a strategy may be legal, cheapest to reach first.

    A beam over mesh dims: what a dim costs depends on the dims before it by the sizes of the pieces alone. Not every
    candidate is legal: the caller decides each.
    """
    shape = call.mesh.shape
    ndim, inputs = len(shape), range(len(have))
    # Where all Partials that can be are of kinds that may stand together, that need not be looked at.
    mixed = not _commute([w for h in have for w in h] + [w for c in choices for w in c.needs])
    aligned: dict[tuple[Any, ...], bool] = {}
    beam = [_Path(0.0, tuple([message.piece_bytes(s, h) for s, h in zip(call.specs, have, strict=True)]), ())]
    for j, n in enumerate(shape):
        now = [h[j] for h in have]
        later = [h[j + 1 :] for h in have]
        able = _reachable(choices, j, now, limits, every=width > 6)
        longer: list[_Path] = []
        for path in beam:
            for choice in able:
                tag = choice.tag
                if type(tag) is str:
                    key = (tag, *[m for m, p in zip(shape, path.picks, strict=False) if p.tag == tag], n)
                    fits = aligned.get(key)
                    if fits is None:
                        fits = aligned[key] = _aligned(rule, call, tag, list(key[1:]))
                    if not fits:
                        continue
                picks = (*path.picks, choice)
                if mixed and not all([_commute((*[p.needs[i] for p in picks], *later[i])) for i in inputs]):
                    continue
                cost, sizes = path.cost, path.sizes
                if choice.needs != tuple(now):
                    moved = list(sizes)
                    for i in inputs:
                        if now[i] != choice.needs[i]:
                            paid, moved[i] = message.dim_bytes(moved[i], n, now[i], choice.needs[i], later[i])
                            cost += paid
                    sizes = tuple(moved)
                longer.append(_Path(cost, sizes, picks))
        longer.sort(key=_cost)
        beam = longer[:width] if j + 1 < ndim else longer
    for path in beam:
        yield [tuple([p.needs[i] for p in path.picks]) for i in inputs]


def _cost(path: _Path) -> float:
    return path.cost


def _reachable(choices: list[Strategy], j: int, now: list[Code], limits: _Limits, *, every: bool) -> list[Strategy]:
    """The strategies that mesh dim `j` may come to from the placements `now`, whatever the other dims do.

    A flow of Partials that must all be made of Replicates first is no better than Replicate: only where `every` one is
    asked for, or an output must be so placed.
    """
    every = every or bool(limits.keep)
    return [
        c
        for c in choices
        if (every or type(c.tag) is not Flow or any([w < 0 and w == h for w, h in zip(c.needs, now, strict=True)]))
        and all([c.outs[o] == codes[j] for o, codes in limits.keep])
        and all([c.needs[i] == now[i] for i in limits.still])
        # A Partial is made of a Replicate only.
        and not any([w < 0 and h != 0 and h != w for w, h in zip(c.needs, now, strict=True)])
    ]


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
