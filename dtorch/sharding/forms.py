"""Closed forms of outputs: reductions, products, normalisations, lookups and what else is called often.

Each gives what torch's CPU kernel gives, or None where it is not sure, or where the call is wrong: the meta
kernel then decides, and raises torch's error. torch's meta kernels in Python take up to a millisecond, and the
first of them imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..spec import TensorSpec, contiguous_stride
from .infer import Outputs, broadcast, closed_form, dense_stride, iterated_stride
from .rule import Num, OutMeta, dims_of, signature

__all__: list[str] = []

Func = torch._ops.OpOverload
Args = Sequence[Any]
Kwargs = dict[str, Any]
_HALF = (torch.float16, torch.bfloat16)


def _bind(func: Func, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    sig = signature(func)
    return {**sig.defaults, **dict(zip(sig.arguments, args, strict=False)), **kwargs}


def _packed(shape: Sequence[int], dtype: torch.dtype) -> OutMeta:
    shape = tuple(shape)
    return OutMeta(shape, contiguous_stride(shape), dtype)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# ---- reductions -------------------------------------------------------------------------------------


def _reduced(x: TensorSpec, dim: Any, keepdim: bool) -> tuple[int, ...] | None:
    """The shape after reducing `dim`; None where torch has words for these dims."""
    n, span = x.ndim, max(x.ndim, 1)
    listed = [dim] if isinstance(dim, int) else list(dim or ())
    if len({d % span for d in listed}) != len(listed) or any([not -span <= d < span for d in listed]):
        return None
    dims = dims_of(dim, n)
    return tuple([1 if d in dims else s for d, s in enumerate(x.shape) if keepdim or d not in dims])


_TO_INT64 = frozenset("argmax argmin count_nonzero".split())
_NOT_OF_NOTHING = frozenset("amax amin argmax argmin max min aminmax".split())
_NOT_OF_COMPLEX = frozenset("amax amin any all argmax argmin max min aminmax logsumexp".split())


@closed_form(
    *"sum mean amax amin any all argmax argmin count_nonzero prod logsumexp linalg_vector_norm".split(),
    *"var std var_mean std_mean max min aminmax".split(),
)
def reduction(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Outputs of reductions are contiguous, whatever the input's strides."""
    a, stem, outputs = _bind(func, args, kwargs), signature(func).stem, len(func._schema.returns)
    x, dim, keepdim = a["self"], a.get("dim"), bool(a.get("keepdim", False))
    if x.numel == 0 and stem in ("max", "min") and outputs == 1 and "other" not in a:
        raise RuntimeError(
            f"{stem}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with "
            "the 'dim' argument."
        )
    refused = (x.numel == 0 and stem in _NOT_OF_NOTHING) or (x.dtype.is_complex and stem in _NOT_OF_COMPLEX)
    if refused or "other" in a:
        return None
    if stem in ("any", "all") and func._schema.overload_name == "dims" and dim is not None and not list(dim):
        return None  # an empty list reduces nothing here
    shape = _reduced(x, dim, keepdim)
    if shape is None:
        return None
    dtype = a.get("dtype")
    if stem in _TO_INT64:
        dtype = torch.int64
    elif stem in ("any", "all"):
        dtype = torch.uint8 if x.dtype == torch.uint8 else torch.bool
    elif stem in ("sum", "prod"):
        dtype = dtype or (x.dtype if _is_float(x.dtype) else torch.int64)
    elif stem in ("amax", "amin", "max", "min", "aminmax"):
        dtype = x.dtype
    elif not _is_float(x.dtype) or (dtype is not None and dtype != x.dtype):
        return None
    elif stem == "linalg_vector_norm" or stem[:3] in ("var", "std"):
        if "correction" not in a and stem != "linalg_vector_norm":
            return None
        dtype = x.dtype.to_real()
    else:
        dtype = x.dtype
    if outputs == 1:
        return (_packed(shape, dtype),)
    if stem in ("max", "min"):
        return _packed(shape, dtype), _packed(shape, torch.int64)
    return _packed(shape, dtype), _packed(shape, x.dtype)


