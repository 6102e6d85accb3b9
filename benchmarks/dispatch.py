"""µs on the client per issued operator: plain torch, dtorch on one device and on two ranks, torch DTensor.

    python benchmarks/dispatch.py [--rounds 7] [--calls 1000]

Tensors are 8×8 float32, plans are cached, one torch thread. DTensor runs on torch's fake process group, which is to
its advantage: nothing is communicated. The floor is benchmarks/floor.py in the same rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.distributed.tensor as torch_dtensor
from side_by_side import Floor, conditions, microseconds, rounds, table
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtorch

CASES = [
    "a + b",
    "relu, needs grad",
    "view",
    "add_",
    "a @ b",
    "Shard(0) + Replicate",
    "redistribute R -> S0",
    "redistribute S0 -> R",
]
PEERS = ["torch", "dtorch", "dtorch ×2", "DTensor ×2"]
Calls = dict[str, Callable[[], object]]


def local_calls(a: torch.Tensor, b: torch.Tensor) -> Calls:
    """What every peer can do; `b` is all zeros so that `add_` stays finite."""
    leaf = a.detach().clone().requires_grad_()
    target = a.clone()
    return {
        "a + b": lambda: a + b,
        "relu, needs grad": lambda: leaf.relu(),
        "view": lambda: a.view(64),
        "add_": lambda: target.add_(b),
    }


def mesh_calls(
    sharded: torch.Tensor, replicated: torch.Tensor, move: Callable[[Any, list[Any]], Any], lib: Any
) -> Calls:
    """What needs a mesh, plus the rest on Shard(0)."""
    return {
        **local_calls(sharded, sharded - sharded),
        "a @ b": lambda: sharded @ replicated,
        "Shard(0) + Replicate": lambda: sharded + replicated,
        "redistribute R -> S0": lambda: move(replicated, [lib.Shard(0)]),
        "redistribute S0 -> R": lambda: move(sharded, [lib.Replicate()]),
    }


def peers() -> dict[str, Calls]:
    value = torch.randn(8, 8)
    a, b = dtorch.Tensor(value), dtorch.zeros(8, 8)
    mesh = dtorch.init_device_mesh("cpu", 2)
    ours = [dtorch.distribute_tensor(value, mesh, [p]) for p in (dtorch.Shard(0), dtorch.Replicate())]

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    theirs = [
        torch_dtensor.DTensor.from_local(piece, group, [p], run_check=False)
        for piece, p in ((value[:4].clone(), torch_dtensor.Shard(0)), (value.clone(), torch_dtensor.Replicate()))
    ]
    return {
        "torch": {**local_calls(value, torch.zeros(8, 8)), "a @ b": lambda: value @ value},
        "dtorch": {**local_calls(a, b), "a @ b": lambda: a @ b},
        "dtorch ×2": mesh_calls(*ours, lambda t, to: t.redistribute(placements=to), dtorch),
        "DTensor ×2": mesh_calls(*theirs, lambda t, to: t.redistribute(group, to), torch_dtensor),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000)
    args = parser.parse_args()

    torch.set_num_threads(1)
    with Floor() as floor:
        measures: dict[str, Callable[[], float]] = {"floor": lambda: floor.measure()[0]}
        for peer, calls in peers().items():
            settle = dtorch.Graph.sync if peer.startswith("dtorch") else None
            for case, call in calls.items():
                measures[f"{peer} {case}"] = lambda call=call, settle=settle: microseconds(call, args.calls, settle)
        medians = rounds(measures, args.rounds)
    torch.distributed.destroy_process_group()

    def cell(peer: str, case: str) -> str:
        found = medians.get(f"{peer} {case}")
        return "" if found is None else f"{found:.1f}"

    def ratio(case: str, ours: str, peer: str) -> str:
        top, bottom = medians.get(f"{ours} {case}"), medians.get(f"{peer} {case}")
        return f"{top / bottom:.2f}" if top and bottom else ""

    print(f"µs per issued op, median of {args.rounds} rounds of {args.calls} calls; {conditions()}")
    print(f"floor (a + b, one executor, no product around it): {medians['floor']:.1f} µs\n")
    print(
        table(
            ["", *PEERS, "dtorch/torch", "×2/DTensor", "dtorch/floor"],
            [
                [
                    case,
                    *(cell(peer, case) for peer in PEERS),
                    ratio(case, "dtorch", "torch"),
                    ratio(case, "dtorch ×2", "DTensor ×2"),
                    f"{medians[f'dtorch {case}'] / medians['floor']:.2f}" if case == "a + b" else "",
                ]
                for case in CASES
            ],
        )
    )


main()
