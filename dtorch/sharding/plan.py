"""From a decided call to what each rank runs: :class:`Plan` and :class:`LocalCall`.

Ranks that run the same share one local call, so that the plan of a large mesh costs little more than that of a
small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..placement import Partial, Placement, Replicate, Shard
from ..spec import TensorSpec, contiguous_stride
from .rule import Call, Flow, In, Local, OutMeta, Rule, always, piece, sizes_of

__all__ = ["Codes", "LocalCall", "Plan", "Pre", "Strategy", "build", "decode", "encode", "placements", "replicated"]

Code = int
Codes = tuple[Code, ...]

_KINDS = ("sum", "avg", "max", "min")
PARTIAL: dict[str, Code] = {kind: -1 - i for i, kind in enumerate(_KINDS)}
SUM, AVG = PARTIAL["sum"], PARTIAL["avg"]
_DECODED: dict[Code, Placement] = {0: Replicate(), **{c: Partial(k) for k, c in PARTIAL.items()}}
_INS = tuple(In(i) for i in range(64))


def encode(p: Placement) -> Code:
    kind = type(p)
    if kind is Replicate:
        return 0
    if kind is Shard:
        return p.dim + 1  # type: ignore[attr-defined]
    return PARTIAL[p.reduce_op]  # type: ignore[attr-defined]


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
        empty: nothing to compute: do not run the kernel, make zeros (most often, of no element) of `outs`.
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


def replicated(call: Call) -> Plan:
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
    """Whether there is nothing to compute; an operator without outputs is run for what it writes."""
    real = [m for m in outs if m is not None]
    return bool(real) and all([0 in m.shape for m in real])


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
        self.summed = [j for j, p in enumerate(picks) if SUM in p.outs]
        # Sharded factors that all outputs without them sum over, and the longest dim that carries each: a rank with
        # an empty piece of one adds nothing. (Kernels cannot be trusted with it: some leave what they should sum into
        # as it was.) Where something else is added, or written, it is not nothing.
        self.summing: list[tuple[int, list[int]]] = []
        if not rule.addend and not call.sig.aliased:
            for f, js in self.along.items():
                kinds = rule.reduce.get(f)
                each = kinds if type(kinds) is tuple else (kinds,) * len(rule.outs)
                if kinds and all([d is None or f in d or k == "sum" for d, k in zip(rule.outs, each, strict=True)]):
                    size, n = max(sizes_of(rule, call, f)), 1
                    for j in js:
                        n *= call.mesh.shape[j]
                    if size <= n * n:  # two cuts of five rows into four leave some ranks none
                        self.summing.append((size, js))

    def chains(self, coord: tuple[int, ...]) -> dict[str, tuple[tuple[int, int], ...]]:
        """Per sharded factor: (ranks, our index) along each mesh dim that shards it."""
        shape = self.call.mesh.shape
        return {f: tuple([(shape[j], coord[j]) for j in js]) for f, js in self.along.items()}

    def sums_nothing(self, coord: tuple[int, ...]) -> bool:
        """Whether a rank's piece of a factor that is summed over is empty, so that its share of the outputs is zero."""
        shape = self.call.mesh.shape
        return any([piece(size, tuple([(shape[j], coord[j]) for j in js]))[1] == 0 for size, js in self.summing])

    def group(self, *, offsets: bool, lead: bool) -> tuple[list[int], list[int]]:
        """(rank -> class, class -> its first rank)."""
        mesh = self.call.mesh
        groups: list[tuple[list[int], dict[tuple[int, ...], Any]]] = []
        for f, js in self.along.items():
            sizes = sorted(sizes_of(self.rule, self.call, f))
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


