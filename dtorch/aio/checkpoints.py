"""``await dtorch.aio.save(…)`` and ``await dtorch.aio.load(…)``: states on disk, and the event loop goes on."""

from __future__ import annotations

import os
from typing import Any

import anyio.to_thread

from ..checkpoint.api import format_of, is_directory, opened
from ..checkpoint.loading import TRIES, is_replaced, load_state
from ..checkpoint.pieces import Source
from ..checkpoint.saving import save_state
from ..errors import CheckpointError
from ..future import TensorFuture
from ..mesh import DeviceMesh

__all__ = ["load", "save"]


def save(obj: Any, f: str | os.PathLike[str], *, format: str | None = None) -> TensorFuture[None]:
    """As :func:`dtorch.save`, without waiting: the future is done when the checkpoint is in its place.

    What is saved is `obj` as it is at this call, whatever is issued afterwards. The format "torch" is put together on
    one executor, and takes what the other formats take.

    Raises:
        CheckpointError, TypeError: as :func:`dtorch.save`; what can be told at once, at the call.
    """
    kind = format_of(f, format)
    return save_state(obj, f, kind, is_directory=is_directory(f, kind))


async def load(
    f: str | os.PathLike[str],
    *,
    into: Any = None,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    **kwargs: Any,
) -> Any:
    """As :func:`dtorch.load`, without stopping the event loop. `into` is written when all has been read."""
    placed = device_mesh is not None or placements is not None
    for left in reversed(range(TRIES)):
        source = await anyio.to_thread.run_sync(opened, f, kwargs, into is not None, placed)
        if not isinstance(source, Source):
            return source[0]
        try:
            return await load_state(source, into, device_mesh, placements)
        except CheckpointError:
            # A save has put the next one in its place: nothing was written yet, and that one is whole.
            if not left or not is_replaced(source):
                raise
    raise AssertionError
