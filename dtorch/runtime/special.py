"""Operators that are not one command: those that share a value, wait for one, or run on the client.

Each function here has the signature ``(func, args, kwargs)`` of a dispatched call. :func:`know` decides, once per
operator, which of them (if any) stands for it; :func:`miss` decides a call that has no plan yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey

from ..errors import PlacementError
from ..sharding.rule import Recipe, free_numbers, signature
from . import client as _client
from . import dispatch as _dispatch
from .client import client
from .copies import UNTRACKED, mark, refuse_write, settled, version_of
from .dispatch import DEFERRED, Again, Operator, OperatorPlan, dispatch, wrap
from .generators import draw_here, has_generator
from .indices import check_indices
from .make import make
from .moves import fetch, forget, lift, lift_constant, plain_torch, redistribute, replicated, to_plain
from .plans import decide, define, make_room, may_move, one_mesh, remember
from .variants import inplace_view, out_variant, stem
from .writeback import can_write_back, write_back

__all__ = ["know", "miss"]

_client.on_close(forget)

Special = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _flat(values: Any, into: list[torch.Tensor]) -> list[torch.Tensor]:
    for v in values:
        if isinstance(v, torch.Tensor):
            into.append(v)
        elif type(v) is list or type(v) is tuple:
            _flat(v, into)
    return into


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All tensors among the arguments, in order."""
    return _flat(kwargs.values(), _flat(args, []))


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(_map(v, change) for v in value)
    return value


def _map_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(_map(a, change) for a in args), {k: _map(v, change) for k, v in kwargs.items()}


def is_proxy(t: Any) -> bool:
    """Whether `t` is a dtorch tensor."""
    return type(t) is _dispatch._tensor


# -- the value itself -----------------------------------------------------------------------------------------------


def _same_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """detach, alias, lift_fresh: another proxy of the same value; nothing is sent."""
    t = args[0]
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return wrap(t._spec, t._ref)
    return wrap(t._spec, t._ref)


