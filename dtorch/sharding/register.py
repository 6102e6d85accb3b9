"""``dtorch.register_sharding``: rules for operators of the user's own, in the notation of dtorch's.

    @torch.library.custom_op("mylib::rms_norm", mutates_args=())
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    dtorch.register_sharding(rms_norm, "...n,n->...n", whole="n", free="eps")

What an equation cannot say, a function from the call to a :class:`~dtorch.sharding.rule.Rule` can. Either is held
against the tensors of every call that has no plan yet: a rule that does not fit them raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import families
from . import rule as rules
from .call import Call, signature
from .equation import Equation, Names
from .rule import Dims, Each, Entry, Flow, Local, Recipe, Rule, RuleFunction

__all__ = ["FAMILIES", "modules", "overload_of", "register_sharding"]

FAMILIES = families.__all__
"""Imported first, so that a second rule for an operator of torch's is seen when it is registered."""

modules: dict[str, str] = {}
"""Qualified operator name -> the module that executors import for it."""


class _Registered(NamedTuple):
    """A rule of a user's: the overload it is of (one that is defined again has another), and the line that gave it."""

    func: Any
    line: str


_registered: dict[str, _Registered] = {}
_DTORCH = str(Path(__file__).parents[1])


def register_sharding(
    op: Any,
    equation: str | RuleFunction | None = None,
    /,
    *,
    whole: str = "",
    even: str = "",
    reduce: Mapping[str, str | tuple[str | None, ...] | None] | None = None,
    linear: Names = (),
    addend: Names = (),
    free: str | Iterable[str] = (),
    local: Callable[[Local], None] | None = None,
    why: str = "",
    module: str | None = None,
    replace: bool = False,
) -> Any:
    """Say how an operator's tensors may be sharded.

    With an equation this registers at once, and so it does with a function that makes the
    :class:`~dtorch.sharding.rule.Rule` (or Recipe) of a :class:`~dtorch.sharding.rule.Call`. Without either it is a
    decorator of such a function. A function that returns None leaves that call to Replicate inputs. One rule serves
    all overloads of an operator, and ``f_`` with ``f``.

    Args:
        op: ``"mylib::f"``, what ``torch.library.custom_op`` returned, or ``torch.ops.mylib.f``.
        equation: a term for each tensor argument and each output, as in ``"mk,kn->mn"``: a letter for each dim, "."
            for one that can never be sharded, "..." for any number of dims that broadcast. For a list of tensors,
            one term that every element has. Nothing stands right of "->" where nothing is returned. Or a function, as
            above.
        whole: letters that cannot be sharded. Every other letter can.
        even: letters that can be sharded only in equal pieces.
        reduce: for a letter that an output lacks, how the outputs of the ranks combine: "sum", "avg", "max", "min",
            or "same" where the output does not depend on it; a tuple gives one per output. Without an entry such a
            letter cannot be sharded.
        linear: arguments in which the operator is linear, so that Partial passes; a tuple for several taken together.
        addend: arguments that are added to a contraction: where it is Partial, they must be.
        free: arguments whose numbers change neither shape, dtype nor placement: calls that differ in them alone share
            one plan.
        local: edits what one rank runs; for operators whose arguments name sizes or positions.
        why: a sentence for the error where no placement is legal.
        module: the module that defines the operator, for executors to import. Not needed for a ``custom_op``, whose
            function is sent to them, or for libraries that ``torch.ops.load_library`` loaded.
        replace: put this rule in the place of one that was registered before; what was decided by that is forgotten.

    Raises:
        ValueError: there is no such operator, it has a rule, or the equation is none of it.
        TypeError: the second argument is neither text nor a function.
    """
    func = overload_of(op)
    names = (free,) if isinstance(free, str) else tuple(free)
    unknown = [n for n in names if n not in signature(func).index]
    if unknown:
        raise ValueError(f"register_sharding({_name(func)}): there is no argument {unknown[0]!r} in {func._schema}")

    line = _users_line()

    def register(make: RuleFunction) -> RuleFunction:
        if not callable(make):
            raise TypeError(f"register_sharding({_name(func)}): {make!r} is neither an equation nor a rule function")
        _enter(func, _held_to(func, make), names, module, line, replace)
        return make

    if not isinstance(equation, str):
        if whole or even or reduce or linear or addend or local or why:
            raise ValueError(
                f"register_sharding({_name(func)}): whole, reduce and the like belong to an equation; a rule function "
                "says them in the Rule that it returns"
            )
        return register if equation is None else register(equation)
    register(Equation.of(func, equation, whole, even, dict(reduce or {}), linear, addend, local, why))
    return None


