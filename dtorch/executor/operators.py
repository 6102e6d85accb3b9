"""Operators that the program defined, on an executor, which did not run the program.

The function of a ``torch.library.custom_op`` runs as it is, without torch's dispatcher: nothing is registered that a
module imported later could register again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..runtime import command
from ..runtime.command import DefineOperator
from .forks import run_here

__all__ = ["OURS", "define", "find", "named"]

OURS = frozenset(["aten", "dtorch", "prims", "prim"])
"""Namespaces of operators that every executor has, and whose rules are dtorch's."""

_serials: dict[str, int] = {}
_failures: dict[str, Exception] = {}
_functions: dict[str, Callable[..., Any]] = {}


def define(m: DefineOperator) -> None:
    """Make the operator `m` known here. What goes wrong is told by the first call of it, not here."""
    if _serials.get(m.name) == m.serial:
        return
    _serials[m.name] = m.serial
    _failures.pop(m.name, None)
    _functions.pop(m.name, None)
    try:
        for path in m.libraries:
            if path not in torch.ops.loaded_libraries:
                torch.ops.load_library(path)
        if m.module is not None:
            importlib.import_module(m.module)
        elif m.functions is not None and m.schema is not None:
            _functions[m.name] = _runnable(m.name, m.schema, command.decode(m.functions))
    except Exception as error:
        _failures[m.name] = error


def _runnable(name: str, text: str, functions: dict[str | None, Callable[..., Any]]) -> Callable[..., Any]:
    """The user's function, its results held to the schema as torch holds them."""
    schema = torch._C.parse_schema(name.rpartition("::")[2] + text)
    views = any(r.alias_info is not None for r in schema.returns)
    only = functions.get(None) if len(functions) == 1 else None

    def run(*args: Any, **kwargs: Any) -> Any:
        result = run_here(only or _of_device(name, functions, args), *args, **kwargs)
        if not views:
            _refuse_aliases(name, _tensors((*args, *kwargs.values()), []), _tensors((result,), []))
        return result

    return run


def _of_device(name: str, functions: dict[str | None, Callable[..., Any]], args: tuple[Any, ...]) -> Callable[..., Any]:
    device = next((t.device.type for t in _tensors(args, [])), "cpu")
    found = functions.get(device, functions.get(None))
    if found is None:
        raise RuntimeError(f'{name} has no kernel for "{device}": register one with register_kernel')
    return found


def _tensors(values: Any, into: list[torch.Tensor]) -> list[torch.Tensor]:
    for v in values:
        if isinstance(v, torch.Tensor):
            into.append(v)
        elif type(v) is list or type(v) is tuple:
            _tensors(v, into)
    return into


def _refuse_aliases(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """A result that shares memory with an argument would change when that is written to."""
    held = {t.untyped_storage()._cdata for t in inputs}
    for t in outputs:
        storage = t.untyped_storage()._cdata
        if storage in held:
            raise RuntimeError(
                f"{name} returns a tensor that shares memory with an argument or another result, which its schema does "
                "not say: return a clone"
            )
        held.add(storage)


def named(name: str, overload: str | None = None) -> Any:
    """The operator "namespace::name", for a function that was sent and calls it."""
    namespace, _, op = name.partition("::")
    return find(namespace, op, overload)


def find(namespace: str, name: str, overload: str | None) -> Callable[..., Any]:
    """What runs the operator.

    Raises:
        RuntimeError: executors have no such operator.
    """
    qualified = f"{namespace}::{name}"
    failure = _failures.get(qualified)
    if failure is not None:
        raise RuntimeError(
            f"the executors could not define {qualified}: {type(failure).__name__}: {failure}"
        ) from failure
    function = _functions.get(qualified)
    if function is not None:
        return function
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise RuntimeError(
            f"executors have no operator {qualified}: define it with torch.library.custom_op, which is sent to them, "
            f'or name the module that defines it: dtorch.register_sharding("{qualified}", ..., module="...")'
        )
    return packet if overload is None else getattr(packet, overload)._op
