"""torch's functions that would lose something on the way to a dtorch tensor: a check, a mesh, a placement.

Each is torch's own for every other tensor, and stands in torch's namespace, where models call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import _nn as nn  # pyright: ignore[reportAttributeAccessIssue]

from . import sequences
from ._tensor import Tensor
from .mesh import DeviceMesh
from .placement import Placement, Replicate, Shard
from .runtime.moves import lift_constant
from .runtime.plans import may_move
from .standins import stand_in

__all__ = ["install"]


def _classes_checked(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``one_hot``: torch compares with every class where it cannot look, and a class out of range is then no class.

    A scatter looks, on the executors: the result of a class out of range raises when it is asked for.
    """

    @functools.wraps(original)
    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if type(tensor) is not Tensor or tensor.dtype != torch.int64 or tensor.numel() == 0:
            return original(tensor, num_classes)
        classes = int(tensor.max()) + 1 if num_classes == -1 else num_classes
        if classes < 1:
            inferred = num_classes == -1
            raise RuntimeError(f"Class values must be {'non-negative' if inferred else 'smaller than num_classes'}.")
        return tensor.new_zeros((*tensor.shape, classes)).scatter(-1, tensor.unsqueeze(-1), 1)

    return one_hot


def _of_mesh(original: type[Any]) -> type[Any]:
    """``save_on_cpu``: what lies on GPUs waits on CPUs in the same pieces, and comes back to its own mesh."""

    class save_on_cpu(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            pack, unpack = self.pack_hook, self.unpack_hook

            def pack_hook(tensor: torch.Tensor) -> Any:
                if type(tensor) is not Tensor:
                    return pack(tensor)
                mesh = tensor.device_mesh
                if mesh.device_type == "cpu":
                    return tensor, None
                return tensor.redistribute(DeviceMesh("cpu", mesh.mesh.tolist()), tensor.placements), mesh

            def unpack_hook(packed: tuple[Any, Any]) -> Any:
                kept, mesh = packed
                if type(kept) is not Tensor:
                    return unpack(packed)
                return kept if mesh is None else kept.redistribute(mesh, kept.placements)

            self.pack_hook, self.unpack_hook = pack_hook, unpack_hook

    functools.update_wrapper(save_on_cpu, original, updated=())
    return save_on_cpu


def _by_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    """``gru`` over a batch that is sharded: step by step, as its rows have nothing to do with each other.

    torch multiplies all steps at once, for which it joins time and batch into one dim: no view of a sharded batch.
    """

    @functools.wraps(original)
    def gru(*args: Any, **kwargs: Any) -> Any:
        # The other overload has a packed sequence: (data, batch_sizes, hx, …).
        if kwargs or len(args) != 9 or type(args[0]) is not Tensor or args[0].ndim != 3:
            return original(*args, **kwargs)
        x, hx, weights, biased, layers, dropout, train, both, batch_first = args
        batch = Shard(0 if batch_first else 1)
        if may_move():
            x = x.redistribute(placements=[p if p == batch else Replicate() for p in x.placements])
        placed: Sequence[Placement] = x.placements
        if batch not in placed or not all(p in (batch, Replicate()) for p in placed):
            return original(x, *args[1:])
        rows = tuple(Shard(1) if p == batch else p for p in placed)
        if type(hx) is not Tensor:
            hx = lift_constant(hx, x.device_mesh)
        if hx.placements != rows:
            if not may_move() and not all(p == Replicate() for p in hx.placements):
                return original(x, *args[1:])
            hx = hx.redistribute(placements=rows)
        x = x.transpose(0, 1) if batch_first else x
        each = 4 if biased else 2
        last: list[torch.Tensor] = []
        for layer in range(layers):
            outs: list[torch.Tensor] = []
            for direction in range(1 + both):
                k = (1 + both) * layer + direction
                h, steps, made = hx[k], list(x.unbind()), list[torch.Tensor]()
                for step in reversed(steps) if direction else steps:
                    h = torch.gru_cell(step, h, *weights[each * k : each * (k + 1)])
                    made.append(h)
                last.append(h)
                outs.append(torch.stack(made[::-1] if direction else made))
            x = torch.cat(outs, 2) if both else outs[0]
            if dropout and train and layer + 1 < layers:
                x = F.dropout(x, dropout, True)
        return (x.transpose(0, 1) if batch_first else x), torch.stack(last)

    return gru


def install() -> None:
    """Put these into torch's namespace."""
    for places, name, around in (
        ((F, nn), "one_hot", _classes_checked),
        ((torch.autograd.graph,), "save_on_cpu", _of_mesh),
        ((torch, torch._VF), "gru", _by_batches),
        *sequences.ADAPTED,
    ):
        stand_in(places, name, around)
    sequences.adapt_module()
