"""A state (nested dicts and lists of numbers, strings and tensors) as a tree that JSON holds, and back.

A node is None, a bool, an int, a float or a str as it stands, or an object of one key that says what it is:

    {"dict": [[key, node], …]}   {"odict": [[key, node], …], "metadata": node}   {"list": […]}   {"tuple": […]}
    {"float": "inf"}   {"size": […]}   {"bytes": base64}   {"complex": [re, im]}   {"dtype": "float32"}
    {"device": "cpu"}
    {"tensor": name, "dtype": …, "plain": true, "grad": true, "parameter": true}

Nothing in it is code: what a file says can make values of these types, and no others.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError

__all__ = ["Leaf", "decode", "encode", "is_stateful", "leaves_of", "shown"]

_SCALARS = (bool, int, float, str)
# As deep as any state is; JSON's own reader gives up at about three times that.
_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a state.

    Attributes:
        name: unique in the state: the keys on the way to it, joined by dots.
        tensor: a dtorch tensor or a plain one.
    """

    name: str
    tensor: torch.Tensor


def shown(path: tuple[Any, ...]) -> str:
    """The keys on the way to a value as one name."""
    return ".".join(map(str, path))


def is_stateful(value: Any) -> bool:
    """Whether `value` is a module, an optimizer or their like, which stand for their ``state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def encode(state: Any, is_plain: Callable[[torch.Tensor], bool], *, stateful: bool = True) -> tuple[Any, list[Leaf]]:
    """The tree of `state`, and its tensors in the order in which they stand there.

    Args:
        state: what to save.
        is_plain: whether a tensor is a plain one, to be plain again when it is loaded.
        stateful: whether modules and optimizers stand for their ``state_dict()``; else they are refused.

    Raises:
        TypeError: something in it is none of the types of a tree; the message names where.
    """
    leaves: list[Leaf] = []
    taken: set[str] = {"", "__metadata__"}

    def name_of(path: tuple[Any, ...]) -> str:
        name = base = shown(path)
        n = 1
        while name in taken:
            n += 1
            name = f"{base}#{n}"
        taken.add(name)
        return name

    def tensor(t: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        name = name_of(path)
        leaves.append(Leaf(name, t))
        node: dict[str, Any] = {"tensor": name, "dtype": _name(t.dtype)}
        if is_plain(t):
            node["plain"] = True
        if t.requires_grad:
            node["grad"] = True
        if isinstance(t, torch.nn.Parameter):
            node["parameter"] = True
        return node

    def key(k: Any, path: tuple[Any, ...]) -> Any:
        if type(k) is tuple:
            return {"tuple": [key(x, path) for x in k]}
        if k is None or type(k) in _SCALARS:
            return _scalar(k)
        raise TypeError(f"dtorch.save: a key of {shown(path) or 'the state'} is {_kind(k)}; keys are str, int or tuple")

    def node(value: Any, path: tuple[Any, ...]) -> Any:
        if value is None or type(value) in _SCALARS:
            return _scalar(value)
        if len(path) > _DEPTH:
            raise TypeError(f"dtorch.save: {shown(path[:4])}… is nested more than {_DEPTH} deep, or contains itself")
        if isinstance(value, torch.Tensor):
            return tensor(value, path)
        if isinstance(value, dict):
            pairs = [[key(k, path), node(v, (*path, k))] for k, v in value.items()]
            if not isinstance(value, OrderedDict):
                return {"dict": pairs}
            metadata = getattr(value, "_metadata", None)
            return {"odict": pairs, "metadata": None if metadata is None else node(metadata, (*path, "_metadata"))}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if type(value) in (list, tuple):
            return {type(value).__name__: [node(v, (*path, i)) for i, v in enumerate(value)]}
        if type(value) is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) is complex:
            return {"complex": [_scalar(value.real), _scalar(value.imag)]}
        if type(value) is torch.dtype:
            return {"dtype": _name(value)}
        if type(value) is torch.device:
            return {"device": str(value)}
        if stateful and is_stateful(value):
            return node(value.state_dict(), path)
        raise TypeError(
            f"dtorch.save: {shown(path) or 'the state'} is {_kind(value)}, and a checkpoint holds tensors, numbers, "
            'strings, dicts and lists; save its state_dict(), or write format="torch", which pickles'
        )

    return node(state, ()), leaves


def decode(tree: Any, tensor: Callable[[dict[str, Any]], Any]) -> Any:
    """The state of `tree`; `tensor` makes a tensor from its node.

    Raises:
        CheckpointError: it is no tree.
    """
    if tree is None or type(tree) in _SCALARS:
        return tree
    if type(tree) is dict and tree:
        kind, value = next(iter(tree.items()))
        try:
            if kind == "tensor" and type(value) is str:
                return tensor(tree)
            if kind in ("dict", "odict"):
                made = {decode(k, tensor): decode(v, tensor) for k, v in value}
                if kind == "dict":
                    return made
                ordered: Any = OrderedDict(made)
                if tree["metadata"] is not None:
                    ordered._metadata = decode(tree["metadata"], tensor)
                return ordered
            if kind in ("list", "tuple"):
                items = [decode(v, tensor) for v in value]
                return items if kind == "list" else tuple(items)
            if kind == "size":
                return torch.Size(value)
            if kind == "bytes":
                return base64.b64decode(value, validate=True)
            if kind == "complex":
                return complex(*(decode(v, tensor) for v in value))
            if kind == "float":
                return float(value)
            if kind == "dtype":
                return dtype_of(value)
            if kind == "device":
                return torch.device(value)
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, binascii.Error) as error:
            raise CheckpointError(f"the structure of the state cannot be read: {_line(error)}") from None
    raise CheckpointError(f"the structure of the state cannot be read: {str(tree)[:80]!r} is no part of one")


def leaves_of(tree: Any) -> Iterator[dict[str, Any]]:
    """The nodes of the tensors in `tree`."""
    found: list[dict[str, Any]] = []
    decode(tree, found.append)
    return iter(found)


def dtype_of(name: Any) -> torch.dtype:
    """The dtype that :func:`encode` called `name`.

    Raises:
        CheckpointError: there is none.
    """
    found = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{str(name)[:80]!r} is no dtype of this torch")
    return found


def _scalar(value: Any) -> Any:
    """`value`, which JSON itself has, unless it is a float that is no number."""
    return {"float": repr(value)} if type(value) is float and not math.isfinite(value) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _line(error: BaseException) -> str:
    """What `error` says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
