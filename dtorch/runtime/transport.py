"""An exception as plain values, on its way from an executor to the client, and what becomes of them there.

    told = describe(error)      # on the executor: never raises, and is never large
    error = rebuild(told)       # on the client: of the original type, and a RemoteError

Whatever cannot travel is replaced by the nearest thing that can: a type that the client does not have by its nearest
base under the same name, a value that does not pickle by its repr, a long text by its beginning.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import cloudpickle

from ..errors import RemoteError, remade

__all__ = ["Told", "describe", "full_traceback", "rebuild"]

# Bytes that one argument or attribute may take, and characters of one text.
_LARGEST = 64 << 10
_SHOWN = 2000
# Exceptions of one chain of causes, and of one group, that are told of.
_DEEPEST, _WIDEST = 8, 32

# They, and all that is no Exception, would end somebody else's loop, task or process, and quietly.
_STEERING = (StopIteration, StopAsyncIteration)
# Known by other means, or of no use elsewhere.
_NOT_STATE = frozenset(["__notes__", "_said", "_type", "__weakref__", "__dict__"])


@dataclass(frozen=True, slots=True)
class Value:
    """One argument or attribute: pickled where that can be done, and as text for whoever cannot read that."""

    pickled: bytes | None
    text: str


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of an exception.

    Attributes:
        name: "module.name" of its type.
        types: its type and the bases of that, nearest first, each pickled; those that do not pickle are left out.
        steers: it is of a type that must not be raised elsewhere.
        message: its text.
        arguments, state: its ``args``, and its other attributes.
        notes: what was added to it.
        members: of a group, the exceptions in it.
        cause, context, suppress: what it came from, as Python keeps it.
    """

    name: str
    types: tuple[bytes, ...]
    steers: bool
    message: str
    arguments: tuple[Value, ...]
    state: tuple[tuple[str, Value], ...]
    notes: tuple[str, ...]
    members: tuple[Told, ...] = ()
    cause: Told | None = None
    context: Told | None = None
    suppress: bool = False

    @property
    def short_name(self) -> str:
        """The name of the type alone."""
        return self.name.rpartition(".")[2]


# -- on the executor -------------------------------------------------------------------------------------------------


def describe(error: BaseException) -> Told:
    """All that can be told of `error`."""
    return _describe(error, _DEEPEST, set())


def full_traceback(error: BaseException) -> str:
    """The traceback of `error` with all it came from, as Python prints it; of a very long one both ends."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # its __str__ is asked there too, and __notes__ may be anything
        lines = traceback.format_tb(error.__traceback__)
        text = "Traceback (most recent call last):\n" + "".join(lines) + f"{_name(type(error))}: {_message(error)}\n"
    return text if len(text) <= 2 * _LARGEST else f"{text[:_LARGEST]}\n…\n{text[-_LARGEST:]}"


def _describe(error: BaseException, depth: int, seen: set[int]) -> Told:
    seen.add(id(error))
    kind = type(error)

    def told(other: BaseException | None) -> Told | None:
        return None if other is None or depth <= 1 or id(other) in seen else _describe(other, depth - 1, seen)

    members: tuple[Told, ...] = ()
    if isinstance(error, BaseExceptionGroup):
        found = [told(e) for e in error.exceptions[:_WIDEST]]
        members = tuple(t for t in found if t is not None)
    notes = getattr(error, "__notes__", ())
    return Told(
        name=_name(kind),
        types=_types(kind),
        steers=isinstance(error, _STEERING) or not isinstance(error, Exception),
        message=_message(error),
        arguments=tuple(_value(a) for a in error.args[:_WIDEST]),
        state=() if members else _state(error),
        notes=tuple(_text(n, str, _LARGEST) for n in notes) if isinstance(notes, (list, tuple)) else (),
        members=members,
        cause=told(error.__cause__),
        context=told(error.__context__),
        suppress=error.__suppress_context__,
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _text(value: object, how: Callable[[Any], str], longest: int) -> str:
    """``how(value)``, cut; what stands for it where that raises."""
    try:
        text = how(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose {how.__name__}() raised {type(error).__name__}>"
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters in all)"


def _message(error: BaseException) -> str:
    try:
        str(error)
    except Exception as failure:
        shown = ", ".join(_text(a, repr, _SHOWN) for a in error.args[:_WIDEST])
        return f"({shown}) (its __str__ raised {type(failure).__name__})"
    return _text(error, str, _LARGEST)


def _value(value: object) -> Value:
    if isinstance(value, str):
        # Cut, a string is still one.
        value = _text(value, str, _LARGEST)
    try:
        data = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        data = None
    if data is not None and len(data) > 2 * _LARGEST:
        data = None
    return Value(data, _text(value, repr, _SHOWN))


def _types(kind: type) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for base in kind.__mro__:
        if not issubclass(base, BaseException):
            continue
        try:
            data = cloudpickle.dumps(base, pickle.HIGHEST_PROTOCOL)
        except Exception:
            continue
        if len(data) <= 2 * _LARGEST:
            found.append(data)
    return tuple(found)


def _state(error: BaseException) -> tuple[tuple[str, Value], ...]:
    """Attributes: those in the dict, in slots, and in fields of types written in C."""
    found: dict[str, Any] = {}
    for kind in type(error).__mro__:
        if kind is BaseException:
            break
        for name, member in vars(kind).items():
            if isinstance(member, (MemberDescriptorType, GetSetDescriptorType)):
                try:
                    found[name] = member.__get__(error)
                except Exception:  # a slot that was never filled
                    continue
    found.update(error.__dict__)
    return tuple((str(k), _value(v)) for k, v in list(found.items())[:_WIDEST] if k not in _NOT_STATE)


# -- on the client ---------------------------------------------------------------------------------------------------


def rebuild(told: Told) -> RemoteError:
    """The exception that `told` describes."""
    error = _rebuild(told)
    for note in told.notes:
        error.add_note(note)
    if told.cause is not None:
        error.__cause__ = rebuild(told.cause)
    if told.context is not None:
        error.__context__ = rebuild(told.context)
    error.__suppress_context__ = told.suppress
    return error


def _rebuild(told: Told) -> RemoteError:
    if told.steers:
        said = f"{told.short_name}: {told.message}" if told.message else told.short_name
        return remade(RuntimeError, "", (said,), said, {})
    arguments = tuple(_read(a) for a in told.arguments)
    if told.members:
        arguments = (*arguments[:1], [rebuild(m) for m in told.members])
    state = {name: _read(value) for name, value in told.state}
    for data in told.types:
        try:
            kind: Any = pickle.loads(data)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                continue
            # The nearest that the client has, under the name of the one that it may not have.
            name = "" if f"{kind.__module__}.{kind.__name__}" == told.name else told.name
            return remade(kind, name, arguments, told.message, state)
        except Exception:
            continue
    return remade(RemoteError, told.name, arguments, told.message, state)


def _read(value: Value) -> Any:
    if value.pickled is None:
        return value.text
    try:
        return pickle.loads(value.pickled)
    except Exception:  # of a type that the client does not have
        return value.text
