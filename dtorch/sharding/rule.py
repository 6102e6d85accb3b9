"""Sharding rules: what an operator does to the dims of its tensors, as data.

A rule ties tensor dims together with *factors*, as in ``mm: [m,k],[k,n] -> [m,n]``. Everything else is read
off the rule by :mod:`dtorch.sharding.propagate`: which placements are legal, the placements of the outputs,
what each rank runs, the text of the error, and the tests.

Per mesh dim there are three kinds of strategy:

* nothing is sharded: Replicate in, Replicate out;
* one factor is sharded: every dim that carries it is Shard, everything else Replicate; an output without
  the factor is Partial as ``reduce`` says;
* a :class:`Flow`: Partial passes through.

A rule is made from one call (:class:`Call`), where a ``TensorSpec`` stands for each tensor and a :class:`Num`
for each number that may change from call to call without another decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ..spec import cut
from .call import Call, In, Num, OutMeta, Signature, signature

__all__ = [
    "NONE",
    "Call",
    "Dims",
    "Each",
    "Flow",
    "In",
    "Local",
    "Num",
    "OutMeta",
    "Recipe",
    "Rule",
    "Signature",
    "dims_of",
    "einsum",
    "find",
    "free_numbers",
    "is_positive",
    "linear",
    "names",
    "partials",
    "rule",
    "signature",
    "untied",
]

Dims = tuple[str, ...]
"""A factor name per tensor dim; "" ties the dim to nothing, so it can never be sharded."""

Reduce = str | None | tuple[str | None, ...]

NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Flow:
    """Partial(`op`) on the inputs `ins`, Replicate on all others, gives Partial on the outputs.

    Attributes:
        op: "sum", "avg", "max" or "min".
        ins: input indices.
        out: the kind on the outputs; None is `op`; a tuple gives one per output; "same" means that the
            output does not depend on the Partial inputs' values, and is Replicate.
    """

    op: str
    ins: frozenset[int]
    out: str | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """An operator that communicates inside: a composition of other operators and ``redistribute``.

    Attributes:
        fn: ``fn(func, args, kwargs)`` with dtorch tensors in the arguments; returns what `func` returns.
        strict: whether the recipe *is* the operator and runs in strict mode too. Otherwise only where
            communication is allowed.
    """

    fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Each:
    """An operator on lists: its elements are decided one by one, each as a call of its own.

    Attributes:
        parts: a call per element.
        join: the plans of the parts, made into the plan of the whole.
    """

    parts: tuple[Call, ...]
    join: Callable[[list[Any]], Any]


@dataclass(slots=True)
class Rule:
    """How the dims of an operator's tensors hang together.

    Attributes:
        ins: the factors of each input's dims, in the order of ``Call.specs``.
        outs: the factors of each output's dims, aligned with ``Call.outs``; None for an undefined output.
        whole: factors that cannot be sharded.
        even: factors that can be sharded only in equal pieces.
        reduce: for a factor that an output lacks, how the ranks' outputs combine: "sum", "avg", "max", "min",
            or "same" where that output does not depend on the factor. A tuple gives one per output. None
            (or no entry) forbids sharding the factor.
        flows: how Partial passes.
        addend: inputs added to a contraction: where sharding makes output 0 Partial, they must be Partial too.
        local: edits what one rank runs (see :class:`Local`); not asked where every tensor is Replicate.
        recipe: used where no strategy is legal for the placements at hand.
        why: one sentence for the error message, such as "The softmax dim must be whole on every rank."
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims | None, ...]
    whole: frozenset[str] = NONE
    even: frozenset[str] = NONE
    reduce: Mapping[str, Reduce] = field(default_factory=dict)
    flows: tuple[Flow, ...] = ()
    addend: frozenset[int] = frozenset()
    local: Callable[[Local], None] | None = None
    recipe: Recipe | None = None
    why: str = ""


