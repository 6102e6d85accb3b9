"""Stream text from the demo's GPT over HTTP, a token at a time, to many clients at once.

    pip install -e '.[serve]'
    python examples/serve_generate.py --port 8001                        # learns for some seconds, then serves
    python examples/train_gpt.py --context 256 --save gpt.pt && python examples/serve_generate.py --checkpoint gpt.pt
    curl -N localhost:8001/generate -H 'content-type: application/json' -d '{"prompt": "import ", "max_tokens": 60}'

Continuous batching: every step computes the next token of all sequences there are. New ones join between two steps,
finished ones, and those whose client has left, leave. Keys and values of earlier tokens stay in the executors. Shapes
come from a short list, so that a sequence that grows needs no new plan. `--tp 2` cuts every matrix and the cache. When
an executor dies, running sequences end with an error, and callers get 503 with Retry-After until the weights are there
again.
"""

from __future__ import annotations

import argparse
import codecs
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import torch
import torch.nn.functional as F
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from gpt import GPT, PLAN, batches, load, read_text
from pydantic import BaseModel, Field, field_validator
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from web import Health, Requests, Sample, Text, answer_errors, death_argument, prometheus, serve, settle

import dtorch
from dtorch import Replicate, Shard
from dtorch.distributed.tensor.parallel import parallelize_module

log = logging.getLogger("serve_generate")

CHUNK = 16  # tokens of a prompt that one step reads
COLDEST = 1e-3  # temperature: logits divided by less may be infinite


def first_fit(n: int, sizes: tuple[int, ...]) -> int:
    """The first of `sizes`, ascending, that `n` fits into."""
    return next(size for size in sizes if n <= size)


@dataclass(eq=False)
class Sequence:
    """One request. Tokens are put out in `tokens`, and its end by closing it."""

    unread: list[int]  # of the prompt, or the one token that was chosen last
    limit: int
    temperature: float
    generator: torch.Generator
    tokens: MemoryObjectSendStream[int]
    received: MemoryObjectReceiveStream[int]
    position: int = 0  # how many tokens the cache holds
    written: int = 0
    ended: bool = False  # finished, failed, or without a listener
    error: BaseException | None = None

    def choose(self, logits: torch.Tensor) -> int:
        """The next token: the likeliest, or one that is drawn.

        Raises:
            ValueError: there is no likeliest.
        """
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite")
        if self.temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits.double() / self.temperature, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self.generator))


class SequenceFailed(Exception):
    """A sequence ended before its last token; its client has been told why."""


@dataclass
class Counts:
    """What the engine has done."""

    tokens: int = 0
    steps: int = 0
    shapes: set[tuple[int, int, int]] = field(default_factory=set)
    seconds_per_step: float = 0.05


