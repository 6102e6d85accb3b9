"""One operator call → cached plan → command. The hot path, and only that.

A call's key is its operator (each has a dict of its own), the interned specs of its tensors, and its static
arguments. Numbers that can change neither shape nor placement travel in the message. On a hit nothing is looked up
twice and nothing is pickled; a miss is decided in `plans`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .client import Client
from .failures import SITE_MASK, internal_files, user_frame
from .refs import FREE_BATCH, Plan, Ref, freed, next_ref

if TYPE_CHECKING:
    from .._tensor import Tensor
    from ..spec import TensorSpec

__all__ = ["Again", "Operator", "OperatorPlan", "bind", "dispatch", "operator", "publish", "run", "scan", "wrap"]

# Kinds of plan.
NEW, SELF, GENERAL, DEFERRED = 0, 1, 2, 3

_make = torch.Tensor._make_wrapper_subclass
_CPU = torch.device("cpu")
_STRIDED = torch.strided
_frame = sys._getframe
_inference = torch.is_inference_mode_enabled


class _Mark:
    """A part of a key that equals nothing but itself."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


# The kind and sign of a number that rides in the message; a rule may depend on nothing else of it.
_INT, _INT_POSITIVE, _FLOAT, _FLOAT_POSITIVE = _Mark("int"), _Mark("int>0"), _Mark("float"), _Mark("float>0")
# 1 == True == 1.0 and 0.0 == -0.0, but no two of them are the same argument.
_TRUE, _FALSE = _Mark("True"), _Mark("False")
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1


