"""Autograd over meshes: gradients lie as their leaves, move in one command, and equal those of plain torch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from dtorch.runtime import moves
from dtorch.runtime.client import client

R, P, S = Replicate(), Partial(), Shard
MESH = init_device_mesh("cpu", 2)
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
CUBE = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=["dp", "cp", "tp"])


@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[str, ...]]]:
    """The kinds of collectives of every command that moved something between ranks."""
    seen: list[tuple[str, ...]] = []

    def observe(kinds: tuple[str, ...], _: int) -> None:
        if kinds:
            seen.append(kinds)

    moves.observers.append(observe)
    yield seen
    moves.observers.remove(observe)


def commands(work: Callable[[], object]) -> int:
    """How many operator records `work` issues, the second time it is done; refs that die do not count."""
    work()
    client().flush()
    before = client().writer.issued
    work()
    return client().writer.issued - before


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def leaf(t: torch.Tensor, *placements: Any, mesh: dtorch.DeviceMesh = MESH) -> Any:
    return dtorch.distribute_tensor(t, mesh, placements).requires_grad_()


# -- leaves ---------------------------------------------------------------------------------------------------------


def test_all_gradients_move_in_one_command() -> None:
    torch.manual_seed(0)
    x, ws, b = values(4, 6), [values(6, 6) for _ in range(5)], values(6)
    plain = [w.clone().requires_grad_() for w in [*ws, b]]
    params = [*(leaf(w, R) for w in ws), leaf(b, S(0))]

    def loss(x: Any, *params: Any) -> Any:
        for w in params[:-1]:
            x = torch.tanh(x @ w)
        return (x * params[-1]).sum()

    loss(x, *plain).backward()
    total = loss(dtorch.distribute_tensor(x, MESH, [S(0)]), *params[:-1], params[-1].redistribute(placements=[R]))
    with collectives() as seen:
        total.backward()
    # The bias comes back through its own redistribute; all others in one.
    assert seen == [("reduce_scatter",), ("all_reduce",) * 5]
    for p, q in zip(params, plain, strict=True):
        assert p.grad.placements == p.placements
        assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-12)


def test_the_number_of_commands_is_that_of_the_operators() -> None:
    x, w = dtorch.distribute_tensor(values(4, 4), MESH, [S(0)]), leaf(values(4, 4), R)
    v = leaf(values(4, 4), R)

    def step() -> None:
        w.grad = v.grad = None
        loss = ((x @ w) @ v).sum()
        with collectives() as seen:
            loss.backward()
        assert seen == [("all_reduce", "all_reduce")]

    sharded = commands(step)
    x, w, v = dtorch.tensor(x.to_torch()), leaf(w.detach().to_torch(), R, mesh=dtorch.DeviceMesh("cpu")), None
    v = leaf(values(4, 4), R, mesh=dtorch.DeviceMesh("cpu"))
    single = commands(lambda: (setattr(w, "grad", None), setattr(v, "grad", None), ((x @ w) @ v).sum().backward()))
    assert sharded <= single + 3


@pytest.mark.parametrize("placements", [[R], [S(0)], [S(1)]], ids=str)
def test_gradients_accumulate(placements: list[Any]) -> None:
    x, w = values(6, 4), values(4, 4)
    p = leaf(w, *placements)
    q = w.clone().requires_grad_()
    first = None
    for step in range(3):
        rows = x[2 * step : 2 * step + 2]
        (rows @ q).pow(2).sum().backward()
        loss = (dtorch.distribute_tensor(rows, MESH, [S(0)]) @ p.redistribute(placements=[R])).pow(2).sum()
        loss.backward()
        first = p.grad if first is None else first
        assert p.grad is first, "added in place, as in torch"
        assert p.grad.placements == placements
        assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-12)


def test_accumulating_moves_in_one_command_too_and_reaches_a_flat_buffer() -> None:
    x = dtorch.distribute_tensor(values(4, 3), MESH, [S(0)])
    ws = [leaf(values(3, 3), R) for _ in range(4)]
    buffer = dtorch.zeros(36, dtype=torch.float64, device_mesh=MESH)
    for w, part in zip(ws, buffer.split(9), strict=True):
        w.grad = part.view(3, 3)
    for count in (1, 2):
        total = sum((x @ w).sum() for w in ws)
        with collectives() as seen:
            total.backward()
        assert seen == [("all_reduce",) * 4]
        expected = count * x.to_torch().sum(0)[:, None].expand(3, 3)
        assert all(torch.allclose(w.grad.to_torch(), expected) and w.grad.placements == [R] for w in ws)
        assert torch.allclose(buffer.to_torch(), expected.reshape(-1).repeat(4))


def test_an_error_in_backward_harms_no_gradient() -> None:
    x = dtorch.distribute_tensor(values(4, 3), MESH, [S(0)])
    w, v = leaf(values(3, 3), R), leaf(values(3, 3), R)
    ((x @ w).sum() + (x @ v).sum()).backward()
    before = w.grad.to_torch()

    def fail(grad: Any) -> None:
        raise RuntimeError("the hook failed")

    handle = v.register_hook(fail)
    with pytest.raises(RuntimeError, match="the hook failed"):
        ((x @ v) @ w).sum().backward()
    handle.remove()
    added = w.grad.to_torch() - before
    assert torch.allclose(added, torch.zeros_like(added)) or torch.allclose(
        added, (x.to_torch() @ v.detach().to_torch()).sum(0)[:, None].expand(3, 3)
    )
    w.grad = v.grad = None
    ((x @ v) @ w).sum().backward()
    assert w.grad.placements == v.grad.placements == [R]


def test_shared_parameters() -> None:
    x, w = values(4, 4), values(4, 4)
    q = w.clone().requires_grad_()
    torch.tanh(torch.tanh(x @ q) @ q.T).sum().backward()
    p = leaf(w, R)
    total = torch.tanh(torch.tanh(dtorch.distribute_tensor(x, MESH, [S(0)]) @ p) @ p.T).sum()
    with collectives() as seen:
        total.backward()
    assert seen == [("all_reduce",)]
    assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-12)


def test_hooks() -> None:
    x, w = values(4, 3), values(3, 3)
    q, p = w.clone().requires_grad_(), leaf(w, R)
    sharded = dtorch.distribute_tensor(x, MESH, [S(0)])
    for t in (p, q):
        t.register_hook(lambda g: g.clamp(-1, 1) * 2)
    calls: list[str] = []
    p.register_hook(lambda g: calls.append("tensor"))
    p.register_post_accumulate_grad_hook(lambda t: calls.append("accumulated"))
    for _ in range(2):
        (x @ q).sum().backward()
        (sharded @ p).sum().backward()
        assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-12)
        assert p.grad.placements == [R]
    assert calls == ["tensor", "accumulated"] * 2
    y = sharded @ p
    seen: list[Any] = []
    y.register_hook(seen.append)
    y.retain_grad()
    y.sum().backward()
    assert torch.equal(seen[0].to_torch(), torch.ones(4, 3, dtype=torch.float64))
    assert torch.equal(y.grad.to_torch(), seen[0].to_torch())


def test_a_hook_that_places_a_gradient_otherwise() -> None:
    p = leaf(values(4, 4), R)
    p.register_hook(lambda g: g.redistribute(placements=[S(1)]))
    p.sum().backward()
    assert p.grad.placements == [R]
    assert torch.equal(p.grad.to_torch(), torch.ones(4, 4, dtype=torch.float64))


def test_an_optimizer_inside_backward() -> None:
    p, x = leaf(values(3, 3), R), dtorch.distribute_tensor(values(4, 3), MESH, [S(0)])
    before = p.detach().to_torch()

    def step(t: Any) -> None:
        with torch.no_grad():
            t.sub_(t.grad * 0.1)
        t.grad = None

    p.register_post_accumulate_grad_hook(step)
    (x @ p).sum().backward()
    assert p.grad is None and p.placements == [R]
    assert torch.allclose(p.detach().to_torch(), before - 0.1 * x.to_torch().sum(0)[:, None].expand(3, 3))


def test_retain_graph() -> None:
    p, x = leaf(values(3, 3), R), dtorch.distribute_tensor(values(4, 3), MESH, [S(0)])
    total = torch.exp(x @ p).sum()
    total.backward(retain_graph=True)
    once = p.grad.to_torch()
    total.backward()
    assert torch.allclose(p.grad.to_torch(), 2 * once, rtol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


@pytest.mark.parametrize("has_grad", [False, True])
def test_autograd_grad(has_grad: bool) -> None:
    x, ws = values(4, 3), [values(3, 3), values(3, 3)]
    params = [leaf(w, R) for w in ws]
    sharded = dtorch.distribute_tensor(x, MESH, [S(0)])
    if has_grad:
        for p in params:
            p.grad = dtorch.ones(3, 3, dtype=torch.float64, device_mesh=MESH)
    total = torch.tanh(torch.tanh(sharded @ params[0]) @ params[1]).sum()
    with collectives() as seen:
        grads = torch.autograd.grad(total, params)
    assert seen == [("all_reduce", "all_reduce")]
    plain = [w.clone().requires_grad_() for w in ws]
    expected = torch.autograd.grad(torch.tanh(torch.tanh(x @ plain[0]) @ plain[1]).sum(), plain)
    for p, grad, want in zip(params, grads, expected, strict=True):
        assert grad.placements == [R]
        assert torch.allclose(grad.to_torch(), want, rtol=1e-12)
        assert p.grad is None or p.grad.tolist() == [[1.0] * 3] * 3
    hidden = sharded @ params[0]
    (grad,) = torch.autograd.grad(hidden.sum(), hidden)
    assert torch.equal(grad.to_torch(), torch.ones(4, 3, dtype=torch.float64))
    assert torch.autograd.grad(hidden.sum(), params, allow_unused=True)[1] is None


def test_double_backward_through_redistribute() -> None:
    x, w = values(4, 3), values(3, 3)

    def penalty(x: Any, w: Any, move: Callable[[Any], Any]) -> Any:
        (grad,) = torch.autograd.grad(torch.tanh(move(x @ w)).pow(2).sum(), w, create_graph=True)
        return grad.pow(2).sum()

    q = w.clone().requires_grad_()
    expected = penalty(x, q, lambda t: t)
    expected.backward()
    for placements in ([R], [S(0)], [S(1)]):
        p = leaf(w, R)
        total = penalty(
            dtorch.distribute_tensor(x, MESH, [S(0)]), p, lambda t, to=placements: t.redistribute(placements=to)
        )
        total.backward()
        assert total.item() == pytest.approx(expected.item(), rel=1e-12)
        assert p.grad.placements == [R]
        assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-11)


def test_a_gradient_of_summands_is_whole() -> None:
    p = leaf(values(4), R)
    (p.redistribute(placements=[P]) * 3).redistribute(placements=[S(0)]).sum().backward()
    assert p.grad.tolist() == [3.0] * 4


# -- modes ------------------------------------------------------------------------------------------------------------


def test_no_grad() -> None:
    p, x = leaf(values(3, 3), R), dtorch.distribute_tensor(values(4, 3), MESH, [S(0)])
    with torch.no_grad():
        y = (x @ p).redistribute(placements=[R])
        p.mul_(2)
    assert not y.requires_grad and p.requires_grad
    with torch.enable_grad(), dtorch.no_grad():
        assert not (x @ p).requires_grad


def test_inference_mode() -> None:
    """Composites arrive whole there: linear, norms, attention, dropout."""
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval()
    x = values(4, 5, 8)
    with torch.inference_mode():
        expected = layer(x)
    moved = copy.deepcopy(layer).to(MESH)
    sharded = dtorch.distribute_tensor(x, MESH, [S(0)])
    with torch.inference_mode():
        y = moved(sharded)
        assert y.placements == [S(0)] and not y.requires_grad
        assert torch.allclose(y.to_torch(), expected, rtol=1e-10)
        z = sharded[:, 1:]
        z.add_(1)
        dropped = torch.nn.functional.dropout(sharded, 0.0)
        normed = torch.nn.functional.layer_norm(dropped, (8,))
        q = sharded.view(4, 5, 2, 4).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        kept = torch.nn.functional.linear(sharded, moved.linear1.weight).redistribute(placements=[R])
    x[:, 1:] += 1
    assert torch.equal(sharded.to_torch(), x)
    assert torch.allclose(normed.to_torch(), torch.nn.functional.layer_norm(x, (8,)))
    plain = x.view(4, 5, 2, 4).transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention(plain, plain, plain, is_causal=True)
    assert torch.allclose(attended.to_torch(), attention)
    assert torch.allclose(kept.to_torch(), (x @ layer.linear1.weight.T).detach())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    x, w = values(4, 3), values(3, 3)
    q, p = w.clone().requires_grad_(), leaf(w, R)
    torch.tanh(torch.tanh(x @ q) @ q).sum().backward()

    def block(x: Any) -> Any:
        return torch.tanh((x @ p).redistribute(placements=[S(1)])).redistribute(placements=[S(0)])

    sharded = dtorch.distribute_tensor(x, MESH, [S(0)]).requires_grad_()
    hidden = dtorch.utils.checkpoint.checkpoint(block, sharded, use_reentrant=reentrant)
    block(hidden).sum().backward()
    assert p.grad.placements == [R]
    assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-12)


def test_in_place_and_views() -> None:
    x = values(4, 6)

    def work(t: Any) -> Any:
        y = t * 2
        y[:, 1].mul_(3)
        y.neg_()
        z = y.view(4, 2, 3).transpose(0, 2)
        z[2] = 7.0
        y.add_(t)
        return y

    q = x.clone().requires_grad_()
    expected = work(q)
    (expected**2).sum().backward()
    for placements in ([S(0)], [R]):
        p = leaf(x, *placements)
        y = work(p)
        (y**2).sum().backward()
        assert torch.allclose(y.detach().to_torch(), expected.detach(), rtol=1e-12)
        assert p.grad.placements == placements
        assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-12)
    p = leaf(x, S(0))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        p.add_(1)
    y = torch.exp(p)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_custom_functions() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, scale: float) -> Any:
            y = x * x
            ctx.save_for_backward(x, y)
            ctx.scale = scale
            return y * x * scale

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            _, y = ctx.saved_tensors
            return grad * 3 * y * ctx.scale, None

    x, w = values(4, 3), values(3, 3)
    q, p = w.clone().requires_grad_(), leaf(w, R)
    Cube.apply(x @ q, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    Cube.apply(dtorch.distribute_tensor(x, MESH, [S(0)]) @ p, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-12)


def test_functional_transforms() -> None:
    x, w = values(4, 3), values(3, 3)

    def loss(w: Any, x: Any) -> Any:
        return torch.tanh(x @ w).pow(2).sum()

    expected = torch.func.grad(loss)(w, x)
    grad = torch.func.grad(loss)(dtorch.distribute_tensor(w, MESH, [R]), dtorch.distribute_tensor(x, MESH, [S(0)]))
    assert torch.allclose(grad.to_torch(), expected, rtol=1e-12)


# -- whole models ---------------------------------------------------------------------------------------------------


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(8, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 8)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))


class Former(torch.nn.Module):
    """Two blocks of attention and an MLP, tied embeddings, dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 8)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(8, 24) for _ in range(2))
        self.proj = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))
        self.mlp = torch.nn.ModuleList(MLP() for _ in range(2))
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(8, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens))
        for qkv, proj, norm, mlp in zip(self.qkv, self.proj, self.norm, self.mlp, strict=True):
            q, k, v = qkv(norm(x)).view(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, dim=-1)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.dropout(proj(y.transpose(1, 2).reshape(x.shape)))
            x = mlp(x)
        return self.head(x)


