"""``torch.nn.utils.rnn``: sequences of different lengths, padded and packed.

torch's kernels read lengths and batch sizes where they are, so those are plain tensors of this process, and so are the
permutations of what is sorted; the data is on its mesh. Which row goes where, torch itself says: it packs and pads the
numbers of the rows, and the rows follow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import _nn as nn  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from ._tensor import Tensor
from .runtime.moves import lift_constant
from .standins import stand_in

__all__ = ["ADAPTED", "adapt_module"]

# As they were before routing.py: inside ``with dtorch.device_mesh(…)`` these make plain tensors still.
_plain_arange, _plain_tensor, _plain_full = torch.arange, torch.as_tensor, torch.full


def _read(lengths: Any) -> torch.Tensor:
    """`lengths` as a plain tensor; those that lie on a mesh are waited for."""
    if isinstance(lengths, Tensor):
        return lengths.to_torch()
    return lengths if isinstance(lengths, torch.Tensor) else _plain_tensor(lengths, dtype=torch.int64, device="cpu")


def _rows(*shape: int) -> torch.Tensor:
    return _plain_arange(math.prod(shape), device="cpu").view(shape)


def _packed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _pack_padded_sequence(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        if not isinstance(input, Tensor):
            return original(input, _read(lengths), batch_first)
        rows, batch_sizes = original(_rows(*input.shape[:2]), _read(lengths), batch_first)
        return input.flatten(0, 1).index_select(0, rows), batch_sizes

    return _pack_padded_sequence


def _padded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _pad_packed_sequence(
        data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> Any:
        batch_sizes = _read(batch_sizes)
        if not isinstance(data, Tensor):
            return original(data, batch_sizes, batch_first, padding_value, total_length)
        rows, lengths = original(_rows(*data.shape[:1]), batch_sizes, batch_first, -1, total_length)
        padding = _plain_full((), padding_value, dtype=data.dtype, device="cpu").item()
        outside = (rows < 0).view(*rows.shape, *[1] * (data.ndim - 1))
        found = data.index_select(0, rows.clamp(min=0).flatten()).unflatten(0, rows.shape)
        return found.masked_fill(outside, padding), lengths

    return _pad_packed_sequence


def _stacked(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``pad_sequence``: torch's fills a tensor that it makes itself, on no mesh."""

    @functools.wraps(original)
    def pad_sequence(
        sequences: Iterable[torch.Tensor],
        batch_first: bool = False,
        padding_value: float = 0.0,
        padding_side: str = "right",
    ) -> torch.Tensor:
        given = tuple(sequences)
        on = next((t for t in given if isinstance(t, Tensor)), None)
        if on is None:
            return original(given, batch_first, padding_value, padding_side)
        # torch says what is wrong, and what comes of it.
        shapes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in given]
        made = original(shapes, batch_first, padding_value, padding_side)
        padding = _plain_full((), padding_value, dtype=made.dtype, device="cpu").item()
        longest, left = made.shape[1 if batch_first else 0], padding_side == "left"
        each: list[torch.Tensor] = []
        for t in given:
            t = (t if isinstance(t, Tensor) else lift_constant(t, on.device_mesh)).to(made.dtype)
            more = longest - t.shape[0]
            if t.shape[1:] != made.shape[2:]:
                t = t.expand(-1, *made.shape[2:])
            around = [0, 0] * (t.ndim - 1) + ([more, 0] if left else [0, more])
            each.append(F.pad(t, around, value=padding) if more else t)
        return torch.stack(each, 0 if batch_first else 1)

    return pad_sequence


