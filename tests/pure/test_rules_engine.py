"""The engine that reads rules: which placements are legal, what each rank runs, what moves freely."""

from __future__ import annotations

import time

import pytest
import torch

from dtorch.errors import PlacementError
from dtorch.placement import Partial
from dtorch.sharding.infer import infer
from dtorch.sharding.propagate import Plan, propagate
from dtorch.sharding.rule import Call, In, Num, OutMeta, Recipe, free_numbers, rule
from dtorch.spec import TensorSpec

from .harness import P, R, S, Sample, SimTensor, check, combine, distribute, make_call, mesh_of, run_local

aten = torch.ops.aten


def rn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


def plan_of(sample: Sample, shape: tuple[int, ...], have: list, *, auto: bool = False) -> Plan:
    found = propagate(make_call(sample, shape, have), auto=auto)
    assert isinstance(found, Plan)
    return found


ADD = Sample(aten.add.Tensor, (rn(4, 6), rn(4, 6)))


def test_same_shards_run_the_call_as_it_is() -> None:
    plan = plan_of(ADD, (2,), [(S(0),), (S(0),)])
    assert plan.outs[0] is TensorSpec.of((4, 6), (6, 1), torch.float64, mesh_of((2,)), (S(0),))
    assert plan.which == (0, 0)
    assert (plan.moves, plan.frees) == ((), ())
    (local,) = plan.calls
    assert (local.func, local.args, local.kwargs, local.pre, local.empty) == (
        "aten.add.Tensor",
        (In(0), In(1)),
        {},
        None,
        False,
    )
    assert local.outs == (OutMeta((2, 6), (6, 1), torch.float64),)


def test_replicate_meets_shard_by_a_local_slice() -> None:
    plan = plan_of(ADD, (2,), [(S(1),), (R,)])
    assert plan.frees == (1,)
    assert plan.needs == ((S(1),), (S(1),))
    assert [c.pre for c in plan.calls] == [(None, ("narrow", ((1, 0, 3),))), (None, ("narrow", ((1, 3, 3),)))]
    assert plan.which == (0, 1)


ON_ONE_RANK = {
    "softmax of its shard": Sample(aten._softmax.default, (rn(4, 6), 1, False)),
    "view that joins a dim of size 1": Sample(aten.view.default, (rn(1, 3, 8), [3, 8])),
    "scatter along its shard": Sample(aten.scatter.src, (rn(4, 6), 1, torch.zeros(4, 2, dtype=torch.int64), rn(4, 2))),
    "scatter into what stays": Sample(aten.scatter_.src, (rn(4, 6), 1, torch.zeros(4, 2, dtype=torch.int64), rn(4, 2))),
    "relu of summands": Sample(aten.relu.default, (rn(4, 6),)),
    "no rule": Sample(aten.kthvalue.default, (rn(4, 6), 2)),
}


@pytest.mark.parametrize("mesh", [(1,), (1, 2), (2, 1)])
@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_every_placement_is_legal_over_one_rank(case: str, mesh: tuple[int, ...]) -> None:
    sample = ON_ONE_RANK[case]
    count = len(make_call(sample, mesh, [(R,) * len(mesh)] * 3 if "scatter" in case else [(R,) * len(mesh)]).specs)
    one = mesh.index(1)
    for moved in range(count):
        for placement in (S(0), S(1), P()):
            if "stays" in case and moved == 0:
                continue  # what is written keeps its placements
            if placement == P() and "scatter" in case and moved == 1:
                continue  # an index is no sum
            have = [[R] * len(mesh) for _ in range(count)]
            have[moved][one] = placement
            check(sample, mesh, [tuple(h) for h in have])


def test_replicate_meets_partial_on_the_lead_rank_only() -> None:
    plan = plan_of(ADD, (3,), [(P(),), (R,)])
    assert plan.outs[0] is not None
    assert plan.outs[0].placements == (P(),)
    assert [c.pre for c in plan.calls] == [(None, None), (None, ("zero", ()))]
    assert plan.which == (0, 1, 1)


def test_replicate_meets_partial_avg_on_every_rank() -> None:
    plan = plan_of(ADD, (3,), [(P("avg"),), (R,)])
    assert plan.which == (0, 0, 0)
    assert plan.calls[0].pre == (None, None)


def test_a_slice_under_a_later_cut_is_communication() -> None:
    # Done as a slice, [S0, S0] + [R, S0] gave 0, 21, 12, 33 for 0, 11, 22, 33.
    with pytest.raises(PlacementError):
        plan_of(ADD, (2, 2), [(S(0), S(0)), (R, S(0))])
    plan = check(ADD, (2, 2), [(S(0), S(0)), (R, S(0))], auto=True)
    assert isinstance(plan, Plan)
    assert plan.moves


