"""Functions over the pool as a whole: configure, shut down, restart, clear errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._tensor import Tensor
from .graph import Graph, device_mesh
from .graph import default_device_mesh as get_default_device_mesh
from .mesh import DeviceMesh
from .runtime import client as _client
from .runtime.config import configure

__all__ = [
    "clear_errors",
    "configure",
    "default_graph",
    "device_mesh_guard",
    "get_default_device_mesh",
    "restart",
    "shutdown",
    "tensors_redistribute_by_dict",
]


def shutdown() -> None:
    """End all executors. Their tensors are lost; the next use of dtorch starts a fresh pool."""
    _client.close()


def restart() -> None:
    """End all executors, if any run, start a fresh pool and run the hooks of :func:`dtorch.on_restart`.

    After a death, the way to go on. In a running event loop hooks run as a task; ``await dtorch.aio.recovered()``
    waits for them.

    Raises:
        PoolError: the pool could not start, or a hook has failed.
    """
    _client.restart()


def clear_errors() -> None:
    """Let tensors whose write was not done (its input had failed) be read again: the old value stands.

    Where some ranks had written and others had not, the tensor is lost instead, and says so.
    """
    _client.client().clear_errors()


def default_graph() -> Graph:
    """The graph in force."""
    return Graph.default_graph()


@contextlib.contextmanager
def device_mesh_guard(mesh: DeviceMesh | str) -> Iterator[DeviceMesh]:
    """Inside, `mesh` is the default mesh; a string is a single device."""
    with device_mesh(mesh) as found:
        yield found


def tensors_redistribute_by_dict(
    tensors: Sequence[Tensor],
    device_mesh: DeviceMesh | None = None,
    placements_dict: Mapping[str, Any] | None = None,
    default_placement_mode: str = "raise_error",
) -> list[Tensor]:
    """:meth:`Tensor.redistribute_by_dict` of several tensors."""
    return [t.redistribute_by_dict(device_mesh, placements_dict, default_placement_mode) for t in tensors]
