"""CommDebugMode: which collectives a piece of a program amounts to, in all and module by module."""

from __future__ import annotations

import threading
from collections import Counter
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..._tensor import Tensor
from ...placement import Placement
from ...runtime import moves

__all__ = ["CommCounts", "CommDebugMode"]

_NAMES = {
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}


class CommCounts(dict[Any, int]):
    """Collective → how often; 0 where it did not occur.

    The collectives are called "all_reduce", "all_gather", "reduce_scatter", "all_to_all", and "send" from one mesh
    to another. torch's operators, such as ``torch.ops.c10d_functional.all_reduce``, find the same numbers.
    """

    def __missing__(self, key: Any) -> int:
        name = str(key).rpartition(".")[2]
        return self.get(_NAMES.get(name, name), 0)


class CommDebugMode:
    """Counts, within ``with``, the collectives that this thread or task issues; forward, backward and reading.

    A command that moves several tensors counts once for each. What the client fetches is no collective, but the
    reduction of a Partial tensor on the way is.

        with CommDebugMode() as mode:
            model(x).sum().backward()
        print(mode.get_comm_counts(), mode.bytes_moved)

    Attributes:
        bytes_moved: bytes that the busiest ranks received.
        commands: how many commands moved something between ranks.
        module_counts: by the name of a module in the outermost module called, what its forward and its children's
            issued; under "backward" what backward did.
    """

    def __init__(self) -> None:
        self.bytes_moved = 0
        self.commands = 0
        self.module_counts: dict[str, CommCounts] = {}
        self._counts = CommCounts()
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._parameters: dict[str, dict[str, torch.Tensor]] = {}
        self._hooks: dict[torch.nn.Module, Any] = {}
        self._token: Token[tuple[CommDebugMode, ...]] | None = None

    def __enter__(self) -> CommDebugMode:
        _listening.begin()
        self.bytes_moved = self.commands = 0
        self._counts, self.module_counts = CommCounts(), {}
        self._token = _active.set((*_active.get(), self))
        return self

    def __exit__(self, *args: object) -> None:
        assert self._token is not None
        _active.reset(self._token)
        _listening.end()
        for hook in self._hooks.values():
            hook.remove()
        self._stack.clear()
        self._names.clear()
        self._hooks.clear()

    def get_comm_counts(self) -> CommCounts:
        """How often each collective occurred."""
        return CommCounts(self._counts)

    def get_total_counts(self) -> int:
        """How many collectives occurred."""
        return sum(self._counts.values())

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """Module name → parameter name → parameter, of the modules called."""
        return {name: dict(parameters) for name, parameters in self._parameters.items()}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Name of a parameter of a module called → its placements."""
        return {
            f"{module}.{name}": p.placements
            for module, parameters in self._parameters.items()
            for name, p in parameters.items()
            if isinstance(p, Tensor)
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 0) -> str:
        """The counts as an indented table.

        Args:
            noise_level: from 1 on also the placements of parameters.
        """
        lines = ["Global", *_table(self._counts, 2)]
        for name, counts in self.module_counts.items():
            depth = 2 * (name.count(".") + 1)
            lines += [" " * depth + name, *_table(counts, depth + 2)]
            if noise_level:
                found = self._parameters.get(name, {})
                placed = {k: p.placements for k, p in found.items() if isinstance(p, Tensor)}
                lines += [f"{' ' * (depth + 2)}*{k}: {v!r}" for k, v in placed.items()]
        return "\n".join(lines)

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write :meth:`generate_comm_debug_tracing_table` to a file."""
        with open(file_name, "w", encoding="utf-8") as f:
            f.write(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    # -- what is listened to ----------------------------------------------------------------------------------

    def _moved(self, kinds: tuple[str, ...], nbytes: int) -> None:
        if not kinds:
            return
        self.commands += 1
        self.bytes_moved += nbytes
        backward = torch._C._current_graph_task_id() != -1
        for name in ["backward"] if backward else self._stack:
            _add(self.module_counts.setdefault(name, CommCounts()), kinds)
        _add(self._counts, kinds)

    def _enter_module(self, module: torch.nn.Module) -> None:
        if not self._stack:
            root = type(module).__name__
            self._names = {id(m): f"{root}.{n}" if n else root for n, m in module.named_modules()}
        if module not in self._hooks:
            # The last of the module's own: what its other hooks move is part of it.
            self._hooks[module] = module.register_forward_hook(self._leave_module, always_call=True)
        name = self._names.get(id(module), type(module).__name__)
        self._stack.append(name)
        self.module_counts.setdefault(name, CommCounts())
        self._parameters[name] = dict(module.named_parameters(recurse=False))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack and self in _active.get():
            self._stack.pop()


def _add(counts: CommCounts, kinds: tuple[str, ...]) -> None:
    for kind, n in Counter(kinds).items():
        counts[kind] = counts.get(kind, 0) + n


def _table(counts: CommCounts, depth: int) -> list[str]:
    return [f"{' ' * depth}*{kind}: {n}" for kind, n in sorted(counts.items())]


# The modes that this thread or task is in; others never see its collectives.
_active: ContextVar[tuple[CommDebugMode, ...]] = ContextVar("dtorch_comm_debug_modes", default=())


def _observe(kinds: tuple[str, ...], nbytes: int) -> None:
    for mode in _active.get():
        mode._moved(kinds, nbytes)  # pyright: ignore[reportPrivateUsage]


def _entered(module: torch.nn.Module, args: Any) -> None:
    for mode in _active.get():
        mode._enter_module(module)  # pyright: ignore[reportPrivateUsage]


class _Listening:
    """Whether any thread is in a mode: only then is anything paid, and is there a hook on all modules."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modes = 0
        self._hook: Any = None

    def begin(self) -> None:
        with self._lock:
            self._modes += 1
            if self._modes == 1:
                moves.observers.append(_observe)
                self._hook = register_module_forward_pre_hook(_entered)

    def end(self) -> None:
        with self._lock:
            self._modes -= 1
            if not self._modes:
                moves.observers.remove(_observe)
                self._hook.remove()


_listening = _Listening()