def test_moves_on_several_mesh_dims_are_applied_in_order() -> None:
    for have in ([(S(0), S(0)), (R, R)], [(S(0), R), (R, S(0))], [(S(1), S(0)), (R, R)], [(P(), S(0)), (R, R)]):
        sample = Sample(aten.add.Tensor, (rn(5, 7), rn(5, 7)))
        try:
            check(sample, (2, 2), have)
        except PlacementError:
            assert have == [(S(0), R), (R, S(0))]


def test_nested_cuts_are_not_one_cut_into_four() -> None:
    plan = plan_of(Sample(aten.relu.default, (rn(5, 2),)), (2, 2), [(S(0), S(0))])
    assert [plan.calls[w].outs[0].shape[0] for w in plan.which] == [2, 1, 1, 1]  # type: ignore[union-attr]
    x = rn(5, 2)
    pieces = distribute(x, (S(0), S(0)), (2, 2), torch.Generator())
    assert torch.equal(combine(pieces, (S(0), S(0)), (2, 2)), x)


def test_empty_pieces_do_not_run_the_kernel() -> None:
    plan = plan_of(Sample(aten.relu.default, (rn(3, 2),)), (4,), [(S(0),)])
    assert [plan.calls[w].empty for w in plan.which] == [False, False, False, True]
    (out,) = run_local(plan.calls[plan.which[3]], [rn(0, 2)])
    assert out is not None
    assert out.shape == (0, 2)


def test_negative_and_bool_dims_do_not_confuse_placements() -> None:
    one, two = [plan_of(Sample(aten.sum.dim_IntList, (rn(4, 4), [d])), (2,), [(S(0),)]) for d in (0, 1)]
    assert one.outs[0].placements == (P(),)  # type: ignore[union-attr]
    assert two.outs[0].placements == (S(0),)  # type: ignore[union-attr]
    last = plan_of(Sample(aten.sum.dim_IntList, (rn(4, 4), [-1])), (2,), [(S(1),)])
    assert last.outs[0].placements == (P(),)  # type: ignore[union-attr]


def test_fewest_moved_inputs_win() -> None:
    # addcmul of one shard and two replicas cuts two; of three replicas none.
    sample = Sample(aten.addcmul.default, (rn(4, 4), rn(4, 4), rn(4, 4)))
    assert plan_of(sample, (2,), [(R,), (S(1),), (R,)]).frees == (0, 2)
    assert plan_of(sample, (2,), [(R,), (R,), (R,)]).frees == ()


def test_addend_counts_once() -> None:
    # A Replicate bias with sharded k used to be added on every rank: 1 + 4 gave 6.
    sample = Sample(aten.addmm.default, (torch.ones(1), torch.ones(1, 4), torch.ones(4, 1)))
    plan = plan_of(sample, (2,), [(R,), (S(1),), (S(0),)])
    assert plan.outs[0].placements == (P(),)  # type: ignore[union-attr]
    pieces = [[torch.ones(1), torch.ones(1, 2), torch.ones(2, 1)]] * 2
    outs = [run_local(plan.calls[w], p)[0] for w, p in zip(plan.which, pieces, strict=True)]
    assert sum(o.item() for o in outs if o is not None) == 5.0


def test_in_place_keeps_the_placements_of_self_or_raises() -> None:
    sample = Sample(aten.add_.Tensor, (rn(4, 4), rn(4, 4)))
    assert plan_of(sample, (2,), [(S(0),), (R,)]).frees == (1,)
    assert plan_of(sample, (2,), [(P(),), (R,)]).outs[0].placements == (P(),)  # type: ignore[union-attr]
    for have in ([(R,), (S(0),)], [(S(0),), (S(1),)], [(R,), (P(),)]):
        with pytest.raises(PlacementError):
            plan_of(sample, (2,), have)
    moved = plan_of(sample, (2,), [(R,), (S(0),)], auto=True)
    assert moved.moves == ((1, (R,)),)
    with pytest.raises(PlacementError, match="never moved"):
        plan_of(Sample(aten.relu_.default, (rn(4, 4),)), (2,), [(P(),)], auto=True)


def test_inplace_views_change_placements() -> None:
    plan = plan_of(Sample(aten.t_.default, (rn(4, 6),)), (2,), [(S(0),)])
    assert plan.outs[0] is TensorSpec.of((6, 4), (1, 6), torch.float64, mesh_of((2,)), (S(1),))