# ---- products ---------------------------------------------------------------------------------------


@closed_form("mm", "bmm", "addmm", "baddbmm")
def product(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    stem = signature(func).stem
    if func._schema.overload_name or any([type(a) is not TensorSpec for a in args]):
        return None
    added = stem in ("addmm", "baddbmm")
    a, b = args[added], args[added + 1]
    if a.ndim != b.ndim or a.dtype != b.dtype or a.shape[:-2] != b.shape[:-2] or a.ndim != (3 if "bmm" in stem else 2):
        return None
    if a.shape[-1] != b.shape[-2] or a.dtype == torch.bool:
        return None
    shape = (*a.shape[:-1], b.shape[-1])
    if added and (broadcast([args[0].shape, shape]) != shape or args[0].dtype != a.dtype):
        return None
    if signature(func).inplace:
        return (OutMeta(shape, args[0].stride, a.dtype),) if args[0].shape == shape else None
    return (_packed(shape, a.dtype),)


# ---- operators that keep a shape --------------------------------------------------------------------


@closed_form("masked_fill")
def masked_fill(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """A contiguous copy, filled."""
    if signature(func).inplace:
        return None
    shape = broadcast([args[0].shape, args[1].shape])
    if shape is None or args[1].dtype != torch.bool:
        return None
    return (_packed(shape, args[0].dtype),)


@closed_form("_softmax", "_log_softmax")
def softmax(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim, half_to_float = args
    n = max(x.ndim, 1)
    if half_to_float or not x.dtype.is_floating_point or not -n <= dim < n:
        return None
    return (_packed(x.shape, x.dtype),) if x.is_contiguous else None


@closed_form("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Contiguous for log_softmax, whatever the inputs are; the meta kernel does not know."""
    grad, output, _, dtype = args
    if grad.shape != output.shape or dtype != grad.dtype:
        return None
    if signature(func).stem == "_softmax_backward_data" and not (grad.is_contiguous and output.is_contiguous):
        return None
    return (_packed(grad.shape, dtype),)


@closed_form("native_layer_norm")
def layer_norm(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, normalized, weight, bias = args[:4]
    m = len(normalized)
    if not m or m > x.ndim or tuple(normalized) != x.shape[x.ndim - m :]:
        return None
    given = [w for w in (weight, bias) if w is not None]
    mixed = x.dtype in _HALF and bool(given) and all([w.dtype == torch.float32 for w in given])
    if any([w.shape != tuple(normalized) or (w.dtype != x.dtype and not mixed) for w in given]):
        return None
    stat = _packed((*x.shape[: x.ndim - m], *(1,) * m), torch.float32 if mixed else x.dtype)
    return _packed(x.shape, x.dtype), stat, stat


@closed_form("native_layer_norm_backward")
def layer_norm_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Contiguous, whatever the inputs are; the meta kernel does not know."""
    x, weight, bias, mask = args[1], args[5], args[6], args[7]
    if (mask[1] and weight is None) or (mask[2] and bias is None):
        return None
    outs = (x, weight, bias)
    return tuple([_packed(t.shape, t.dtype) if k else None for t, k in zip(outs, mask, strict=True)])


@closed_form("cumsum", "cumprod")
def cumulative(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim = args[:2]
    n = max(x.ndim, 1)
    if not -n <= dim < n or signature(func).inplace or not x.is_contiguous:
        return None
    dtype = kwargs.get("dtype") or (x.dtype if _is_float(x.dtype) else torch.int64)
    return (_packed(x.shape, dtype),)


@closed_form("tril", "triu", "roll", "flip")
def rearranged(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, stem = args[0], signature(func).stem
    if signature(func).inplace or not x.is_contiguous or not x.numel:
        return None
    if stem in ("tril", "triu"):
        return (_packed(x.shape, x.dtype),) if x.ndim >= 2 else None
    given = _bind(func, args, kwargs)["dims"] or []
    if any([not -x.ndim <= d < x.ndim for d in given]) or len({d % x.ndim for d in given}) != len(given):
        return None
    if stem == "roll" and len(args[1]) != max(len(given), 1):
        return None
    return (_packed(x.shape, x.dtype),)


@closed_form("sort")
def sort(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim = args[0], _bind(func, args, kwargs)["dim"]
    n = max(x.ndim, 1)
    if not -n <= dim < n:
        return None
    stride = dense_stride(x)
    return OutMeta(x.shape, stride, x.dtype), OutMeta(x.shape, stride, torch.int64)


@closed_form("native_dropout")
def dropout(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x = args[0]
    if not x.is_contiguous or not x.dtype.is_floating_point:
        return None
    # Of nothing the mask is no mask: torch returns an empty tensor like the input.
    return _packed(x.shape, x.dtype), _packed(x.shape, torch.bool if x.numel else x.dtype)


# ---- lookups and joins ------------------------------------------------------------------------------


@closed_form("embedding")
def embedding(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    weight, indices = args[:2]
    if weight.ndim != 2 or indices.dtype not in (torch.int64, torch.int32):
        return None
    return (_packed((*indices.shape, weight.shape[1]), weight.dtype),)


@closed_form("embedding_dense_backward")
def embedding_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    grad, _, rows = args[:3]
    return (_packed((rows, grad.shape[-1]), grad.dtype),)


@closed_form("gather")
def gather(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim, index = args[:3]
    if x.ndim != index.ndim or not x.ndim or index.dtype != torch.int64 or not -x.ndim <= dim < x.ndim:
        return None
    if any([i > s for d, (i, s) in enumerate(zip(index.shape, x.shape, strict=True)) if d != dim % x.ndim]):
        return None
    return (_packed(index.shape, x.dtype),)


@closed_form("index")
def index(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """``x[i, j]``: index tensors for the first dims; for others the strides are not so simple."""
    x, picks = args
    given = [i for i in picks if i is not None]
    if not given or any([i is None for i in picks[: len(given)]]) or not x.is_contiguous or len(picks) > x.ndim:
        return None
    if any([i.dtype not in (torch.int64, torch.int32) or not i.is_contiguous for i in given]) or not x.numel:
        return None
    if any([i.shape != given[0].shape for i in given]):
        return None
    return (_packed((*given[0].shape, *x.shape[len(given) :]), x.dtype),)


@closed_form("cat")
def cat(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    parts, dim = args[0], _bind(func, args, kwargs)["dim"]
    first = parts[0]
    n = first.ndim
    if not n or not -n <= dim < n or any([p.ndim != n or p.dtype != first.dtype or not p.is_contiguous for p in parts]):
        return None
    dim %= n
    rest = first.shape[:dim] + first.shape[dim + 1 :]
    if any([p.shape[:dim] + p.shape[dim + 1 :] != rest for p in parts]):
        return None
    return (_packed((*rest[:dim], sum([p.shape[dim] for p in parts]), *rest[dim:]), first.dtype),)


@closed_form("stack")
def stack(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    parts, dim = args[0], _bind(func, args, kwargs)["dim"]
    first = parts[0]
    n = first.ndim + 1
    if not -n <= dim < n or any([p.shape != first.shape or p.dtype != first.dtype for p in parts]):
        return None
    if not all([p.is_contiguous for p in parts]):
        return None
    dim %= n
    return (_packed((*first.shape[:dim], len(parts), *first.shape[dim:]), first.dtype),)


# ---- losses and attention ---------------------------------------------------------------------------


@closed_form("nll_loss_forward")
def nll_loss(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, target, weight, reduction_, _ = args
    if x.ndim not in (1, 2) or target.shape != x.shape[:-1] or target.dtype != torch.int64:
        return None
    if weight is not None and (weight.shape != x.shape[-1:] or weight.dtype != x.dtype):
        return None
    return _packed(target.shape if reduction_ == 0 else (), x.dtype), _packed((), x.dtype)


@closed_form("nll_loss_backward")
def nll_loss_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    _, x, target = args[:3]
    if x.ndim not in (1, 2) or target.shape != x.shape[:-1] or not x.is_contiguous:
        return None
    return (_packed(x.shape, x.dtype),)


@closed_form("native_dropout_backward")
def dropout_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    grad, mask = args[:2]
    if grad.shape != mask.shape:
        return None
    dtype = grad.dtype if _is_float(grad.dtype) else torch.get_default_dtype()
    return (OutMeta(grad.shape, iterated_stride([grad, mask], grad.shape), dtype),)


def _heads_inside(x: TensorSpec) -> OutMeta:
    """[batch, heads, length, size] that lies in memory as [batch, length, heads, size]."""
    b, h, n, d = x.shape
    s = contiguous_stride((b, n, h, d))
    return OutMeta(x.shape, (s[0], s[2], s[1], s[3]), x.dtype)


def _attention_inputs(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> bool:
    alike = q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype and 0 not in (q.numel, k.numel, v.numel)
    return alike and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[3] == k.shape[3] == v.shape[3]


@closed_form("_scaled_dot_product_flash_attention_for_cpu")
def attention(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    q, k, v = args[:3]
    if not _attention_inputs(q, k, v):
        return None
    b, h, n, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return OutMeta(q.shape, dense_stride(q), q.dtype), OutMeta((b, h, n), (h * n, 1, h), dtype)


@closed_form("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    q, k, v = args[1:4]
    return (_heads_inside(q), _heads_inside(k), _heads_inside(v)) if _attention_inputs(q, k, v) else None


# ---- copies -----------------------------------------------------------------------------------------


@closed_form("detach", "alias", "lift_fresh")
def same(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x = args[0]
    return (OutMeta(x.shape, x.stride, x.dtype),)


@closed_form("clone", "_to_copy", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
def like(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Dense strides are kept; others are packed in the order of the strides."""
    x, form = args[0], kwargs.get("memory_format")
    if kwargs.get("layout") not in (None, torch.strided) or type(x) is not TensorSpec:
        return None
    dtype = kwargs.get("dtype") or x.dtype
    if form is torch.contiguous_format:
        return (_packed(x.shape, dtype),)
    if form is not None and form is not torch.preserve_format:
        return None
    return (OutMeta(x.shape, dense_stride(x), dtype),)


@closed_form("log_sigmoid_forward")
def log_sigmoid(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    return (_packed(args[0].shape, args[0].dtype),) * 2


@closed_form("equal", "allclose")
def no_tensor(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    return ()


# ---- factories --------------------------------------------------------------------------------------


@closed_form("zeros", "ones", "empty", "full", "rand", "randn", "randint")
def filled(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    a, stem = _bind(func, args, kwargs), signature(func).stem
    dtype, size = a.get("dtype"), a["size"]
    if not isinstance(dtype, torch.dtype) or any([s < 0 for s in size]) or a.get("memory_format") is not None:
        return None
    if stem in ("rand", "randn") and not _is_float(dtype):
        return None
    if stem == "randint":
        low, high = [n.value if isinstance(n, Num) else n for n in (a.get("low", 0), a["high"])]
        if low >= high:
            return None
    return (_packed(size, dtype),)


@closed_form("randperm", "eye", "linspace")
def counted(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    a = _bind(func, args, kwargs)
    size = [a[name] for name in ("n", "m", "steps") if name in a]
    if not isinstance(a.get("dtype"), torch.dtype) or any([not isinstance(s, int) or s < 0 for s in size]):
        return None
    return (_packed(size, a["dtype"]),)


@closed_form("binomial", "_sample_dirichlet")
def drawn_like(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Samples of distributions, one for each count or row of weights; torch has no meta kernel for these."""
    x = args[0]
    return (_packed(x.shape, x.dtype),) if type(x) is TensorSpec and x.dtype.is_floating_point else None
