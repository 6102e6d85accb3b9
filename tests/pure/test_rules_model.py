"""A small transformer on sharded tensors: the rules in concert, forward and backward, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from .harness import R, S, SimTensor, mesh_of

VOCABULARY, WIDTH, HEADS, LENGTH = 12, 8, 4, 5


def _weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def rn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * 0.3

    return {
        "table": rn(VOCABULARY, WIDTH),
        "norm": rn(WIDTH) + 1,
        "shift": rn(WIDTH),
        "q": rn(WIDTH, WIDTH),
        "k": rn(WIDTH, WIDTH),
        "v": rn(WIDTH, WIDTH),
        "o": rn(WIDTH, WIDTH),
        "up": rn(4 * WIDTH, WIDTH),
        "down": rn(WIDTH, 4 * WIDTH),
        "head": rn(VOCABULARY, WIDTH),
    }


def _loss(w: dict[str, Any], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    x = F.embedding(tokens, w["table"])
    h = F.layer_norm(x, [WIDTH], w["norm"], w["shift"])
    batch = tokens.shape[0]
    q, k, v = (F.linear(h, w[n]).view(batch, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for n in "qkv")
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, LENGTH, WIDTH)
    x = x + F.linear(a, w["o"])
    x = x + F.linear(F.gelu(F.linear(x, w["up"])), w["down"])
    return F.cross_entropy(F.linear(x, w["head"]).view(-1, VOCABULARY), targets.view(-1), ignore_index=3)


# Megatron's placements of each weight along a tensor-parallel mesh dim.
PARALLEL = {"q": S(0), "k": S(0), "v": S(0), "o": S(1), "up": S(0), "down": S(1), "table": S(0), "head": S(0)}


@pytest.mark.parametrize("shape, data", [((2,), True), ((3,), True), ((2,), False), ((2, 2), True)], ids=str)
def test_loss_and_gradients(shape: tuple[int, ...], data: bool) -> None:
    g = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, VOCABULARY, (6, LENGTH), generator=g) for _ in range(2))
    plain = {k: v.clone().requires_grad_() for k, v in _weights().items()}
    want = _loss(plain, tokens, targets)
    want.backward()

    mesh = mesh_of(shape)
    tensor = len(shape) - 1 if len(shape) > 1 or not data else None
    batch = tuple(S(0) if data and j == 0 else R for j in range(len(shape)))
    placed = {k: tuple(PARALLEL.get(k, R) if j == tensor else R for j in range(len(shape))) for k in plain}
    w = {k: SimTensor.distribute(v.detach(), mesh, placed[k]).requires_grad_() for k, v in plain.items()}
    given = [SimTensor.distribute(t, mesh, batch) for t in (tokens, targets)]
    with SimTensor.moving():
        loss = _loss(w, *given)
        loss.backward()
    torch.testing.assert_close(loss.full(), want)  # type: ignore[attr-defined]
    for k, t in plain.items():
        torch.testing.assert_close(w[k].grad.full(), t.grad, msg=lambda m, k=k: f"{k}: {m}")  # type: ignore[union-attr]


def test_data_parallel_needs_no_communication_but_the_loss() -> None:
    g = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, VOCABULARY, (6, LENGTH), generator=g) for _ in range(2))
    mesh = mesh_of((3,))
    w = {k: SimTensor.distribute(v, mesh, (R,)) for k, v in _weights().items()}
    SimTensor.counts.clear()
    _loss(w, *(SimTensor.distribute(t, mesh, (S(0),)) for t in (tokens, targets)))
    assert SimTensor.counts["redistribute"] == 1