def test_views_are_never_moved_freely() -> None:
    # A local slice would be an alias: writes through the view would reach half of the base only.
    for sample in (
        Sample(aten.view.default, (rn(4, 4), [16])),
        Sample(aten.t.default, (rn(4, 4),)),
        Sample(aten.expand.default, (rn(4, 4), [2, 4, 4])),
    ):
        for p in (R, S(0), P(), P("max")):
            try:
                assert plan_of(sample, (2,), [(p,)]).frees == ()
            except PlacementError:
                assert p == S(0)


def test_writes_through_views_of_shards_reach_the_base() -> None:
    mesh = mesh_of((2,))
    base = SimTensor.distribute(rn(5, 4), mesh, (S(0),))
    aten.fill_.Scalar(aten.t.default(base), 7.0)
    assert torch.equal(base.full(), torch.full((5, 4), 7.0, dtype=torch.float64))
    base = SimTensor.distribute(rn(4, 6), mesh, (S(0),))
    aten.add_.Tensor(aten.view.default(base, [2, 2, 6]), 1.0)
    assert torch.equal(base.full(), rn(4, 6) + 1.0)


def test_a_view_of_a_few_rows_of_a_shard_is_refused() -> None:
    # d[:2] of five rows over two ranks has pieces of 2 and 0 rows: no placement says that.
    base = SimTensor.distribute(rn(5, 4), mesh_of((2,)), (S(0),))
    with pytest.raises(PlacementError):
        aten.slice.Tensor(base, 0, 0, 2)
    with pytest.raises(PlacementError):
        aten.select.int(base, 0, 0)


