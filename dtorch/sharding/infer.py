"""Shapes, strides and dtypes of an operator's outputs, exactly as torch's CPU kernels give them.

Three ways, fastest first:

* closed forms, for elementwise operators (the algorithm of torch's TensorIterator) and those of
  :mod:`dtorch.sharding.forms`;
* torch's meta kernels, for everything else and for every call that is wrong, so that errors are torch's own;
* torch's fake tensors, where an operator has no meta kernel but can be decomposed.

Dtypes of elementwise operators are learned from torch itself: the operator is run once on tensors of one
element for each combination of dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..spec import TensorSpec, contiguous_stride
from .rule import UNTAGGED_POINTWISE, Num, OutMeta, Signature, signature

__all__ = ["Outputs", "broadcast", "closed_form", "dense_stride", "infer", "iterated_stride"]

Outputs = tuple[OutMeta | None, ...]
# The operators themselves: torch.ones and its like are patched inside ``with dtorch.device_mesh(...)``.
_empty_strided: Any = torch.ops.aten.empty_strided.default
_META, _CPU = torch.device("meta"), torch.device("cpu")
_ones: Any = torch.ops.aten.ones.default
Shape = tuple[int, ...]
Form = Callable[[torch._ops.OpOverload, Sequence[Any], dict[str, Any]], Outputs | None]

_forms: dict[str, Form] = {}


def closed_form(*stems: str) -> Callable[[Form], Form]:
    """Register ``f(func, args, kwargs)`` as the closed form of operators; it returns None where it does not
    apply, and where the call is wrong: the meta kernel then raises torch's error."""

    def register(form: Form) -> Form:
        for stem in stems:
            _forms[stem] = form
        return form

    return register


