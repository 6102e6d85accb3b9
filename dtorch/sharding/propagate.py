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
from typing import NamedTuple

from ..errors import PlacementError
from ..spec import cuts
from . import families, forms, forms_view, message
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
from .rule import NONE, Call, Each, Recipe, Rule, always, find, sizes_of, untied

__all__ = ["FAMILIES", "LocalCall", "Plan", "decode", "propagate", "strategies"]

FAMILIES = (*families.__all__, forms.__name__, forms_view.__name__)
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
        return found.join([propagate(part, auto=auto) for part in found.parts])
    strict = found
    if found is None:
        found = _no_rule(call)
    choices = strategies(found)
    limits = _Limits.of(call, have, want)
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


def _commute(codes: Codes) -> bool:
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


def _candidates(
    rule: Rule, choices: list[Strategy], call: Call, have: Sequence[Codes], limits: _Limits, width: int = 6
) -> list[list[Codes]]:
    """Placements of the inputs for which a strategy may be legal, cheapest to reach first.

    A beam over mesh dims. Not every one is legal: the caller decides each.
    """
    ndim = call.mesh.ndim
    costs: dict[tuple[int, Codes], float] = {}

    def cost_of(i: int, needs: Codes) -> float:
        found = costs.get((i, needs))
        if found is None:
            found = costs[(i, needs)] = message.move_bytes(call.specs[i], placements(needs))
        return found

    beam: list[tuple[float, list[Strategy]]] = [(0.0, [])]
    for j in range(ndim):
        longer = []
        for _, picks in beam:
            for choice in choices:
                if any(choice.outs[o] != codes[j] for o, codes in limits.keep):
                    continue
                if any([choice.needs[i] != have[i][j] for i in limits.still]):
                    continue
                if any([w < 0 and h[j] not in (w, 0) for w, h in zip(choice.needs, have, strict=True)]):
                    continue  # a Partial is made of a Replicate only
                if type(choice.tag) is str:
                    ns = [m for m, p in zip(call.mesh.shape, picks, strict=False) if p.tag == choice.tag]
                    if not _aligned(rule, call, choice.tag, [*ns, call.mesh.shape[j]]):
                        continue
                path = [*picks, choice]
                needs = [tuple([p.needs[i] for p in path]) + have[i][j + 1 :] for i in range(len(have))]
                if all(_commute(c) for c in needs):
                    longer.append((sum([cost_of(i, c) for i, c in enumerate(needs)]), path))
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