def test_no_rule_means_replicate_only() -> None:
    library = torch.library.Library("dtorch_unruled", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    sample = Sample(torch.ops.dtorch_unruled.twice.default, (torch.eye(4),))
    assert plan_of(sample, (2,), [(R,)]).which == (0, 0)
    with pytest.raises(PlacementError, match=r"no sharding rule for dtorch_unruled\.twice"):
        plan_of(sample, (2,), [(S(0),)])
    assert plan_of(sample, (2,), [(S(0),)], auto=True).moves == ((0, (R,)),)


def test_auto_moves_the_fewest_bytes() -> None:
    # The bias of 4 moves rather than the batch of 400; a Partial is reduce-scattered rather than all-reduced.
    sample = Sample(aten.mm.default, (rn(400, 4), rn(4, 4)))
    assert plan_of(sample, (2,), [(S(0),), (S(0),)], auto=True).moves == ((1, (R,)),)
    assert plan_of(Sample(aten.relu.default, (rn(4, 4),)), (2,), [(P(),)], auto=True).moves == ((0, (S(0),)),)


def test_auto_finds_a_way_for_every_combination() -> None:
    for have in ([(S(0), P()), (S(1), S(0))], [(P("max"), R), (P(), S(1))], [(S(0), S(0)), (S(1), S(1))]):
        check(ADD, (2, 2), have, auto=True)


def test_kinds_of_partial_that_do_not_commute_are_not_mixed() -> None:
    sample = Sample(aten.add.Tensor, (rn(4, 4), rn(4, 4)))
    with pytest.raises(PlacementError):
        plan_of(sample, (2,), [(P("max"),), (P(),)])
    plan = plan_of(sample, (2, 2), [(P(), P("avg")), (R, R)])
    assert plan.outs[0].placements == (P(), P("avg"))  # type: ignore[union-attr]
    with pytest.raises(PlacementError):  # sum along one dim, max along the other
        plan_of(Sample(aten.amax.default, (rn(4, 4), [0])), (2, 2), [(P(), S(0))])


def test_values_of_numbers_do_not_reach_the_plan() -> None:
    mesh = mesh_of((2,))
    spec = TensorSpec.of((4, 4), None, torch.float64, mesh, (P(),))
    plans = []
    for value in (2.0, 3.5):
        args = (spec, Num.of(value))
        call = Call(aten.add.Tensor, args, {}, infer(aten.add.Tensor, args, {}))
        plans.append(propagate(call))
    for plan, value in zip(plans, (2.0, 3.5), strict=True):
        assert isinstance(plan, Plan)
        assert plan.calls[0].args[1] == Num(float, True, value)
        assert plan.calls[1].args[1] == 0.0
        assert type(plan.calls[1].args[1]) is float


def test_which_numbers_are_free() -> None:
    assert free_numbers(aten.add.Tensor) == (False, True, True)  # t + 2 is a call of it
    assert free_numbers(aten.add_.Scalar) == (False, True, True)
    assert free_numbers(aten.clamp.default) == (False, True, True)
    assert free_numbers(aten.addmm.default) == (False, False, False, True, True)
    assert free_numbers(aten.sum.dim_IntList) == (False,) * 4
    assert free_numbers(aten.linalg_vector_norm.default) == (False,) * 5
    assert free_numbers(aten.constant_pad_nd.default) == (False, False, True)


def test_ranks_that_run_alike_share_one_local_call() -> None:
    x = rn(864, 4)
    for shape, have, most in (
        ((432,), [(S(0),), (S(0),)], 1),
        ((6, 72), [(S(0), S(0)), (S(0), S(0))], 2),
        ((432,), [(P(),), (R,)], 2),
        ((3, 144), [(P(), S(0)), (P(), S(0))], 1),
    ):
        plan = plan_of(Sample(aten.add.Tensor, (x, x)), shape, have)
        assert len(plan.calls) <= most
        assert len(plan.which) == 432
    uneven = plan_of(Sample(aten.add.Tensor, (rn(865, 4), rn(865, 4))), (432,), [(S(0),), (S(0),)])
    assert sorted({c.outs[0].shape[0] for c in uneven.calls}) == [0, 1, 3]  # type: ignore[union-attr]


def test_a_large_mesh_is_planned_in_milliseconds() -> None:
    x = rn(864, 4)
    call = make_call(Sample(aten.add.Tensor, (x, x)), (432,), [(S(0),), (S(0),)])
    best = min(_timed(lambda: propagate(call)) for _ in range(5))
    assert best < 0.05  # takes 1 ms: only a plan that costs 432 local computations could fail this


def _timed(work) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_recipes_are_chosen_only_where_needed() -> None:
    sample = Sample(aten.var.correction, (rn(4, 6), [0]))
    assert isinstance(propagate(make_call(sample, (2,), [(S(1),)])), Plan)
    assert isinstance(propagate(make_call(sample, (2,), [(S(0),)])), Recipe)
    with pytest.raises(PlacementError):
        propagate(make_call(sample, (2,), [(Partial(),)]))


def test_a_stem_has_one_rule() -> None:
    with pytest.raises(ValueError, match="two rules for mm"):
        rule("mm")(lambda call: None)


def test_factories_follow_the_placements_asked_for() -> None:
    mesh = mesh_of((2,))
    out = (OutMeta((5, 4), (4, 1), torch.float32),)
    call = Call(aten.zeros.default, ([5, 4],), {}, out, mesh=mesh, placements=(S(0),))
    plan = propagate(call)
    assert isinstance(plan, Plan)
    assert plan.outs[0].placements == (S(0),)  # type: ignore[union-attr]
    assert [plan.calls[w].outs[0].shape for w in plan.which] == [(3, 4), (2, 4)]  # type: ignore[union-attr]


class Block(torch.nn.Module):
    """One transformer block over an embedding, with a loss."""

    def __init__(self, vocabulary: int = 12, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        nn = torch.nn
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        f = torch.nn.functional
        x = self.embedding(tokens)
        b, n, d = x.shape
        q, k, v = [z.view(b, n, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm(x)).split(d, 2)]
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, n, d)
        x = x + self.out(y)
        logits = self.head(x + self.down(f.gelu(self.up(x))))
        return f.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("shape", "rows", "batch"),
    [((2,), 6, (S(0),)), ((3,), 6, (S(0),)), ((2, 2), 6, (S(0), R)), ((2, 2), 8, (S(0), S(0)))],
)
def test_a_model_trained_on_pieces_has_the_gradients_of_the_whole(
    shape: tuple[int, ...], rows: int, batch: tuple
) -> None:
    torch.manual_seed(0)
    model = Block()
    tokens, target = torch.randint(0, 12, (2, rows, 5))
    want = model(tokens, target)
    grads = torch.autograd.grad(want, list(model.parameters()))
    mesh = mesh_of(shape)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = SimTensor.distribute(p.detach(), mesh, (R,) * len(shape)).requires_grad_()
    loss = model(SimTensor.distribute(tokens, mesh, batch), SimTensor.distribute(target, mesh, batch))
    assert torch.allclose(loss.full(), want)
    with SimTensor.moving():
        found = torch.autograd.grad(loss, list(model.parameters()))
    for got, whole in zip(found, grads, strict=True):
        assert torch.allclose(got.full(), whole, atol=1e-5)