def infer(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """The outputs of a call, flat over the returns; None for an undefined tensor.

    Args:
        func: the operator.
        args, kwargs: TensorSpec in place of each tensor, Num in place of free numbers.

    Raises:
        Whatever torch raises for these arguments.
    """
    sig = signature(func)
    form = _forms.get(sig.stem)
    if form is None:
        if sig.pointwise or sig.stem in UNTAGGED_POINTWISE:
            form = _pointwise
        elif sig.inplace and torch.Tag.nondeterministic_seeded in func.tags:
            form = _filled
    if form is not None and not sig.has_out:
        found = form(func, args, kwargs)
        if found is not None:
            return found
    return by_meta(func, args, kwargs)


# ---- meta kernels -----------------------------------------------------------------------------------


def _meta(value: Any) -> Any:
    kind = type(value)
    if kind is TensorSpec:
        return _empty_strided(value.shape, value.stride, dtype=value.dtype, device=_META)
    if kind is Num:
        return value.value
    if kind is list or kind is tuple:
        return kind([_meta(v) for v in value])
    return value


def _flat(result: Any, out: list[OutMeta | None]) -> list[OutMeta | None]:
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided:
            raise RuntimeError(
                f"a dtorch tensor cannot have the layout {result.layout}, as this would make; write it with dense "
                "tensors (sparse=False), or with t.to_torch()"
            )
        out.append(OutMeta(tuple(result.shape), tuple(result.stride()), result.dtype))
    elif isinstance(result, (list, tuple)):
        for r in result:
            _flat(r, out)
    elif result is None:
        out.append(None)
    return out


def by_meta(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """Run the operator on meta tensors."""
    given = {k: _meta(v) for k, v in kwargs.items()}
    if "device" in signature(func).index:
        given.pop("pin_memory", None)
        given["device"] = "meta"
    try:
        return tuple(_flat(func(*[_meta(a) for a in args], **given), []))
    except NotImplementedError:
        return _by_fake(func, args, kwargs)
    except Exception:
        _raise_as_cpu(func, args, kwargs)
        raise


_SMALL = 1 << 16


def _raise_as_cpu(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU kernel raises for a call that the meta kernel refused: its words are what users know.

    Kernels check before they compute, so that large inputs may be one element seen many times.
    """

    def real(value: Any) -> Any:
        kind = type(value)
        if kind is TensorSpec:
            if value.numel <= _SMALL:
                return _empty_strided(value.shape, value.stride, dtype=value.dtype, device=_CPU).fill_(1)
            return _ones((), dtype=value.dtype).expand(value.shape)
        if kind is Num:
            return value.value
        return kind([real(v) for v in value]) if kind is list or kind is tuple else value

    specs = [v for v in (*args, *kwargs.values()) if type(v) is TensorSpec]
    largest = max([s.numel for s in specs], default=0)
    if largest <= (_SMALL if signature(func).inplace else _SMALL << 8):
        given = {k: real(v) for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        func(*[real(a) for a in args], **given)


def _by_fake(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """Run the operator on fake cpu tensors, which decompose what has no meta kernel."""
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if type(value) is TensorSpec:
                return mode.from_tensor(_empty_strided(value.shape, value.stride, dtype=value.dtype, device=_META))
            if type(value) is Num:
                return value.value
            return type(value)([fake(v) for v in value]) if isinstance(value, (list, tuple)) else value

        return tuple(_flat(func(*[fake(a) for a in args], **{k: fake(v) for k, v in kwargs.items()}), []))


def _filled(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    """A tensor that is filled with random numbers stays what it is."""
    x = args[0]
    return (OutMeta(x.shape, x.stride, x.dtype),) if type(x) is TensorSpec and x.dtype.is_floating_point else None


# ---- elementwise ------------------------------------------------------------------------------------

# Elementwise, yet their outputs are not laid out by TensorIterator, or not as their inputs' broadcast.
_NOT_ITERATED = frozenset(
    "equal copy fill masked_fill native_dropout rrelu_with_noise log_sigmoid_backward real imag _conj _neg_view conj "
    "resolve_conj mvlgamma".split()
)
# Their kernels give TensorIterator the inputs in another order, which decides where strides disagree.
_ORDERS = {
    "threshold_backward": (1, 0),
    "leaky_relu_backward": (1, 0),
    "rsub": (1, 0),
    "_prelu_kernel_backward": (1, 2, 0),
}
_dtypes: dict[Any, tuple[torch.dtype, ...] | None] = {}


def _key(value: Any) -> Any:
    """What of an argument decides the dtypes of the outputs."""
    kind = type(value)
    if kind is TensorSpec:
        return value.dtype, not value.shape
    if kind is Num:
        return value.kind
    if kind is float or kind is int or kind is bool or kind is complex:
        return kind
    if kind is list or kind is tuple:
        return tuple([_key(v) for v in value])
    return value


def _one(value: Any) -> Any:
    """A tensor of one element (of no dims, where the spec has none) in place of a spec."""
    kind = type(value)
    if kind is TensorSpec:
        return _ones((1,) if value.shape else (), dtype=value.dtype)
    if kind is Num:
        return value.value
    return value


def _learn(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.dtype, ...] | None:
    """The dtypes of the outputs; None where the outputs are not all tensors."""
    key = (func, tuple([_key(a) for a in args]), tuple([(k, _key(v)) for k, v in kwargs.items()]) if kwargs else ())
    if key not in _dtypes:
        given = {k: _one(v) for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        try:
            outs = _flat(func(*[_one(a) for a in args], **given), [])
        except Exception:
            return None  # the meta kernel says what is wrong, with the real shapes
        _dtypes[key] = tuple([o.dtype for o in outs if o is not None]) if outs and None not in outs else None
    return _dtypes[key]


def _pointwise(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    sig = signature(func)
    if sig.stem.startswith(("_foreach", "_fused")) or (sig.stem in _NOT_ITERATED and not sig.inplace):
        return None
    specs = [a for a in args if type(a) is TensorSpec]
    if kwargs:
        specs += [v for v in kwargs.values() if type(v) is TensorSpec]
    if not specs or any([type(a) is list or type(a) is tuple for a in args]):
        return None
    shape = broadcast([s.shape for s in specs])
    if shape is None:
        _raise_as_cpu(func, args, kwargs)
        return None
    dtypes = _learn(func, args, kwargs)
    if dtypes is None:
        return None
    if sig.inplace:
        own = specs[0]
        return (OutMeta(own.shape, own.stride, own.dtype),) if own.shape == shape else None
    order = _ORDERS.get(sig.stem)
    if order is not None and len(order) == len(specs):
        specs = [specs[i] for i in order]
    if sig.stem == "ldexp" and not (specs[1].dtype.is_complex or specs[1].dtype in (torch.float16, torch.bfloat16)):
        # x * pow(2, other), and the power is contiguous
        specs[1] = TensorSpec.of(specs[1].shape, None, specs[1].dtype, specs[1].mesh, specs[1].placements)
    if sig.op == "aten.pow.Scalar" or (sig.stem == "angle" and specs[0].dtype.is_complex):
        stride = contiguous_stride(shape)
    else:
        stride = iterated_stride(specs, shape, _has_wrapped_number(sig, args, kwargs))
    return tuple([OutMeta(shape, stride, d) for d in dtypes])


def _has_wrapped_number(sig: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a number stands where the schema has a tensor: it takes part as a tensor of no dims."""
    for t, a in zip(sig.types, args, strict=False):
        if t == "Tensor" and type(a) is not TensorSpec:
            return True
    return any([sig.types[sig.index[k]] == "Tensor" and type(v) is not TensorSpec for k, v in kwargs.items()])


def broadcast(shapes: list[Shape]) -> Shape | None:
    """The common shape; None where there is none."""
    first = shapes[0]
    if all([s == first for s in shapes]):
        return first
    n = max(map(len, shapes))
    out = [1] * n
    for s in shapes:
        for i, size in enumerate(s, n - len(s)):
            if size != 1 and size != out[i]:
                if out[i] != 1:
                    return None
                out[i] = size
    return tuple(out)


def _dense(shape: Shape, stride: Shape) -> bool:
    """Whether the elements fill their memory without holes or overlaps."""
    if 0 in shape:
        return True
    step = 1
    for st, s in sorted([(st, s) for s, st in zip(shape, stride, strict=True) if s != 1]):
        if st != step:
            return False
        step *= s
    return True


def _contiguous(spec: TensorSpec) -> bool:
    """As torch means it: the stride of a dim of size 1 does not matter."""
    if spec.is_contiguous:
        return True
    step = 1
    for s, st in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if s != 1:
            if st != step:
                return False
            step *= s
    return True


def iterated_stride(specs: list[TensorSpec], shape: Shape, wrapped: bool = False) -> Shape:
    """Strides of an output that TensorIterator allocates for these inputs."""
    first = specs[0]
    if not wrapped and all([s.shape == shape for s in specs]):
        if all([_contiguous(s) for s in specs]):
            return contiguous_stride(shape)
        if all([s.stride == first.stride for s in specs]) and _dense(shape, first.stride):
            return first.stride
    elif all([_contiguous(s) for s in specs if s.shape == shape]) and all(
        [s.numel == 1 or s.shape == shape for s in specs]
    ):
        return contiguous_stride(shape)
    return _permuted_stride(tuple([(s.shape, s.stride) for s in specs]), shape)


@lru_cache(maxsize=4096)
def _permuted_stride(operands: tuple[tuple[Shape, Shape], ...], shape: Shape) -> Shape:
    """``TensorIteratorBase::reorder_dimensions`` and ``allocate_or_resize_outputs`` (ATen/TensorIterator.cpp)."""
    n = len(shape)
    if n == 0:
        return ()
    strides = []
    for s, st in operands:
        lead = n - len(s)
        strides.append([0] * lead + [0 if s[d] == 1 and shape[lead + d] != 1 else st[d] for d in range(len(s))])

    def order(a: int, b: int) -> int:
        for st in strides:
            if st[a] == 0 or st[b] == 0:
                continue  # a broadcast dim says nothing
            if st[a] != st[b]:
                return -1 if st[a] < st[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    perm = list(range(n - 1, -1, -1))  # fastest dim first
    for i in range(1, n):
        dim1 = i
        for dim0 in range(i - 1, -1, -1):
            says = order(perm[dim0], perm[dim1])
            if says > 0:
                perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
                dim1 = dim0
            elif says < 0:
                break
    if perm == list(range(n - 1, -1, -1)):
        return contiguous_stride(shape)
    out, step = [0] * n, 1
    for d in perm:
        out[d] = step
        step *= shape[d]
    return tuple(out)


def dense_stride(x: TensorSpec) -> Shape:
    """Strides that ``empty_like`` gives: the input's where it is dense, else packed in their order."""
    return x.stride if _dense(x.shape, x.stride) else _permuted_stride(((x.shape, x.stride),), x.shape)
