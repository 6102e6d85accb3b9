"""µs that a call costs the client when it has no plan yet, beside torch DTensor's sharding propagator.

    python benchmarks/plan_miss.py [--rounds 5] [--only softmax] [--no-pool]

Two figures of dtorch: *decide*, which is shapes, rule, placements and local calls, and what torch's propagator is
compared with; and *miss*, the whole call as a program sees it, with its plan encoded, sent and issued. Every call has
other sizes, so that nothing but the operator itself is known beforehand. Meshes are (4,), (2, 2) and (2, 2, 2); DTensor
runs on torch's fake process group. Processor time, medians.

The exit status is 1 where *decide* is above its bound: 300, 400 and 500 µs on 1-D, 2-D and 3-D meshes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.distributed.tensor as theirs
from side_by_side import conditions, table
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtorch
from dtorch.errors import PlacementError
from dtorch.placement import as_placements
from dtorch.runtime.dispatch import operator
from dtorch.sharding.infer import infer
from dtorch.sharding.propagate import propagate
from dtorch.sharding.rule import Call, Num, free_numbers, signature
from dtorch.spec import TensorSpec, contiguous_stride

MESHES = ((4,), (2, 2), (2, 2, 2))
BOUNDS = {1: 300.0, 2: 400.0, 3: 500.0}
# DTensor takes up to a second for a call: so many rounds of it, and none of the run's other calls after so many µs.
PEER_ROUNDS, SLOW = 3, 20_000.0

aten: Any = torch.ops.aten
R = "R"


class T(NamedTuple):
    """A tensor argument: its sizes, and a placement per mesh dim ("R", "S0", "P", "Pmax")."""

    shape: tuple[int, ...]
    placements: str
    dtype: torch.dtype = torch.float32


class Case(NamedTuple):
    """A call. `args` is made for a size, which is a multiple of 8 and differs from round to round."""

    name: str
    func: Any
    args: Callable[[int], list[Any]]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 (never written)
    auto: bool = False


def _index(*shape: int, at: str = "S0 R R") -> T:
    return T(shape, at, torch.int64)


CASES = [
    Case("add", aten.add.Tensor, lambda n: [T((n, 64), "S0 S1 R"), T((n, 64), "S0 S1 R")]),
    Case("mul, broadcast", aten.mul.Tensor, lambda n: [T((n, 64), "S0 S1 R"), T((64,), "R R R")]),
    Case("add, Partial", aten.add.Tensor, lambda n: [T((n, 64), "P S0 P"), T((n, 64), "R R P")]),
    Case("P + number", aten.add.Tensor, lambda n: [T((n, 64), "P S0 P"), 2.0]),
    Case("add_", aten.add_.Tensor, lambda n: [T((n, 64), "S0 S1 R"), T((n, 64), "R R R")]),
    Case("relu", aten.relu.default, lambda n: [T((n, 64), "S0 S0 R")]),
    Case("gelu", aten.gelu.default, lambda n: [T((n, 64), "S0 S0 R")]),
    Case("gelu backward", aten.gelu_backward.default, lambda n: [T((n, 64), "S0 S1 P"), T((n, 64), "S0 S1 R")]),
    Case("where", aten.where.self, lambda n: [T((n, 64), "S0 R R", torch.bool), T((n, 64), "S0 R R"), T((), "R R R")]),
    Case("masked_fill", aten.masked_fill.Scalar,
         lambda n: [T((n, 64), "S0 R R"), T((n, 64), "R R R", torch.bool), 0.0]),
    Case("mm", aten.mm.default, lambda n: [T((n, 64), "S0 R S1"), T((64, 32), "R S1 S0")]),
    Case("mm, auto", aten.mm.default, lambda n: [T((n, 64), "S0 S0 R"), T((64, 32), "S0 S1 S0")], auto=True),
    Case("addmm", aten.addmm.default, lambda n: [T((32,), "R S0 R"), T((n, 64), "S0 R S1"), T((64, 32), "R S1 S0")]),
    Case("bmm", aten.bmm.default, lambda n: [T((n, 8, 16), "S0 S1 R"), T((n, 16, 8), "S0 R S2")]),
    Case("bmm, auto", aten.bmm.default, lambda n: [T((n, 8, 16), "S0 S2 P"), T((n, 16, 8), "R S0 S2")], auto=True),
    Case("sum", aten.sum.dim_IntList, lambda n: [T((n, 64), "S0 S1 P"), [1]]),
    Case("mean", aten.mean.dim, lambda n: [T((n, 64), "S0 S1 R"), [1]]),
    Case("var", aten.var.correction, lambda n: [T((n, 64), "S0 R R"), [1]], {"correction": 1}),
    Case("amax", aten.amax.default, lambda n: [T((n, 64), "S0 S1 R"), [1]]),
    Case("argmax", aten.argmax.default, lambda n: [T((n, 64), "S0 R R"), 1]),
    Case("view", aten.view.default, lambda n: [T((n, 64), "S0 S1 R"), [n, 8, 8]]),
    Case("transpose", aten.transpose.int, lambda n: [T((n, 8, 8), "S0 S1 S2"), 1, 2]),
    Case("permute", aten.permute.default, lambda n: [T((n, 8, 8), "S0 S1 P"), [2, 0, 1]]),
    Case("slice", aten.slice.Tensor, lambda n: [T((n, 64), "S0 R P"), 1, 0, 16]),
    Case("select", aten.select.int, lambda n: [T((n, 64), "S0 R P"), 1, 3]),
    Case("split", aten.split.Tensor, lambda n: [T((n, 96), "S0 R P"), 32, 1]),
    Case("cat", aten.cat.default, lambda n: [[T((n, 64), "S0 R P"), T((n, 32), "S0 R P")], 1]),
    Case("stack", aten.stack.default, lambda n: [[T((n, 64), "S0 S1 P"), T((n, 64), "S0 S1 P")]]),
    Case("expand", aten.expand.default, lambda n: [T((1, 64), "S1 R P"), [n, 64]]),
    Case("clone", aten.clone.default, lambda n: [T((n, 64), "S0 S1 P")]),
    Case("to bfloat16", aten._to_copy.default, lambda n: [T((n, 64), "S0 S1 R")], {"dtype": torch.bfloat16}),
    Case("zeros_like", aten.zeros_like.default, lambda n: [T((n, 64), "S0 S1 R")]),
    Case("softmax", aten._softmax.default, lambda n: [T((n, 8, 8), "S0 S1 R"), 2, False]),
    Case("softmax, auto", aten._softmax.default, lambda n: [T((n, 8, 8), "S0 S2 P"), 1, False], auto=True),
    Case("log_softmax backward", aten._log_softmax_backward_data.default,
         lambda n: [T((n, 64), "S0 R R"), T((n, 64), "S0 R R"), 1, torch.float32]),
    Case("layer_norm", aten.native_layer_norm.default,
         lambda n: [T((n, 8, 64), "S0 S1 R"), [64], T((64,), "R R R"), T((64,), "R R R"), 1e-5]),
    Case("layer_norm backward", aten.native_layer_norm_backward.default,
         lambda n: [T((n, 8, 64), "S0 S1 R"), T((n, 8, 64), "S0 S1 R"), [64], T((n, 8, 1), "S0 S1 R"),
                    T((n, 8, 1), "S0 S1 R"), T((64,), "R R R"), T((64,), "R R R"), [True] * 3]),
    Case("group_norm", aten.native_group_norm.default,
         lambda n: [T((n, 8, 4, 4), "S0 S0 R"), T((8,), "R R R"), T((8,), "R R R"), n, 8, 16, 4, 1e-5]),
    Case("batch_norm", aten.native_batch_norm.default,
         lambda n: [T((n, 8, 4, 4), "S1 R R"), T((8,), "S0 R R"), T((8,), "S0 R R"), T((8,), "S0 R R"),
                    T((8,), "S0 R R"), False, 0.1, 1e-5]),
    Case("embedding", aten.embedding.default, lambda n: [T((n, 64), "R S1 R"), _index(8, 16)]),
    Case("embedding, vocabulary", aten.embedding.default,
         lambda n: [T((n, 64), "S0 R S1"), _index(8, 16, at="R S0 R")]),
    Case("embedding backward", aten.embedding_dense_backward.default,
         lambda n: [T((8, 16, 64), "S0 S1 R"), _index(8, 16, at="S0 S1 R"), n, -1, False]),
    Case("gather", aten.gather.default, lambda n: [T((n, 64), "S0 R R"), 1, _index(n, 8)]),
    Case("index_select", aten.index_select.default, lambda n: [T((n, 64), "R S1 P"), 0, _index(8, at="S0 R R")]),
    Case("scatter_add", aten.scatter_add.default,
         lambda n: [T((n, 64), "S0 R R"), 1, _index(n, 8), T((n, 8), "S0 R R")]),
    Case("index", aten.index.Tensor, lambda n: [T((n, 64), "R S1 R"), [_index(8)]]),
    Case("index_put", aten.index_put.default,
         lambda n: [T((n, 64), "R S1 R"), [_index(8, at="R R R")], T((8, 64), "R S1 R")]),
    Case("topk", aten.topk.default, lambda n: [T((n, 64), "S0 R R"), 4]),
    Case("sort", aten.sort.default, lambda n: [T((n, 64), "S0 R R")]),
    Case("cumsum", aten.cumsum.default, lambda n: [T((n, 64), "S0 R P"), 1]),
    Case("tril", aten.tril.default, lambda n: [T((n, 64), "S0 S1 R")]),
    Case("constant_pad", aten.constant_pad_nd.default, lambda n: [T((n, 64), "S0 R P"), [1, 1]]),
    Case("nll_loss", aten.nll_loss_forward.default, lambda n: [T((n, 64), "S0 R R"), _index(n), None, 1, -100]),
    Case("nll_loss backward", aten.nll_loss_backward.default,
         lambda n: [T((), "R R R"), T((n, 64), "S0 R R"), _index(n), None, 1, -100, T((), "R R R")]),
    Case("mse_loss", aten.mse_loss.default, lambda n: [T((n, 64), "S0 R R"), T((n, 64), "S0 R R")]),
    Case("mse_loss backward", aten.mse_loss_backward.default,
         lambda n: [T((), "R R R"), T((n, 64), "S0 R R"), T((n, 64), "S0 R R"), 1]),
    Case("binary_cross_entropy", aten.binary_cross_entropy_with_logits.default,
         lambda n: [T((n, 64), "S0 R R"), T((n, 64), "S0 R R")]),
    Case("conv2d", aten.convolution.default,
         lambda n: [T((n, 8, 6, 6), "S0 R R"), T((16, 8, 3, 3), "R S0 R"), T((16,), "R S0 R"), [1, 1], [1, 1], [1, 1],
                    False, [0, 0], 1]),
    Case("conv2d backward", aten.convolution_backward.default,
         lambda n: [T((n, 16, 6, 6), "S0 R R"), T((n, 8, 6, 6), "S0 R R"), T((16, 8, 3, 3), "R R R"), [16], [1, 1],
                    [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]]),
    Case("max_pool2d", aten.max_pool2d_with_indices.default, lambda n: [T((n, 8, 6, 6), "S0 S1 R"), [2, 2]]),
    Case("avg_pool2d", aten.avg_pool2d.default, lambda n: [T((n, 8, 6, 6), "S0 S1 P"), [2, 2]]),
    Case("upsample", aten.upsample_nearest2d.default, lambda n: [T((n, 8, 6, 6), "S0 S1 P"), [12, 12]]),
    Case("sdpa", aten._scaled_dot_product_flash_attention_for_cpu.default,
         lambda n: [T((n, 8, 16, 8), "S0 S1 R")] * 3),
    Case("sdpa backward", aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
         lambda n: [*[T((n, 8, 16, 8), "S0 S1 R")] * 5, T((n, 8, 16), "S0 S1 R"), 0.0, False]),
    Case("dropout's bernoulli_", aten.bernoulli_.float, lambda n: [T((n, 64), "S0 S1 R"), 0.9]),
    Case("foreach add", aten._foreach_add.List, lambda n: [[T((n, 64), "S0 S1 R")] * 4, [T((n, 64), "S0 S1 R")] * 4]),
    Case("foreach mul_", aten._foreach_mul_.Scalar, lambda n: [[T((n, 64), "S0 S1 R")] * 4, 0.9]),
    Case("linalg.inv", aten.linalg_inv_ex.default, lambda n: [T((n, 8, 8), "S0 S0 R")]),
    Case("fft", aten._fft_c2c.default, lambda n: [T((n, 64), "S0 S0 R", torch.complex64), [1], 0, True]),
]  # fmt: skip


def _placements(text: str, ndim: int, of: Any) -> list[Any]:
    kinds = {
        "R": lambda _: of.Replicate(),
        "S": lambda p: of.Shard(int(p[1])),
        "P": lambda p: of.Partial(p[1:] or "sum"),
    }
    return [kinds[p[0]](p) for p in text.split()[:ndim]]


def _map(value: Any, make: Callable[[T], Any]) -> Any:
    if isinstance(value, T):
        return make(value)
    return [_map(v, make) for v in value] if isinstance(value, list) else value


def decided_in(case: Case, mesh: Any, size: int) -> float:
    """µs that dtorch takes to decide the call."""

    def spec(t: T) -> TensorSpec:
        placed = as_placements(_placements(t.placements, mesh.ndim, dtorch), mesh.ndim, len(t.shape))
        return TensorSpec.of(t.shape, None, t.dtype, mesh, placed)

    free, sig = free_numbers(case.func), signature(case.func)

    def numbered(value: Any, is_free: bool) -> Any:
        return Num.of(value) if is_free and type(value) in (int, float) else value

    plain = tuple(_map(a, spec) for a in case.args(size))
    args = tuple(numbered(a, f) for a, f in zip(plain, free, strict=False))
    kwargs = {k: numbered(v, free[sig.index[k]]) for k, v in case.kwargs.items()}
    start = time.process_time()
    outs = infer(case.func, plain, case.kwargs)
    propagate(Call(case.func, args, kwargs, outs), auto=case.auto)
    return (time.process_time() - start) * 1e6


def missed_in(case: Case, mesh: Any, size: int) -> float:
    """µs of a whole call without a plan, from the operator to the new tensor."""

    def tensor(t: T) -> Any:
        placed = _placements(t.placements, mesh.ndim, dtorch)
        whole = [p if isinstance(p, dtorch.Shard) else dtorch.Replicate() for p in placed]
        made = dtorch.zeros(t.shape, dtype=t.dtype, device_mesh=mesh, placements=whole)
        return made.redistribute(placements=placed) if placed != whole else made

    args = [_map(a, tensor) for a in case.args(size)]
    operator(case.func).plans.clear()
    dtorch.Graph.sync()
    with dtorch.auto_redistribute(case.auto), torch.no_grad():
        start = time.process_time()
        case.func(*args, **case.kwargs)
        return (time.process_time() - start) * 1e6


def theirs_in(case: Case, mesh: Any, size: int) -> float:
    """µs that torch's propagator takes."""
    propagator = theirs.DTensor._op_dispatcher.sharding_propagator

    def spec(t: T) -> DTensorSpec:
        meta = TensorMeta(torch.Size(t.shape), contiguous_stride(t.shape), t.dtype)
        return DTensorSpec(mesh, tuple(_placements(t.placements, mesh.ndim, theirs)), meta)

    args = tuple(_map(a, spec) for a in case.args(size))
    info = propagator.op_to_schema_info.get(case.func) or propagator.op_to_schema_info_for_single_dim_strategy.get(
        case.func
    )
    schema = OpSchema(case.func, args, case.kwargs, schema_info=info)
    start = time.process_time()
    propagator.propagate_op_sharding_non_cached(schema)
    return (time.process_time() - start) * 1e6


