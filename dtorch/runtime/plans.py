"""A call seen for the first time: decide it, define its plan on the executors, remember it.

The decision itself is `sharding.propagate`'s; here it becomes messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ..errors import DeviceMeshError, PlacementError
from ..mesh import DeviceMesh
from ..placement import Placement
from ..sharding import propagate as sharding
from ..sharding.infer import infer
from ..sharding.rule import Call, Num, Recipe, free_numbers, signature
from ..sharding.rule import In as RuleIn
from ..spec import TensorSpec
from . import client as _client
from .client import Client
from .command import CallPlan, DropPlans, In, LocalCall, NumberIn
from .dispatch import GENERAL, NEW, SELF, Operator, OperatorPlan, wrap
from .failures import with_site
from .refs import ref_type

__all__ = ["auto_redistribute_on", "decide", "define", "forget", "known", "make_room", "may_move"]

auto_redistribute_on: ContextVar[bool] = ContextVar("dtorch_auto_redistribute", default=False)

_known: list[Operator] = []


def may_move() -> bool:
    """Whether a call may communicate to make its placements fit: where asked for, and in every backward."""
    return auto_redistribute_on.get() or torch._C._current_graph_task_id() != -1


def remember(op: Operator) -> Operator:
    """Keep `op`, to be told when its plans are void."""
    _known.append(op)
    return op


def known() -> tuple[Operator, ...]:
    """Every operator that was called so far."""
    return tuple(_known)


def make_room(c: Client, op: Operator) -> None:
    """Before a plan is added to `op`: where there are too many, the oldest quarter goes, here and on the executors.

    The executors keep what goes until the next time: another thread may be about to issue one of them.
    """
    if len(op.plans) < c.config.plan_cache:
        return
    oldest = tuple(itertools.islice(tuple(op.plans), 1 + len(op.plans) // 4))
    gone = [plan for plan in [op.plans.pop(key, None) for key in oldest] if plan is not None]
    if op.gone:
        c.send(DropPlans(op.gone))
    op.gone = tuple([plan.id for plan in gone if plan.id and plan.client is c])


def forget() -> None:
    """Drop every plan: the pool they were defined on has ended."""
    for op in _known:
        op.plans.clear()
        op.gone = ()


_client.on_close(forget)


def specs_of(value: Any, cls: type) -> Any:
    """`value` with each tensor's spec in its place."""
    if type(value) is cls:
        return value._spec
    if type(value) is list or type(value) is tuple:
        return type(value)(specs_of(v, cls) for v in value)
    return value


def _numbered(value: Any, free: bool, into: list[Num]) -> Any:
    t = type(value)
    if free and (t is int or t is float):
        if t is int and not -(1 << 63) <= value < 1 << 63:
            return value
        into.append(Num.of(value))
        return into[-1]
    if t is list or t is tuple:
        return t(_numbered(v, free, into) for v in value)
    return value


def _plain(value: Any) -> Any:
    """`value` with numbers in the place of Nums, for shape inference."""
    t = type(value)
    if t is Num:
        return value.value
    if t is list or t is tuple:
        return t(_plain(v) for v in value)
    return value


def decide(
    op: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cls: type,
    *,
    mesh: DeviceMesh | None = None,
    placements: tuple[Placement, ...] | None = None,
) -> tuple[Call, sharding.Plan | Recipe, list[Num]]:
    """Infer the outputs of a call and choose its placements.

    Raises whatever torch raises for wrong shapes, and PlacementError.
    """
    sig, free = signature(op.func), free_numbers(op.func)
    numbers: list[Num] = []
    spec_args = tuple(_numbered(specs_of(a, cls), free[i], numbers) for i, a in enumerate(args))
    spec_kwargs = {k: _numbered(specs_of(v, cls), free[sig.index[k]], numbers) for k, v in kwargs.items()}
    try:
        outs = infer(op.func, _plain(spec_args), {k: _plain(v) for k, v in spec_kwargs.items()})
        call = Call(op.func, spec_args, spec_kwargs, outs, mesh=mesh, placements=placements)
        try:
            plan = sharding.propagate(call, auto=may_move())
        except PlacementError:
            _refuse_dims(op.func, _plain(spec_args), {k: _plain(v) for k, v in spec_kwargs.items()})
            raise
        if call.mesh.device_type == "cpu" and _dtypes_may_be_wrong(call):
            _refuse_dtypes(op.func, _plain(spec_args), {k: _plain(v) for k, v in spec_kwargs.items()})
    except Exception as error:
        with_site(error)
        raise
    return call, plan, numbers


