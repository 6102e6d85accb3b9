"""Random kernels that do not depend on the mesh: a rank draws what belongs to its slice of the global tensor.

torch's CPU generator is one stream of 32-bit words, and most distributions take a fixed number of words per element,
in memory order. So a rank may skip ahead to its rows, draw those alone, and skip to the end: it gets the very values
a single device would, and leaves the generator where a single device would. Whether a distribution works like that
here (MKL builds of torch draw some by other means) is tried once on a private generator. Where it does not, the rank
draws the whole tensor and keeps its slice.

Every rank's generator must stand at the same place before such a kernel, and the kernel runs for empty slices too:
skipping is then all it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch

__all__ = ["random_embed", "random_factory", "random_normal", "random_slice", "random_slice_"]

Region = tuple[tuple[int, int], ...]  # (offset, length) per dim

WHOLE_BELOW = 1 << 14  # elements; below it one whole draw costs less than the bookkeeping of skipping
BLOCK = 1 << 18  # elements drawn at a time
_BLOCK_OF_NORMAL = 16  # torch's normal_ turns 16 uniforms into 16 normals at a time


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in region)


def skip(words: int, generator: torch.Generator) -> None:
    """Let a CPU generator pass `words` 32-bit words."""
    pairs, odd = divmod(words, 2)
    if pairs:
        scratch = torch.empty(min(pairs, BLOCK), dtype=torch.int64)
        while pairs:
            n = min(pairs, BLOCK)
            scratch[:n].random_(generator=generator)
            pairs -= n
    if odd:
        torch.empty(1, dtype=torch.uint8).random_(generator=generator)


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Dims longer than 1, slowest first, where the strides are those of a dense tensor; else None."""
    order = sorted((d for d, s in enumerate(shape) if s != 1), key=lambda d: -stride[d])
    step = 1
    for d in reversed(order):
        if stride[d] != step:
            return None
        step *= shape[d]
    return tuple(order)


