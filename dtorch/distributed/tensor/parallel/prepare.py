"""The styles that place the inputs and outputs of a module, whatever it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....mesh import DeviceMesh
from ....nn.placing import put
from ....placement import Placement, as_placement
from .style import ParallelStyle

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Layouts = tuple[Placement | None, ...]
Given = Placement | Sequence[Placement | None] | None


def _layouts(given: Given) -> Layouts:
    if given is None:
        return ()
    many = given if isinstance(given, Sequence) else (given,)
    return tuple(None if p is None else as_placement(p) for p in many)


def _pairs(call: str, given: Given, desired: Given) -> tuple[Layouts, Layouts]:
    """What comes in and what is wanted, one of each a tensor."""
    have, want = _layouts(given), _layouts(desired)
    if len(have) != len(want):
        raise ValueError(f"{call}: {len(have)} layouts and {len(want)} desired layouts; give one of each per tensor")
    return have, want


def _put(where: str, value: Any, mesh: DeviceMesh, layout: Placement | None, desired: Placement | None) -> Any:
    """`value` as desired; untouched where no layout was announced for it.

    A plain tensor is the whole value, not a shard, and so goes straight to where it is wanted. A tensor that is
    placed already keeps its placements where nothing else is desired.
    """
    if layout is None:
        return value
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        raise TypeError(f"{where}: layout {layout!r} is for a tensor, this is a {kind}; write None for it")
    return put(value, mesh, (desired or layout,))


class PrepareModuleInput(ParallelStyle):
    """Place the inputs of a module before its forward.

    Args:
        input_layouts: one per positional input, None for those to leave alone. Accepted as torch's, where they say
            what a plain tensor is a shard of: here a plain tensor is the whole value.
        desired_input_layouts: where each is to lie.
        input_kwarg_layouts: the same for keyword inputs, by name.
        desired_input_kwarg_layouts: where each of those is to lie.
        use_local_output: accepted as torch's; the module gets tensors of global shape either way.

    Raises:
        ValueError: layouts and desired layouts are not equally many, or not as many as the inputs.
    """

    def __init__(
        self,
        *,
        input_layouts: Given = None,
        desired_input_layouts: Given = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        call = type(self).__name__
        self.input_layouts, self.desired_input_layouts = _pairs(call, input_layouts, desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ValueError(f"{call}: give a layout and a desired layout for each keyword input")
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            where = f"inputs of {type(mod).__name__}"
            if self.input_layouts:
                if len(args) != len(self.input_layouts):
                    raise ValueError(f"{where}: {len(args)} came, {len(self.input_layouts)} input_layouts were given")
                layouts = zip(args, self.input_layouts, self.desired_input_layouts, strict=True)
                args = tuple(_put(where, x, device_mesh, have, want) for x, have, want in layouts)
            have, want = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            kwargs = {k: _put(f"{where}, {k}", v, device_mesh, have.get(k), want.get(k)) for k, v in kwargs.items()}
            return args, kwargs

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Place the outputs of a module after its forward.

    Args:
        output_layouts: one per output, None for those to leave alone; accepted as torch's.
        desired_output_layouts: where each is to lie.
        use_local_output: accepted as torch's; tensors keep their global shape either way.

    Raises:
        ValueError: layouts and desired layouts are not equally many, or not as many as the outputs.
    """

    def __init__(self, *, output_layouts: Given, desired_output_layouts: Given, use_local_output: bool = True) -> None:
        call = type(self).__name__
        self.output_layouts, self.desired_output_layouts = _pairs(call, output_layouts, desired_output_layouts)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def finish(mod: nn.Module, _: Any, outputs: Any) -> Any:
            where = f"outputs of {type(mod).__name__}"
            many = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(many) != len(self.output_layouts):
                raise ValueError(f"{where}: {len(many)} came, {len(self.output_layouts)} output_layouts were given")
            layouts = zip(many, self.output_layouts, self.desired_output_layouts, strict=True)
            placed = tuple(_put(where, y, device_mesh, have, want) for y, have, want in layouts)
            return placed if isinstance(outputs, tuple) else placed[0]

        module.register_forward_hook(finish)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one."""

    def __init__(
        self,
        *,
        input_layouts: Given = None,
        desired_input_layouts: Given = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Given,
        desired_output_layouts: Given,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        self.prepare_module_output._apply(module, device_mesh)
        return module