PLAN: dict[str, ParallelStyle] = {
    "qkv.*": ColwiseParallel(),
    "proj.*": RowwiseParallel(),
    "mlp.*.up": ColwiseParallel(),
    "mlp.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=R),
}


def train(model: torch.nn.Module, place: Callable[[torch.Tensor], Any], lib: Any) -> tuple[list[float], list[Any]]:
    """Five steps of AdamW with clipped gradients, dropout on; the losses and the parameters."""
    lib.manual_seed(5)
    optimizer = dtorch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        tokens = torch.randint(13, (8, 7), generator=data)
        logits = model(place(tokens[:, :-1].contiguous()))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), place(tokens[:, 1:].contiguous()).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.fixture(scope="module")
def former() -> tuple[Former, list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Former().double()
    return model, *train(copy.deepcopy(model), lambda t: t, torch)


@pytest.mark.parametrize(
    ("mesh", "batch", "tp"),
    [
        (MESH, [S(0)], None),
        (init_device_mesh("cpu", 2, mesh_dim_names=["tp"]), [R], "tp"),
        (init_device_mesh("cpu", 4), [S(0)], None),
        (GRID, [S(0), R], "tp"),
        (GRID, [S(0), S(0)], None),
        (CUBE, [S(0), S(0), R], "tp"),
    ],
    ids=["dp", "tp", "four dp", "dp x tp", "dp x dp", "dp x dp x tp"],
)
def test_parallel_training_equals_plain_torch(
    former: tuple[Former, list[float], list[torch.Tensor]], mesh: dtorch.DeviceMesh, batch: list[Any], tp: str | None
) -> None:
    plain, losses, parameters = former
    model = copy.deepcopy(plain).to(mesh)
    if tp:
        parallelize_module(model, mesh[tp], PLAN)
    got, moved = train(model, lambda t: dtorch.distribute_tensor(t, mesh, batch), dtorch)
    assert got == pytest.approx(losses, abs=1e-9)
    for p, expected in zip(moved, parameters, strict=True):
        assert torch.allclose(p.to_torch(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_a_gradient_that_is_a_plain_tensor_is_added_to(placement: Any) -> None:
    t = dtorch.ones(4, 3, device_mesh=init_device_mesh("cpu", 2), placements=[placement]).requires_grad_()
    t.grad = torch.full((4, 3), 5.0)
    (t * 2).sum().backward()
    assert torch.equal(torch.as_tensor(t.grad.tolist()), torch.full((4, 3), 7.0))
