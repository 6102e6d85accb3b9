"""Factories whose values torch computes in this process, as they are few: windows, index tables, what memory holds.

Each takes torch's own arguments, and ``device_mesh=`` and ``placements=`` as :func:`dtorch.zeros` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._tensor import Tensor
from .options import OPTIONS, Where, default_dtype, sizes

__all__ = [
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty_permuted",
    "empty_strided",
    "fftfreq",
    "from_dlpack",
    "from_file",
    "frombuffer",
    "hamming_window",
    "hann_window",
    "here",
    "kaiser_window",
    "normal",
    "range",
    "rfftfreq",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
]  # fmt: skip

_aten = torch.ops.aten


def here(name: str, function: Callable[..., torch.Tensor], floating: bool = True) -> Callable[..., Tensor]:
    """`function`, a factory of torch, with its result copied to a mesh.

    Args:
        name: as the user writes it.
        floating: it makes tensors of the default dtype where it is told none.
    """

    def factory(*args: Any, **options: Any) -> Tensor:
        where = Where(name, {k: options.pop(k) for k in OPTIONS if k in options})
        if floating and options.get("dtype") is None:
            options["dtype"] = default_dtype()
        return where.lift(function(*_numbers(args), **{k: _numbers(v) for k, v in options.items()}))

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"As ``torch.{name}``, on a mesh; see :func:`dtorch.zeros` for the options."
    return factory


def _numbers(value: Any) -> Any:
    """`value` with numbers for dtorch tensors."""
    if isinstance(value, Tensor):
        return value.tolist()
    return type(value)(_numbers(v) for v in value) if type(value) in (list, tuple) else value


bartlett_window = here("bartlett_window", torch.bartlett_window)
blackman_window = here("blackman_window", torch.blackman_window)
hamming_window = here("hamming_window", torch.hamming_window)
hann_window = here("hann_window", torch.hann_window)
kaiser_window = here("kaiser_window", torch.kaiser_window)
range = here("range", torch.range)
tril_indices = here("tril_indices", torch.tril_indices, floating=False)
triu_indices = here("triu_indices", torch.triu_indices, floating=False)
fftfreq = here("fft.fftfreq", torch.fft.fftfreq)
rfftfreq = here("fft.rfftfreq", torch.fft.rfftfreq)
_from_file = here("from_file", torch.from_file)
_frombuffer = here("frombuffer", torch.frombuffer, floating=False)
_normal = torch.normal
_asarray = torch.asarray
_from_dlpack = torch.from_dlpack


def frombuffer(buffer: Any, *, dtype: torch.dtype, count: int = -1, offset: int = 0, **options: Any) -> Tensor:
    """As ``torch.frombuffer``, on a mesh; the buffer is copied now, so neither is written by the other."""
    return _frombuffer(bytearray(memoryview(buffer)), dtype=dtype, count=count, offset=offset, **options)


def from_file(filename: str, shared: bool | None = None, size: int | None = 0, **options: Any) -> Tensor:
    """As ``torch.from_file``, on a mesh: the file is read now.

    Raises:
        ValueError: `shared`: writes would not reach the file.
    """
    if shared:
        raise ValueError(
            "from_file(shared=True): a dtorch tensor's memory lies on its executors, so writes cannot reach the file.\n"
            "  Write:  torch.from_file(…, shared=True).copy_(t.to_torch())  to write it"
        )
    return _from_file(filename, shared=shared, size=size, **options)


def from_dlpack(ext_tensor: Any, **options: Any) -> Tensor:
    """As ``torch.from_dlpack``, on a mesh: a copy. A dtorch tensor comes back as another tensor of the same value."""
    where = Where("from_dlpack", {k: options.pop(k) for k in OPTIONS if k in options})
    if isinstance(ext_tensor, Tensor):
        return ext_tensor.detach()  # type: ignore[return-value]
    return where.lift(_from_dlpack(ext_tensor, **options))


def asarray(
    obj: Any,
    *,
    dtype: torch.dtype | None = None,
    copy: bool | None = None,
    requires_grad: bool | None = None,
    **options: Any,
) -> Tensor:
    """As ``torch.asarray``, on a mesh. A dtorch tensor that is as asked comes back itself, and otherwise keeps its
    autograd history, unless `requires_grad` is False.

    Raises:
        ValueError: `copy` is False, and it takes a copy.
    """
    if isinstance(obj, Tensor):
        moved = obj.to(dtype or obj.dtype)
        if copy is False and moved is not obj:
            raise ValueError("asarray(copy=False): another dtype takes a copy")
        if moved is obj and copy:
            moved = obj.clone()  # type: ignore[assignment]
        if requires_grad is None or requires_grad == moved.requires_grad:
            return moved  # type: ignore[return-value]
        return moved.detach().requires_grad_(requires_grad)  # type: ignore[return-value]
    if copy is False:
        raise ValueError("asarray(copy=False): a dtorch tensor is always a copy, which lies on executors")
    where = Where("asarray", {**options, "requires_grad": bool(requires_grad)})
    return where.lift(_asarray(_numbers(obj), dtype=dtype).detach())


def scalar_tensor(s: Any, **options: Any) -> Tensor:
    """As ``torch.scalar_tensor``, on a mesh; see :func:`dtorch.zeros` for the options."""
    where = Where("scalar_tensor", options)
    value = s.item() if isinstance(s, torch.Tensor) else s
    return where.make(_aten.full.default, 0, [], value, dtype=where.dtype or default_dtype())


def empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    """As ``torch.empty_strided``, on a mesh; strides that are not dense can be had on Replicate alone."""
    where = Where("empty_strided", options)
    return where.make(
        _aten.empty_strided.default, len(size), list(size), list(stride), dtype=where.dtype or default_dtype()
    )


def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:
    """As ``torch.empty_permuted``, on a mesh: dim ``physical_layout[0]`` is the outermost in memory."""
    stride = torch.empty_permuted(list(size), list(physical_layout), device="meta").stride()
    return empty_strided(size, stride, **options)


def normal(mean: Any, std: Any = 1.0, size: Sequence[int] | None = None, **options: Any) -> torch.Tensor:
    """As ``torch.normal``: with a size, on a mesh; else the tensors among `mean` and `std` say where."""
    if size is None:
        return _normal(mean, std, **options)
    generator = options.pop("generator", None)
    where = Where("normal", options)
    drawn = where.make(_aten.empty.memory_format, len(size), sizes((size,), {}), dtype=where.dtype or default_dtype())
    with torch.no_grad():
        return drawn.normal_(float(mean), float(std), generator=generator)