def _refuse_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what torch says of a dim that is out of range: no placement would make that call right."""
    stem = func._schema.name.removeprefix("aten::")
    if stem not in _ASKED and (stem.startswith("_") or "backward" in stem or "rnn" in stem):
        return  # not made to be called by users, and so not checked: see _said_of_one_element
    error = _said_of_one_element(func, args, kwargs)
    if isinstance(error, IndexError) and str(error).startswith("Dimension out of range"):
        raise error from None


_ORDINARY = {torch.float32}
# In the names of operators that want integers somewhere.
_OF_INTEGERS = ("index", "gather", "scatter", "take", "put", "bitwise", "shift")
_OF_DTYPES = ("dtype", "scalar type", "not implemented for")
# Operators, besides pointwise ones, whose kernels are asked about dtypes: those that check all they are given.
_ASKED = frozenset(
    "_log_softmax _softmax addbmm addmm addmv addr baddbmm bmm convolution cumprod cumsum dot gather index index_add "
    "index_copy index_fill index_put index_select linear logsumexp matmul mm mv prod scatter scatter_add sort take "
    "take_along_dim topk vdot".split()
)


def _dtypes_may_be_wrong(call: Call) -> bool:
    """Whether to ask a kernel: hardly ever where all is float32, as in most calls."""
    func = call.func
    stem = func._schema.name.removeprefix("aten::").rstrip("_")
    if torch.Tag.pointwise not in func.tags and stem not in _ASKED:
        return False
    if {s.dtype for s in call.specs} <= _ORDINARY:
        return bool(call.specs) and any(word in call.sig.op for word in _OF_INTEGERS)
    return True


def _refuse_dtypes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what torch's kernel says of the dtypes: shape inference passes many that no kernel takes."""
    error = _said_of_one_element(func, args, kwargs)
    if error is not None and any(word in str(error) for word in _OF_DTYPES):
        raise error from None


