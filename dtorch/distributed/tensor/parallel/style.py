"""The styles that shard parameters: column-wise, row-wise, and along the sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ....mesh import DeviceMesh
from ....nn.placing import put, put_parameter
from ....placement import Placement, Replicate, Shard, as_placement
from ..module import distribute_module

__all__ = ["ColwiseParallel", "ParallelStyle", "RowwiseParallel", "SequenceParallel"]


class ParallelStyle(ABC):
    """How one module is parallelised over one mesh dim; a plan of ``parallelize_module`` maps names to styles."""

    src_data_rank: int | None = 0
    """Accepted as torch's: there is one source of values here, the client."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_") and k != "src_data_rank")
        return f"{type(self).__name__}({shown})"


def _first(prepare: Callable[[Any], Any]) -> Callable[..., tuple[Any, ...]]:
    """An input_fn of distribute_module that prepares the first input and passes the others."""

    def prepare_first(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        if not inputs:
            kind = type(module).__name__
            raise ValueError(f"{kind}: its parallel style prepares the first positional input, and none was given")
        return (prepare(inputs[0]), *inputs[1:])

    return prepare_first


class _Sharded(ParallelStyle):
    """What column-wise and row-wise have in common."""

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        self.input_layouts = (as_placement(input_layouts),)
        self.output_layouts = (as_placement(output_layouts),)
        self.use_local_output = use_local_output

    def _layout_of(self, module: nn.Module) -> tuple[Placement, Mapping[str, Placement]]:
        """What the module's input must be, and where each of its parameters goes."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        wanted, layout = self._layout_of(module)

        def shard(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for key, p in submodule._parameters.items():
                if p is not None:
                    submodule._parameters[key] = put_parameter(p, mesh, (layout.get(key, Replicate()),))

        def prepare(x: torch.Tensor) -> torch.Tensor:
            return put(x, device_mesh, (wanted,))

        def finish(_: nn.Module, y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
            return put(y, mesh, self.output_layouts)

        return distribute_module(module, device_mesh, shard, _first(prepare), finish)

    def _no_style(self, module: nn.Module) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} knows nn.Linear and nn.Embedding, not {type(module).__name__}; place its parameters"
            " with distribute_module(module, mesh, partition_fn)"
        )


class ColwiseParallel(_Sharded):
    """Each rank computes some of the output features of a Linear, or of the embedding dim of an Embedding.

    Args:
        input_layouts: accepted as torch's; the input, plain or not, is the whole value and is replicated.
        output_layouts: how the output goes out; by default as it is, Shard(-1).
        use_local_output: accepted as torch's; the output keeps its global shape either way.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)

    def _layout_of(self, module: nn.Module) -> tuple[Placement, Mapping[str, Placement]]:
        if isinstance(module, nn.Linear):
            return Replicate(), {"weight": Shard(0), "bias": Shard(0)}
        if isinstance(module, nn.Embedding):
            return Replicate(), {"weight": Shard(1)}
        raise self._no_style(module)


class RowwiseParallel(_Sharded):
    """Each rank computes with some of the input features of a Linear, or holds some rows of an Embedding; the
    output is a Partial sum, reduced to `output_layouts`.

    Args:
        input_layouts: accepted as torch's; the input, plain or not, is the whole value. A Linear's is sharded on
            its last dim, an Embedding's replicated.
        output_layouts: Replicate() by default (an all_reduce); Shard(d) is a reduce_scatter.
        use_local_output: accepted as torch's; the output keeps its global shape either way.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)

    def _layout_of(self, module: nn.Module) -> tuple[Placement, Mapping[str, Placement]]:
        if isinstance(module, nn.Linear):
            return Shard(-1), {"weight": Shard(1), "bias": Replicate()}
        if isinstance(module, nn.Embedding):
            return Replicate(), {"weight": Shard(0)}
        raise self._no_style(module)


class SequenceParallel(ParallelStyle):
    """A norm or a dropout on sequences of which each rank has a part; parameters are replicated.

    Args:
        sequence_dim: the dim of the input that is sharded.
        use_local_output: accepted as torch's; the output keeps its global shape either way.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepare = _first(lambda x: put(x, device_mesh, self.sequence_sharding))
        return distribute_module(module, device_mesh, None, prepare)
