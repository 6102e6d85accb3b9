"""Defaults of where and what tensors are made, in context variables: two tasks never see each other's.

``Graph`` is the name the C++ system gave to a scope of defaults; :meth:`Graph.default_graph` is the one in force.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch

from .future import VoidFutureCollect
from .mesh import DeviceMesh, as_mesh
from .placement import Placement
from .runtime.client import in_use as client  # what was issued to a dead pool died with it: no fresh one is asked
from .runtime.plans import auto_redistribute_on

__all__ = [
    "Graph",
    "GraphOption",
    "as_mesh",
    "auto_redistribute",
    "default_device_mesh",
    "device_mesh",
    "placements_guard",
    "reset_device_mesh",
    "routed_mesh",
    "routed_placements",
    "set_device_mesh",
]

_mesh: ContextVar[DeviceMesh | None] = ContextVar("dtorch_mesh", default=None)
_placements: ContextVar[Sequence[Any] | None] = ContextVar("dtorch_placements", default=None)
_dtype: ContextVar[torch.dtype | None] = ContextVar("dtorch_dtype", default=None)
_graph: ContextVar[Graph | None] = ContextVar("dtorch_graph", default=None)


def routed_mesh() -> DeviceMesh | None:
    """The mesh that torch's own factories are routed to in this context, if any."""
    return _mesh.get()


def routed_placements() -> Sequence[Any] | None:
    """The placements that go with :func:`routed_mesh`."""
    return _placements.get()


def default_device_mesh() -> DeviceMesh:
    """Where a tensor is made when nothing is said: the mesh of the innermost guard, else one CPU."""
    return _mesh.get() or Graph.default_graph().default_device_mesh


def set_device_mesh(mesh: DeviceMesh | None) -> Token[DeviceMesh | None]:
    """Make `mesh` the default mesh of this context (``None``: it has none of its own, and torch's factories make plain
    tensors); what :func:`reset_device_mesh` needs to undo that."""
    return _mesh.set(mesh)


def reset_device_mesh(token: Token[DeviceMesh | None]) -> None:
    """Undo a :func:`set_device_mesh`. Of a context that has ended with its task there is nothing to undo."""
    with contextlib.suppress(ValueError):
        _mesh.reset(token)


@contextlib.contextmanager
def device_mesh(mesh: DeviceMesh | str | torch.device) -> Iterator[DeviceMesh]:
    """Inside, factories (torch's own as well) make their tensors on `mesh`, and modules their parameters."""
    found = as_mesh(mesh)
    token = _mesh.set(found)
    try:
        yield found
    finally:
        _mesh.reset(token)


@contextlib.contextmanager
def placements_guard(placements: Sequence[Placement] | None) -> Iterator[None]:
    """Inside, factories that are told no placements use these; a Shard of a dim that a tensor lacks is Replicate."""
    token = _placements.set(placements)
    try:
        yield
    finally:
        _placements.reset(token)


@contextlib.contextmanager
def auto_redistribute(enabled: bool = True) -> Iterator[None]:
    """Inside, calls whose placements do not fit move their inputs, by the least bytes, instead of raising."""
    token = auto_redistribute_on.set(enabled)
    try:
        yield
    finally:
        auto_redistribute_on.reset(token)


@dataclass(frozen=True, slots=True)
class GraphOption:
    """Accepted for programs written for the C++ system: an executor is always a process of its own."""

    per_device_per_process: bool = True


class Graph:
    """A scope of defaults. The order of work is one per pool, whatever the graph.

    Args:
        option: accepted and kept.
    """

    def __init__(self, option: GraphOption | None = None) -> None:
        self.option = option or GraphOption()
        self._mesh = DeviceMesh("cpu")

    @staticmethod
    def default_graph() -> Graph:
        """The graph in force in this context."""
        return _graph.get() or _DEFAULT

    @property
    def default_device_mesh(self) -> DeviceMesh:
        """The mesh of tensors that name none."""
        return _mesh.get() or self._mesh

    @default_device_mesh.setter
    def default_device_mesh(self, mesh: DeviceMesh | str) -> None:
        self._mesh = as_mesh(mesh)

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype of floating-point tensors that name none: the innermost guard's, else torch's default dtype."""
        return _dtype.get() or torch.get_default_dtype()

    @default_dtype.setter
    def default_dtype(self, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)

    @contextlib.contextmanager
    def device_mesh_guard(self, mesh: DeviceMesh | str) -> Iterator[DeviceMesh]:
        """Inside, `mesh` is the default mesh."""
        with self, device_mesh(mesh) as found:
            yield found

    @contextlib.contextmanager
    def dtype_guard(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside, `dtype` is the default floating-point dtype."""
        token = _dtype.set(dtype)
        try:
            yield
        finally:
            _dtype.reset(token)

    def __enter__(self) -> Graph:
        self._tokens = [*getattr(self, "_tokens", []), _graph.set(self)]
        return self

    def __exit__(self, *exc: object) -> None:
        _graph.reset(self._tokens.pop())

    @staticmethod
    def sync() -> None:
        """Wait until everything issued so far has run."""
        c = client()
        c.waiting.on_block()  # as fetch_now() does
        c.values.sync().get()

    @staticmethod
    def sync_future() -> VoidFutureCollect:
        """A future of everything issued so far."""
        return client().values.sync()

    @staticmethod
    async def sync_async() -> None:
        """As :meth:`sync`, without blocking the event loop."""
        await client().values.sync()

    @staticmethod
    def satisfy(mesh: DeviceMesh) -> bool:
        """Whether the devices of `mesh` exist here."""
        try:
            client().hosts(mesh)
        except ValueError:
            return False
        return True

    @staticmethod
    def get_memory_stats(device_mesh: DeviceMesh | None = None, reset_peak: bool = False) -> dict[str, int]:
        """Bytes of the shared arena: limit, used, peak and idle, and the number of blocks in use."""
        arena = client().arena
        stats = arena.stats()
        if reset_peak:
            arena.reset_peak()
        return {
            "limit": stats.limit,
            "used": stats.used,
            "peak": stats.peak,
            "idle": stats.idle,
            "blocks": stats.blocks,
        }

    @staticmethod
    def empty_cache() -> None:
        """Give idle memory of the arena back to the system."""
        client().arena.trim()

    def __repr__(self) -> str:
        return f"Graph(default_device_mesh={self.default_device_mesh!r}, default_dtype={self.default_dtype})"


_DEFAULT = Graph()
