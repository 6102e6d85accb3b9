"""What random programs compute: functions of one tensor and of several, reductions, losses, factories, moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import dtorch

from .programs import OPERATORS, Digits, Maker, Pair, Program, Skip, Step, operator, simple

# -- operators: one in, one out ---------------------------------------------------------------------------------------

for _name in "neg abs relu sigmoid tanh cos square clone contiguous sign floor erf softplus".split():
    _f = getattr(torch, _name, None) or getattr(F, _name, None) or (lambda t, n=_name: getattr(t, n)())
    simple(_name, _f, steep=_name in ("sign", "floor"))
simple("exp", lambda t: torch.exp(-t.abs()))
simple("sqrt", lambda t: torch.sqrt(t.abs() + 1))
simple("times 2", lambda t: t * 2.0)
simple("times -1.5", lambda t: -1.5 * t)
simple("plus 1", lambda t: t + 1)
simple("1 minus", lambda t: 1 - t)
simple("divided", lambda t: t / 4.0)
simple("pow 2", lambda t: t**2)
simple("clamp", lambda t: t.clamp(-1.0, 1.0))
simple("reciprocal", lambda t: 1 / (t.abs() + 1))
simple("positive", lambda t: t > 0, steep=True)
simple("to float32", lambda t: t.to(torch.float32).to(torch.float64), steep=True)
simple("detach", lambda t: t.detach())
simple("zeros_like", torch.zeros_like, floating=False)
simple("ones_like", torch.ones_like, floating=False)
simple("full_like", lambda t: torch.full_like(t, 2.5))
simple("empty_like", lambda t: torch.empty_like(t).fill_(3))
simple("new_zeros", lambda t: t.new_zeros(3, 2))
simple("triu", lambda t: t.triu(1) if t.ndim >= 2 else t.clone())
simple("masked by itself", lambda t: t.masked_fill(t > 0, 0.5), steep=True)
simple("item", lambda t: t.sum().item())
simple("bool", lambda t: bool((t > 100).any()))
simple("any", lambda t: (t > 0).any(), steep=True)
simple("all", lambda t: (t > -100).all(), steep=True)
simple("nan_to_num", torch.nan_to_num)
simple("gelu", F.gelu)
simple("silu", F.silu)
simple("count", lambda t: (t > 0).sum(), steep=True)
simple("masked_select", lambda t: t[t > 0], steep=True)
simple("nonzero", lambda t: (t > 0).nonzero(), steep=True)


@operator("dropout")
def _dropout(p: Program, d: Digits) -> Step:
    a = p.pick(d, floating=True)

    def f(t: torch.Tensor) -> torch.Tensor:
        dtorch.manual_seed(7)
        return F.dropout(t, 0.5)

    return [a], f, False


# -- operators: two or three in ---------------------------------------------------------------------------------------

_BINARY: dict[str, tuple[Callable[..., Any], bool]] = {
    "add": (torch.add, False),
    "sub": (torch.sub, False),
    "mul": (torch.mul, False),
    "div": (lambda a, b: a / (b.abs() + 1), False),
    "maximum": (torch.maximum, False),
    "minimum": (torch.minimum, False),
    "where": (lambda a, b: torch.where(a > b, a, b), True),
    "less": (torch.lt, True),
    "equal": (torch.eq, True),
    "add alpha": (lambda a, b: torch.add(a, b, alpha=2.0), False),
    "rsub": (lambda a, b: torch.rsub(a, b), False),
    "lerp": (lambda a, b: torch.lerp(*torch.broadcast_tensors(a, b), 0.25), False),
    "mse": (F.mse_loss, False),
    "allclose": (lambda a, b: torch.allclose(*torch.broadcast_tensors(a, b)), True),
    "addcmul": (lambda a, b: torch.addcmul(a, b, a, value=0.5), False),
    "tensor equal": (torch.equal, True),
    "stack": (lambda a, b: torch.stack(torch.broadcast_tensors(a, b)), False),
    "outer": (lambda a, b: torch.outer(a.flatten()[:4], b.flatten()[:4]), False),
}


def _binary(f: Callable[..., Any], steep: bool) -> Maker:
    def make(p: Program, d: Digits) -> Step:
        a = p.pick(d, floating=True)
        return [a, p.beside(d, a)], f, steep

    return make


for _name, (_f, _steep) in _BINARY.items():
    if _name == "mse":
        OPERATORS[_name] = lambda p, d: (
            [
                a := p.pick(d, floating=True),
                p.pick(d, where=lambda t: t.shape == a.plain.shape and t.is_floating_point()),
            ],
            F.mse_loss,
            False,
        )
    else:
        OPERATORS[_name] = _binary(_f, _steep)


@operator("mm")
def _mm(p: Program, d: Digits) -> Step:
    a = p.pick(d, floating=True, ndim=1)
    k = a.plain.shape[-1]
    b = p.pick(d, floating=True, where=lambda t: t.ndim in (1, 2) and t.shape[0] == k)
    return [a, b], torch.matmul, False


@operator("mm transposed")
def _mm_transposed(p: Program, d: Digits) -> Step:
    a = p.pick(d, floating=True, ndim=2)
    k = a.plain.shape[-1]
    b = p.pick(d, floating=True, where=lambda t: t.ndim == 2 and t.shape[1] == k)
    return [a, b], F.linear, False


@operator("gram")
def _gram(p: Program, d: Digits) -> Step:
    return [p.pick(d, floating=True, where=lambda t: t.ndim == 2)], lambda t: t.t() @ t, False


@operator("bmm")
def _bmm(p: Program, d: Digits) -> Step:
    return [p.pick(d, floating=True, where=lambda t: t.ndim == 3)], lambda t: torch.bmm(t, t.transpose(1, 2)), False


@operator("einsum")
def _einsum(p: Program, d: Digits) -> Step:
    return [p.pick(d, floating=True, where=lambda t: t.ndim == 2)], lambda t: torch.einsum("ij,kj->ik", t, t), False


@operator("linear with bias")
def _linear(p: Program, d: Digits) -> Step:
    a = p.pick(d, floating=True, ndim=1)
    k = a.plain.shape[-1]
    w = p.pick(d, floating=True, where=lambda t: t.ndim == 2 and t.shape[1] == k)
    b = p.pick(d, floating=True, where=lambda t: t.shape == (w.plain.shape[0],))
    return [a, w, b], F.linear, False


@operator("cat")
def _cat(p: Program, d: Digits) -> Step:
    a = p.pick(d, floating=True, ndim=1)
    dim = d.below(a.plain.ndim)

    def fits(t: torch.Tensor) -> bool:
        shape = a.plain.shape
        return (
            t.is_floating_point()
            and t.ndim == a.plain.ndim
            and all(t.shape[i] == shape[i] for i in range(t.ndim) if i != dim)
        )

    return [a, p.pick(d, where=fits), a], lambda *ts: torch.cat(ts, dim), False


# -- reductions and scans ---------------------------------------------------------------------------------------------

_REDUCTIONS: dict[str, tuple[Callable[..., Any], bool]] = {
    "sum": (lambda t, i, k: t.sum(i, k), False),
    "mean": (lambda t, i, k: t.mean(i, k), False),
    "amax": (lambda t, i, k: t.amax(i, k), False),
    "amin": (lambda t, i, k: t.amin(i, k), False),
    "max": (lambda t, i, k: t.max(i, k).values, False),
    "argmax": (lambda t, i, k: t.argmax(i, k), True),
    "prod": (lambda t, i, k: t.prod(i, k), False),
    "norm": (lambda t, i, k: torch.linalg.vector_norm(t, 2, i, k), False),
    "norm 1": (lambda t, i, k: torch.linalg.vector_norm(t, 1, i, k), False),
    "var": (lambda t, i, k: t.var(i, keepdim=k, unbiased=False), False),
    "logsumexp": (lambda t, i, k: t.logsumexp(i, k), False),
    "softmax": (lambda t, i, k: t.softmax(i), False),
    "log_softmax": (lambda t, i, k: t.log_softmax(i), False),
    "cumsum": (lambda t, i, k: t.cumsum(i), False),
    "sort": (lambda t, i, k: t.sort(i, stable=True).values, False),
    "topk": (lambda t, i, k: t.topk(1, i).values, False),
    "flip": (lambda t, i, k: t.flip(i), False),
    "roll": (lambda t, i, k: t.roll(1, i), False),
}


def _reduction(f: Callable[..., Any], steep: bool) -> Maker:
    def make(p: Program, d: Digits) -> Step:
        a = p.pick(d, floating=True, ndim=1)
        i, keep = d.below(a.plain.ndim), bool(d.below(2))
        if a.plain.shape[i] == 0:
            raise Skip
        return [a], lambda t: f(t, i, keep), steep

    return make


for _name, (_f, _steep) in _REDUCTIONS.items():
    OPERATORS[_name] = _reduction(_f, _steep)
for _name in ("sum", "mean", "norm", "max", "std"):
    OPERATORS[f"{_name} of all"] = lambda p, d, n=_name: (  # type: ignore[misc]
        [p.pick(d, where=lambda t: t.is_floating_point() and t.numel() > 1)],
        lambda t: getattr(t, n)(),
        False,
    )


@operator("layer_norm")
def _layer_norm(p: Program, d: Digits) -> Step:
    a = p.pick(d, floating=True, where=lambda t: t.ndim and t.shape[-1] > 1 and t.numel())
    return [a], lambda t: F.layer_norm(t, t.shape[-1:]), False


@operator("cross_entropy")
def _cross_entropy(p: Program, d: Digits) -> Step:
    a = p.pick(d, floating=True, where=lambda t: t.ndim == 2 and t.shape[1] > 0 and t.shape[0] > 0)
    target = p.indices(a.plain.shape[1], (a.plain.shape[0],))
    ignore = int(target[0]) if d.below(2) and len(set(target.tolist())) > 1 else -100
    ours = dtorch.distribute_tensor(target, p.mesh, p.placements(d, tuple(target.shape), partial=False))
    return [a, Pair(target, ours)], lambda t, y: F.cross_entropy(t, y, ignore_index=ignore), False


# -- factories and moves ----------------------------------------------------------------------------------------------


def _factory(make_plain: Callable[[], torch.Tensor], make_ours: Callable[..., Any]) -> Maker:
    def make(p: Program, d: Digits) -> Step:
        value = make_plain()
        ours = make_ours(device_mesh=p.mesh, placements=p.placements(d, tuple(value.shape)))
        return [Pair(value, ours)], lambda t: t, False

    return make


for _name, _args in {
    "zeros": (4, 3),
    "ones": (5,),
    "eye": (3, 4),
    "arange": (7,),
    "linspace": (0, 1, 5),
    "full": ((3, 2), 1.5),
}.items():
    OPERATORS[f"factory {_name}"] = _factory(
        lambda n=_name, a=_args: getattr(torch, n)(*a, dtype=torch.float64),
        lambda n=_name, a=_args, **k: getattr(dtorch, n)(*a, dtype=torch.float64, **k),
    )


def _seeded(f: Callable[[], Any]) -> Any:
    dtorch.manual_seed(11)
    return f()


for _name in ("rand", "randn"):
    OPERATORS[f"factory {_name}"] = _factory(
        lambda n=_name: _seeded(lambda: getattr(torch, n)(5, 4, dtype=torch.float64)),
        lambda n=_name, **k: _seeded(lambda: getattr(dtorch, n)(5, 4, dtype=torch.float64, **k)),
    )


@operator("redistribute")
def _redistribute(p: Program, d: Digits) -> Step:
    a = p.pick(d)
    at = p.placements(d, tuple(a.plain.shape), partial=a.plain.is_floating_point())

    def f(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, dtorch.Tensor):
            return t.redistribute(placements=at)
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)

    return [a], f, False


@operator("forget")
def _forget(p: Program, d: Digits) -> Step:
    """Drop a tensor: its views must live on."""
    if len(p.pairs) > 2:
        p.pairs.pop(d.below(len(p.pairs)))
    raise Skip
