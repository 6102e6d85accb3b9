"""What serve_embeddings.py and serve_generate.py share: counters, watches on clients and executors, start and end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import anyio
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import AfterValidator
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import dtorch
from dtorch import Shard

log = logging.getLogger("serve")

T = TypeVar("T")

Sample = tuple[str, str, float, dict[str, str]]
"""A value that Prometheus reads: (name, "counter" or "gauge", value, labels)."""


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a character: "\ud800"
        raise ValueError(f"not Unicode text: {error.reason}") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text of a request; what UTF-8 cannot write is refused."""


class Health:
    """Whether the server can do its work. Without executors it cannot: weights and caches are gone with them. With
    ``on_executor_death="restart"`` hooks make them again on fresh ones, and callers get a 503 meanwhile; else, or where
    that fails, the server ends, for its supervisor to start it again.

    Attributes:
        reason: why it cannot; it is about to end then.
        lost: what has died, until its work can be done again.
        recoveries: how often that was.
        stop: ends the server.
    """

    GRACE = 2.0  # seconds between the failure and the end, in which callers and load balancers are told: 503
    SILENCE = 30.0  # seconds without an answer of the executors after which they count as stuck
    PATIENCE = 60.0  # seconds in which no request was answered for what was lost, before the server ends

    def __init__(self, mesh: dtorch.DeviceMesh) -> None:
        self.mesh = mesh
        self.reason: str | None = None
        self.lost: str | None = None
        self.recoveries = 0
        self.stop: Callable[[], None] = lambda: None
        self._answered = math.inf
        self._lost_since: float | None = None
        self._failed = anyio.Event()

    def fail(self, error: BaseException) -> None:
        """The server cannot go on; the first reason is kept."""
        if self.reason is None:
            self.reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.critical("cannot go on, exiting with status 1 for a supervisor to restart: %s", self.reason)
            self._failed.set()

    def lose(self, error: BaseException) -> None:
        """A request has met executors that have died, or what was lost with them."""
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since > self.PATIENCE:
            self.fail(error)
        self.lost = self.lost or f"{type(error).__name__}: {error}".partition("\n")[0]

    def served(self) -> None:
        """A request was answered."""
        self.lost = self._lost_since = None

    async def recover(self, error: BaseException) -> bool:
        """Wait until hooks have made anew what died; whether they have. If not, the server ends."""
        self.lose(error)
        try:
            await dtorch.aio.recovered()
        except dtorch.errors.PoolError as final:
            self.fail(final)
            return False
        return True

    def restored(self) -> None:
        """The last of the hooks: what died has been made anew."""
        log.warning("serving again after: %s", self.lost)
        self.recoveries += 1
        self.lost, self._answered = None, time.monotonic()

    async def watch(self) -> None:
        """Ask all executors for a number, once a second; end the server when they, or anything else, have failed."""
        self._answered = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ask)
            await self._failed.wait()
            tasks.cancel_scope.cancel()
        await anyio.sleep(self.GRACE)
        self.stop()

    async def _ask(self) -> None:
        while True:
            try:
                await dtorch.zeros(self.mesh.size(), device_mesh=self.mesh, placements=[Shard(0)] * self.mesh.ndim)
            except dtorch.errors.PoolError as error:
                if not await self.recover(error):
                    return
            except Exception as error:  # too much is in flight, say: it may pass, and counts as silence until then
                log.warning("the executors gave no answer: %s", error)
            else:
                self._answered = time.monotonic()
                self.lost = None
            await anyio.sleep(1)

    def check(self) -> None:
        """Raise a PoolError if the server cannot go on, or not yet."""
        if self.reason is not None:
            raise dtorch.errors.PoolError(f"the server is about to end: {self.reason}")
        if self.lost is not None:
            raise dtorch.errors.PoolRestartingError(f"weights are being loaded again: {self.lost}")

    def answer(self) -> JSONResponse:
        """200, or 503 with the reason."""
        silent = time.monotonic() - self._answered
        reason = self.reason or self.lost
        if reason is None and silent > self.SILENCE:
            reason = f"the executors have not answered for {silent:.0f} s"
        if reason is None:
            return JSONResponse({"status": "ok", "mesh": str(self.mesh)})
        return JSONResponse({"status": "failed", "reason": reason, "mesh": str(self.mesh)}, status_code=503)


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


def death_argument(parser: argparse.ArgumentParser) -> None:
    """The option that says what becomes of the server when an executor dies."""
    parser.add_argument(
        "--on-executor-death",
        default="restart",
        choices=["restart", "raise"],
        help="load the weights again on fresh executors, or end for a supervisor to start the server again",
    )


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


class BodyLimit:
    """Middleware that answers 413 to a body larger than any request needs: parsing tens of megabytes would hold up the
    loop, and tokenizing them a thread for a minute.
    """

    LIMIT = 1 << 22  # bytes
    PATIENCE = 1 << 26  # bytes read and dropped, for a client listens to an answer only when it has sent all

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.LIMIT:
                while message.get("more_body") and seen < self.PATIENCE:
                    message = await receive()
                    seen += len(message.get("body", b""))
                text = f"the body of a request may have {self.LIMIT} bytes at most"
                raise HTTPException(413, text, headers={"Connection": "close"})
            return message

        await self.app(scope, limited if scope["type"] == "http" else receive, send)


def answer_errors(app: FastAPI, health: Health) -> None:
    """422 to a request that is wrong, 413 to one that is too large, 429 with Retry-After where a queue is full, 503
    without executors; nothing to a client that has left.
    """
    app.add_middleware(BodyLimit)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # The input is not sent back: it may be what no JSON can hold, such as NaN or half a character.
        detail = [{key: e[key] for key in ("type", "loc", "msg")} for e in error.errors()]
        return Response(json.dumps({"detail": detail}), status_code=422, media_type="application/json")

    @app.exception_handler(dtorch.errors.TensorLostError)
    @app.exception_handler(dtorch.errors.PoolError)
    async def lost(request: Request, error: Exception) -> JSONResponse:
        health.lose(error)
        after = str(math.ceil(getattr(error, "retry_after", 5)))
        return JSONResponse({"detail": str(error)}, status_code=503, headers={"Retry-After": after})

    @app.exception_handler(dtorch.errors.OverloadedError)
    async def overloaded(request: Request, error: dtorch.errors.OverloadedError) -> JSONResponse:
        after = str(math.ceil(error.retry_after))
        return JSONResponse({"detail": str(error)}, status_code=429, headers={"Retry-After": after})

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> PlainTextResponse:
        return PlainTextResponse(status_code=499)


def settle() -> None:
    """At the end of the start, and when what was lost is there again: what there is by now stays. Going through all of
    it, torch and transformers included, the garbage collector would stop the loop for a tenth of a second, again and
    again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def serve(app: FastAPI, host: str, port: int, health: Health) -> None:
    """Serve until Ctrl-C or SIGTERM; requests that have come in by then are still answered, for up to half a minute.
    The status is 1 where it ends because it cannot go on.
    """
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    health.stop = stop
    try:
        server.run()
    except KeyboardInterrupt:
        pass  # Ctrl-C, raised again after the graceful end
    if health.reason is not None or not server.started:
        sys.exit(1)
