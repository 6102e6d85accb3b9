"""dtorch inside ``async def``: tensors are awaited, and the event loop never stops for one.

    async with dtorch.aio.open(mesh=mesh):
        loss, accuracy = await dtorch.aio.gather(loss, accuracy)
        rows = await dtorch.aio.nonzero(mask)

``await t`` needs none of this. Here is what else a program of tasks wants: a lifetime for the executors
(:func:`open`, :func:`lifespan`), several values at once (:func:`gather`, :func:`as_completed`), awaitable forms of
calls whose result's shape depends on the data (:func:`nonzero` and its kin), a bound on the work in flight
(:func:`ready_to_send`, :func:`in_flight`), an error where a call would stop the loop (:func:`strict`), one batch of
many callers' requests (:func:`batched`), batches uploaded ahead of their use (:func:`prefetch`), and a way to wait
for a fresh pool after a death (:func:`recovered`).
"""

from __future__ import annotations

import importlib
from typing import Any

# name -> module that defines it
_NAMES: dict[str, str] = {
    **dict.fromkeys(["Session", "lifespan", "open", "strict"], "lifetime"),
    **dict.fromkeys(["as_completed", "gather"], "collecting"),
    **dict.fromkeys(
        [
            "allclose",
            "argwhere",
            "bincount",
            "call",
            "equal",
            "histogramdd",
            "index",
            "index_put_",
            "item",
            "masked_select",
            "nonzero",
            "numpy",
            "one_hot",
            "repeat_interleave",
            "tolist",
            "unique",
            "unique_consecutive",
            "where",
        ],
        "data_dependent",
    ),
    **dict.fromkeys(["Pressure", "backlog", "in_flight", "ready_to_send"], "pressure"),
    **dict.fromkeys(["Batched", "batched"], "batching"),
    "prefetch": "prefetching",
    "recovered": "recovery",
    **dict.fromkeys(["load", "save"], "checkpoints"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'dtorch.aio' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"dtorch.aio.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(_NAMES)


__all__ = sorted(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
