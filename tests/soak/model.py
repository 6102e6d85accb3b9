"""A small model that is trained in the trials, and what plain torch makes of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import dtorch
from dtorch import Replicate, Shard

__all__ = ["LEARNING_RATE", "Model", "loss_of_step"]

LEARNING_RATE = 0.05


@cache
def _start() -> tuple[torch.Tensor, ...]:
    """Inputs, targets and the two weights, float64; the same in every process."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(8, 6), (8, 4), (6, 16), (16, 4)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for shape in shapes)


def _loss(x: torch.Tensor, y: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return ((x @ first).relu() @ second - y).square().mean()


class _Reference:
    """Losses of plain torch, computed as far as anyone has asked."""

    def __init__(self) -> None:
        self.x, self.y, *weights = _start()
        self.weights = [w.clone().requires_grad_() for w in weights]
        self.optimizer = torch.optim.SGD(self.weights, lr=LEARNING_RATE, momentum=0.9)
        self.losses: list[float] = []

    def loss(self, step: int) -> float:
        while len(self.losses) <= step:
            self.optimizer.zero_grad()
            loss = _loss(self.x, self.y, *self.weights)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        return self.losses[step]


_reference = _Reference()


def loss_of_step(step: int) -> float:
    """The loss of training step `step`, counted from 0, as plain torch has it."""
    return _reference.loss(step)


class Model:
    """The same on a mesh of two: "dp" cuts the batch, "tp" the weights.

    Attributes:
        weights: the parameters.
        steps: how many were issued.
    """

    def __init__(self, kind: str, mesh: dtorch.DeviceMesh) -> None:
        placements: list[Any] = [Shard(0), Shard(0), Replicate(), Replicate()]
        if kind == "tp":
            placements = [Replicate(), Replicate(), Shard(1), Shard(0)]
        self.x, self.y, *weights = (
            dtorch.distribute_tensor(value, mesh, [p]) for value, p in zip(_start(), placements, strict=True)
        )
        self.weights = [w.requires_grad_() for w in weights]
        self._optimizer = torch.optim.SGD(self.weights, lr=LEARNING_RATE, momentum=0.9)
        self._tp = kind == "tp"
        self.steps = 0

    def step(self) -> dtorch.Tensor:
        """Issue one training step; its loss, Replicate."""
        self._optimizer.zero_grad()
        out = (self.x @ self.weights[0]).relu() @ self.weights[1]
        if self._tp:
            out = out.redistribute(placements=[Replicate()])
        loss = (out - self.y).square().mean().redistribute(placements=[Replicate()])
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        return loss.detach()
