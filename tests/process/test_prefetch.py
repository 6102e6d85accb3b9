"""Batches uploaded ahead: their order and values, how many there are at once, and what is left when a loop is left."""

from __future__ import annotations

import asyncio
import collections
import gc
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.aio import prefetch, prefetching

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@pytest.fixture
def mesh() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


class Loader:
    """Batches int64[4] of their index, counted as they are made; raises, or ends, where it is told to."""

    def __init__(self, count: int, error_at: int = -1) -> None:
        self.count, self.error_at = count, error_at
        self.made = 0
        self.closed = 0
        self.threads: set[int] = set()

    def _batch(self, i: int) -> torch.Tensor:
        self.threads.add(threading.get_ident())
        if i == self.error_at:
            raise KeyError(i)
        self.made += 1
        return torch.full((4,), i)

    def sync(self) -> Iterator[torch.Tensor]:
        try:
            for i in range(self.count):
                yield self._batch(i)
        finally:
            self.closed += 1

    async def asynchronous(self) -> AsyncIterator[torch.Tensor]:
        try:
            for i in range(self.count):
                await anyio.lowlevel.checkpoint()
                yield self._batch(i)
        finally:
            self.closed += 1
            await anyio.lowlevel.checkpoint()

    def of(self, kind: str) -> Any:
        return self.sync() if kind == "sync" else self.asynchronous()


async def until(condition: Any) -> None:
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.002)


@BACKENDS
@KINDS
def test_values_in_order(mesh: dtorch.DeviceMesh, backend: str, kind: str) -> None:
    async def main() -> None:
        loader = Loader(20)
        seen = []
        async for batch in prefetch(loader.of(kind), mesh, [Shard(0)]):
            assert isinstance(batch, dtorch.Tensor) and batch.placements == [Shard(0)] and batch.device_mesh == mesh
            seen.append((await batch).tolist())
        assert seen == [[i] * 4 for i in range(20)]
        assert loader.closed == 1
        assert (threading.get_ident() in loader.threads) == (kind == "async")

    anyio.run(main, backend=backend)


class Pair(NamedTuple):
    x: Any
    y: Any


NESTED = {"x": torch.arange(8.0).view(4, 2), "rest": (torch.arange(4), [torch.ones(2, 2), "name", None, 7])}


@BACKENDS
@pytest.mark.parametrize(
    ("batch", "placements", "want"),
    [
        (torch.ones(4), Shard(0), [Shard(0)]),
        (torch.ones(4), None, [Replicate()]),
        ((torch.ones(4), torch.ones(2)), [Shard(0)], [Shard(0), Shard(0)]),
        ([torch.ones(4), torch.ones(2)], ([Shard(0)], Replicate()), [Shard(0), Replicate()]),
        (Pair(torch.ones(4), torch.ones(2)), ([Shard(0)], None), [Shard(0), Replicate()]),
        (NESTED, [Shard(0)], [Shard(0)] * 3),
        (
            NESTED,
            {"rest": (Replicate(), [[Shard(1)], None, None, None]), "x": [Shard(1)]},
            [Shard(1), Replicate(), Shard(1)],
        ),
        (collections.UserDict(a=torch.ones(4), b=torch.ones(4)), {"b": Shard(0), "a": None}, [Replicate(), Shard(0)]),
    ],
)
def test_structures(mesh: dtorch.DeviceMesh, backend: str, batch: Any, placements: Any, want: list[Any]) -> None:
    def leaves(tree: Any) -> list[Any]:
        if isinstance(tree, (dict, collections.UserDict)):
            tree = list(tree.values())
        return [leaf for node in tree for leaf in leaves(node)] if isinstance(tree, (list, tuple)) else [tree]

    async def main() -> None:
        async for got in prefetch([batch] * 3, mesh, placements):
            assert type(got) is type(batch) or isinstance(batch, torch.Tensor)
            tensors = [t for t in leaves(got) if isinstance(t, torch.Tensor)]
            assert [t.placements[0] for t in tensors] == want
            for mine, given in zip(leaves(got), leaves(batch), strict=True):
                assert (await mine).equal(given) if isinstance(given, torch.Tensor) else mine is given

    anyio.run(main, backend=backend)


