"""torch's own namespace where dtorch is installed: factories that make tensors on the mesh of the guard they stand in,
and functions that read a tensor's memory without asking it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._utils as torch_utils
import torch.utils.dlpack as torch_dlpack
from torch.utils._device import _device_constructors

from . import graph
from ._tensor import Tensor
from .placement import Shard
from .runtime.client import current_client
from .runtime.moves import lift
from .spec import TensorSpec
from .standins import stand_in

__all__ = ["install"]

# Inside a fake tensor mode torch infers shapes: what its decompositions make there is fake.
_fake_mode = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined]
_routed_mesh = graph._mesh.get


def _route(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        mesh = _routed_mesh()
        if mesh is None or _fake_mode() is not None:
            return original(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None:
            if torch.device(device).type != mesh.device_type:
                return original(*args, **kwargs)
            kwargs.pop("device")
        return ours(*args, **kwargs)

    return routed


def install(factories: Mapping[str, Callable[..., Any]]) -> None:
    """Put `factories` into torch's namespace, by name. They do nothing outside ``with dtorch.device_mesh(…)``."""
    # torch lists what ``with torch.device(…)`` concerns when that is first used: the originals, not these.
    _device_constructors()
    for name, ours in factories.items():
        stand_in((torch,), name, functools.partial(_route, ours=ours))
    for places, name, around in (
        ((torch, torch_dlpack), "to_dlpack", _with_memory),
        ((torch,), "vander", _on_its_mesh),
        ((torch,), "tensor_split", _reading_indices),
        ((torch, torch.random), "manual_seed", _seeding),
        ((torch.nn.functional,), "linear", _unflattened),
        *[((torch.linalg,), name, _lifted) for name in ("matrix_rank", "matrix_norm", "norm", "cond")],
        ((torch_utils,), "_rebuild_tensor", _without_mesh),
    ):
        stand_in(places, name, around)


def _reading_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor_split``, which reads the memory of indices in a tensor without asking it."""

    @functools.wraps(original)
    def tensor_split(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return input.tensor_split(*args, **kwargs) if isinstance(input, Tensor) else original(input, *args, **kwargs)

    return tensor_split


def _seeding(original: Callable[[Any], torch.Generator]) -> Callable[[Any], torch.Generator]:
    """``torch.manual_seed``, which seeds all devices: the executors too, once there are any."""

    @functools.wraps(original)
    def manual_seed(seed: Any) -> torch.Generator:
        generator = original(seed)
        found = current_client()
        if found is not None and not found.closed and _fake_mode() is None:
            found.draws.seed(torch.initial_seed())
        return generator

    return manual_seed


def _on_its_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.vander``, which fills a tensor that it makes itself, on no mesh."""

    @functools.wraps(original)
    def vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
        if not isinstance(x, Tensor):
            return original(x, N, increasing)
        columns = x.shape[0] if N is None else N
        if x.ndim != 1 or columns < 2:
            # torch says what is wrong; one column or none holds ones, whatever x.
            made = original(torch.empty(x.shape, dtype=x.dtype, device="meta"), N, increasing)
            return x.new_ones(made.shape, dtype=made.dtype)
        powers = torch.linalg.vander(x, N=columns)
        return powers if increasing else powers.flip(1)

    return vander


def _unflattened(original: Callable[..., Any]) -> Callable[..., Any]:
    """``F.linear``, which joins all dims but the last into one.

    Where shards of [b, n, i] do not allow that (of n, or of b in unequal pieces), each b is multiplied by itself: the
    same products, and nothing moves.
    """

    @functools.wraps(original)
    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if type(input) is Tensor and input.ndim == 3 and weight.ndim == 2 and not _joins(input._spec):
            out = torch.bmm(input, weight.t().expand(input.shape[0], -1, -1))
            return out if bias is None else out + bias
        return original(input, weight, bias)

    return linear


def _joins(spec: TensorSpec) -> bool:
    """Whether the first two of three dims can be joined into one."""
    ranks = 1
    for p, n in zip(spec.placements, spec.mesh.shape, strict=True):
        if type(p) is Shard:
            if p.dim == 1:
                return False
            ranks *= n if p.dim == 0 else 1
    return spec.shape[0] % ranks == 0


def _lifted(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which makes its result itself, on no mesh, where a matrix has no elements."""

    @functools.wraps(original)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if type(result) is torch.Tensor:
            found = next((t for t in (*args, *kwargs.values()) if type(t) is Tensor), None)
            if found is not None and kwargs.get("out") is not result:
                return lift(result, found.device_mesh)
        return result

    return lifted


def _without_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with torch's own factories inside: what was saved is read back as plain tensors."""

    @functools.wraps(original)
    def unrouted(*args: Any, **kwargs: Any) -> Any:
        token = graph._mesh.set(None)
        try:
            return original(*args, **kwargs)
        finally:
            graph._mesh.reset(token)

    return unrouted


def _with_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which takes a tensor's memory without asking it, for tensors that have some."""

    @functools.wraps(original)
    def checked(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__() if isinstance(tensor, Tensor) else original(tensor)

    return checked
