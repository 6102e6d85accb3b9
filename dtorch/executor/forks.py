"""Functions of the user that fork: their child ends where the function does, and never runs on as an executor."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["run_here"]


def run_here(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``. In a child that it forked, the process ends with the function, as a script would:
    with the status of a ``SystemExit``, or after the traceback of another exception."""
    me, status = os.getpid(), 0
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if os.getpid() != me:
            status = _told(error)
        raise
    finally:
        if os.getpid() != me:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)


def _told(error: BaseException) -> int:
    """The exit status that `error` makes, said on stderr if it is for reading."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