class _Stream:
    """One draw of a dense tensor of `shape` (in memory order), of which only `region` is kept."""

    def __init__(self, method: str, shape: tuple[int, ...], region: Region, words: int, args: tuple[Any, ...]) -> None:
        self.shape, self.region, self.words, self.args = shape, region, words, args
        self.draw: Callable[..., Any] = getattr(torch.Tensor, method)
        self.normal = method == "normal_"
        self.row = math.prod(shape[1:])
        self.numel = self.row * shape[0]
        # normal_ must be drawn in multiples of 16 elements, so that its blocks fall where those of the whole do.
        self.step = _BLOCK_OF_NORMAL // math.gcd(self.row, _BLOCK_OF_NORMAL) if self.normal else 1

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> None:
        """Draw into `out`, the slice, whose dims are in memory order."""
        rows, (first, length) = self.shape[0], self.region[0]
        if out.numel() == 0:
            length = 0
        at = first // self.step * self.step if length else rows
        skip(at * self.row * self.words, generator)
        per = max(1, BLOCK // (self.row * self.step)) * self.step
        inner = _index(self.region[1:])
        buffer = torch.empty(min(per, rows - at) * self.row if length else 0, dtype=out.dtype)
        while at < first + length:
            end = min(at + per, rows)
            block = buffer[: (end - at) * self.row]
            # Of an incomplete block of 16 normals at the very end only the words are used up: the tail overwrites it.
            whole = block.numel() // _BLOCK_OF_NORMAL * _BLOCK_OF_NORMAL if self.normal else block.numel()
            self.draw(block[:whole], *self.args, generator=generator)
            skip((block.numel() - whole) * self.words, generator)
            lo, hi = max(at, first), min(end, first + length)
            if lo < hi:
                drawn = block.view(end - at, *self.shape[1:])
                out[lo - first : hi - first] = drawn[(slice(lo - at, hi - at), *inner)]
            at = end
        skip((rows - at) * self.row * self.words, generator)
        if self.normal and self.numel % _BLOCK_OF_NORMAL:
            self._tail(out, generator)

    def _tail(self, out: torch.Tensor, generator: torch.Generator) -> None:
        """The last 16 normals, which torch draws anew where the size is no multiple of 16."""
        tail = torch.empty(_BLOCK_OF_NORMAL, dtype=out.dtype)
        self.draw(tail, *self.args, generator=generator)
        for i, value in enumerate(tail):
            rest, where = self.numel - _BLOCK_OF_NORMAL + i, []
            for size in reversed(self.shape):
                rest, index = divmod(rest, size)
                where.append(index)
            where.reverse()
            if all(start <= w < start + length for w, (start, length) in zip(where, self.region, strict=True)):
                out[tuple(w - start for w, (start, _) in zip(where, self.region, strict=True))] = value


_EXAMPLES: dict[str, tuple[Any, ...]] = {"bernoulli_": (0.5,), "geometric_": (0.5,)}


@lru_cache(256)
def _words(method: str, dtype: torch.dtype, args: tuple[Any, ...]) -> int:
    """32-bit words per element that `method` takes from the generator; 0 where its draws cannot be split."""
    generator = torch.Generator()
    draw: Callable[..., Any] = getattr(torch.Tensor, method)
    for words in (1, 2):
        for n in (96, 100):
            if n % _BLOCK_OF_NORMAL and method == "normal_" and dtype.itemsize < 4:
                continue  # half precision treats the tail otherwise: never split (see `_splittable`)
            whole = torch.empty(n, dtype=dtype)
            draw(whole, *args, generator=generator.manual_seed(1))
            after = generator.get_state()
            cuts = (0, 32, 77, n)
            for a, b in pairwise(cuts):
                part = torch.empty(b - a, dtype=dtype)
                _Stream(method, (n,), ((a, b - a),), words, args).fill(part, generator.manual_seed(1))
                if not torch.equal(part, whole[a:b]) or not torch.equal(generator.get_state(), after):
                    break
            else:
                continue
            break
        else:
            return words
    return 0


def _splittable(local: torch.Tensor, method: str, shape: tuple[int, ...], args: tuple[Any, ...]) -> int:
    numel = math.prod(shape)
    if local.device.type != "cpu" or numel < WHOLE_BELOW:
        return 0
    if method == "normal_" and numel % _BLOCK_OF_NORMAL and local.element_size() < 4:
        return 0
    # How many words an element takes depends on these alone.
    return _words(method, local.dtype, args if method == "random_" else _EXAMPLES.get(method, ()))


def random_slice_(
    local: torch.Tensor,
    method: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    region: Region,
    *args: Any,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill `local` with the `region` of a tensor of `shape` and `stride` filled by `method` (``"normal_"``, …).

    Args:
        args: what the method takes: mean and std, for example.
    """
    draw: Callable[..., Any] = getattr(torch.Tensor, method)
    if tuple(local.shape) == tuple(shape) and (local.stride() == tuple(stride) or local.numel() == 0):
        draw(local, *args, generator=generator)
        return local
    order = memory_order(shape, stride)
    words = 0
    # Other than in memory order normal_ draws one by one, in pairs: that is left whole.
    if order and (method != "normal_" or list(order) == sorted(order)):
        words = _splittable(local, method, shape, args)
    if order and words:
        short = [d for d in range(len(shape)) if d not in order]
        if local.numel() == 0:
            out = local.new_empty([0] * len(order))
        else:
            out = local.permute(*short, *order)[(0,) * len(short)]
        stream = _Stream(method, tuple(shape[d] for d in order), tuple(region[d] for d in order), words, args)
        stream.fill(out, generator or torch.default_generator)
        return local
    whole = torch.empty_strided(shape, stride, dtype=local.dtype, device=local.device)
    draw(whole, *args, generator=generator)
    local.copy_(whole[_index(region)])
    return local


def random_slice(
    method: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    region: Region,
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    *args: Any,
    device: Any = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A new tensor: the `region` of a tensor of `shape` and `stride` filled by `method`."""
    local = torch.empty_strided([length for _, length in region], local_stride, dtype=dtype, device=device)
    return random_slice_(local, method, shape, stride, region, *args, generator=generator)


def random_normal(
    mean: torch.Tensor | float,
    std: torch.Tensor | float,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    region: Region,
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``torch.normal`` where mean or std is this rank's piece of a tensor."""
    device = mean.device if isinstance(mean, torch.Tensor) else None
    args = (shape, stride, region, local_stride, dtype, 0.0, 1.0)
    return random_slice("normal_", *args, device=device, generator=generator).mul_(std).add_(mean)


@cache
def _operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def random_embed(
    local: torch.Tensor,
    operator: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    region: Region,
    out_region: Region,
    fill: float,
    *args: Any,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """What `operator` (``"aten.bernoulli.default"``) draws for `local`, the `region` of a tensor of `shape`.

    For distributions whose parameters are a tensor. The rest of the tensor is filled with `fill`, a parameter the
    operator accepts: the operator must take as much from the generator whatever the parameters are.
    """
    run = partial(_operator(operator), generator=generator)
    if tuple(local.shape) == tuple(shape):
        return run(local, *args)
    whole = torch.empty_strided(shape, stride, dtype=local.dtype, device=local.device).fill_(fill)
    whole[_index(region)] = local
    return run(whole, *args)[_index(out_region)].clone()


def random_factory(operator: str, region: Region, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The `region` of what the random factory `operator` makes, drawn whole."""
    return _operator(operator)(*args, **kwargs)[_index(region)].clone()