def _sorting(original: Callable[..., PackedSequence]) -> Callable[..., PackedSequence]:
    @functools.wraps(original)
    def pack_padded_sequence(
        input: torch.Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
    ) -> PackedSequence:
        lengths = _read(lengths)
        if not isinstance(input, Tensor):
            return original(input, lengths, batch_first, enforce_sorted)
        lengths, order = lengths.to(dtype=torch.int64), None
        if not enforce_sorted:
            lengths, order = torch.sort(lengths, descending=True)
            input = input.index_select(0 if batch_first else 1, order)
        data, batch_sizes = torch._VF._pack_padded_sequence(input, lengths, batch_first)  # type: ignore[attr-defined]
        return PackedSequence(data, batch_sizes, order, None if order is None else order.argsort())

    return pack_padded_sequence


def _packing(original: Callable[..., PackedSequence]) -> Callable[..., PackedSequence]:
    @functools.wraps(original)
    def pack_sequence(sequences: Any, enforce_sorted: bool = True) -> PackedSequence:
        if not any(isinstance(t, Tensor) for t in sequences):
            return original(sequences, enforce_sorted)
        lengths = [t.size(0) for t in sequences]
        return rnn.pack_padded_sequence(rnn.pad_sequence(sequences), lengths, enforce_sorted=enforce_sorted)

    return pack_sequence


def _cut(original: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """``unpad_sequence``: torch asks of each row whether it is one, though lengths alone say how many there are."""

    @functools.wraps(original)
    def unpad_sequence(padded_sequences: torch.Tensor, lengths: Any, batch_first: bool = False) -> list[torch.Tensor]:
        if not isinstance(padded_sequences, Tensor):
            return original(padded_sequences, _read(lengths), batch_first)
        if not batch_first:
            padded_sequences.transpose_(0, 1)  # as torch does, in place
        counts = [max(0, math.ceil(n)) for n in _read(lengths).tolist()]
        return [t[:n].clone() for t, n in zip(padded_sequences.unbind(), counts, strict=True)]

    return unpad_sequence


def _reading_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """What all of ``PackedSequence`` is made through: its batch sizes are read by torch's kernels."""

    @functools.wraps(original)
    def _packed_sequence_init_args(data: Any, batch_sizes: Any = None, *rest: Any, **named: Any) -> Any:
        if isinstance(batch_sizes, Tensor):
            batch_sizes = batch_sizes.to_torch()
        return original(data, batch_sizes, *rest, **named)

    return _packed_sequence_init_args


def _moving(original: Callable[..., PackedSequence]) -> Callable[..., PackedSequence]:
    """A method of ``PackedSequence`` that moves it: what torch's kernels read stays where it is."""

    @functools.wraps(original)
    def moved(self: PackedSequence, *args: Any, **kwargs: Any) -> PackedSequence:
        if not isinstance(self.data, Tensor):
            return original(self, *args, **kwargs)
        data = getattr(self.data, original.__name__)(*args, **kwargs)
        if data is self.data:
            return self
        return type(self)(data, self.batch_sizes, self.sorted_indices, self.unsorted_indices)

    return moved


# Where they are looked up, by which name, and what is put there.
ADAPTED: tuple[tuple[tuple[Any, ...], str, Callable[..., Any]], ...] = (
    ((torch, torch._VF), "_pack_padded_sequence", _packed),
    ((torch, torch._VF), "_pad_packed_sequence", _padded),
    ((nn,), "pad_sequence", _stacked),
)


def adapt_module() -> None:
    """Put what takes lengths, or moves what is packed, into ``torch.nn.utils.rnn``."""
    places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (rnn, "pack_padded_sequence", _sorting),
        (rnn, "pack_sequence", _packing),
        (rnn, "unpad_sequence", _cut),
        (rnn, "_packed_sequence_init_args", _reading_sizes),
        (PackedSequence, "to", _moving),
        (PackedSequence, "cpu", _moving),
        (PackedSequence, "cuda", _moving),
    )
    for place, name, around in places:
        adapted = stand_in((place,), name, around)
        if adapted is not None:
            # TorchScript and Dynamo read the source of a function: that of torch's.
            adapted.__dict__.update({"__script_if_tracing_wrapper": True, "__original_fn": adapted._dtorch_original})