def _conj(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A conjugate is a copy: torch's is a view with a bit set, which it resolves where it sees the bit, and a dtorch
    tensor shows none. A backward writes to none."""
    t = args[0]
    made = dispatch(None, torch.ops.aten.conj_physical.default, (), (t,))
    return made if torch._C._current_graph_task_id() != -1 else mark(made, version_of(t))


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fetch(args[0]).get().item()


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    if a.shape != b.shape:
        return False
    same = dispatch(None, torch.ops.aten.eq.Tensor, (), (a, b))
    return bool(fetch(dispatch(None, torch.ops.aten.all.default, (), (same,))).get().item())


def _on_client(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators whose result's shape is known with its values only: inputs are fetched, the result is replicated."""
    mesh = one_mesh([t._spec for t in tensors_of(args, kwargs) if is_proxy(t)], func._schema.name)
    cls = _dispatch._tensor
    plain_args = tuple(to_plain(a, cls) for a in args)
    plain_kwargs = {k: to_plain(v, cls) for k, v in kwargs.items()}
    with plain_torch():
        result = func(*plain_args, **plain_kwargs)
    return _map(result, lambda t: lift(t, mesh))


def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The storage of a dtorch tensor begins with the tensor itself, as its ``storage_offset()`` of 0 says.

    So an offset counts from there, for a view as well; torch's composites (``fill_diagonal_``) pass the 0 they saw.
    """
    given = dict(zip(signature(func).arguments, args, strict=False)) | kwargs
    t, size, stride = given["self"], given["size"], given["stride"]
    offset = given.get("storage_offset") or 0
    if offset:
        end = offset + (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else 0)
        line = dispatch(None, func, (), (t, [end], [1]))
        t = dispatch(None, torch.ops.aten.slice.Tensor, (), (line, 0, offset, end))
    return Again((t, size, stride), {})


def _into_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor is written to: the operator runs on the client, and the target stays plain."""
    cls = _dispatch._tensor
    plain_args = tuple(to_plain(a, cls) for a in args)
    plain_kwargs = {k: to_plain(v, cls) for k, v in kwargs.items()}
    with plain_torch():
        return func(*plain_args, **plain_kwargs)


def linalg_check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What linalg.inv and its kin find wrong is raised by the call itself: it waits, as torch does on a GPU."""
    return _into_plain(func, args, kwargs)


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A composite operator, which inference mode hands over whole."""
    key = DispatchKey.CompositeImplicitAutograd
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        # What torch itself runs: its Python decompositions are others (that of dropout draws other values).
        return func._op_dk(key, *args, **kwargs)
    return func.decompose(*args, **kwargs)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`to` never leaves the mesh by itself: devices are what `Tensor.to` is asked for, and it answers itself.

    A shape without values, on "meta", is of no mesh; torch's forward-mode AD computes with those.
    """
    device = kwargs.get("device")
    if device is not None and device.type == "meta":
        t = args[0]
        return torch.empty_strided(t.shape, t.stride(), dtype=kwargs.get("dtype") or t.dtype, device=device)
    return Again(args, {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")})


def _made_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """empty_like and its kin: the mesh is the tensor's, whatever device is named."""
    dropped = ("device", "pin_memory", "layout")
    return Again(args, {k: v for k, v in kwargs.items() if k not in dropped})


def _new_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a backward: where autograd undoes a write through a view, by writing through the same view of this tensor.

    So it must be one whose views are views, whatever they cut: Replicate. (Where it copies a gradient for a leaf it
    names a dtype; there is no view, and the placements are kept.)
    """
    if kwargs or torch._C._current_graph_task_id() == -1:
        return _made_like(func, args, kwargs)
    t, size, stride = args
    mesh = t._spec.mesh
    return make(torch.ops.aten.empty_strided.default, (size, stride), {"dtype": t.dtype}, mesh, replicated(mesh))


def _refuse(reason: str) -> Special:
    def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RuntimeError(f"{stem(func)} of a dtorch tensor: {reason}")

    return refuse


_SPECIAL: dict[str, Special] = {
    "aten.detach.default": _same_value,
    "aten.alias.default": _same_value,
    "aten.lift_fresh.default": _same_value,
    "aten._conj.default": _conj,
    "aten._local_scalar_dense.default": _item,
    "aten.equal.default": _equal,
    "aten._linalg_check_errors.default": linalg_check,
    "aten.is_same_size.default": lambda func, args, kwargs: args[0].shape == args[1].shape,
    "aten._has_same_storage_numel.default": lambda func, args, kwargs: args[0].numel() == args[1].numel(),
    "aten.is_set_to.default": lambda func, args, kwargs: (
        all(is_proxy(t) for t in args) and args[0]._spec is args[1]._spec and args[0]._ref == args[1]._ref
    ),
    "aten.as_strided.default": _as_strided,
    "aten._to_copy.default": _to_copy,
    "aten.new_empty_strided.default": _new_strided,
    "aten.resize_.default": _refuse("its memory lies on the executors; make a new tensor of the wanted shape"),
    "aten.set_.source_Tensor": _refuse("write t.data = other, or t.copy_(other)"),
    "aten.set_.source_Storage_storage_offset": _refuse("its memory lies on the executors; write t.copy_(other)"),
    **dict.fromkeys(
        [
            "aten.quantize_per_tensor.default",
            "aten.quantize_per_tensor.tensor_qparams",
            "aten.quantize_per_channel.default",
        ],
        _refuse("quantized tensors cannot be distributed; quantize t.to_torch()"),
    ),
    **dict.fromkeys(
        [
            "aten._nested_tensor_from_tensor_list.default",
            "aten._sparse_coo_tensor_with_dims_and_tensors.default",
            "aten._sparse_coo_tensor_unsafe.default",
            "aten._sparse_compressed_tensor_unsafe.default",
            "aten._sparse_compressed_tensor_with_dims.default",
            "aten.hspmm.default",
            "aten.hspmm.out",
            "aten.resize_as_sparse_.default",
            "aten.saddmm.default",
            "aten.smm.default",
            "aten.sparse_compressed_tensor.comp_plain_value_size",
            "aten.sparse_coo_tensor.indices",
            "aten.sparse_coo_tensor.indices_size",
            "aten.sparse_resize_.default",
            "aten.sparse_resize_and_clear_.default",
            "aten.sspaddmm.default",
            "aten.sspaddmm.out",
        ],
        _refuse("sparse and nested layouts cannot be distributed; write it with dense tensors, or with t.to_torch()"),
    ),
    "aten.dense_dim.default": lambda func, args, kwargs: args[0].ndim,
    "aten.sparse_dim.default": lambda func, args, kwargs: 0,
    "aten.is_pinned.default": lambda func, args, kwargs: False,
    "aten._pin_memory.default": _same_value,
}
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW_LIKE = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


def know(func: Any) -> Operator:
    """What dispatch needs to know of `func`."""
    sig = signature(func)
    free = free_numbers(func)
    names = frozenset(a for a, f in zip(sig.arguments, free, strict=True) if f)
    return remember(Operator(func, free if any(free) else None, names, _special(func, sig)))


def _special(func: Any, sig: Any) -> Special | None:
    found = _SPECIAL.get(sig.op)
    if found is not None:
        return found
    if sig.stem in _LIKE or sig.stem in _NEW_LIKE:
        return _made_like
    if any(a.is_out for a in func._schema.arguments):
        return out_variant
    if sig.inplace_view:
        return inplace_view
    if torch.Tag.data_dependent_output in func.tags or _dynamic(func):
        return _on_client
    if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return _decompose
    return None


def _dynamic(func: Any) -> bool:
    # `index` is tagged, but only a boolean mask makes its shape depend on data: see _index.
    return torch.Tag.dynamic_output_shape in func.tags and stem(func) not in ("index", "_unsafe_index")


# -- a call without a plan --------------------------------------------------------------------------------------------


def miss(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    """Decide a call that dispatch has no plan for, remember the plan, and run the call.

    `key` is None where plain tensors are among the arguments.
    """
    func = op.func
    tensors = tensors_of(args, kwargs)
    proxies = [t for t in tensors if is_proxy(t)]
    if key is None:
        return _with_plain(op, args, kwargs, proxies)
    if any(t._spec.copied is not None for t in proxies):
        return _of_copies(func, args, kwargs)
    mesh = _common_mesh(proxies, func)
    if mesh is None:
        return _on_common_mesh(func, args, kwargs, proxies)
    if stem(func) in _INDEXED:
        check_indices(args[0], args[1])
        if _has_mask(args):
            return _masked(func, args, kwargs)
    if has_generator(args, kwargs):
        return draw_here(func, args, kwargs)
    c = client()
    c.check()
    for t in proxies:
        c.refuse_lost(t._ref)
    make_room(c, op)
    try:
        call, decided, numbers = decide(op, args, kwargs, _dispatch._tensor)
    except NotImplementedError:
        if any(a.alias_info is not None for a in func._schema.arguments):
            raise
        # torch itself cannot tell the shape of the result without computing it (geqrf).
        plan = OperatorPlan(c, 0, "", ())
        plan.kind, plan.defer = DEFERRED, _on_client
        op.plans[key] = plan
        return _on_client(func, args, kwargs)
    except PlacementError as refused:
        if not may_move() or not can_write_back(func):
            raise
        return _written_back(op, func, args, kwargs, key, refused)
    if isinstance(decided, Recipe):
        recipe, run = decided, _laid(decided.fn, call.outs)
        plan = OperatorPlan(c, 0, "", ())
        plan.kind = DEFERRED
        if recipe.strict:
            plan.defer = run
        else:
            plan.defer = lambda f, a, k: run(f, a, k) if may_move() else _decide_again(op, a, k)
        op.plans[key] = plan
        return plan.defer(func, args, kwargs)
    if decided.moves:
        plan = OperatorPlan(c, 0, "", ())
        plan.kind = DEFERRED
        plan.defer = _mover(op, dict(decided.moves), _views(func))
        op.plans[key] = plan
        return plan.defer(func, args, kwargs)
    op.plans[key] = define(c, op, call, decided, numbers)
    return dispatch(None, func, (), args, kwargs)


def _writer_back(op: Operator, shards: bool) -> Special:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return write_back(func, args, kwargs, shards=shards) if may_move() else _decide_again(op, args, kwargs)

    return run


def _written_back(
    op: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, refused: PlacementError
) -> Any:
    """A call that cannot write where its targets lie: it writes to copies. Remembers how much had to be moved."""
    for shards in (False, True):
        try:
            result = write_back(func, args, kwargs, shards=shards)
        except PlacementError as e:
            if shards:
                raise refused from e
            continue
        plan = OperatorPlan(client(), 0, "", ())
        plan.kind, plan.defer = DEFERRED, _writer_back(op, shards)
        op.plans[key] = plan
        return result
    raise refused


def _decide_again(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that was allowed to move when it was decided, and is not now: raises PlacementError."""
    decide(op, args, kwargs, _dispatch._tensor)
    raise AssertionError("a call that needs moves was decided without them")


# Views by what they do, though their schemas do not say so. (`_unsafe_view` is one too, but only torch's composites
# call it, each on a result of its own making that nobody reads again: a write to the view is lost on nobody.)
_UNSAFE_VIEWS = frozenset({"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"})


def _views(func: Any) -> bool:
    """Whether the operator's results are views of an argument."""
    if stem(func) in _UNSAFE_VIEWS:
        return True
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


def _of_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with copies that stand for views among its arguments: they are read, and their views are copies too."""
    sig = signature(func)
    for a in func._schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            at = sig.index[a.name]
            for t in _flat([args[at] if at < len(args) else kwargs.get(a.name)], []):
                refuse_write(stem(func), t)
    marked = next(t for t in tensors_of(args, kwargs) if t._spec.copied is not None)  # type: ignore[attr-defined]
    version = marked._spec.copied  # type: ignore[attr-defined]
    args, kwargs = _map_call(args, kwargs, settled)  # type: ignore[arg-type]
    result = dispatch(None, func, (), args, kwargs)
    return _map(result, lambda t: mark(t, version)) if _views(func) else result  # type: ignore[arg-type]


def _laid(run: Special, outs: tuple[Any, ...]) -> Special:
    """`run`, a recipe, with new results in the memory order that the operator itself gives them."""

    def laid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(func, args, kwargs)
        if any(signature(func).writes):
            return result
        strides = iter([m.stride for m in outs if m is not None])

        def lay(t: torch.Tensor) -> torch.Tensor:
            want = next(strides, t.stride())
            if all(n < 2 or a == b for n, a, b in zip(t.shape, t.stride(), want, strict=False)) or not t.numel():
                return t
            order = sorted(range(t.ndim), key=lambda d: -want[d])
            back = [order.index(d) for d in range(t.ndim)]
            aten = torch.ops.aten
            packed = aten.clone.default(aten.permute.default(t, order), memory_format=torch.contiguous_format)
            return aten.permute.default(packed, back)

        return _map(result, lay)

    return laid


def _mover(op: Operator, moves: dict[int, Any], views: bool) -> Special:
    """Move the inputs as decided, then run the call on what came of it. A view of what moved is a copy."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not may_move():
            return _decide_again(op, args, kwargs)
        at = iter(range(1 << 30))

        def move(t: torch.Tensor) -> Any:
            placements = moves.get(next(at))
            return t if placements is None else redistribute(t, t._spec.mesh, placements)  # type: ignore[arg-type,attr-defined]

        # What torch does not call a view counts its writes itself.
        version = None if not views else UNTRACKED if stem(func) in _UNSAFE_VIEWS else version_of(args[0])
        args, kwargs = _map_call(args, kwargs, move)
        result = dispatch(None, func, (), args, kwargs)
        return result if version is None else _map(result, lambda t: mark(t, version))  # type: ignore[arg-type]

    return run


def _with_plain(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], proxies: list[Any]) -> Any:
    """Plain tensors among the arguments are constants, replicated; a plain target stays plain."""
    func = op.func
    if stem(func) in _INDEXED and is_proxy(args[0]):
        check_indices(args[0], args[1])
        if not _fills(args, kwargs):
            args = (args[0], _positions(args[1]), *args[2:])
    written = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            _flat([args[i] if i < len(args) else kwargs.get(a.name)], written)
    plain = [t for t in written if not is_proxy(t)]
    if plain and len(plain) == len(written):
        return _into_plain(func, args, kwargs)
    meshes = [t._spec.mesh for t in proxies if t.ndim] or [t._spec.mesh for t in proxies]
    mesh = next((m for m in meshes if m.is_distributed), meshes[0])
    targets = {id(t): lift(t.detach(), mesh) for t in plain}

    def lifted(t: torch.Tensor) -> Any:
        return t if is_proxy(t) else targets[id(t)] if id(t) in targets else lift_constant(t, mesh)

    args, kwargs = _map_call(args, kwargs, lifted)
    result = dispatch(None, func, (), args, kwargs)
    for t in plain:
        # Written beside proxies, as found_inf is beside the gradients that a GradScaler unscales.
        t.copy_(fetch(targets[id(t)]).get())
    return result


