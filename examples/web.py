"""What serve_embeddings.py and serve_generate.py share: counters, a watch on the client, and how they start."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect

import dtorch

T = TypeVar("T")

Sample = tuple[str, str, float, dict[str, str]]
"""A value that Prometheus reads: (name, "counter" or "gauge", value, labels)."""


class Requests:
    """How the requests of one endpoint ended: ``started == sum of outcomes + in progress``, at any time."""

    BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf)

    def __init__(self) -> None:
        self.started = 0
        self.outcomes = dict.fromkeys(("ok", "refused", "disconnected", "failed"), 0)
        self.took = dict.fromkeys(self.BOUNDS, 0)
        self.seconds = 0.0

    @contextmanager
    def count(self) -> Iterator[None]:
        """One request, from its first line to its last."""
        self.started += 1
        start, outcome = time.perf_counter(), "disconnected"
        try:
            yield
            outcome = "ok"
        except dtorch.errors.OverloadedError:
            outcome = "refused"
            raise
        except ClientDisconnect:
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.outcomes[outcome] += 1
            seconds = time.perf_counter() - start
            self.seconds += seconds
            self.took[next(bound for bound in self.BOUNDS if seconds <= bound)] += 1

    def samples(self, name: str) -> Iterator[Sample]:
        yield f"{name}_requests_started_total", "counter", self.started, {}
        for outcome, n in self.outcomes.items():
            yield f"{name}_requests_total", "counter", n, {"outcome": outcome}
        ended = sum(self.outcomes.values())
        yield f"{name}_requests_in_progress", "gauge", self.started - ended, {}
        below = 0
        for bound, n in self.took.items():
            below += n
            yield f"{name}_seconds_bucket", "histogram", below, {"le": "+Inf" if bound == math.inf else f"{bound:g}"}
        yield f"{name}_seconds_sum", "histogram", self.seconds, {}
        yield f"{name}_seconds_count", "histogram", ended, {}


def process_samples() -> Iterator[Sample]:
    """What must not grow with the number of requests."""
    # Shared memory apart: the ring of commands is filled once round, 64 MB, before it is used again.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kind = "anonymous" if line.startswith("RssAnon") else "shared"
            yield f"process_{kind}_memory_bytes", "gauge", 1024 * int(line.split()[1]), {}
    yield "process_open_fds", "gauge", len(os.listdir("/proc/self/fd")), {}
    yield "asyncio_tasks", "gauge", len(asyncio.all_tasks()), {}
    memory = dtorch.Graph.get_memory_stats()
    yield "dtorch_arena_blocks", "gauge", memory["blocks"], {}
    yield "dtorch_arena_bytes", "gauge", memory["used"], {}


def prometheus(samples: Iterable[Sample]) -> PlainTextResponse:
    """The text format of Prometheus."""
    lines: list[str] = []
    told: set[str] = set()
    for name, kind, value, labels in (*samples, *process_samples()):
        family = (
            name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") if kind == "histogram" else name
        )
        if family not in told:
            told.add(family)
            lines.append(f"# TYPE {family} {kind}")
        shown = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}")
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client leaves before that.

    Raises:
        ClientDisconnect: the client has left.
    """
    results: list[T] = []
    error: Exception | None = None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            results.append(await work)
        except Exception as e:  # not through the task group, which would make an ExceptionGroup of it
            error = e
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    if not results:
        raise ClientDisconnect
    return results[0]


def answer_errors(app: FastAPI) -> None:
    """429 with Retry-After where a queue is full; nothing to a client that has left."""

    @app.exception_handler(dtorch.errors.OverloadedError)
    async def overloaded(request: Request, error: dtorch.errors.OverloadedError) -> JSONResponse:
        after = str(math.ceil(error.retry_after))
        return JSONResponse({"detail": str(error)}, status_code=429, headers={"Retry-After": after})

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> PlainTextResponse:
        return PlainTextResponse(status_code=499)


def settle() -> None:
    """At the end of the start: what there is by now stays. Going through all of it, torch and transformers included,
    the garbage collector would stop the loop for a tenth of a second, again and again.
    """
    gc.collect()
    gc.freeze()


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM; requests that have come in by then are still answered, for up to half a minute."""
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)