def build(
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
                elif w == SUM:
                    zeroed.add(j)
    classes = _Classes(rule, call, picks, cut_freely, zeroed)
    use_local = rule.local is not None and (any([p.tag is not None for p in picks]) or always(call))
    shared = (call.sig.op, *_arguments(call)) if not use_local else None
    free = _Free(call, have, needs, frees) if frees else None
    offsets = lead = False
    while True:
        which, first = classes.group(offsets=offsets, lead=lead)
        calls = []
        asked_offset = asked_lead = False
        for rank in first:
            if shared is None:
                local = _local(call, rule, picks, classes, mesh.coordinates[rank])
                asked_offset |= local.asked_offset
                asked_lead |= local.asked_lead
                func, args, kwargs = local.func, local.args, local.kwargs
            else:
                func, args, kwargs = shared
            metas = _local_outs(rule, outs, classes, rank)
            # A random operator runs for an empty piece too: every rank's generator must pass as many draws.
            empty = (_all_empty(metas) or classes.sums_nothing(mesh.coordinates[rank])) and not always(call)
            pre = free.of(mesh.coordinates[rank]) if free else None
            calls.append(LocalCall(func, tuple(args), kwargs, pre, empty, metas))
        if asked_offset <= offsets and asked_lead <= lead:
            break
        offsets, lead = offsets or asked_offset, lead or asked_lead
    return Plan(outs, tuple([placements(n) for n in needs]), moves, frees, tuple(calls), tuple(which))


def _local(call: Call, rule: Rule, picks: list[Strategy], classes: _Classes, coord: tuple[int, ...]) -> Local:
    """The local call of one rank, edited by the rule."""
    leads = tuple(
        [all([c == 0 for p, c in zip(picks, coord, strict=True) if p.outs[o] == SUM]) for o in range(len(rule.outs))]
    )
    args, kwargs = _arguments(call)
    local = Local(call, rule, classes.chains(coord), leads, args, kwargs)
    assert rule.local is not None
    rule.local(local)
    return local


def _local_outs(
    rule: Rule, outs: tuple[TensorSpec | None, ...], classes: _Classes, rank: int
) -> tuple[OutMeta | None, ...]:
    chains = classes.chains(classes.call.mesh.coordinates[rank])
    found: list[OutMeta | None] = []
    for spec, dims in zip(outs, rule.outs, strict=True):
        if spec is None or dims is None:
            found.append(None)
            continue
        shape = tuple([piece(s, chains[f])[1] if f in chains else s for s, f in zip(spec.shape, dims, strict=True)])
        stride = contiguous_stride(shape) if spec.is_contiguous else spec.local_stride(rank)
        found.append(OutMeta(shape, stride, spec.dtype))  # type: ignore[arg-type]
    return tuple(found)


class _Free:
    """The free moves of a call."""

    def __init__(self, call: Call, have: Sequence[Codes], needs: list[Codes], frees: tuple[int, ...]) -> None:
        self.n, self.mesh = len(have), call.mesh.shape
        # Per moved input: its index, the dims cut (size, mesh dims that cut before, and after), mesh dims to zero.
        self.inputs: list[tuple[int, list[tuple[int, int, list[int], list[int]]], list[int]]] = []
        for i in frees:
            cut_dims = []
            for d, size in enumerate(call.specs[i].shape):
                before = [j for j, c in enumerate(have[i]) if c == d + 1]
                after = [j for j, c in enumerate(needs[i]) if c == d + 1]
                if before != after:
                    cut_dims.append((d, size, before, after))
            zero = [j for j, (h, w) in enumerate(zip(have[i], needs[i], strict=True)) if h != w and w == SUM]
            self.inputs.append((i, cut_dims, zero))

    def of(self, coord: tuple[int, ...]) -> tuple[Pre, ...]:
        """What one rank does to each input before the call."""
        out: list[Pre] = [None] * self.n
        for i, cut_dims, zero in self.inputs:
            narrow = []
            for d, size, before, after in cut_dims:
                start, _ = piece(size, tuple([(self.mesh[j], coord[j]) for j in before]))
                offset, length = piece(size, tuple([(self.mesh[j], coord[j]) for j in after]))
                # Ranks whose piece is empty share one local call, wherever it would begin.
                narrow.append((d, offset - start if length else 0, length))
            off_lead = any([coord[j] for j in zero])
            if off_lead or narrow:
                out[i] = ("zero" if off_lead else "narrow", tuple(narrow))
        return tuple(out)