def _common_mesh(proxies: list[Any], func: Any) -> Any:
    mesh = proxies[0]._spec.mesh
    if all(t._spec.mesh is mesh for t in proxies):
        return mesh
    # A 0-dim tensor of a single device mixes with any mesh.
    others = [t for t in proxies if t.ndim or t._spec.mesh.is_distributed]
    if others and len(others) < len(proxies):
        one_mesh([t._spec for t in others], stem(func))
        return None
    return one_mesh([t._spec for t in proxies], stem(func))


def _on_common_mesh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], proxies: list[Any]) -> Any:
    mesh = next(t._spec.mesh for t in proxies if t.ndim or t._spec.mesh.is_distributed)

    def move(t: torch.Tensor) -> Any:
        return t if t._spec.mesh is mesh else redistribute(t, mesh, replicated(mesh))  # type: ignore[attr-defined,arg-type]

    args, kwargs = _map_call(args, kwargs, move)
    return dispatch(None, func, (), args, kwargs)


_INDEXED = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put"})


def _positions(given: list[Any]) -> list[Any]:
    """`given`, each plain mask in it as the positions it stands for: they are known here, and nobody waits for them."""
    indices: list[Any] = []
    for t in given:
        if t is not None and not is_proxy(t) and t.dtype in (torch.bool, torch.uint8):
            indices += t.nonzero().unbind(1)
        else:
            indices.append(t)
    return indices


