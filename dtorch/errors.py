"""Every exception dtorch raises.

    DtorchError
    ├── PlacementError (ValueError)       the placements of a call are not legal for the operator
    ├── DeviceMeshError (ValueError)      a mesh is malformed, or two meshes meet in one call
    ├── ConfigError (ValueError)          an environment variable or option cannot be read
    ├── RunAheadError (RuntimeError)      too much work was issued without awaiting any of it
    ├── OverloadedError (RuntimeError)    a bounded queue is full: come again later
    ├── BlockingCallError (RuntimeError)  a call would stop a running event loop (strict mode only)
    ├── PoolError (RuntimeError)          the pool cannot start, or is closed
    │   └── ExecutorDiedError             an executor process ended while it was needed
    ├── TensorLostError (RuntimeError)    the values of a tensor are gone for good
    └── RemoteError                       mixed into the type of an error that an executor raised

    BlockingCallWarning (RuntimeWarning)  a call has stopped a running event loop

A value whose computation failed raises the original type (``IndexError``, ``torch.OutOfMemoryError``, …),
which is then also a ``RemoteError``: see :func:`remote`.
"""

from __future__ import annotations

from functools import cache

__all__ = [
    "BlockingCallError",
    "BlockingCallWarning",
    "ConfigError",
    "DeviceMeshError",
    "DtorchError",
    "ExecutorDiedError",
    "OverloadedError",
    "PlacementError",
    "PoolError",
    "RemoteError",
    "RunAheadError",
    "TensorLostError",
    "remote",
]


class DtorchError(Exception):
    """Base of all errors raised by dtorch itself."""


class PlacementError(DtorchError, ValueError):
    """The placements of a call are not legal for the operator; the message lists the legal ones."""


class DeviceMeshError(DtorchError, ValueError):
    """A mesh is malformed, or tensors of different meshes meet in one call."""


class ConfigError(DtorchError, ValueError):
    """An environment variable or an option of ``configure`` cannot be read."""


class RunAheadError(DtorchError, RuntimeError):
    """A coroutine issued more work than the hard run-ahead bound without awaiting any of it."""


class OverloadedError(DtorchError, RuntimeError):
    """A bounded queue is full, and this request was not taken.

    Attributes:
        retry_after: seconds after which there should be room again, as an HTTP server says in ``Retry-After``.
    """

    def __init__(self, message: str = "the queue is full", retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[OverloadedError], tuple[str, float]]:
        return type(self), (str(self), self.retry_after)


class BlockingCallError(DtorchError, RuntimeError):
    """A call would stop the running event loop while it waits, and ``dtorch.aio.strict()`` is on."""


class BlockingCallWarning(RuntimeWarning):
    """A call stopped the running event loop while it waited; told once per call site."""


class PoolError(DtorchError, RuntimeError):
    """The pool of executors could not start, or is closed."""


class ExecutorDiedError(PoolError):
    """An executor process ended while work needed it."""


class TensorLostError(DtorchError, RuntimeError):
    """The values of a tensor are gone: its executor died, or only some ranks finished a write."""


class RemoteError(DtorchError):
    """An error that was raised on an executor. Instances are also of the original type.

    Attributes:
        rank: the mesh rank that raised, or ``None`` where it was not one rank alone.
        operator: the call that failed, with shapes and placements.
        site: ``file:line in function`` of the user's call that issued it.
        executor_traceback: the traceback as the executor saw it.
    """

    rank: int | None = None
    operator: str = ""
    site: str = ""
    executor_traceback: str = ""


@cache
def remote(original: type[BaseException]) -> type[BaseException]:
    """The type that is both `original` and a :class:`RemoteError`, named as `original` is.

    Where the two cannot share a layout (an exception class written in C with fields of its own), plain
    ``RemoteError`` stands in.
    """
    try:
        kind = type(original.__name__, (RemoteError, original), {"__module__": original.__module__})
    except TypeError:
        return RemoteError
    # The original's constructor may want other arguments than the ones that travel.
    kind.__init__ = lambda self, *args: Exception.__init__(self, *args)  # type: ignore[misc]
    kind.__new__ = lambda cls, *args: Exception.__new__(cls, *args)  # type: ignore[method-assign,assignment]
    kind.__str__ = Exception.__str__  # type: ignore[method-assign,assignment]
    return kind