class Local:
    """What one rank runs, for a rule's ``local`` function to edit.

    It begins as the global call: change ``func`` (an operator's name such as "aten.add.Tensor", or
    "dtorch.<name>" for a function of :mod:`dtorch.executor.kernels`), ``args`` and ``kwargs``, or call
    :meth:`set` and :meth:`use`. Ranks for which the rule asks nothing that differs share one local call: which
    questions were asked is recorded here.
    """

    __slots__ = ("_chains", "_leads", "args", "asked_lead", "asked_offset", "call", "coord", "func", "kwargs", "rule")

    def __init__(
        self,
        call: Call,
        rule: Rule,
        chains: Mapping[str, tuple[tuple[int, int], ...]],
        leads: tuple[bool, ...],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.call, self.rule = call, rule
        self._chains, self._leads = chains, leads
        self.func = call.sig.op
        self.args, self.kwargs = args, kwargs
        self.asked_offset = self.asked_lead = False

    def sharded(self, factor: str) -> bool:
        """Whether any mesh dim shards the factor."""
        return factor in self._chains

    def span(self, size: int, factor: str) -> tuple[int, int]:
        """(offset, length) of this rank's piece of a dim of global `size` that carries the factor."""
        chain = self._chains.get(factor)
        if chain is None:
            return 0, size
        self.asked_offset = True
        return piece(size, chain)

    def length(self, size: int, factor: str) -> int:
        """Length of this rank's piece of a dim of global `size` that carries the factor."""
        chain = self._chains.get(factor)
        return size if chain is None else piece(size, chain)[1]

    def in_shape(self, i: int = 0) -> tuple[int, ...]:
        """Local shape of input `i`."""
        return tuple(self.length(s, f) for s, f in zip(self.call.specs[i].shape, self.rule.ins[i], strict=True))

    def out_shape(self, o: int = 0) -> tuple[int, ...]:
        """Local shape of output `o`."""
        meta, dims = self.call.outs[o], self.rule.outs[o]
        assert meta is not None and dims is not None
        return tuple(self.length(s, f) for s, f in zip(meta.shape, dims, strict=True))

    def lead(self, o: int = 0) -> bool:
        """Whether a constant added to output `o` must be added here: exactly one rank of every mesh dim on
        which the output is Partial("sum") is the lead; for all other placements every rank is."""
        self.asked_lead = True
        return self._leads[o]

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument `name` of the local call as it stands, with In in place of tensors."""
        i = self.call.sig.index[name]
        if i < len(self.args):
            return self.args[i]
        found = self.kwargs.get(name, self.call.sig.defaults.get(name))
        return default if found is None else found

    def set(self, name: str, value: Any) -> None:
        """Replace the argument `name`."""
        i = self.call.sig.index[name]
        if i < len(self.args):
            self.args[i] = value
        else:
            self.kwargs[name] = value

    def use(self, func: str, *args: Any, **kwargs: Any) -> None:
        """Run `func` with these arguments instead."""
        self.func, self.args, self.kwargs = func, list(args), kwargs


def piece(size: int, chain: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """(offset, length) after cutting `size` by each (number of pieces, index of ours) in turn."""
    offset = 0
    for n, c in chain:
        start, size = cut(size, n, c)
        offset += start
    return offset, size


def sizes_of(rule: Rule, call: Call, factor: str) -> set[int]:
    """The global sizes of all dims that carry the factor."""
    found = {s.shape[d.index(factor)] for s, d in zip(call.specs, rule.ins, strict=True) if factor in d}
    for meta, dims in zip(call.outs, rule.outs, strict=True):
        if meta is not None and dims is not None and factor in dims:
            found.add(meta.shape[dims.index(factor)])
    return found


# ---- registry ---------------------------------------------------------------------------------------

RuleFunction = Callable[[Call], "Rule | Recipe | Each | None"]


class Entry(NamedTuple):
    make: RuleFunction
    always: bool
    free: tuple[str, ...]


_entries: dict[str, Entry] = {}
_fallbacks: list[RuleFunction] = []


def rule(*stems: str, free: tuple[str, ...] = (), always: bool = False) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function that makes the rule of a call, for the operators named by `stems`.

    Args:
        stems: operator names without "aten::" and the in-place underscore; other namespaces as "ns::name".
        free: schema arguments whose numbers cannot change shape, dtype (beyond int or float) or placement.
        always: ask the rule even where every tensor is Replicate (random numbers, for instance).

    The function returns None where it has nothing to say for an overload.
    """

    def register(make: RuleFunction) -> RuleFunction:
        for stem in stems:
            if stem in _entries:
                raise ValueError(f"two rules for {stem}: {_entries[stem].make.__module__} and {make.__module__}")
            _entries[stem] = Entry(make, always, free)
        return make

    return register


def fallback(make: RuleFunction) -> RuleFunction:
    """Register a function that is asked where no rule is registered for the operator's stem."""
    _fallbacks.append(make)
    return make


def find(call: Call) -> Rule | Recipe | Each | None:
    """The rule of a call, or None where dtorch has none (then only Replicate is legal)."""
    if call.sig.has_out:
        return None
    entry = _entries.get(call.sig.stem)
    if entry is not None:
        return _rounding(entry.make(call), call)
    for make in _fallbacks:
        found = make(call)
        if found is not None:
            return _rounding(found, call)
    return None


def _rounding(found: Rule | Recipe | Each | None, call: Call) -> Rule | Recipe | Each | None:
    """An average of integers is rounded: what is computed of the summands would be rounded later, and differently."""
    if type(found) is not Rule or not any([s.is_partial for s in call.specs]) or call.sig.stem in ("fill", "zero"):
        return found
    whole = frozenset([i for i, s in enumerate(call.specs) if not (s.dtype.is_floating_point or s.dtype.is_complex)])
    if whole and any([f.op == "avg" and f.out != "same" and f.ins & whole for f in found.flows]):
        kept = tuple([f for f in found.flows if f.op != "avg" or f.out == "same" or not f.ins & whole])
        return replace(found, flows=kept)
    return found


def always(call: Call) -> bool:
    """Whether the rule must be asked even where every tensor is Replicate."""
    entry = _entries.get(call.sig.stem)
    return entry is not None and entry.always


NUMBER_TYPES = ("number", "float", "Optional[number]", "Optional[float]", "List[number]")

# Elementwise operators that torch does not tag as such.
UNTAGGED_POINTWISE = frozenset(
    "elu_backward hardtanh_backward leaky_relu_backward softplus_backward hardswish_backward mish_backward "
    "hardshrink_backward softshrink_backward log_sigmoid_backward hardswish _prelu_kernel _prelu_kernel_backward "
    "complex polar floor_divide masked_fill rsub fill copy _to_copy where log_sigmoid_forward clone lift_fresh "
    "detach alias zero native_dropout_backward _conj _neg_view real imag glu_jvp hardsigmoid_backward "
    "threshold_backward addcmul addcdiv lerp".split()
)


def free_numbers(func: torch._ops.OpOverload) -> tuple[bool, ...]:
    """Per schema argument: whether a number given there (also inside a list) may ride in the message.

    Such a number changes neither shapes nor placements, and the dtype only through being an int or a float.
    """
    sig = signature(func)
    if sig.free is None:
        entry = _entries.get(sig.stem)
        pointwise = sig.pointwise or sig.stem in UNTAGGED_POINTWISE
        if entry is not None and entry.free:
            sig.free = tuple(a in entry.free for a in sig.arguments)
        elif pointwise:
            # A number stands in the place of a tensor too: t * 0.5 is a call of mul.Tensor.
            sig.free = tuple(t in NUMBER_TYPES or (i > 0 and t == "Tensor") for i, t in enumerate(sig.types))
        else:
            sig.free = (False,) * len(sig.arguments)
    return sig.free


# ---- small helpers for rule functions ---------------------------------------------------------------


@cache
def names(n: int, prefix: str = "o") -> Dims:
    """`n` distinct factors."""
    return tuple(f"{prefix}{i}" for i in range(n))


def untied(n: int) -> Dims:
    """`n` dims tied to nothing."""
    return ("",) * n


@cache
def partials(
    kinds: tuple[str, ...], *sets: tuple[int, ...], out: str | tuple[str, ...] | None = None
) -> tuple[Flow, ...]:
    """A Flow for each kind through each set of inputs."""
    return tuple(Flow(kind, frozenset(s), out) for s in sets for kind in kinds)


def linear(*sets: tuple[int, ...]) -> tuple[Flow, ...]:
    """Flows of an operator that is linear in each set of inputs, taken together: Partial sum and avg pass."""
    return partials(("sum", "avg"), *sets)


@cache
def _parse(equation: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    ins, outs = equation.replace(" ", "").split("->")

    def side(text: str) -> tuple[Dims, ...]:
        return tuple(tuple("" if c == "." else c for c in part) for part in text.split(","))

    return side(ins), side(outs)


def einsum(equation: str, **fields: Any) -> Rule:
    """The rule of ``"mk,kn->mn"``: one letter per factor, "." for a dim tied to nothing."""
    ins, outs = _parse(equation)
    return Rule(ins, outs, **fields)


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """Sorted, non-negative dims; None and an empty list are all dims."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    if not ndim:
        return ()
    return tuple(sorted({d % ndim for d in ([dim] if isinstance(dim, int) else dim)}))


def is_positive(x: Any) -> bool:
    """Whether a number argument is known to be greater than zero."""
    if isinstance(x, Num):
        return x.positive
    return isinstance(x, (int, float)) and not math.isnan(x) and x > 0