def measure(cases: list[Case], rounds: int, pool: bool) -> dict[tuple[str, str, int], float]:
    """(who, case, mesh dims) -> median µs over rounds of runs of five; a round runs everybody, so that drift of the box
    hits them alike, and in a run the first call alone meets a processor whose caches another has filled."""
    ours = {len(shape): dtorch.init_device_mesh("cpu", shape) for shape in MESHES}
    peers = {len(s): theirs.DeviceMesh("cpu", torch.arange(torch.Size(s).numel()).view(s)) for s in MESHES}
    figures: dict[tuple[str, str, int], list[float]] = defaultdict(list)

    def run(who: str, case: Case, n: int, one: Callable[[Case, Any, int], float], mesh: Any, k: int) -> bool:
        values: list[float] = []
        for size in range(16 + 40 * k, 56 + 40 * k, 8):
            try:
                values.append(one(case, mesh, size))
            except Exception as error:
                if who == "theirs" or isinstance(error, PlacementError):
                    return False  # without a rule, or not for these placements
                raise
            if sum(values) > SLOW:
                break
        if k:  # the first round learns dtypes and imports what torch imports on first use
            figures[who, case.name, n].append(statistics.median(values))
        return True

    for k in range(rounds + 1):
        for case in cases:
            for n in ours:
                if run("decide", case, n, decided_in, ours[n], k):
                    if pool:
                        run("miss", case, n, missed_in, ours[n], k)
                    if k < PEER_ROUNDS:
                        run("theirs", case, n, theirs_in, peers[n], k)
        gc.collect()
    return {key: statistics.median(values) for key, values in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-pool", action="store_true", help="decide only: no process is started")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    cases = [c for c in CASES if args.only in c.name]
    figures = measure(cases, args.rounds, not args.no_pool)
    torch.distributed.destroy_process_group()

    dims = sorted(BOUNDS)
    unruled = [c.name for c in cases if any(("decide", c.name, n) not in figures for n in dims)]
    cases = [c for c in cases if c.name not in unruled]
    late = [(c.name, n) for c in cases for n in dims if figures["decide", c.name, n] > BOUNDS[n]]

    def cell(who: str, case: str, n: int) -> str:
        found = figures.get((who, case, n), float("nan"))
        return "" if found != found else f"{found:.0f}" + ("!" if who == "decide" and (case, n) in late else "")

    def ratio(case: str, n: int) -> str:
        found = figures["decide", case, n] / figures.get(("theirs", case, n), float("nan"))
        return "" if found != found else f"{found:.2f}"

    columns = [("decide", n) for n in dims] + [("miss", n) for n in dims] + [("theirs", n) for n in dims]
    names = {"decide": "decide", "miss": "miss", "theirs": "DTensor"}
    header = ["", *(f"{names[who]} {n}-D" for who, n in columns), *(f"ratio {n}-D" for n in dims)]
    rows = [[c.name, *(cell(w, c.name, n) for w, n in columns), *(ratio(c.name, n) for n in dims)] for c in cases]
    middle = ["median"]
    for who, n in columns:
        known = [v for c in cases if (v := figures.get((who, c.name, n), float("nan"))) == v]
        middle.append(f"{statistics.median(known):.0f}" if known else "")
    middle += [
        f"{statistics.median([float(r[-len(dims) + i]) for r in rows if r[-len(dims) + i]]):.2f}" for i in range(3)
    ]
    print(f"µs of processor time per call without a plan, median of {args.rounds} rounds of 5; {conditions()}")
    print("decide: shapes, placements, local calls (ratio: to DTensor's propagator); miss: the whole call\n")
    print(table(header, [*rows, middle]))
    if unruled:
        print("\nNo rule: " + ", ".join(unruled))
    bounds = ", ".join(f"{BOUNDS[n]:.0f} µs on {n}-D" for n in dims)
    if late:
        print(f"\nAbove the bound ({bounds}): " + ", ".join(f"{name} on {n}-D" for name, n in late), file=sys.stderr)
        return 1
    print(f"\nAll within the bounds: {bounds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