def _users_line() -> str:
    """``file.py:12`` of the user's code that is calling."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_DTORCH) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _name(func: Any) -> str:
    return repr(str(func._schema.name))


def overload_of(op: Any) -> Any:
    """The overload that `op` names: a string, a custom op, a packet of ``torch.ops`` or an overload.

    Raises:
        ValueError: there is no such operator.
    """
    op = getattr(op, "_opoverload", op)
    if isinstance(op, torch._ops.OpOverload):
        return op
    if isinstance(op, str):
        text = op if "::" in op else op.replace(".", "::", 1)
        namespace, _, rest = text.partition("::")
        name, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops, namespace), name, None) if rest else None
        if op is None:
            raise ValueError(
                f"register_sharding: there is no operator {text!r}. Define it first (torch.library.custom_op, or "
                "import the module that does), then say how it is sharded"
            )
        if overload:
            return getattr(op, overload)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return getattr(op, "default" if "default" in op.overloads() else op.overloads()[0])
    raise ValueError(
        f'register_sharding: {op!r} is no operator; pass "namespace::name", a torch.library.custom_op, or '
        "torch.ops.namespace.name"
    )


def _enter(func: Any, make: RuleFunction, free: tuple[str, ...], module: str | None, line: str, replace: bool) -> None:
    stem = signature(func).stem
    before, known = rules._entries.get(stem), _registered.get(stem)
    if before is not None and known is None:
        raise ValueError(
            f"register_sharding({_name(func)}): two rules for one operator; the other is dtorch's own, of "
            f"{before.make.__module__}, and stays"
        )
    if known is not None and not replace:
        of = known.func
        again = (of._schema.name, of._schema.overload_name) == (func._schema.name, func._schema.overload_name)
        if of is func or not again:
            raise ValueError(
                f"register_sharding({_name(func)}): two rules for one operator; the other was registered at "
                f"{known.line}.\n  Write:  replace=True  to put this one in its place. One rule serves f and f_, and "
                "all overloads: look at call.sig.inplace and call.overload"
            )
    rules._entries[stem] = Entry(make, False, free)
    _registered[stem] = _Registered(func, line)
    if module is not None:
        modules[func._schema.name] = module
    # What was learnt of the operator before it had this rule is void.
    namespace, _, name = func._schema.name.partition("::")
    for form in (name.removesuffix("_"), name.removesuffix("_") + "_"):
        packet = getattr(getattr(torch.ops, namespace), form, None)
        for overload in packet.overloads() if packet is not None else ():
            known = getattr(packet, overload)
            signature(known).free = None
            vars(known).pop("_dtorch", None)


# ---- what a rule must be ----------------------------------------------------------------------------


def _held_to(func: Any, make: RuleFunction) -> RuleFunction:
    """`make`, whose rules are held against the calls they are for."""

    def checked(call: Call) -> Rule | Recipe | Each | None:
        found: Any = make(call)
        if not isinstance(found, Rule):
            if found is not None and not isinstance(found, (Recipe, Each)):
                raise TypeError(f"the rule of {call.sig.op} is a {type(found).__name__}, not a Rule, a Recipe or None")
            return found
        fault = _fault(found, call)
        if fault:
            raise ValueError(f"the rule of {call.sig.op}: {fault}")
        return _writes_whole(found, call)

    checked.__module__ = make.__module__
    return checked


def _fault(rule: Rule, call: Call) -> str | None:
    """What is wrong with a rule, or None."""
    if len(rule.ins) != len(call.specs):
        return f"it has dims for {len(rule.ins)} inputs, and the call has {len(call.specs)} tensors"
    if len(rule.outs) != len(call.outs):
        return f"it has dims for {len(rule.outs)} outputs, and the call has {len(call.outs)}"
    given: list[tuple[str, tuple[int, ...], Dims]] = [
        (name, s.shape, d) for name, s, d in zip(call.owners(), call.specs, rule.ins, strict=True)
    ]
    for o, (meta, dims) in enumerate(zip(call.outs, rule.outs, strict=True)):
        if (meta is None) != (dims is None):
            return f"output {o} is {'undefined' if meta is None else 'a tensor'}, and the rule says otherwise"
        if meta is not None and dims is not None:
            given.append((f"output {o}", meta.shape, dims))
    known: set[str] = set()
    for name, shape, dims in given:
        if len(dims) != len(shape):
            return f"{name} has {len(shape)} dims {list(shape)}, and the rule has {len(dims)} for it: {list(dims)}"
        factors = [f for f in dims if f]
        if len(set(factors)) < len(factors):
            return f"a factor stands twice in {name}: {list(dims)}"
        known.update(factors)
    for what, named in (("whole", rule.whole), ("even", rule.even), ("reduce", rule.reduce)):
        for f in named:
            if f not in known:
                return f"{what} names {f!r}, which no tensor has"
    for flow in rule.flows:
        if any(not 0 <= i < len(call.specs) for i in flow.ins):
            return f"a flow names inputs {sorted(flow.ins)}, and there are {len(call.specs)}"
    return None


def _writes_whole(rule: Rule, call: Call) -> Rule:
    """What is written and not returned must come out as it is placed: no output can say that it is Partial."""
    returned = set(call.sig.writes)
    silent = [i for i, n in enumerate(call.owners()) if n in call.sig.written and n not in returned]
    if not silent:
        return rule
    lacking = {
        f for dims in (*rule.ins, *rule.outs) for f in dims or () if f and any(f not in rule.ins[i] for i in silent)
    }

    def keeps(flow: Flow) -> bool:
        return all(i in flow.ins for i in silent)

    return changed(rule, whole=rule.whole | lacking, flows=tuple([f for f in rule.flows if keeps(f)]))