class OperatorPlan(Plan):
    """A plan of an operator, and what its call returns.

    Attributes:
        kind: NEW (one new tensor), SELF (the argument at `position` is returned), GENERAL (`finish` builds the
            result from new refs), DEFERRED (`defer` runs instead: recipes, moves, operators done on the client).
        out, ref: spec and kind of ref of the new tensor.
        view: whether the new tensor is a view of an input.
        draws: whether the executors' generators advance.
        client: the one that defined it.
    """

    __slots__ = ("client", "defer", "draws", "finish", "kind", "news", "out", "position", "ref", "view")

    def __init__(self, client: Client, id: int, layout: str, executors: tuple[int, ...]) -> None:
        super().__init__(id, layout, executors)
        self.client = client
        self.kind = GENERAL
        self.out: TensorSpec | None = None
        self.ref = Ref
        self.position = 0
        self.view = False
        self.draws = False
        self.news = 0
        self.finish: Callable[[list[int], tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.defer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None


class Operator:
    """What dispatch knows of one overload; hangs on the overload itself, as ``func._dtorch``.

    Attributes:
        plans: key → plan.
        gone: ids of plans that are no longer here, and still on the executors.
        free: per argument, whether a number there rides in the message; None where none does.
        free_names: the same for keyword arguments.
        special: is asked first; returns the result, or :class:`Again`.
    """

    __slots__ = ("free", "free_names", "func", "gone", "plans", "special")

    def __init__(self, func: Any, free: tuple[bool, ...] | None, names: frozenset[str], special: Any) -> None:
        self.func, self.free, self.free_names, self.special = func, free, names, special
        self.plans: dict[Any, OperatorPlan] = {}
        self.gone: tuple[int, ...] = ()


class Again:
    """What a special handler returns to have the call go the ordinary way with these arguments."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


Miss = Callable[[Operator, tuple[Any, ...], dict[str, Any], Any], Any]

_tensor: type[Tensor]
_miss: Miss
_know: Callable[[Any], Operator]


def bind(cls: type[Tensor], know: Callable[[Any], Operator], miss: Miss) -> None:
    """Tell dispatch the proxy class, how to learn of an operator, and who decides a call seen for the first time."""
    global _tensor, _know, _miss
    _tensor, _know, _miss = cls, know, miss


def operator(func: Any) -> Operator:
    """What is known of `func`, learnt on first use."""
    try:
        return func._dtorch  # type: ignore[no-any-return]
    except AttributeError:
        found = func._dtorch = _know(func)
        return found


def wrap(spec: TensorSpec, ref: Ref) -> Tensor:
    """A proxy of the value `ref`."""
    out = _make(_tensor, spec.shape, spec.stride, 0, None, spec.dtype, _STRIDED, _CPU)
    out._spec = spec
    out._ref = ref
    return out  # type: ignore[no-any-return]


def scan(a: Any, free: bool, key: list[Any], words: list[Any], nums: list[Any]) -> None:
    """Append one argument to the key, its refs and free numbers to the message."""
    t = type(a)
    if t is _tensor:
        key.append(a._spec)
        words.append(a._ref)
    elif t is int:
        if free and _INT_MIN <= a <= _INT_MAX:
            key.append(_INT_POSITIVE if a > 0 else _INT)
            nums.append(a)
        else:
            key.append(a)
    elif t is float:
        if free:
            key.append(_FLOAT_POSITIVE if a > 0 else _FLOAT)
            nums.append(a)
        else:
            key.append(repr(a))
            key.append(float)
    elif t is bool:
        key.append(_TRUE if a else _FALSE)
    elif t is list or t is tuple:
        inner: list[Any] = []
        for x in a:
            scan(x, free, inner, words, nums)
        key.append(tuple(inner))
    elif a is None or t is str or t is torch.dtype:
        key.append(a)
    elif isinstance(a, torch.Tensor):
        raise _Plain
    else:
        key.append(t)
        key.append(repr(a))


class _Plain(Exception):
    """An argument is a tensor that is no proxy."""


def dispatch(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run one operator on proxies: the body of ``Tensor.__torch_dispatch__``."""
    try:
        op = func._dtorch
    except AttributeError:
        op = operator(func)
    if op.special is not None:
        result = op.special(func, args, kwargs or {})
        if type(result) is not Again:
            return result
        args, kwargs = result.args, result.kwargs
    nums: list[Any] = []
    words: Any
    k: tuple[Any, ...]
    free = op.free
    if len(args) == 2 and not kwargs and type(args[0]) is _tensor and type(args[1]) is _tensor:
        x, y = args
        k = (x._spec, y._spec)
        words = (x._ref, y._ref)
    elif len(args) == 2 and free and free[1] and not kwargs and type(args[1]) is float and type(args[0]) is _tensor:
        x, number = args
        k = (x._spec, _FLOAT_POSITIVE if number > 0 else _FLOAT)
        words = (x._ref, number)
    else:
        words, key = [], []
        try:
            if free is None:
                for a in args:
                    t = type(a)
                    if t is _tensor:
                        key.append(a._spec)
                        words.append(a._ref)
                    elif t is int or a is None:
                        key.append(a)
                    else:
                        scan(a, False, key, words, nums)
            else:
                i = 0
                for a in args:
                    t = type(a)
                    if t is _tensor:
                        key.append(a._spec)
                        words.append(a._ref)
                    elif t is float and free[i]:
                        key.append(_FLOAT_POSITIVE if a > 0 else _FLOAT)
                        nums.append(a)
                    else:
                        scan(a, free[i], key, words, nums)
                    i += 1
            if kwargs:
                names = op.free_names
                for name, a in kwargs.items():
                    key.append(name)
                    scan(a, name in names, key, words, nums)
        except _Plain:
            return _miss(op, args, kwargs or {}, None)
        k = tuple(key)
    plan = op.plans.get(k)
    if plan is None:
        return _miss(op, args, kwargs or {}, k)
    if plan.kind == 3:
        return plan.defer(func, args, kwargs or {})  # type: ignore[misc]
    client = plan.client
    writer = client.writer
    kind = plan.kind
    failures = client.failures
    f: Any = _frame(1)
    new = 0
    try:
        while internal_files[f.f_code.co_filename]:
            f = f.f_back
    except (KeyError, AttributeError):
        f = user_frame(_frame(1))
    if plan.draws:
        client.draws.begin(plan.executors)
    try:
        with writer.lock:
            head = writer.head
            end = head + plan.nwords
            if end > writer.limit:
                head = writer.make_room(plan.nwords)
                end = head + plan.nwords
            if kind == 0:
                new = next_ref()
                plan.pack(client.ring_bytes, (head & writer.mask) << 3, plan.header, new, *words, *nums)
            elif kind == 1:
                plan.pack(client.ring_bytes, (head & writer.mask) << 3, plan.header, *words, *nums)
            else:
                news = [next_ref() for _ in range(plan.news)]
                plan.pack(client.ring_bytes, (head & writer.mask) << 3, plan.header, *news, *words, *nums)
            site = head >> 1 & SITE_MASK
            failures.codes[site] = f.f_code
            failures.instructions[site] = f.f_lasti
            control = client.control
            writer.issued += 1
            writer.head = control[0] = end
            if len(freed) >= FREE_BATCH:
                client.write_frees()
    finally:
        if plan.draws:
            client.draws.end()
    for s in plan.states:
        if control[s]:
            writer.wake(plan.executors)
            break
    if client.blocking:
        client.wait_here(head)
    if kind == 0:
        spec = plan.out
        if plan.view and _inference():
            # A view of a normal tensor must itself be one: in-place writes through it need a version counter.
            with torch.inference_mode(False):
                return wrap(spec, plan.ref(new))  # type: ignore[arg-type]
        out = _make(_tensor, spec.shape, spec.stride, 0, None, spec.dtype, _STRIDED, _CPU)  # type: ignore[union-attr]
        out._spec = spec  # type: ignore[assignment]
        out._ref = plan.ref(new)
        return out
    if kind == 1:
        return args[plan.position]
    return plan.finish(news, args, kwargs or {})  # type: ignore[misc]


def publish(plan: OperatorPlan, words: list[Any]) -> Tensor:
    """Issue a plan that makes one new tensor, away from the hot path."""
    client = plan.client
    new = next_ref()
    if plan.draws:
        client.draws.begin(plan.executors)
    try:
        at = client.issue(plan, [new, *words])
    finally:
        if plan.draws:
            client.draws.end()
    if client.blocking:
        client.wait_here(at)
    return wrap(plan.out, plan.ref(new))  # type: ignore[arg-type]


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one operator on proxies, below autograd, from inside dtorch."""
    return dispatch(None, func, (), args, kwargs)
