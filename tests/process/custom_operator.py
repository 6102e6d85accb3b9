"""A plain script with operators of its own: forward and backward, on one device and on a mesh, beside plain torch."""

from __future__ import annotations

import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.testing import assert_close, check_sharding

DOUBLE = 2.0


def halved(x: torch.Tensor) -> torch.Tensor:
    """Not in any module that an executor could import."""
    return x / DOUBLE


@torch.library.custom_op("scriptlib::twice_half", mutates_args=())
def twice_half(x: torch.Tensor) -> torch.Tensor:
    """An operator that another one calls."""
    return halved(x) * 2


@twice_half.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("scriptlib::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * weight`` over the root of the mean square along the last dim."""
    return twice_half(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("scriptlib::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `x` and `weight`."""
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    scaled = grad * weight
    return scaled * r - x * r.pow(3) * (scaled * x).mean(-1, keepdim=True), (grad * x * r).flatten(0, -2).sum(0)


@rms_norm_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def setup(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def backward(ctx, grad):
    return *rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


rms_norm.register_autograd(backward, setup_context=setup)


@torch.library.custom_op("scriptlib::add_into", mutates_args={"into"})
def add_into(into: torch.Tensor, x: torch.Tensor) -> None:
    """``into += x``."""
    into.add_(x)


dtorch.register_sharding(rms_norm, "...n,n->...n", whole="n", free="eps")
dtorch.register_sharding(
    "scriptlib::rms_norm_backward",
    "...n,...n,n->...n,n",
    whole="n",
    reduce={"...": (None, "sum")},
    linear="grad",
    free="eps",
)
dtorch.register_sharding(torch.ops.scriptlib.add_into, "...,...->", linear=[("into", "x")])


def run(x, weight, grad):
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = rms_norm(x, weight, 1e-5)
    y.backward(grad)
    return y, x.grad, weight.grad


torch.manual_seed(0)
X, W, G = torch.randn(5, 3, 8), torch.randn(8), torch.randn(5, 3, 8)
want = run(X.clone(), W.clone(), G)
check_sharding(rms_norm, X, W, 1e-5)
check_sharding(rms_norm_backward, G, X, W, 1e-5)

for a, b in zip(run(*map(dtorch.from_torch, (X, W, G))), want, strict=True):
    assert_close(a.to_torch(), b)
for shape, placements in [((2,), [Shard(0)]), ((3,), [Shard(1)]), ((2, 2), [Shard(1), Shard(0)])]:
    mesh = dtorch.init_device_mesh("cpu", shape)
    x, g = (dtorch.distribute_tensor(t, mesh, placements) for t in (X, G))
    y, gx, gw = run(x, dtorch.distribute_tensor(W, mesh, [Replicate()] * len(shape)), g)
    assert y.placements == gx.placements == tuple(placements), (y.placements, gx.placements)
    for a, b in zip((y, gx, gw), want, strict=True):
        assert_close(a.to_torch(), b)

mesh = dtorch.init_device_mesh("cpu", 2)
into = dtorch.distribute_tensor(X, mesh, [Shard(0)])
add_into(into, dtorch.distribute_tensor(G, mesh, [Replicate()]))
assert_close(into.to_torch(), X + G)
summed = dtorch.distribute_tensor(X, mesh, [Replicate()]).redistribute(placements=[Partial()])
try:
    add_into(into, summed)
except dtorch.PlacementError:
    pass
else:
    raise AssertionError("a Partial was added to a shard")
with dtorch.auto_redistribute():
    add_into(into, summed)
assert_close(into.to_torch(), X + G + X)
replicated = dtorch.distribute_tensor(X, mesh, [Replicate()])
with dtorch.auto_redistribute():
    add_into(replicated, dtorch.distribute_tensor(G, mesh, [Shard(0)]))
assert_close(replicated.to_torch(), X + G)
assert replicated.placements == (Replicate(),)
print("as torch")
