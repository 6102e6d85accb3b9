"""dtorch.distributed: torch's names for meshes, tensors and tensor parallelism, on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh, nn
from dtorch import distributed as dist
from dtorch.distributed import tensor as dtensor
from dtorch.distributed.fsdp import fully_shard
from dtorch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 12)
        self.down = torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class LM(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(MLP() for _ in range(2))
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 10]])

PLAN: dict[str, ParallelStyle] = {
    "embed": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def loss_and_gradients(model: torch.nn.Module, tokens: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(tokens).pow(2).mean()
    loss.backward()
    full = {name: p.grad.to_torch() if isinstance(p, dtorch.Tensor) else p.grad for name, p in model.named_parameters()}
    return loss.item(), full


@pytest.fixture
def plain() -> LM:
    torch.manual_seed(0)
    return LM()


def test_tensor_parallel_equals_plain_torch(plain: LM) -> None:
    expected, gradients = loss_and_gradients(copy.deepcopy(plain), TOKENS)
    mesh = init_device_mesh("cpu", 2, mesh_dim_names=["tp"])
    model = parallelize_module(plain, mesh, PLAN)
    assert model.layers[0].up.weight.placements == [Shard(0)]
    assert model.layers[1].down.weight.placements == [Shard(1)]
    assert model.layers[1].down.bias.placements == [Replicate()]
    assert model.layers[0].norm.weight.placements == [Replicate()]
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.placements == [Shard(0)]
    loss, got = loss_and_gradients(model, dtorch.distribute_tensor(TOKENS, mesh))
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, grad in gradients.items():
        assert torch.allclose(got[name], grad, atol=1e-6), name


def test_a_slice_keeps_the_other_dims(plain: LM) -> None:
    expected, gradients = loss_and_gradients(copy.deepcopy(plain), TOKENS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    model = parallelize_module(plain.to(mesh), mesh["tp"], PLAN)
    assert model.layers[0].up.weight.device_mesh is mesh
    assert model.layers[0].up.weight.placements == [Replicate(), Shard(0)]
    tokens = dtorch.distribute_tensor(TOKENS, mesh, [Shard(0), Replicate()])
    logits = model(tokens)
    assert logits.placements == [Shard(0), Replicate()]
    loss, got = loss_and_gradients(model, tokens)
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, grad in gradients.items():
        assert torch.allclose(got[name], grad, atol=1e-6), name


def test_plans_that_part_a_shared_parameter(plain: LM) -> None:
    mesh = init_device_mesh("cpu", 2)
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one parameter"):
        parallelize_module(plain, mesh, {"embed": ColwiseParallel(), "head": ColwiseParallel()})


def test_plans_are_checked(plain: LM) -> None:
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=["dp", "tp"])
    with pytest.raises(dtorch.DeviceMeshError, match=r"a plan is about one; write mesh\['tp'\]"):
        parallelize_module(plain, grid, PLAN)
    mesh = init_device_mesh("cpu", 2)
    with pytest.warns(UserWarning, match="no submodule is called 'layer.up'"):
        parallelize_module(plain, mesh, {"layer.up": ColwiseParallel()})
    with pytest.warns(UserWarning, match="nothing is parallelised"):
        parallelize_module(plain, mesh)
    with pytest.raises(NotImplementedError, match=r"knows nn\.Linear and nn\.Embedding, not LayerNorm"):
        parallelize_module(plain.layers[0].norm, mesh, RowwiseParallel())
    with pytest.raises(TypeError, match="a style or a dict"):
        parallelize_module(plain, mesh, "colwise")  # type: ignore[arg-type]


def test_sequence_parallel() -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(8)
    x = torch.randn(2, 4, 8)
    expected = norm(x)
    mesh = init_device_mesh("cpu", 2)
    y = parallelize_module(norm, mesh, SequenceParallel())(x)
    assert y.placements == [Shard(1)]
    assert torch.allclose(y.detach().to_torch(), expected, atol=1e-6)


def test_loss_parallel() -> None:
    mesh = init_device_mesh("cpu", 2)
    logits, classes = torch.randn(6, 5, requires_grad=True), torch.arange(6) % 5
    expected = torch.nn.functional.cross_entropy(logits, classes)
    expected.backward()
    sharded = dtorch.distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    target = dtorch.distribute_tensor(classes, mesh, [Replicate()])
    with pytest.raises(dtorch.PlacementError, match="softmax dim must be whole"):
        nn.functional.cross_entropy(sharded, target)
    with loss_parallel():
        loss = nn.functional.cross_entropy(sharded, target)
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert sharded.grad.placements == [Shard(1)]
    assert torch.allclose(sharded.grad.to_torch(), logits.grad, atol=1e-7)


def test_prepare_module_input_and_output() -> None:
    class Two(torch.nn.Module):
        def forward(self, a: Any, b: Any, *, c: Any) -> Any:
            self.seen = (a, b, c)
            return a + c, b

    mesh = init_device_mesh("cpu", 2)
    a = torch.arange(8.0).reshape(2, 4)
    style = PrepareModuleInputOutput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(0), None),
        input_kwarg_layouts={"c": Shard(1)},
        desired_input_kwarg_layouts={"c": Shard(0)},
        output_layouts=(Shard(0), None),
        desired_output_layouts=(Replicate(), None),
    )
    m = parallelize_module(Two(), mesh, style)
    out, b = m(a, "b", c=a)
    assert [m.seen[0].placements, m.seen[2].placements] == [[Shard(0)], [Shard(0)]]
    assert (m.seen[1], b) == ("b", "b")
    assert out.placements == [Replicate()]
    assert torch.equal(out.to_torch(), 2 * a)
    with pytest.raises(ValueError, match="1 came, 2 input_layouts were given"):
        m(a, c=a)
    with pytest.raises(TypeError, match="write None for it"):
        m("a", "b", c=a)
    with pytest.raises(ValueError, match="2 layouts and 1 desired"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
    with pytest.raises(ValueError, match="1 layouts and 0 desired"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=())


def test_styles_have_a_readable_repr() -> None:
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(-1),), use_local_output=True)"
    )


# distribute_module.


def test_distribute_module() -> None:
    torch.manual_seed(0)
    model = MLP()
    x = torch.randn(4, 8)
    expected = model(x)
    mesh = init_device_mesh("cpu", 2)

    def partition(name: str, module: torch.nn.Module, mesh: dtorch.DeviceMesh) -> None:
        if name == "up":
            for key, p in list(module.named_parameters()):
                module.register_parameter(key, nn.Parameter(dtensor.distribute_tensor(p.detach(), mesh, [Shard(0)])))

    moved = dtensor.distribute_module(
        model,
        mesh,
        partition,
        input_fn=lambda mod, inputs, mesh: (dtensor.distribute_tensor(inputs[0], mesh, [Replicate()]),),
        output_fn=lambda mod, outputs, mesh: outputs.redistribute(placements=[Shard(0)]),
    )
    assert moved is model
    assert model.up.weight.placements == [Shard(0)]
    # What the partition leaves is replicated; the row-sharded input of `down` asks for a column-sharded weight.
    model.down.weight = nn.Parameter(model.down.weight.detach().redistribute(placements=[Shard(1)]))
    assert model.norm.weight.placements == [Replicate()]
    y = model(x)
    assert y.placements == [Shard(0)]
    assert torch.allclose(y.detach().to_torch(), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"input_fn takes \(module, inputs, device_mesh\)"):
        dtensor.distribute_module(model, mesh, input_fn=lambda inputs: inputs)


# fully_shard.


def test_fully_shard_composes_with_tensor_parallel(plain: LM) -> None:
    expected, gradients = loss_and_gradients(copy.deepcopy(plain), TOKENS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    model = parallelize_module(plain.to(mesh), mesh["tp"], PLAN)
    for layer in model.layers:
        fully_shard(layer, mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    up, head = model.layers[0].up.weight, model.head.weight
    assert up.placements == [Shard(0), Shard(0)]
    assert model.layers[0].down.weight.placements == [Shard(0), Shard(1)]
    assert head is model.embed.weight
    tokens = dtorch.distribute_tensor(TOKENS, mesh, [Shard(0), Replicate()])
    loss, got = loss_and_gradients(model, tokens)
    assert model.layers[0].up.weight is up
    assert up.grad.placements == [Shard(0), Shard(0)]
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, grad in gradients.items():
        assert torch.allclose(got[name], grad, atol=1e-6), name
    twin = copy.deepcopy(model)
    assert twin(tokens).placements == [Shard(0), Replicate()]
    assert twin.layers[0].up.weight is not up


def test_fully_shard_puts_the_shards_back_after_an_error() -> None:
    mesh = init_device_mesh("cpu", 2)
    m = fully_shard(torch.nn.Linear(4, 4), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    weight = m.weight
    assert (weight.placements, m.bias.placements) == ([Shard(1)], [Shard(0)])
    with pytest.raises(RuntimeError):
        m(torch.ones(3, 7))
    assert m.weight is weight
    with pytest.raises(NotImplementedError, match="mp_policy"):
        fully_shard(m, mesh=mesh, mp_policy=object())


# The second document.


def test_creating_distributed_tensors() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    local = dtensor.ones(8, device_mesh=mesh, placements=[Shard(0)])
    assert isinstance(local, dtensor.DTensor)
    assert dtensor.DTensor is dtorch.Tensor
    assert [local.to_local(rank).tolist() for rank in range(4)] == [[1.0, 1.0]] * 4
    assert (local.shape, local.size(), local.stride(), local.ndim, local.numel()) == ((8,), (8,), (1,), 1, 8)
    assert (local.dtype, local.device, local.device_mesh) == (torch.float32, torch.device("cpu"), mesh)
    for make in (dtensor.zeros, dtensor.empty, dtensor.rand, dtensor.randn):
        assert make(3, 4, device_mesh=mesh, placements=[Shard(1)], requires_grad=True).placements == [Shard(1)]
    assert dtensor.full((3,), 7.0, device_mesh=mesh).full_tensor().tolist() == [7.0] * 3
    t = dtensor.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    assert t.redistribute(placements=[Replicate()], async_op=True).to_local().tolist() == list(range(6))
    pieces = [torch.full((2,), float(rank)) for rank in range(4)]
    assert dtensor.DTensor.from_local(pieces, mesh, [Shard(0)]).full_tensor().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dtensor.from_local(pieces, mesh, [Partial()]).full_tensor().tolist() == [6.0, 6.0]


def test_the_import_paths_are_one_thing() -> None:
    spec = dtorch.distributed_spec
    for name in spec.__all__:
        assert getattr(spec, name) is getattr(dtensor, name, getattr(dist, name, None)) or name == "TensorSpec"
    assert dtensor.placement_types.Shard is Shard


def test_visualize_sharding(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    t = dtensor.zeros(3, 5, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    dtensor.debug.visualize_sharding(t, header="weights")
    assert capsys.readouterr().out.splitlines() == [
        "weights",
        "float32[3, 5] [Shard(0), Shard(1)] on cpu(dp=2, tp=2)",
        "         col 0-2  col 3-4",
        "row 0-1  cpu:0    cpu:1",
        "row 2    cpu:2    cpu:3",
    ]
    dtensor.debug.visualize_sharding(dtensor.zeros(1, device_mesh=mesh, placements=[Shard(0), Replicate()]))
    assert capsys.readouterr().out.splitlines() == [
        "float32[1] [Shard(0), Replicate()] on cpu(dp=2, tp=2)",
        "  col 0",
        "  cpu:0 cpu:1",
        "nothing: cpu:2 cpu:3",
    ]
    with pytest.raises(ValueError, match="a picture has two"):
        dtensor.debug.visualize_sharding(dtensor.zeros(1, 1, 1, device_mesh=mesh))


# Process groups.


def test_there_is_one_process() -> None:
    dist.init_process_group("nccl", rank=0, world_size=8)
    assert (dist.is_available(), dist.is_initialized(), dist.get_rank(), dist.get_world_size()) == (True, True, 0, 1)
    dist.barrier()
    dist.destroy_process_group()
    assert dist.ReduceOp is torch.distributed.ReduceOp


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("all_reduce", r"redistribute\(placements=\[Replicate\(\)\]\) of a Partial"),
        ("all_gather_into_tensor", r"t\.full_tensor\(\)"),
        ("reduce_scatter_tensor", r"Shard\(0\)"),
        ("broadcast_object_list", "distribute_tensor"),
        ("isend", r"t\.redistribute\(other_mesh"),
        ("new_group", "make a DeviceMesh"),
        ("monitored_barrier", "say with placements"),
    ],
)
def test_collectives_are_refused_with_what_to_write(name: str, instead: str) -> None:
    with pytest.raises(NotImplementedError, match=instead):
        getattr(dist, name)(torch.ones(2))


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dist.nonsense  # noqa: B018


def test_to_a_mesh_replicates_there() -> None:
    mesh = init_device_mesh("cpu", 2)
    values = torch.arange(10.0).reshape(5, 2)
    t = dtorch.distribute_tensor(values, mesh, [Shard(0)]).to(mesh)
    assert t.placements == [Replicate()]
    assert torch.equal(t.to_torch(), values)