@pytest.mark.parametrize(
    ("batch", "placements"),
    [
        ((torch.ones(4), torch.ones(4)), ([Shard(0)],)),
        ({"a": torch.ones(4)}, {"b": [Shard(0)]}),
        (torch.ones(4), {"b": [Shard(0)]}),
        ((torch.ones(4),), "Shard(0)"),
    ],
)
def test_placements_unlike_the_batch_are_refused(mesh: dtorch.DeviceMesh, batch: Any, placements: Any) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"placements=.* (are not like the batch|one placement per mesh dim)"):
            async for _ in prefetch([batch], mesh, placements):
                raise AssertionError

    anyio.run(main)


def test_arguments_are_checked_at_the_call(mesh: dtorch.DeviceMesh) -> None:
    with pytest.raises(ValueError, match="depth=0"):
        prefetch([], mesh, depth=0)
    with pytest.raises(TypeError, match="takes an iterable"):
        prefetch(3, mesh)
    assert len(prefetch([1, 2, 3], mesh)) == 3


@BACKENDS
@KINDS
def test_a_loader_makes_plain_tensors_whatever_the_default_mesh_is(
    mesh: dtorch.DeviceMesh, backend: str, kind: str
) -> None:
    made: list[torch.Tensor] = []

    class Watched(Loader):
        def _batch(self, i: int) -> torch.Tensor:
            made.append(super()._batch(i))
            return made[-1]

    async def main() -> None:
        async with dtorch.aio.open(mesh=mesh):
            async for batch in prefetch(Watched(3).of(kind)):
                assert batch.device_mesh == mesh
        assert len(made) == 3 and all(type(t) is torch.Tensor for t in made)

    anyio.run(main, backend=backend)


@BACKENDS
def test_torchs_data_loader_epoch_after_epoch(mesh: dtorch.DeviceMesh, backend: str) -> None:
    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))

    async def main() -> None:
        batches = prefetch(DataLoader(data, batch_size=4), mesh, [Shard(0)])
        assert len(batches) == 3
        for _ in range(2):
            rows = []
            async for x, y in batches:
                rows += (await y).tolist()
                assert (await x)[:, 0].tolist() == [2.0 * i for i in rows[-len(x) :]]
            assert rows == list(range(10))

    anyio.run(main, backend=backend)


@BACKENDS
@KINDS
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth_bounds_what_is_loaded_ahead(mesh: dtorch.DeviceMesh, backend: str, kind: str, depth: int) -> None:
    async def main() -> None:
        loader = Loader(30)
        taken = 0
        async for _ in prefetch(loader.of(kind), mesh, [Shard(0)], depth=depth):
            taken += 1
            # As much as may be is loaded while the consumer is busy with something else.
            await until(lambda t=taken: loader.made == min(t + depth, 30))
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            assert loader.made == min(taken + depth, 30)
        assert taken == 30

    anyio.run(main, backend=backend)


@BACKENDS
@KINDS
def test_an_error_of_the_loader_comes_in_its_place(mesh: dtorch.DeviceMesh, backend: str, kind: str) -> None:
    async def main() -> None:
        loader = Loader(10, error_at=3)
        iterator = aiter(prefetch(loader.of(kind), mesh, [Shard(0)], depth=8))
        seen = [(await (await anext(iterator)))[0].item() for _ in range(3)]
        assert seen == [0, 1, 2]
        with pytest.raises(KeyError) as caught:
            await anext(iterator)
        assert caught.value.args == (3,) and caught.traceback[-1].name == "_batch"
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
        assert loader.closed == 1

    anyio.run(main, backend=backend)


class Raising:
    """Two batches, and then `error`, from one of the places that run a loader's code."""

    def __init__(self, error: BaseException, at: str = "next") -> None:
        self.error, self.at, self.given = error, at, 0

    def _next(self) -> torch.Tensor:
        self.given += 1
        if self.given > 2:
            raise self.error
        return torch.full((4,), self.given)


class Sync(Raising):
    def __iter__(self) -> Sync:
        if self.at == "iter":
            raise self.error
        return self

    def __next__(self) -> torch.Tensor:
        return self._next()


class Async(Raising):
    def __aiter__(self) -> Async:
        if self.at == "iter":
            raise self.error
        return self

    async def __anext__(self) -> torch.Tensor:
        await anyio.lowlevel.checkpoint()
        return self._next()


