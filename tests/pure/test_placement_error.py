"""The text of a PlacementError: the call, the placements, the legal ones, the line to write."""

from __future__ import annotations

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.mesh import init_device_mesh
from dtorch.sharding.infer import infer
from dtorch.sharding.message import move_bytes, move_kind
from dtorch.sharding.propagate import propagate
from dtorch.sharding.rule import Call, Num
from dtorch.spec import TensorSpec

from .harness import P, R, S

aten = torch.ops.aten
DP = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])


def spec(shape: tuple[int, ...], *placements: object, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(shape, None, dtype, DP if len(placements) == 1 else GRID, placements)  # type: ignore[arg-type]


def text(func: torch._ops.OpOverload, *args: object, **kwargs: object) -> str:
    with pytest.raises(PlacementError) as error:
        propagate(Call(func, args, kwargs, infer(func, args, kwargs)))
    return str(error.value)


def test_softmax_over_a_sharded_dim() -> None:
    assert text(aten._softmax.default, spec((4, 128), S(1)), -1, False) == (
        "softmax(dim=-1) cannot run on these placements\n"
        "    input: float32[4, 128] on cpu(dp=2): [Shard(1)]\n"
        "  The softmax dim must be whole on every rank. Legal here:\n"
        "    [Shard(0)]    [Replicate()]\n"
        "  Write:  input = input.redistribute(placements=[Shard(0)])    # all_to_all, 512 B per rank\n"
        "  or run under  with dtorch.auto_redistribute():"
    )


def test_two_inputs_are_named_and_the_smaller_moves() -> None:
    assert text(aten.mm.default, spec((512, 64), S(0)), spec((64, 256), S(0))) == (
        "mm() cannot run on these placements\n"
        "    input: float32[512, 64] on cpu(dp=2): [Shard(0)]\n"
        "    mat2:  float32[64, 256] on cpu(dp=2): [Shard(0)]\n"
        "  Legal here:\n"
        "    [Shard(0)], [Replicate()]\n"
        "    [Shard(1)], [Shard(0)]\n"
        "    [Replicate()], [Shard(1)]\n"
        "    [Replicate()], [Replicate()]\n"
        "  Write:  mat2 = mat2.redistribute(placements=[Replicate()])    # all_gather, 32.0 KiB per rank\n"
        "  or run under  with dtorch.auto_redistribute():"
    )


def test_a_partial_that_cannot_pass() -> None:
    message = text(aten.relu.default, spec((4, 6), P()))
    assert "  Partial() cannot pass through relu here. Legal here:\n" in message
    assert "    [Shard(0)]    [Shard(1)]    [Replicate()]\n" in message
    assert "input.redistribute(placements=[Shard(0)])    # reduce_scatter, 48 B per rank" in message


def test_in_place_on_a_partial() -> None:
    assert text(aten.relu_.default, spec((4, 6), P())) == (
        "relu_() cannot run on these placements\n"
        "    input: float32[4, 6] on cpu(dp=2): [Partial()]\n"
        "  Partial() cannot pass through relu_ here. It writes input in place, which is never moved.\n"
        "  Write:  input = input.redistribute(placements=[Replicate()])    # then relu_"
    )


def test_numbers_and_named_arguments_are_shown() -> None:
    assert text(aten.add.Tensor, spec((4, 4), S(0)), spec((4, 4), S(1)), alpha=Num.of(2.0)).startswith(
        "add(alpha=2.0) cannot run on these placements\n"
    )
    assert text(aten.flip.default, spec((4, 4), S(0)), [0]).startswith("flip(dims=[0]) cannot run")


def test_lists_of_tensors_are_numbered() -> None:
    message = text(aten.cat.default, [spec((4, 4), S(0)), spec((4, 4), S(0))], 0)
    assert "    tensors[0]: float32[4, 4] on cpu(dp=2): [Shard(0)]\n" in message
    assert "    tensors[1]: float32[4, 4] on cpu(dp=2): [Shard(0)]\n" in message


def test_long_lists_of_legal_placements_are_cut() -> None:
    message = text(aten.add.Tensor, spec((4, 8), S(0), S(0)), spec((4, 8), S(1), S(0)))
    lines = message.split("\n")
    assert lines[1:3] == [
        "    input: float32[4, 8] on cpu(dp=2, tp=2): [Shard(0), Shard(0)]",
        "    other: float32[4, 8] on cpu(dp=2, tp=2): [Shard(1), Shard(0)]",
    ]
    assert "    …" in lines
    assert sum(line.startswith("    [") for line in lines) == 6


def test_what_is_legal_in_the_text_is_legal() -> None:
    """The line to write works: with its placements the call is decided."""
    for func, args in (
        (aten.mm.default, (spec((8, 4), S(0)), spec((4, 8), S(0)))),
        (aten.add.Tensor, (spec((4, 8), S(0), S(0)), spec((4, 8), R, S(0)))),
        (aten.relu.default, (spec((4, 8), P(), S(0)),)),
        (aten.view.default, (spec((5, 4), S(0)), [20])),
        (aten.cholesky.default, (spec((4, 4), S(0)),)),
    ):
        known = {"Shard": S, "Replicate": lambda: R, "Partial": P}
        message = text(func, *args)
        moved = list(args)
        for line in message.split("\n"):
            if ".redistribute(placements=" in line:
                name = line.split(" = ")[0].split()[-1]
                to = eval(line.split("placements=")[1].split(")    #")[0], known)
                i = {"input": 0, "self": 0}.get(name, 1)
                moved[i] = args[i].with_placements(tuple(to))  # type: ignore[union-attr]
        assert moved != list(args)
        propagate(Call(func, tuple(moved), {}, infer(func, args, {})))


def test_what_moves_cost() -> None:
    x = spec((8, 4), S(0))  # 128 bytes, 64 on each rank
    assert (move_bytes(x, (R,)), move_kind(x, (R,))) == (64.0, "all_gather")
    assert (move_bytes(x, (S(1),)), move_kind(x, (S(1),))) == (32.0, "all_to_all")
    assert move_bytes(x, (S(0),)) == 0
    y = spec((8, 4), P())
    assert (move_bytes(y, (R,)), move_kind(y, (R,))) == (128.0, "all_reduce")
    assert (move_bytes(y, (S(0),)), move_kind(y, (S(0),))) == (64.0, "reduce_scatter")
    assert move_bytes(spec((8, 4), R), (S(0),)) == 0
    assert move_bytes(spec((8, 4), R, S(0)), (S(0), S(0))) > 0  # under a later cut


def test_an_uneven_batch_is_named() -> None:
    found = text(aten.view.default, spec((5, 7, 8), S(0)), [35, 8])
    assert "The 5 of dim 0 are uneven over 2 ranks" in found
    assert "drop_last=True" in found
    assert "uneven" not in text(aten.view.default, spec((4, 6, 8), S(1)), [24, 8])
