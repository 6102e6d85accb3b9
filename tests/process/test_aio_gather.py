"""What gather() makes of awaitables that are cancelled by themselves, given twice, or no single value."""

from __future__ import annotations

import asyncio

import pytest

import dtorch
from dtorch import aio

from .loops import LOOPS, on


def test_an_awaitable_that_was_cancelled_by_itself() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError("mine")

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError, match="mine"):
            await aio.gather(cancelled(), dtorch.ones(1))
        task = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_later(0.01, task.cancel)
        lost, one = await aio.gather(task, dtorch.ones(1), return_exceptions=True)
        assert isinstance(lost, asyncio.CancelledError) and one.tolist() == [1.0]
        # The caller's own cancellation is no value.
        gathering = asyncio.create_task(aio.gather(asyncio.sleep(60), return_exceptions=True))
        await asyncio.sleep(0.01)
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering

    asyncio.run(main())


@LOOPS
def test_an_error_that_is_no_exception_is_raised_itself(loop: str) -> None:
    class Stop(BaseException):
        pass

    async def stop() -> None:
        raise Stop

    async def main() -> None:
        for return_exceptions in (False, True):
            with pytest.raises(Stop):
                await aio.gather(stop(), dtorch.ones(1), return_exceptions=return_exceptions)

    on(loop, main)


@LOOPS
def test_an_awaitable_that_is_given_twice_is_awaited_once(loop: str) -> None:
    ran: list[int] = []

    async def five() -> int:
        ran.append(5)
        return 5

    async def main() -> None:
        again = five()
        assert await aio.gather(again, 1, again) == [5, 1, 5] and ran == [5]

    on(loop, main)


@LOOPS
def test_a_generator_is_refused(loop: str) -> None:
    async def main() -> None:
        with pytest.raises(TypeError, match=r"Write:  await dtorch\.aio\.gather\(\*generator\)"):
            await aio.gather(dtorch.ones(1) for _ in range(2))

    on(loop, main)