class Engine:
    """Continuous batching for one model.

    Args:
        model: on `mesh` already.
        slots: sequences that are computed at once; each has its part of the cache.
        max_queue: sequences that may wait for a slot.
    """

    def __init__(self, model: GPT, mesh: dtorch.DeviceMesh, slots: int, max_queue: int) -> None:
        self.model, self.mesh, self.max_queue = model.eval(), mesh, max_queue
        self.context: int = model.config["context"]
        heads, width = model.config["heads"], model.config["width"]
        # A chunk may begin at the last position: what is written behind the end of a sequence is never read.
        capacity = self.context + CHUNK
        self.row_sizes = tuple(sorted({n for n in (1, 4, 16, 64) if n < slots} | {slots}))
        self.lengths = tuple(sorted({n for n in (64, 256, 1024) if n < capacity} | {capacity}))
        self.cache_shape = (slots, heads, capacity, width // heads)
        self.prepare()
        self.slots: list[Sequence | None] = [None] * slots
        self.queue: deque[Sequence] = deque()
        self.counts = Counts()
        self.error: BaseException | None = None  # why it has stopped
        self._arrival = anyio.Event()

    def prepare(self) -> None:
        """Make what it holds on the executors beside the model; again, where those have died that had it."""
        self.empty_cache()
        self.places = {n: dtorch.distribute_tensor(torch.arange(n), self.mesh, [Replicate()]) for n in self.lengths}

    def empty_cache(self) -> None:
        """A new cache, for no sequence."""
        self.keys, self.values = (
            [
                dtorch.zeros(self.cache_shape, device_mesh=self.mesh, placements=[Shard(1)])
                for _ in range(self.model.config["layers"])
            ]
            for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Logits of the next tokens, float32[rows, chunk, 256], of the sequences in the first slots.

        Args:
            tokens: int64[rows, chunk], the newest of each sequence; the cache takes their keys and values.
            positions: where they stand.
            length: how much of the cache is looked at.
        """
        tokens, positions = (dtorch.distribute_tensor(t, self.mesh, [Replicate()]) for t in (tokens, positions))
        rows, index = len(tokens), positions[:, None, :, None]
        seen = self.places[length] <= index

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.keys[layer][:rows, :, :length], self.values[layer][:rows, :, :length]
            keys.scatter_(2, index.expand_as(k), k)
            values.scatter_(2, index.expand_as(v), v)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)

        with torch.no_grad():
            return self.model(tokens, positions.clamp(max=self.context - 1), attend)

    async def warm_up(self) -> None:
        """Make the plans of all shapes, so that no client waits for them."""
        for rows in self.row_sizes:
            for chunk in (1, CHUNK):
                for length in self.lengths:
                    zeros = torch.zeros(rows, chunk, dtype=torch.int64)
                    await self.forward(zeros, zeros + torch.arange(chunk), length)

    def submit(self, prompt: bytes, limit: int, temperature: float, seed: int) -> Sequence:
        """A sequence that continues `prompt`; it joins as soon as a slot is free.

        Raises:
            OverloadedError: too many wait.
            PoolError: the engine has stopped.
        """
        if self.error is not None:
            raise dtorch.errors.PoolError(f"the engine has stopped: {self.error}") from self.error
        if len(self.queue) >= self.max_queue:
            ahead = limit * self.counts.seconds_per_step * (1 + len(self.queue) / len(self.slots))
            raise dtorch.errors.OverloadedError(f"{len(self.queue)} requests wait already", max(ahead, 1.0))
        generator = torch.Generator().manual_seed(seed)
        sequence = Sequence(list(prompt), limit, temperature, generator, *anyio.create_memory_object_stream[int](limit))
        self.queue.append(sequence)
        self._arrival.set()
        return sequence

    async def stream(self, sequence: Sequence) -> AsyncIterator[int]:
        """Its tokens as they come."""
        async for token in sequence.received:
            yield token
        if sequence.error is not None:
            raise sequence.error

    def leave(self, sequence: Sequence) -> None:
        """Nobody listens any longer: its slot is free at the next step."""
        self._end(sequence)
        sequence.received.close()
        if sequence in self.queue:
            self.queue.remove(sequence)

    def _end(self, sequence: Sequence, error: BaseException | None = None) -> None:
        if not sequence.ended:
            sequence.ended, sequence.error = True, error
            sequence.tokens.close()

    async def run(self) -> None:
        """Compute for as long as there are sequences, then wait for the next. May be called again when it has raised.

        Raises:
            Exception: it cannot go on; all sequences there are have ended with this error.
        """
        self.error = None
        try:
            await self._run()
        except Exception as error:
            self.error = error
            for s in (*self.slots, *self.queue):
                if s is not None:
                    self._end(s, error)
            self.slots = [None] * len(self.slots)
            self.queue.clear()
            raise

    async def _run(self) -> None:
        while True:
            self.slots = [None if s is None or s.ended else s for s in self.slots]
            for slot, taken in enumerate(self.slots):
                # The lowest slots first: a step computes up to the highest that is taken.
                if taken is None and self.queue:
                    self.slots[slot] = self.queue.popleft()
            if any(self.slots):
                await self._step()
            else:
                self._arrival = anyio.Event()
                await self._arrival.wait()

    async def _step(self) -> None:
        """The next token of every sequence, or the next chunk of its prompt."""
        active = {slot: s for slot, s in enumerate(self.slots) if s is not None}
        start = time.perf_counter()
        rows = first_fit(max(active) + 1, self.row_sizes)
        chunk = CHUNK if any(len(s.unread) > 1 for s in active.values()) else 1
        length = first_fit(max(s.position for s in active.values()) + chunk, self.lengths)
        tokens = torch.zeros(rows, chunk, dtype=torch.int64)
        positions = torch.arange(chunk).repeat(rows, 1)
        for slot, s in active.items():
            read = s.unread[:chunk]
            tokens[slot, : len(read)] = torch.tensor(read)
            positions[slot] += s.position
        try:
            logits = await self.forward(tokens, positions, length)
        except (dtorch.errors.PoolError, dtorch.errors.TensorLostError):
            raise  # the model is gone
        except Exception as error:
            log.exception("a step failed, and with it all sequences in it")
            for s in active.values():
                self._end(s, error)
            self.empty_cache()  # a failed write has left the old one without a value
            return
        self.counts.steps += 1
        self.counts.shapes.add((rows, chunk, length))
        for slot, s in active.items():
            if s.ended:
                continue
            try:
                self._advance(s, logits[slot])
            except Exception as error:
                log.warning("a sequence failed: %s", error)
                self._end(s, error)
                # What is masked counts with weight 0, and 0 times NaN is NaN to whoever gets the slot next.
                for cache in (*self.keys, *self.values):
                    cache[slot : slot + 1].zero_()
        self.counts.seconds_per_step += 0.1 * (time.perf_counter() - start - self.counts.seconds_per_step)

    def _advance(self, s: Sequence, logits: torch.Tensor) -> None:
        """Take in what a step found for `s`: float32[chunk, 256]."""
        read = min(len(s.unread), len(logits))
        s.position += read
        s.unread = s.unread[read:]
        if s.unread:
            return
        token = s.choose(logits[read - 1])
        s.unread = [token]
        s.written += 1
        s.tokens.send_nowait(token)
        self.counts.tokens += 1
        if s.written == s.limit:
            self._end(s)


class Prompt(BaseModel):
    """The body of a request. With temperature 0 the likeliest token is taken, else one is drawn from `seed`."""

    prompt: Text = Field(min_length=1)
    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)

    @field_validator("temperature")
    @classmethod
    def usable(cls, temperature: float) -> float:
        if 0 < temperature < COLDEST:
            raise ValueError(f"expected 0, or at least {COLDEST}")
        return temperature


def application(model: GPT, mesh: dtorch.DeviceMesh, health: Health, slots: int, max_queue: int) -> FastAPI:
    """The server around `model`, which lies on `mesh`."""
    requests = Requests()
    # On the client: what lies on executors dies with them.
    weights = {name: t.to_torch() for name, t in model.state_dict().items()}
    engine: Engine

    async def warm_up() -> None:
        await engine.warm_up()
        settle()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal engine
        async with dtorch.aio.lifespan(mesh=mesh, strict=True)(app):
            engine = Engine(model, mesh, slots, max_queue)
            await warm_up()
            # What a start does, done again on fresh executors before any request gets through to them.
            again = (lambda: model.load_state_dict(weights), engine.prepare, warm_up, health.restored)
            with ExitStack() as hooks:
                for hook in again:
                    hooks.callback(dtorch.on_restart(hook).remove)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run_engine)
                    tasks.start_soon(health.watch)
                    yield
                    tasks.cancel_scope.cancel()

    async def run_engine() -> None:
        steps = -1
        while True:
            try:
                await engine.run()
            except (dtorch.errors.PoolError, dtorch.errors.TensorLostError) as error:
                if engine.counts.steps == steps:  # nothing has worked since the last time
                    health.fail(error)
                steps = engine.counts.steps
                if health.reason is not None or not await health.recover(error):
                    return
            except Exception as error:
                health.fail(error)
                return

    app = FastAPI(title="GPT on dtorch", lifespan=lifespan)
    answer_errors(app, health)

    async def events(sequence: Sequence) -> AsyncIterator[str]:
        """Server-sent events: one for each token, and one at the end, which says ``done`` or ``error``."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            async for token in engine.stream(sequence):
                yield f"data: {json.dumps({'token': token, 'text': decoder.decode(bytes([token]))})}\n\n"
        except Exception as error:
            yield f"data: {json.dumps({'error': f'{type(error).__name__}: {error}', 'tokens': sequence.written})}\n\n"
        else:
            yield f"data: {json.dumps({'done': True, 'tokens': sequence.written})}\n\n"

    class Events(StreamingResponse):
        """The events of one sequence, which ends with the response: finished or not, begun or not."""

        def __init__(self, sequence: Sequence) -> None:
            super().__init__(events(sequence), media_type="text/event-stream")
            self.sequence = sequence

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            with suppress(ClientDisconnect, SequenceFailed), requests.count():
                try:
                    await super().__call__(scope, receive, send)
                finally:
                    engine.leave(self.sequence)
                if self.sequence.error is not None:
                    raise SequenceFailed
                if self.sequence.written < self.sequence.limit:
                    raise ClientDisconnect

    @app.post("/generate")
    async def generate(body: Prompt) -> StreamingResponse:
        prompt = body.prompt.encode()
        # The last token that is written is never read.
        if len(prompt) + body.max_tokens - 1 > engine.context:
            raise HTTPException(
                422, f"{len(prompt)} bytes of prompt and {body.max_tokens} tokens are more than {engine.context}"
            )
        try:
            health.check()
            sequence = engine.submit(prompt, body.max_tokens, body.temperature, body.seed)
        except (dtorch.errors.OverloadedError, dtorch.errors.PoolError):
            with requests.count():
                raise
        return Events(sequence)

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        return health.answer()

    def samples() -> Iterator[Sample]:
        yield from requests.samples("generate")
        yield "generate_tokens_total", "counter", engine.counts.tokens, {}
        yield "generate_steps_total", "counter", engine.counts.steps, {}
        yield "recoveries_total", "counter", health.recoveries, {}
        yield "generate_shapes", "gauge", len(engine.counts.shapes), {}
        yield "generate_sequences", "gauge", sum(s is not None and not s.ended for s in engine.slots), {}
        yield "generate_queue_depth", "gauge", len(engine.queue), {}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return prometheus(samples())

    return app


def trained(mesh: dtorch.DeviceMesh, steps: int, seed: int) -> GPT:
    """A GPT that has learned for some steps."""
    dtorch.manual_seed(seed)
    with dtorch.device_mesh(mesh):
        model = GPT(layers=2, width=128, heads=4, context=256, dropout=0.0)
    parallelize_module(model, mesh, PLAN)
    optimizer = dtorch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = batches(read_text(None), 8, model.config["context"], seed)
    for step in range(steps):
        x, y = (dtorch.distribute_tensor(t, mesh, [Replicate()]) for t in next(stream))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == steps - 1 or step % 20 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f} nats/byte", flush=True)
    return model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stream text from a GPT with dtorch.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each weight, and the cache")
    parser.add_argument("--threads", type=int, default=1, help="cores that an operator of a lone executor uses")
    parser.add_argument("--checkpoint", metavar="FILE", help="what `train_gpt.py --save FILE` wrote")
    parser.add_argument("--steps", type=int, default=100, help="without a checkpoint: steps to learn at the start")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of what is learned from")
    parser.add_argument("--slots", type=int, default=16, help="sequences computed at once")
    parser.add_argument("--max-queue", type=int, default=256, help="sequences that wait for a slot; more get 429")
    death_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dtorch.configure(on_executor_death=args.on_executor_death)
    torch.set_num_threads(args.threads)
    mesh = dtorch.init_device_mesh(args.device, (args.tp,), mesh_dim_names=["tp"])
    if args.checkpoint:
        model = load(args.checkpoint)
        parallelize_module(model, mesh, PLAN)
        model.to(mesh)
    else:
        model = trained(mesh, args.steps, args.seed)
    health = Health(mesh)
    app = application(model, mesh, health, args.slots, args.max_queue)
    print(f"serving a GPT on {mesh} at http://{args.host}:{args.port}/generate", flush=True)
    serve(app, args.host, args.port, health)


if __name__ == "__main__":
    main()