def _said_of_one_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What torch raises where all tensors of a call have one element. Of dims and dtypes it says the same then; what
    else it says means nothing.

    The other arguments stay, and need not fit these shapes: only for operators that check what they are given. Those
    that torch calls itself (a recurrent layer's backward) do not, and would end this process.
    """
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None  # what runs here must leave no trace
    # A zero is an index that is in range; other operators divide by it.
    fill = int(torch.Tag.pointwise in func.tags)
    given = {k: _one_element(v, fill) for k, v in kwargs.items() if k != "device"}
    try:
        func(*_one_element(args, fill), **given)
    except Exception as error:
        return error
    return None


def _one_element(value: Any, fill: int) -> Any:
    """`value` with a tensor of at most one element, `fill`, in the place of each spec."""
    t = type(value)
    if t is TensorSpec:
        # A dim of size 0 stays one: cat takes an empty vector for a tensor of any dims.
        shape = tuple(min(n, 1) for n in value.shape)
        return torch.empty_strided(shape, (1,) * value.ndim, dtype=value.dtype).fill_(fill)
    if t is list or t is tuple:
        return t(_one_element(v, fill) for v in value)
    return value


def _encode(value: Any, numbers: dict[int, int]) -> Any:
    t = type(value)
    if t is RuleIn:
        return In(value.index)
    if t is Num:
        return NumberIn(numbers[id(value)])
    if t is list or t is tuple:
        return t(_encode(v, numbers) for v in value)
    return value


def _local(call: Any, numbers: dict[int, int], view: bool) -> LocalCall:
    outs = tuple(None if o is None else (tuple(o[0]), None if view else o[1], o[2]) for o in call.outs)
    return LocalCall(
        call.func,
        tuple(_encode(a, numbers) for a in call.args),
        {k: _encode(v, numbers) for k, v in call.kwargs.items()},
        call.pre or (),
        outs,
        call.empty,
    )


def define(client: Client, op: Operator, call: Call, decided: sharding.Plan, numbers: list[Num]) -> OperatorPlan:
    """Define the decided call on the executors of its mesh."""
    func, sig = op.func, call.sig
    mesh, _, executors = client.mesh(call.mesh)
    written = sig.writes
    returns = func._schema.returns
    owners = call.owners()
    writes = tuple(i for i, name in enumerate(owners) if name in _write_names(func))
    index = {id(n): i for i, n in enumerate(numbers)}
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns) or (
        "self" in sig.aliased and not writes
    )
    new: list[bool] = []
    flat_at = 0
    shape: list[tuple[str, Any]] = []  # per return: what the caller gets
    lists = sum(1 for r in returns if "List" in str(r.type))
    for r, name in zip(returns, written, strict=True):
        if "List" in str(r.type):
            n = len(decided.outs) - (len(returns) - lists)
            shape.append(("list", (flat_at, n, name)))
            new += [name is None] * n
            flat_at += n
        elif name is not None:
            shape.append(("arg", name))
            new.append(False)
            flat_at += 1
        elif decided.outs[flat_at] is None:
            shape.append(("none", None))
            new.append(False)
            flat_at += 1
        else:
            shape.append(("new", flat_at))
            new.append(True)
            flat_at += 1
    kinds = "".join("q" if n.kind is int else "d" for n in numbers)
    layout = f"{sum(new) + len(call.specs)}Q" + "".join(kinds)
    plan = OperatorPlan(client, client.plan_id(), layout, executors)
    plan.view = view
    plan.draws = _draws(func, call)
    unique = tuple(_local(c, index, view) for c in decided.calls)
    for c in unique:
        client.operators.need(c.func)
    text = describe(call)
    layouts = ()
    if plan.draws:
        ranks = range(call.mesh.nranks)
        layouts = tuple(tuple((spec.local_shape(r), spec.dtype) for spec in call.specs) for r in ranks)
    client.send(
        CallPlan(
            plan.id,
            mesh,
            unique,
            decided.which,
            len(call.specs),
            kinds,
            tuple(new),
            writes,
            text,
            plan.draws,
            lists > 0,
            layouts,
        )
    )
    client.pool.name_plan(plan.id, text, mesh)
    plan.news = sum(new)
    if len(shape) == 1 and shape[0][0] == "new":
        out = decided.outs[0]
        assert out is not None
        plan.kind, plan.out, plan.ref = NEW, out, ref_type(out)
    elif len(shape) == 1 and shape[0][0] == "arg" and sig.index[shape[0][1]] < len(call.args):
        plan.kind, plan.position = SELF, sig.index[shape[0][1]]
    else:
        plan.kind = GENERAL
        plan.finish = _finisher(shape, decided.outs, new, sig.index, view)
    return plan


def _draws(func: Any, call: Call) -> bool:
    """Whether the call takes random numbers. Fused attention is tagged so for a dropout that is mostly off."""
    return torch.Tag.nondeterministic_seeded in func.tags and call.arg("dropout_p") != 0.0


def _write_names(func: Any) -> frozenset[str]:
    return frozenset(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _finisher(
    shape: list[tuple[str, Any]],
    outs: tuple[TensorSpec | None, ...],
    new: list[bool],
    index: dict[str, int],
    view: bool,
) -> Callable[[list[int], tuple[Any, ...], dict[str, Any]], Any]:
    places = [i for i, n in enumerate(new) if n]
    rank = {place: k for k, place in enumerate(places)}

    def argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[index[name]] if index[name] < len(args) else kwargs[name]

    def finish(news: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def make(i: int) -> Any:
            spec = outs[i]
            return None if spec is None else wrap(spec, ref_type(spec)(news[rank[i]]))

        if view and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                made = [make(i) if new[i] else None for i in range(len(new))]
        else:
            made = [make(i) if new[i] else None for i in range(len(new))]
        results: list[Any] = []
        for kind, what in shape:
            if kind == "new":
                results.append(made[what])
            elif kind == "arg":
                results.append(argument(what, args, kwargs))
            elif kind == "none":
                results.append(None)
            else:
                start, n, name = what
                results.append(made[start : start + n] if name is None else argument(name, args, kwargs))
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    return finish


def describe(call: Call) -> str:
    """``embedding(weight float32[64, 32] [Replicate()], indices int64[4, 16] [Shard(0)])``."""
    parts = [f"{name} {spec.describe()}" for name, spec in zip(call.owners(), call.specs, strict=True)]
    if len(parts) > 6:
        parts = [*parts[:5], f"… {len(parts) - 5} more"]
    return f"{call.stem}{'_' if call.sig.inplace else ''}({', '.join(parts)})"


def one_mesh(specs: list[TensorSpec], name: str) -> DeviceMesh:
    """The mesh of all `specs`.

    Raises:
        DeviceMeshError: they lie on different meshes.
    """
    meshes = {s.mesh: s for s in specs}
    if len(meshes) == 1:
        return specs[0].mesh
    a, b = list(meshes.values())[:2]
    raise DeviceMeshError(
        f"{name}: tensors of one operator must lie on one mesh, but {a.describe()} lies on {a.mesh!r} and "
        f"{b.describe()} on {b.mesh!r}.\n  Write:  x = x.redistribute(device_mesh=mesh, placements=[...])"
    )
