"""torch's functions that dtorch adapts, and errors in torch's words: as without dtorch, on any placements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import PlacementError, Replicate, Shard, init_device_mesh

from .traps import Function, claim, held, mixed, outcome, place, same

DIMS: dict[str, Function] = {
    "sum": lambda t: t.sum(2),
    "mean": lambda t: t.mean(-3),
    "softmax": lambda t: t.softmax(5),
    "log_softmax": lambda t: t.log_softmax(2),
    "select": lambda t: t.select(2, 0),
    "slice": lambda t: torch.ops.aten.slice(t, 3, 0, 1),
    "narrow": lambda t: t.narrow(2, 0, 1),
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(0, 2),
    "cat": lambda t: torch.cat([t, t], 2),
    "stack": lambda t: torch.stack([t, t], 4),
    "unsqueeze": lambda t: t.unsqueeze(5),
    "squeeze": lambda t: t.squeeze(3),
    "cumsum": lambda t: t.cumsum(2),
    "cummax": lambda t: t.cummax(2),
    "sort": lambda t: t.sort(2),
    "argsort": lambda t: t.argsort(2),
    "topk": lambda t: t.topk(1, 2),
    "kthvalue": lambda t: t.kthvalue(1, 2),
    "argmax": lambda t: t.argmax(2),
    "max": lambda t: t.max(2),
    "norm": lambda t: t.norm(dim=2),
    "var": lambda t: t.var(2),
    "flip": lambda t: t.flip(3),
    "roll": lambda t: t.roll(1, 3),
    "split": lambda t: t.split(2, 2),
    "unbind": lambda t: t.unbind(2),
    "unfold": lambda t: t.unfold(2, 1, 1),
    "diagonal": lambda t: t.diagonal(0, 0, 2),
    "flatten": lambda t: t.flatten(0, 3),
    "index_select": lambda t: t.index_select(2, torch.tensor([0])),
    "index_fill": lambda t: t.index_fill(2, torch.tensor([0]), 1.0),
    "select_scatter": lambda t: t.select_scatter(torch.ones(4).double(), 3, 0),
    "slice_scatter": lambda t: t.slice_scatter(torch.ones(1, 4).double(), 2, 0, 1),
    "fft": lambda t: torch.fft.fft(t, dim=3),
    "renorm": lambda t: t.renorm(2, 3, 1.0),
    "an index too many": lambda t: t[0, 0, 0],
}


@pytest.mark.parametrize("layout", ["S0", "S1", "S0,S0"])
def test_a_dim_out_of_range_is_an_index_error_whatever_the_placements(layout: str) -> None:
    for name, f in DIMS.items():
        wanted, got = outcome(f, mixed()), outcome(f, place(mixed(), layout))
        assert isinstance(wanted, Exception), name
        if name == "an index too many":  # the first of its three selects is refused for its placement
            assert isinstance(got, (IndexError, PlacementError))
        else:
            assert isinstance(got, type(wanted)), (name, got)
            assert str(got).startswith(str(wanted)), (name, got)


LOOKUPS: dict[str, Function] = {
    "index": lambda t: t[torch.tensor([7, 0])],
    "index from the end": lambda t: t[torch.tensor([-6])],
    "index_put": lambda t: t.index_put((torch.tensor([9]),), torch.tensor(1.0).double()),
    "gather": lambda t: t.gather(0, torch.full((1, 4), 8)),
    "gather from the end": lambda t: t.gather(-2, torch.full((1, 4), -1)),
    "scatter": lambda t: t.scatter(0, torch.full((1, 4), 9), 1.0),
    "scatter_add": lambda t: t.scatter_add(0, torch.full((1, 4), 9), torch.ones(1, 4).double()),
    "index_select": lambda t: t.index_select(0, torch.tensor([8])),
    "embedding": lambda t: F.embedding(torch.tensor([5]), t),
    "cross_entropy": lambda t: F.cross_entropy(t, torch.tensor([0, 1, 2, 3, 9])),
    "take": lambda t: t.take(torch.tensor([99])),
}


def test_operators_say_of_sparse_tensors_what_functions_say() -> None:
    x, sparse = dtorch.ones(3, 3), torch.eye(3).to_sparse()
    calls: list[Function] = [
        lambda t: t @ sparse,
        lambda t: sparse @ t,
        lambda t: t + sparse,
        lambda t: torch.sparse.mm(sparse, t),
        lambda t: dtorch.distribute_tensor(sparse, t.device_mesh, [Replicate()]),
    ]
    for f in calls:
        with pytest.raises(RuntimeError, match=r"layout torch.sparse_coo cannot be distributed; write .to_dense\(\)"):
            f(x)


@pytest.mark.parametrize("layout", ["S0", "S1", "S0,S0"])
def test_an_index_out_of_range_is_refused_in_torchs_words(layout: str) -> None:
    for name, f in LOOKUPS.items():
        wanted = outcome(f, mixed())
        with dtorch.auto_redistribute():
            got = outcome(f, place(mixed(), layout))
        assert isinstance(wanted, Exception) and isinstance(got, type(wanted)), (name, wanted, got)
        assert str(got).startswith(str(wanted)), (name, wanted, got)


def test_a_slice_without_an_end_is_shown_without_one() -> None:
    for f in (lambda t: t[1:], lambda t: t[1::2]):
        with pytest.raises(PlacementError) as caught:
            f(place(mixed(), "S0"))
        assert "start=1" in str(caught.value)
        assert "922337" not in str(caught.value)


@pytest.mark.parametrize("layout", ["S0", "S1", "S1,S0", "R,S0"])
def test_one_hot(layout: str) -> None:
    classes = torch.tensor([[0, 3, 1, 1], [2, 2, 0, 3], [1, 0, 0, 0], [3, 3, 3, 3], [0, 1, 2, 3]])
    for plain in (classes, classes[:1]):
        for f in (
            F.one_hot,
            lambda t: F.one_hot(t, 4),
            lambda t: F.one_hot(t, num_classes=9),
            dtorch.nn.functional.one_hot,
        ):
            assert claim(f, plain, place(plain, layout))
    refused: list[Function] = [
        lambda t: F.one_hot(t, 3),
        lambda t: F.one_hot(t, 0),
        lambda t: F.one_hot(t - 1),
        lambda t: F.one_hot(t - 1, 4),
        lambda t: F.one_hot(t - 9),
        lambda t: F.one_hot(t.double(), 4),
        lambda t: F.one_hot(t[:0]),
    ]
    for wrong in refused:
        wanted, got = outcome(wrong, classes), outcome(wrong, place(classes, layout))
        assert isinstance(wanted, RuntimeError)
        assert isinstance(got, (RuntimeError, PlacementError)), got
    assert claim(lambda t: F.one_hot(t, 3), classes[:0], place(classes[:0], layout))
    assert torch.equal(torch.func.vmap(lambda t: F.one_hot(t, 4))(classes), F.one_hot(classes, 4))


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_of_a_sharded_batch(kind: str, batch_first: bool, mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = getattr(torch.nn, kind)(3, 4, 2, batch_first=batch_first, bidirectional=True).double()
    on = init_device_mesh("cpu", mesh)
    x = torch.randn(5, 5, 3, dtype=torch.float64)
    batch = 0 if batch_first else 1
    wanted, last = plain(x)
    (wanted**2).sum().backward()
    for at in (batch, 1 - batch, 2):
        ours = getattr(dtorch.nn, kind)(3, 4, 2, batch_first=batch_first, bidirectional=True, dtype=torch.float64)
        ours = dtorch.distributed.tensor.distribute_module(ours, on)
        ours.load_state_dict(plain.state_dict())
        placements = [Shard(at), *[Replicate()] * (len(mesh) - 1)]
        with dtorch.auto_redistribute():
            got, end = ours(dtorch.distribute_tensor(x, on, placements))
            (got**2).sum().backward()
        same(got, wanted)
        same(end, last)
        for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None, name
            same(p.grad, q.grad, 1e-10)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gru_of_a_sharded_batch_needs_no_move(bias: bool, batch_first: bool) -> None:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.nn.GRU(3, 4, 2, bias=bias, batch_first=batch_first, dropout=0.5)
    x = torch.randn(4, 6, 3)
    state = {k: dtorch.distribute_tensor(v.detach(), mesh, [Replicate()]) for k, v in plain.named_parameters()}
    batch = Shard(0 if batch_first else 1)
    torch.manual_seed(7)
    wanted, last = plain(x)
    dtorch.manual_seed(7)
    got, end = torch.func.functional_call(plain, state, (dtorch.distribute_tensor(x, mesh, [batch]),))
    assert got.placements == [batch] and end.placements == [Shard(1)]
    same(got, wanted.detach(), 1e-5)
    same(end, last.detach(), 1e-5)


def test_save_on_cpu_brings_a_tensor_back_to_its_mesh() -> None:
    for pin in (False, True):
        for layout in ("S0", "S1,S0"):
            plain, ours = mixed().requires_grad_(), place(mixed(), layout).requires_grad_()
            for t in (plain, ours):
                with torch.autograd.graph.save_on_cpu(pin_memory=pin):
                    y: Any = (t * t).sin() * t
                y.sum().backward()
            assert ours.grad is not None and plain.grad is not None
            same(ours.grad, plain.grad)
            held(ours.detach(), mixed())
