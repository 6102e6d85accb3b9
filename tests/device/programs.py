"""What is computed on a GPU twice: by plain torch, in a process of its own, and through dtorch. Imports torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Place = Callable[[torch.Tensor], Any]


def inputs() -> dict[str, torch.Tensor]:
    """The same on every machine."""
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(6, 8, generator=g),
        "y": torch.randn(6, 8, generator=g),
        "w": torch.randn(8, 8, generator=g),
        "i": torch.randint(0, 6, (5,), generator=g),
        "image": torch.randn(2, 3, 12, 12, generator=g),
        "kernel": torch.randn(4, 3, 3, 3, generator=g),
        "heads": torch.randn(2, 4, 10, 16, generator=g),
    }


Op = Callable[[dict[str, Any]], Any]
OPS: dict[str, Op] = {
    "add": lambda v: v["x"] + v["y"],
    "number": lambda v: v["x"] * 0.5 - 2,
    "in place": lambda v: v["x"].clone().mul_(v["y"]).add_(1),
    "matmul": lambda v: v["x"] @ v["w"],
    "linear": lambda v: F.linear(v["x"], v["w"], v["w"][0]),
    "sum": lambda v: v["x"].sum(1),
    "mean, var": lambda v: v["x"].mean(0) + v["x"].var(0),
    "max": lambda v: v["x"].max(1).values,
    "argmax": lambda v: v["x"].argmax(1),
    "sort": lambda v: v["x"].sort(1).values,
    "cumsum": lambda v: v["x"].cumsum(0),
    "softmax": lambda v: v["x"].softmax(-1),
    "gelu": lambda v: F.gelu(v["x"]),
    "layer_norm": lambda v: F.layer_norm(v["x"], (8,)),
    "layer_norm, bfloat16": lambda v: F.layer_norm(v["x"].bfloat16(), (8,)),
    "group_norm": lambda v: F.group_norm(v["image"], 3),
    "batch_norm": lambda v: F.batch_norm(v["image"], None, None, training=True),
    "views": lambda v: v["x"].t().reshape(2, -1)[:, 3:9].unsqueeze(0).expand(3, 2, 6),
    "cat, stack": lambda v: torch.cat([torch.stack([v["x"], v["y"]]).flatten(0, 1), v["w"]]),
    "where": lambda v: torch.where(v["x"] > 0, v["x"], v["y"]),
    "embedding": lambda v: F.embedding(v["i"], v["x"]),
    "gather": lambda v: v["x"].gather(0, v["i"].unsqueeze(1)),
    "index_put": lambda v: v["x"].clone().index_put_((v["i"],), v["y"][:5]),
    "triu": lambda v: torch.triu(v["w"]),
    "convolution": lambda v: F.conv2d(v["image"], v["kernel"], padding=1),
    "max_pool": lambda v: F.max_pool2d(v["image"], 2),
    "interpolate": lambda v: F.interpolate(v["image"], scale_factor=2, mode="bilinear"),
    "attention": lambda v: F.scaled_dot_product_attention(v["heads"], v["heads"], v["heads"]),
    "attention, causal": lambda v: F.scaled_dot_product_attention(v["heads"], v["heads"], v["heads"], is_causal=True),
    "cross_entropy": lambda v: F.cross_entropy(v["x"][:5], v["i"]),
    "complex": lambda v: torch.view_as_real(torch.complex(v["x"], v["y"]).conj() * 2),
    "linalg": lambda v: torch.linalg.solve(v["w"], v["x"].t()),
    "float64": lambda v: v["x"].double().exp(),
    "half matmul": lambda v: v["x"].half() @ v["w"].half(),
}


def run_ops(place: Place, back: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor | str]:
    """The result of every operator; an error's text where one was raised."""
    values = {name: place(t) for name, t in inputs().items()}
    results: dict[str, torch.Tensor | str] = {}
    for name, op in OPS.items():
        try:
            results[name] = back(op(values))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


class Model(torch.nn.Module):
    """A bit of everything that the client's composites name after the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.lstm = torch.nn.LSTM(32, 32, batch_first=True)
        self.norm = torch.nn.LayerNorm(32)
        self.qkv = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 50)

    def forward(self, tokens: Any) -> Any:
        h = self.embed(tokens)
        h = self.norm(h + self.lstm(h)[0])
        q, k, v = (t.view(*t.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h + a.transpose(1, 2).flatten(2))


def model() -> Model:
    """With the same parameters on every machine."""
    made = Model()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return made


def train(model: torch.nn.Module, place: Place, steps: int = 20) -> list[float]:
    """Losses of `model`, which is where it is to be trained."""
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 50, (8, 17), generator=g)
    x, y = place(tokens[:, :-1].contiguous()), place(tokens[:, 1:].contiguous())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