def _fills(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one value is written at the places of one mask, which takes no positions: see :func:`_masked`."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return len(args) > 2 and len(args[1]) == 1 and _has_mask(args) and args[2].ndim == 0 and not accumulate


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def _masked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing by a mask: the mask's positions are found first, and their number is then known.

    One value written at the places of one mask needs no positions, and so no communication.
    """
    target, given, *rest = args
    name = stem(func)
    if len(given) == 1 and name in ("index_put", "index_put_", "_unsafe_index_put") and rest[0].ndim == 0:
        accumulate = rest[1] if len(rest) > 1 else kwargs.get("accumulate", False)
        mask = given[0] if given[0].dtype == torch.bool else given[0].bool()
        if not accumulate and mask.shape == target.shape[: mask.ndim]:
            for _ in range(target.ndim - mask.ndim):
                mask = torch.ops.aten.unsqueeze.default(mask, -1)
            packet = torch.ops.aten.masked_fill_ if name.endswith("_") else torch.ops.aten.masked_fill
            value = (
                rest[0]
                if rest[0].dtype == target.dtype
                else torch.ops.aten._to_copy.default(rest[0], dtype=target.dtype)
            )
            return dispatch(None, packet.Tensor, (), (target, mask, value))
    indices: list[Any] = []
    for t in given:
        if t is not None and t.dtype in (torch.bool, torch.uint8):
            indices += list(torch.ops.aten.nonzero.default(t).unbind(1))
        else:
            indices.append(t)
    return dispatch(None, func, (), (target, indices, *rest), kwargs)
