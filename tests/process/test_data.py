"""dtorch.utils.data: batches in the order that torch gives with the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch


def order(lib: Any, data: Any, **options: Any) -> list[Any]:
    """Two epochs, with random numbers drawn between the batches as a model's dropout would."""
    lib.manual_seed(11)
    lib.rand(5)
    out: list[Any] = []
    loader = data.DataLoader(list(range(10)), batch_size=3, **options)
    for _ in range(2):
        for batch in loader:
            out.append((batch.tolist(), lib.rand(2).tolist()))
    return out


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
def test_order_is_torchs(options: dict[str, Any]) -> None:
    assert order(dtorch, dtorch.utils.data, **options) == order(torch, torch.utils.data, **options)


def test_a_generator_is_used_as_torch_uses_it() -> None:
    orders = [
        order(lib, lib.utils.data, shuffle=True, generator=torch.Generator().manual_seed(2)) for lib in (torch, dtorch)
    ]
    assert orders[0] == orders[1]


def test_random_split() -> None:
    for lengths in ([4, 6], [0.5, 0.3, 0.2]):
        parts = []
        for lib in (torch, dtorch):
            lib.manual_seed(4)
            parts.append([list(p.indices) for p in lib.utils.data.random_split(range(10), lengths)])
        assert parts[0] == parts[1]


def test_samplers_with_replacement() -> None:
    samples = []
    for lib in (torch, dtorch):
        lib.manual_seed(4)
        samples.append(list(lib.utils.data.RandomSampler(range(10), replacement=True, num_samples=40)))
    assert samples[0] == samples[1]


def test_the_rest_is_torchs() -> None:
    assert dtorch.utils.data.TensorDataset is torch.utils.data.TensorDataset
    assert issubclass(dtorch.utils.data.DataLoader, torch.utils.data.DataLoader)
    assert set(torch.utils.data.__all__) <= set(dir(dtorch.utils.data))
