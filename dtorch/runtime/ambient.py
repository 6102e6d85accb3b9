"""What holds in a task and in all that it starts, unless something holds in the whole process."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

__all__ = ["Ambient"]

T = TypeVar("T")

_UNSET: Any = object()


class Ambient(Generic[T]):
    """A context variable whose default can be changed for the whole process.

    Two tasks never see each other's value. The default is for servers, whose requests are no children of the task that
    sets the server up.

    Args:
        name: for debuggers.
        default: the value wherever none was set.

    Attributes:
        default: that value; may be assigned.
    """

    __slots__ = ("_variable", "default")

    def __init__(self, name: str, default: T) -> None:
        self._variable: ContextVar[T] = ContextVar(name, default=_UNSET)
        self.default = default

    def get(self) -> T:
        """The value in this context."""
        found = self._variable.get()
        return self.default if found is _UNSET else found

    def set(self, value: T) -> Token[T]:
        """Set it in this context; what :meth:`reset` needs to undo that."""
        return self._variable.set(value)

    def reset(self, token: Token[T]) -> None:
        """Undo a :meth:`set`. Of a context that has ended with its task there is nothing to undo."""
        try:
            self._variable.reset(token)
        except ValueError:
            return