@BACKENDS
@pytest.mark.parametrize(
    ("loader", "name", "before"),
    [
        (lambda: Sync(StopAsyncIteration("bug")), "StopAsyncIteration", 2),
        (lambda: Sync(asyncio.CancelledError("bug")), "CancelledError", 2),
        (lambda: Sync(StopAsyncIteration("bug"), "iter"), "StopAsyncIteration", 0),
        (lambda: Sync(asyncio.CancelledError("bug"), "iter"), "CancelledError", 0),
        (lambda: Async(asyncio.CancelledError("bug")), "CancelledError", 2),
        (lambda: Async(StopAsyncIteration("bug"), "iter"), "StopAsyncIteration", 0),
    ],
)
def test_errors_that_mean_something_to_a_loop_are_told_as_the_loaders(
    mesh: dtorch.DeviceMesh, backend: str, loader: Any, name: str, before: int
) -> None:
    async def main() -> None:
        seen: list[int] = []
        iterator = aiter(prefetch(loader(), mesh, [Shard(0)]))
        with anyio.fail_after(20):
            with pytest.raises(RuntimeError, match=rf"the loader raised {name}\('bug'\)") as caught:
                async for batch in iterator:
                    seen.append((await batch)[0].item())
            assert type(caught.value) is RuntimeError and type(caught.value.__cause__).__name__ == name
            assert len(seen) == before
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)

    anyio.run(main, backend=backend)


@BACKENDS
@KINDS
def test_one_iterator_serves_one_task(mesh: dtorch.DeviceMesh, backend: str, kind: str) -> None:
    async def main() -> None:
        seen: list[int] = []
        refused: list[str] = []

        async def consume(iterator: Any) -> None:
            try:
                async for batch in iterator:
                    seen.append((await batch)[0].item())
            except RuntimeError as error:
                refused.append(str(error))

        iterator = aiter(prefetch(Loader(10).of(kind), mesh, [Shard(0)]))
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(consume, iterator)
        # Whoever came first gets them all; nothing is lost by the other.
        assert seen == list(range(10))
        assert len(refused) == 1 and "one iterator serves one task" in refused[0]

        # One after the other is no harm, nor is a task whose wait was cancelled.
        iterator = aiter(prefetch(Loader(3).of(kind), mesh, [Shard(0)]))
        with anyio.move_on_after(0):
            await anext(iterator)
        got = [(await (await anext(iterator)))[0].item()]
        await consume(iterator)
        assert got == [0] and seen[10:] == [1, 2] and len(refused) == 1

    anyio.run(main, backend=backend)


@BACKENDS
def test_an_error_of_iter_and_an_empty_loader(mesh: dtorch.DeviceMesh, backend: str) -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no such data")

    async def main() -> None:
        with pytest.raises(OSError, match="no such data"):
            async for _ in prefetch(Broken(), mesh):
                raise AssertionError
        async for _ in prefetch([], mesh):
            raise AssertionError

    anyio.run(main, backend=backend)


