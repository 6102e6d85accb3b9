"""The event loops that dtorch is used from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

__all__ = ["LOOPS", "on"]

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])


def on(loop: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """What ``main()`` returns, run by `loop`."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
        return anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
    return anyio.run(main, backend=loop)
