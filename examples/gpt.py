"""A byte-level GPT in plain PyTorch, and the text it learns: what train_gpt.py and serve_generate.py share.

The model knows nothing of dtorch. Made inside `with dtorch.device_mesh(mesh):`, or moved by `model.to(mesh)`, it runs
there; :data:`PLAN` says how tensor parallelism cuts it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from dtorch import Replicate
from dtorch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries, keys, values) -> what they attend to; all [batch, heads, time, head width]."""


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a multilayer perceptron."""

    def __init__(self, width: int, heads: int, dropout: float, layer: int = 0) -> None:
        super().__init__()
        self.heads, self.layer = heads, layer
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, attend: Attend | None = None) -> torch.Tensor:
        batch, time, width = x.shape
        # Head by head, so that cutting the rows of the weight cuts the heads.
        qkv = self.qkv(self.norm1(x)).view(batch, time, self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        if attend is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = attend(self.layer, q, k, v)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Decoder-only transformer over bytes; logits are [batch, time, 256].

    With `positions`, int64[batch, time], and `attend`, the tokens are the newest of sequences whose earlier keys and
    values `attend` keeps.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.config = {"layers": layers, "width": width, "heads": heads, "context": context, "dropout": dropout}
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, layer) for layer in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        # Small enough that the blocks are heard beside the embeddings from the first step.
        nn.init.normal_(self.token.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, attend: Attend | None = None
    ) -> torch.Tensor:
        place = self.position.weight[: tokens.shape[1]] if positions is None else self.position(positions)
        x = self.dropout(self.token(tokens) + place)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


PLAN = {
    "blocks.*.qkv": ColwiseParallel(),
    "blocks.*.proj": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
"""How tensor parallelism cuts each matrix: the first of a pair by columns, the second by rows."""


def save(model: GPT, path: str) -> None:
    """Write a checkpoint that plain torch can load, wherever the model lies."""
    values = {name: getattr(t, "to_torch", lambda t=t: t)() for name, t in model.state_dict().items()}
    torch.save({"config": model.config, "model": values}, path)


def load(path: str) -> GPT:
    """The model of a checkpoint that :func:`save` wrote, on the client and ready to be moved to a mesh."""
    checkpoint = torch.load(path, weights_only=True)
    model = GPT(**checkpoint["config"])
    model.load_state_dict(checkpoint["model"])
    return model


def read_text(path: str | None) -> torch.Tensor:
    """The training text as bytes, int64[n]; without `path`, the Python standard library's own sources."""
    if path:
        text = Path(path).read_bytes()
    else:
        stdlib = Path(sysconfig.get_path("stdlib"))
        text = b"\n".join(f.read_bytes() for f in sorted(stdlib.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


def batches(text: torch.Tensor, size: int, context: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, targets), each int64[size, context], from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (size,), generator=generator)
        rows = text[starts[:, None] + torch.arange(context + 1)]
        yield rows[:, :-1], rows[:, 1:]
