"""Operators that are not one command: those that share a value, wait for one, or run on the client.

Each function here has the signature ``(func, args, kwargs)`` of a dispatched call. :func:`know` decides, once per
operator, which of them (if any) stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.autograd.graph import increment_version

from ..sharding.rule import free_numbers, signature
from . import client as _client
from . import dispatch as _dispatch
from .client import client
from .command import OVERWRITES
from .copies import Standing, any_copies, mark, settled, version_of
from .dispatch import Again, Operator, dispatch, wrap
from .make import make
from .moves import fetch_now, lift, plain_torch, replicated, to_plain
from .plans import known, one_mesh, remember
from .strided import as_strided
from .trees import flat, is_proxy, mapped, tensors_of
from .variants import inplace_view, out_variant, stem
from .writeback import write_through

__all__ = ["Special", "into_plain", "know", "on_client"]

Special = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


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
    made = dispatch(None, torch.ops.aten.conj_physical.default, (), (settled(t),))
    if torch._C._current_graph_task_id() != -1:
        return made
    return mark(made, Standing(wrap(t._spec, t._ref), func, (), {}, 0, None, version_of(t)))


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fetch_now(args[0]).item()


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    if a.shape != b.shape:
        return False
    same = dispatch(None, torch.ops.aten.eq.Tensor, (), (a, b))
    return bool(fetch_now(dispatch(None, torch.ops.aten.all.default, (), (same,))).item())


def on_client(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators whose result's shape is known with its values only: inputs are fetched, the result is replicated."""
    mesh = one_mesh([t._spec for t in tensors_of(args, kwargs) if is_proxy(t)], func._schema.name)
    cls = _dispatch._tensor
    plain_args = tuple(to_plain(a, cls) for a in args)
    plain_kwargs = {k: to_plain(v, cls) for k, v in kwargs.items()}
    with plain_torch():
        result = func(*plain_args, **plain_kwargs)
    return mapped(result, lambda t: lift(t, mesh))


def into_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor is written to: the operator runs on the client, and the target stays plain."""
    cls = _dispatch._tensor
    plain_args = tuple(to_plain(a, cls) for a in args)
    plain_kwargs = {k: to_plain(v, cls) for k, v in kwargs.items()}
    with plain_torch():
        return func(*plain_args, **plain_kwargs)


def linalg_check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What linalg.inv and its kin find wrong is raised by the call itself: it waits, as torch does on a GPU."""
    return into_plain(func, args, kwargs)


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


def _list_writer(names: list[str]) -> Special:
    """Of an operator that writes lists of tensors: torch's kernels count the writes, one tensor after the other.

    Only copies that stand for views ask for the counts.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any_copies():
            return Again(args, kwargs)
        given = dict(zip(signature(func).arguments, args, strict=False)) | kwargs
        targets = flat([given[name] for name in names if name in given], [])
        marked = any(is_proxy(t) and t._spec.copied is not None for t in targets)  # type: ignore[attr-defined]
        if marked and all(map(is_proxy, tensors_of(args, kwargs))):
            result = write_through(func, args, kwargs)
        else:
            result = Again(args, kwargs)
        if not torch.is_inference_mode_enabled():
            increment_version([t for t in targets if is_proxy(t) and not t.is_inference()])
        return result

    return run


# Of draws: what replaces the whole target and is none of OVERWRITES.
_DRAWS = frozenset(
    f"aten.{name}"
    for name in (
        "bernoulli_.float cauchy_.default exponential_.default geometric_.default log_normal_.default "
        "normal_.default random_.default random_.from random_.to uniform_.default"
    ).split()
)


def _renewing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A write of a whole tensor, once a pool has ended: one whose value was lost with it has a value again."""
    target = args[0]
    if not is_proxy(target) or target._spec.copied is not None or not client().is_lost(target._ref):
        return Again(args, kwargs)
    if signature(func).op not in _DRAWS:
        client().renew(target._ref, target._spec)
        return Again(args, kwargs)
    spec = target._spec
    empty = torch.ops.aten.empty_strided.default
    fresh = make(empty, (spec.shape, spec.stride), {"dtype": spec.dtype}, spec.mesh, spec.placements)
    dispatch(None, func, (), (fresh, *args[1:]), kwargs)
    return dispatch(None, torch.ops.aten.copy_.default, (), (target, fresh))


class _Lost:
    """Whether this process has had a pool that ended: no write has to be looked at before."""

    any = False


def _expect_lost() -> None:
    _Lost.any = True
    for op in known():
        if op.special is None and signature(op.func).op in OVERWRITES | _DRAWS:
            op.special = _renewing


_client.on_close(_expect_lost)


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
    "aten.as_strided.default": as_strided,
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
        return on_client
    if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return _decompose
    if _Lost.any and sig.op in OVERWRITES | _DRAWS:
        return _renewing
    lists = [n for n, kind in zip(sig.arguments, sig.types, strict=True) if kind == "List[Tensor]" and n in sig.written]
    return _list_writer(lists) if lists else None


def _dynamic(func: Any) -> bool:
    # `index` is tagged, but only a boolean mask makes its shape depend on data: see _index.
    return torch.Tag.dynamic_output_shape in func.tags and stem(func) not in ("index", "_unsafe_index")