@BACKENDS
@KINDS
@pytest.mark.parametrize("way", ["break", "error", "cancel", "return", "aclose", "with"])
def test_a_loop_that_is_left_leaves_nothing(
    mesh: dtorch.DeviceMesh, backend: str, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(10**9)
    uploads: list[weakref.ref[Any]] = []

    def upload(*args: Any) -> dtorch.Tensor:
        made = dtorch.distribute_tensor(*args)
        uploads.append(weakref.ref(made))
        return made

    monkeypatch.setattr(prefetching, "distribute_tensor", upload)

    async def leave() -> None:
        if way == "with":
            async with prefetch(loader.of(kind), mesh, [Shard(0)], depth=3) as batches:
                async for _ in batches:
                    break
            assert loader.closed == 1
            return
        if way == "aclose":
            iterator = aiter(prefetch(loader.of(kind), mesh, [Shard(0)], depth=3))
            await anext(iterator)
            await iterator.aclose()
            assert loader.closed == 1
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
            return
        taken = 0
        async for _ in prefetch(loader.of(kind), mesh, [Shard(0)], depth=3):
            taken += 1
            if taken < 3:
                continue
            if way == "break":
                break
            if way == "return":
                return
            if way == "error":
                raise ZeroDivisionError
            await anyio.sleep_forever()

    async def main() -> None:
        with anyio.move_on_after(0.3 if way == "cancel" else 60):
            if way == "error":
                with pytest.raises(ZeroDivisionError):
                    await leave()
            else:
                await leave()
        await until(lambda: loader.closed == 1)
        made = loader.made
        for _ in range(20):
            await anyio.sleep(0.001)
        assert loader.made == made
        if backend == "asyncio":
            assert len(asyncio.all_tasks()) == 1

    anyio.run(main, backend=backend)
    gc.collect()
    assert uploads and not any(ref() is not None for ref in uploads)
    assert not any("AnyIO" in t.name for t in threading.enumerate())


class Restarting:
    """A loader that begins anew with the iterator it gave before, as torch's does with persistent workers."""

    def __init__(self) -> None:
        self.at, self.busy = 0, False

    def __iter__(self) -> Restarting:
        assert not self.busy, "begun anew while it made a batch"
        self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        assert not self.busy
        self.busy = True
        time.sleep(0.02)
        self.busy = False
        self.at += 1
        return torch.full((4,), self.at)


@BACKENDS
def test_a_loader_begins_anew_when_the_last_pass_has_let_go_of_it(mesh: dtorch.DeviceMesh, backend: str) -> None:
    async def main() -> list[list[int]]:
        batches, passes = prefetch(Restarting(), mesh, [Shard(0)]), []
        for _ in range(4):
            seen: list[int] = []
            async for x in batches:
                seen.append(int((await x)[0]))
                if len(seen) == 3:
                    break
            passes.append(seen)
        return passes

    assert anyio.run(main, backend=backend) == [[1, 2, 3]] * 4


@BACKENDS
def test_cancelling_the_wait_for_a_batch_loses_none(mesh: dtorch.DeviceMesh, backend: str) -> None:
    rng = random.Random(3)

    async def slowly() -> AsyncIterator[torch.Tensor]:
        for i in range(60):
            await anyio.sleep(rng.choice([0, 0, 0.002]))
            yield torch.tensor([i])

    async def main() -> None:
        seen: list[int] = []
        cut = 0
        iterator = aiter(prefetch(slowly(), mesh))
        while True:
            batch = None
            with anyio.move_on_after(rng.choice([0, 0.001, 1])) as scope:
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    break
            cut += scope.cancelled_caught
            if batch is not None:
                seen.append(int(await batch))
        assert seen == list(range(60)) and cut

    anyio.run(main, backend=backend)


@BACKENDS
def test_the_loop_goes_on_while_a_batch_is_loaded(mesh: dtorch.DeviceMesh, backend: str) -> None:
    may = threading.Event()

    def held() -> Iterator[torch.Tensor]:
        yield torch.zeros(4)
        assert may.wait(30)
        yield torch.ones(4)

    async def main() -> None:
        with torch.no_grad():
            async for batch in prefetch(held(), mesh, [Shard(0)]):
                assert not torch.is_grad_enabled()
                if not may.is_set():
                    # The loader stands still in its thread; here everything works.
                    assert (await (batch + 1)).tolist() == [1] * 4
                    may.set()
        assert may.is_set()

    anyio.run(main, backend=backend)


def test_the_end_of_the_loop_in_the_middle_is_no_hang(mesh: dtorch.DeviceMesh) -> None:
    loader = Loader(10**9)

    async def main() -> None:
        iterator = aiter(prefetch(loader.sync(), mesh, [Shard(0)]))
        await anext(iterator)
        asyncio.get_running_loop().kept = iterator  # type: ignore[attr-defined]

    asyncio.run(main())
    assert loader.closed == 1


def test_a_task_that_is_cancelled_from_outside_is_told(mesh: dtorch.DeviceMesh) -> None:
    async def main() -> None:
        for passes in range(1, 5):
            iterator = aiter(prefetch(Loader(10**9).sync(), mesh, [Shard(0)]))
            first = asyncio.ensure_future(anext(iterator))
            for _ in range(passes):
                await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task(), first}:
                task.cancel()
            with anyio.fail_after(20), pytest.raises(dtorch.PoolError, match="loading was cancelled"):
                await first
                while True:
                    await anext(iterator)

    asyncio.run(main())
