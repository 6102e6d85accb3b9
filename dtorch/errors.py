"""Every exception dtorch raises.

    DtorchError
    ├── PlacementError (ValueError)       the placements of a call are not legal for the operator
    ├── DeviceMeshError (ValueError)      a mesh is malformed, or two meshes meet in one call
    ├── CheckpointError (ValueError)      a checkpoint cannot be written, or is not whole
    ├── ConfigError (ValueError)          an environment variable or option cannot be read
    ├── RunAheadError (RuntimeError)      too much work was issued without awaiting any of it
    ├── OverloadedError (RuntimeError)    a bounded queue is full: come again later
    ├── BlockingCallError (RuntimeError)  a call would stop a running event loop (strict mode only)
    ├── PoolError (RuntimeError)          the pool cannot start, or is closed
    │   ├── ExecutorDiedError             an executor process ended while it was needed
    │   └── PoolRestartingError           a fresh pool is on its way: come again in a moment
    ├── TensorLostError (RuntimeError)    the values of a tensor are gone for good
    └── RemoteError                       mixed into the type of an error that an executor raised

    BlockingCallWarning (RuntimeWarning)  a call has stopped a running event loop

A value whose computation failed raises the original type (``IndexError``, ``torch.OutOfMemoryError``, …),
which is then also a ``RemoteError``: see :func:`remote`. Types that steer the interpreter or an event loop
(``StopIteration``, ``KeyboardInterrupt``, ``SystemExit``, ``CancelledError``) arrive as ``RuntimeError``, as Python
itself makes of a ``StopIteration`` that leaves a generator: raised as they are, they would end somebody else's loop,
quietly.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from types import BuiltinFunctionType, WrapperDescriptorType, new_class
from typing import Any

__all__ = [
    "BlockingCallError",
    "BlockingCallWarning",
    "CheckpointError",
    "ConfigError",
    "DeviceMeshError",
    "DtorchError",
    "ExecutorDiedError",
    "OverloadedError",
    "PlacementError",
    "PoolError",
    "PoolRestartingError",
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


class CheckpointError(DtorchError, ValueError):
    """A checkpoint cannot be written, is damaged or foreign, or is not of the state it is loaded into."""


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


class PoolRestartingError(PoolError):
    """A fresh pool takes a dead one's place, and the program's state is being set anew: come again in a moment.

    Attributes:
        retry_after: seconds after which to come again, as an HTTP server says in ``Retry-After``.
    """

    retry_after: float = 1.0


class TensorLostError(DtorchError, RuntimeError):
    """The values of a tensor are gone: its executor died, or only some ranks finished a write."""


class RemoteError(DtorchError):
    """An error that was raised on an executor. Instances are also of the original type.

    An attribute of the original that has one of these names gives way to dtorch's.

    Attributes:
        rank: the mesh rank that raised, or ``None`` where it was not one rank alone.
        ranks: all mesh ranks known to have raised the same, in order.
        operator: the call that failed, with shapes and placements.
        site: ``file:line in function`` of the user's call that issued it.
        executor_traceback: the traceback as the executor saw it.
    """

    rank: int | None = None
    ranks: tuple[int, ...] = ()
    operator: str = ""
    site: str = ""
    executor_traceback: str = ""

    # The arguments that travelled, and what the executor's str() made of them.
    _said: tuple[tuple[Any, ...], str] | None = None
    _type: tuple[type[BaseException], str] | None = None

    # The original may let nobody set anything (a frozen dataclass, say), not even a note.
    __setattr__ = BaseException.__setattr__

    def __str__(self) -> str:
        # Not the original's own: it may want what did not travel. But whoever changes the arguments sees that.
        if self._said is not None and self._said[0] is self.args:
            return self._said[1]
        return super().__str__()

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except Exception:
            return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._type is None:
            return super().__reduce__()  # type: ignore[return-value]
        original, name = self._type
        state = {k: v for k, v in self.__dict__.items() if k not in ("_said", "_type")}
        return remade, (original, name, self.args, str(self), state)


@lru_cache(maxsize=256)
def remote(original: type[BaseException], name: str = "") -> type[RemoteError]:
    """The type that is both `original` and a :class:`RemoteError`, named as `original` is, or `name` ("module.name").

    Raises:
        Exception: `original` refuses to be subclassed.
    """
    module, _, short = name.rpartition(".") if name else (original.__module__, "", original.__name__)
    bases = (original,) if issubclass(original, RemoteError) else (RemoteError, original)
    kind: type[RemoteError] = new_class(short, bases, exec_body=lambda body: body.update(__module__=module))
    return kind


def remade(
    original: type[BaseException], name: str, args: tuple[Any, ...], message: str, state: dict[str, Any]
) -> RemoteError:
    """An error of the type ``remote(original, name)``, without the original's constructor, which may want other
    arguments than those that ended up in ``args``. Attributes that cannot be set are left out.

    Raises:
        Exception: the type cannot be made, or not without its constructor.
    """
    kind = remote(original, name)
    error = _bare(kind, args)
    error.args = args
    for attribute, value in state.items():
        try:
            object.__setattr__(error, attribute, value)
        except (AttributeError, TypeError):
            error.__dict__.setdefault(attribute, value)  # a property, say: kept where it can be looked up
    error._said = (error.args, message)
    error._type = (original, name)
    return error


def _bare(kind: type[RemoteError], args: tuple[Any, ...]) -> RemoteError:
    """An instance that only constructors written in C have seen: those of the exception class that Python's own code
    knows. The user's may do anything."""
    error = _made(kind, args)
    init = next(m for c in kind.__mro__ if type(m := vars(c).get("__init__")) is WrapperDescriptorType)
    with suppress(Exception):  # arguments of its own: what it would have kept travels as attributes
        init(error, *args)
    return error


def _made(kind: type[RemoteError], args: tuple[Any, ...]) -> Any:
    # Python takes the first for unsafe where the base that laid out the type has another: MemoryError's is such a one.
    for new in [m for c in kind.__mro__ if type(m := vars(c).get("__new__")) is BuiltinFunctionType]:
        for given in (args, ()):
            with suppress(Exception):
                return new(kind, *given)
    raise TypeError(f"{kind.__name__} cannot be made without its constructor")
