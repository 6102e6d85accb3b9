"""The modules of ``torch.nn`` that make parameters, each as a subclass that makes them on a device mesh.

A module's own code is torch's. While its ``__init__`` runs, torch's factory functions make dtorch tensors on
`device_mesh` with `placements`, so a sharded weight is never whole anywhere, and is initialised in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .. import graph
from ..mesh import DeviceMesh, as_mesh
from ..placement import Placement, fitting
from .placing import check_fits, plain_factories, put, put_parameter

__all__ = ["NAMES", "module_class"]

Placements = Sequence[Placement] | Placement | None

# At run time the torch class that follows is what the mixin is mixed into.
_LAZY: Any = object

NAMES: tuple[str, ...] = tuple(nn.modules.__all__)


def _asked_for(
    call: str, device_mesh: DeviceMesh | None, placements: Placements, kwargs: dict[str, Any]
) -> tuple[DeviceMesh, Placements] | None:
    """Mesh and placements that a module's arguments ask for (``kwargs["device"]``, taken out, among them), or that
    are in force; None for the "meta" device.
    """
    device = kwargs.get("device")
    if device is not None and device_mesh is not None:
        raise ValueError(f"{call}: device={device!r} and device_mesh={device_mesh!r} exclude each other; give one")
    if str(device) == "meta":
        return None
    kwargs.pop("device", None)
    if device is None and device_mesh is None:
        return graph.default_device_mesh(), graph.routed_placements() if placements is None else placements
    return device_mesh or as_mesh(device), placements


@contextmanager
def _factories_on(placing: tuple[DeviceMesh, Placements] | None) -> Generator[None]:
    """torch's factories make dtorch tensors on that mesh with those placements; None leaves them as they are."""
    if placing is None:
        yield
        return
    mesh, placements = placing
    many = (placements,) if isinstance(placements, Placement) else placements
    with graph.device_mesh(mesh), graph.placements_guard(many):
        yield


class _Placed(nn.Module):
    """Mixed in before a torch module: makes its parameters on a mesh."""

    def __init__(
        self, *args: Any, device_mesh: DeviceMesh | None = None, placements: Placements = None, **kwargs: Any
    ) -> None:
        call = type(self).__name__
        with _factories_on(_asked_for(call, device_mesh, placements, kwargs)):
            super().__init__(*args, **kwargs)
        check_fits(self, call, placements)


class _PlacedRows(_Placed):
    """Mixed in before an embedding: zeroes the padding row as torch does, on placements that cut the rows too."""

    num_embeddings: int
    padding_idx: int | None
    weight: nn.Parameter

    def _fill_padding_idx_with_zero(self) -> None:
        if self.padding_idx is None:
            return
        with torch.no_grad(), plain_factories():
            padding = torch.arange(self.num_embeddings) == self.padding_idx
            self.weight.masked_fill_(padding.unsqueeze(1), 0)


class _PlacedLazily(_LAZY):
    """Mixed in before a lazy torch module: moves its parameters to a mesh as soon as they have a shape, and only
    then initialises them."""

    _parameters: dict[str, nn.Parameter | None]
    _buffers: dict[str, torch.Tensor | None]

    def __init__(
        self, *args: Any, device_mesh: DeviceMesh | None = None, placements: Placements = None, **kwargs: Any
    ) -> None:
        placing = _asked_for(type(self).__name__, device_mesh, placements, kwargs)
        with plain_factories():
            super().__init__(*args, **kwargs)
        if placing is not None:
            self._placing = placing

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> None:
        with plain_factories():
            super().initialize_parameters(*args, **kwargs)

    def reset_parameters(self) -> None:
        if "_placing" in self.__dict__ and not self.has_uninitialized_params():
            mesh, placements = self.__dict__.pop("_placing")
            for name, p in self._parameters.items():
                if p is not None:
                    self._parameters[name] = put_parameter(p, mesh, fitting(placements, p.ndim))
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = put(buffer, mesh, fitting(placements, buffer.ndim))
            check_fits(cast(nn.Module, self), type(self).__name__, placements)
        super().reset_parameters()


def _makes_parameters(cls: type[nn.Module]) -> bool:
    # Every torch module that makes parameters says so by taking a device; the RNNs take it through **kwargs.
    return issubclass(cls, nn.RNNBase) or "device" in inspect.signature(cls.__init__).parameters


def _signature(cls: type[nn.Module]) -> inspect.Signature:
    """torch's signature with the two arguments of ours."""
    parameters = list(inspect.signature(cls).parameters.values())
    rest = parameters[-1:] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("device_mesh", "DeviceMesh | None"), ("placements", "Sequence[Placement] | None"))
    ]
    return inspect.Signature([*parameters[: len(parameters) - len(rest)], *ours, *rest])


@cache
def module_class(name: str) -> type[Any]:
    """The class ``dtorch.nn.<name>``: a subclass of torch's where that makes parameters, else torch's own."""
    cls: type[Any] = getattr(nn, name)
    if not issubclass(cls, nn.Module) or not _makes_parameters(cls):
        return cls
    mixin = _Placed
    if issubclass(cls, LazyModuleMixin):
        mixin = _PlacedLazily
    elif issubclass(cls, nn.Embedding | nn.EmbeddingBag):
        mixin = _PlacedRows
    body = {
        "__module__": "dtorch.nn",
        "__qualname__": name,
        "__doc__": f"torch.nn.{name} whose parameters lie on `device_mesh` with `placements` (a parameter that lacks a"
        f" sharded dim is Replicate on that mesh dim); by default replicated on the default mesh.\n\n{cls.__doc__}",
        "__signature__": _signature(cls),
    }
    return type(name, (mixin, cls), body)
