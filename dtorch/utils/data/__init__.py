"""``torch.utils.data``, with its random order drawn from dtorch's generator.

torch shuffles with its own global generator, in turn with dropout and initialisation. dtorch's generator lies on
the executors, so ``dtorch.manual_seed(s)`` orders the batches, as ``torch.manual_seed(s)`` does for torch, only if
the order is drawn there: once an epoch, which waits for what was issued before. A `generator` is used as torch
uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils import data as _data
from torch.utils.data import Dataset, IterableDataset, Subset

from ... import factories

__all__ = [*_data.__all__]  # pyright: ignore[reportUnsupportedDunderAll]


def _draw_seed() -> int:
    return int(factories.empty((), dtype=torch.int64).random_().item())


class RandomSampler(_data.RandomSampler):
    """torch's; without a `generator` it draws its seed from dtorch's."""

    def __iter__(self) -> Iterator[int]:
        if self.generator is not None:
            return super().__iter__()
        return self._seeded(_draw_seed())

    def _seeded(self, seed: int) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(seed)
        again = _data.RandomSampler(self.data_source, self.replacement, self._num_samples, generator)
        return iter(again)


class DataLoader(_data.DataLoader[Any]):
    """torch's; without a `generator` its shuffling and the seeds of its workers come from dtorch's."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        plainly = shuffle and sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset)
        if plainly and kwargs.get("generator") is None and isinstance(dataset, Sized):
            sampler, shuffle = RandomSampler(dataset), False
        super().__init__(dataset, batch_size, shuffle, sampler, batch_sampler, **kwargs)

    def _get_iterator(self) -> Any:
        if self.generator is not None:
            return super()._get_iterator()
        # torch draws the seed of the workers here even if there are none; do as much, in the same place.
        self.generator = torch.Generator()
        self.generator.manual_seed(_draw_seed())
        try:
            return super()._get_iterator()
        finally:
            self.generator = None


def random_split(
    dataset: Dataset[Any], lengths: Sequence[int | float], generator: torch.Generator | None = None
) -> list[Subset[Any]]:
    """torch's; without a `generator` the split is drawn from dtorch's."""
    if generator is not None:
        return _data.random_split(dataset, lengths, generator)
    unshuffled = _data.random_split(dataset, lengths, torch.Generator())
    order = factories.randperm(len(dataset)).tolist()  # type: ignore[arg-type]
    parts: list[Subset[Any]] = []
    for part in unshuffled:
        start = sum(len(p.indices) for p in parts)
        parts.append(Subset(dataset, order[start : start + len(part.indices)]))
    return parts


def __getattr__(name: str) -> Any:
    return getattr(_data, name)


def __dir__() -> list[str]:
    return dir(_data)
