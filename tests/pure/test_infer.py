"""Shapes, strides and dtypes agree with what torch's CPU kernels give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_map

from dtorch.sharding import infer as infer_module
from dtorch.sharding.infer import infer
from dtorch.sharding.rule import UNTAGGED_POINTWISE, Num, OutMeta, signature
from dtorch.spec import TensorSpec

from .harness import WIDE, R, Sample, abstract, capture, flat_outputs, mesh_of, meta_of, quiet

aten = torch.ops.aten
FORMS = frozenset(infer_module._forms)
VIEWS = frozenset("view permute t transpose unsqueeze squeeze expand slice select diagonal unfold split unbind".split())
SOME = frozenset(
    "add sub mul div where lerp addcmul masked_fill clamp maximum pow float_power ldexp rsub bitwise_and ge frexp "
    "nn.functional.threshold nn.functional.leaky_relu nn.functional.prelu nn.functional.logsigmoid sgn mvlgamma "
    "sum mean amax any all argmax count_nonzero prod logsumexp var std_mean linalg.vector_norm aminmax "
    "max_reduction_with_dim softmax log_softmax nn.functional.layer_norm cumsum tril roll flip sort cat gather "
    "nn.functional.embedding nn.functional.nll_loss unsqueeze split unbind select narrow reshape t "
    "transpose mm bmm addmm baddbmm addbmm clone to permute squeeze expand view "
    "unfold diagonal nn.functional.scaled_dot_product_attention __getitem__ index_select stack".split()
)


def wanted(func: torch._ops.OpOverload) -> bool:
    sig = signature(func)
    known = sig.stem in FORMS or sig.stem in VIEWS or sig.pointwise or sig.stem in UNTAGGED_POINTWISE
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    return known and not sig.has_out and not seeded and not sig.stem.startswith("_foreach")


def layouts(sample: Sample) -> Iterator[Sample]:
    """The sample with its tensors laid out otherwise: transposed, with holes, permuted, expanded."""

    def transposed(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim >= 2 else x

    def holes(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x], -1)[..., 0] if x.ndim and x.numel() else x

    def permuted(x: torch.Tensor) -> torch.Tensor:
        if x.ndim < 3:
            return x
        return x.movedim(0, -1).contiguous().movedim(-1, 0)

    def expanded(x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand(x.shape) if x.ndim and x.numel() else x

    yield sample
    for relayout in (transposed, holes, permuted, expanded):
        inplace = signature(sample.func).inplace and relayout is expanded

        def apply(x: object, relayout=relayout, inplace=inplace) -> object:  # type: ignore[no-untyped-def]
            return relayout(x) if isinstance(x, torch.Tensor) and not inplace else x

        yield Sample(sample.func, *tree_map(apply, (sample.args, sample.kwargs)))
    first = sample.args[0] if sample.args else None
    if isinstance(first, torch.Tensor) and first.ndim >= 2:
        yield Sample(sample.func, (transposed(first), *sample.args[1:]), sample.kwargs)


def differences(sample: Sample) -> tuple[int, list[str]]:
    """(layouts compared, where infer and the CPU kernel differ)."""
    compared, found = 0, list[str]()
    if signature(sample.func).stem == "index" and any(t.dtype == torch.bool for t in sample.tensors()[1:]):
        return 0, []  # the shape depends on the values
    for laid in layouts(sample):
        specs = [TensorSpec.of(tuple(t.shape), tuple(t.stride()), t.dtype, mesh_of((1,)), (R,)) for t in laid.tensors()]
        args, kwargs = abstract(laid.func, laid.args, laid.kwargs, specs)
        try:
            want = tuple(meta_of(t) for t in flat_outputs(laid.func(*laid.args, **laid.kwargs)))
        except RuntimeError:
            continue  # not a legal call in this layout
        if not want and laid.func._schema.returns:
            continue  # a number
        compared += 1
        try:
            got: object = infer(laid.func, args, kwargs)
        except Exception as e:
            got = repr(e)[:200]
        if got != want:
            found.append(f"{laid} strides {[t.stride() for t in laid.tensors()]}: {got}, torch gives {want}")
    return compared, found


def test_infer_is_what_cpu_kernels_give() -> None:
    compared, found = 0, []
    kinds = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16) if WIDE else (torch.float32,)
    for dtype in kinds:
        samples = capture(
            wanted, ops=lambda name: WIDE or name in SOME, cap=8 if WIDE else 3, per_op=10 if WIDE else 4, dtype=dtype
        )
        with quiet():
            for sample in samples:
                n, wrong = differences(sample)
                compared, found = compared + n, found + wrong
    firsts = {text.partition("(")[0]: text for text in reversed(found)}
    assert not found, "\n".join([f"{len(found)} of {compared} differ", *firsts.values()])
    assert compared > (20_000 if WIDE else 800)


def rn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


TABLE = [
    Sample(aten.add.Tensor, (rn(4, 6), 2)),
    Sample(aten.add.Tensor, (rn(4, 6, dtype=torch.int64), 2.5)),
    Sample(aten.add.Tensor, (rn(4, 6, dtype=torch.bfloat16), rn())),
    Sample(aten.add.Tensor, (rn(4, 6, dtype=torch.bfloat16), rn(6))),
    Sample(aten.mul.Tensor, (rn(4, 1, 6), rn(5, 1))),
    Sample(aten.mul.Tensor, (rn(0, 6), rn(1, 6))),
    Sample(aten.div.Tensor, (rn(4, dtype=torch.int64), 2)),
    Sample(aten.sum.dim_IntList, (rn(4, 6, dtype=torch.bool), [0])),
    Sample(aten.sum.default, (rn(4, 6, dtype=torch.float16),), {"dtype": torch.float32}),
    Sample(aten.any.dim, (rn(4, 6, dtype=torch.uint8), 0)),
    Sample(aten.max.dim, (rn(4, 6), 0, True)),
    Sample(aten.var_mean.correction, (rn(4, 6, dtype=torch.complex64), [0])),
    Sample(aten.native_layer_norm.default, (rn(2, 3, 4), [3, 4], rn(3, 4), None, 1e-5)),
    Sample(aten.embedding.default, (rn(7, 4), torch.tensor([[1, 2, 3]]))),
    Sample(aten.index.Tensor, (rn(7, 4, 3), [torch.tensor([1, 2]), torch.tensor([0, 3])])),
    Sample(aten.index.Tensor, (rn(7, 4, 3), [None, torch.tensor([1, 2])])),
    Sample(aten.nll_loss_forward.default, (rn(4, 6), torch.tensor([1, 2, 3, 0]), None, 1, -100)),
    Sample(aten.view.default, (rn(6, 4).t()[:2], [2, 2, 3])),
    Sample(aten.view.default, (rn(0, 4), [2, 0, 4])),
    Sample(aten.view.default, (rn(), [1, 1])),
    Sample(aten.expand.default, (rn(), [2, 1])),
    Sample(aten.expand.default, (rn(3, 1), [1, 2, 3, 4])),
    Sample(aten.slice.Tensor, (rn(7, 4), 0, -3, 9223372036854775807, 2)),
    Sample(aten.squeeze.dims, (rn(1, 4, 1), [0, 1])),
    Sample(aten.relu_.default, (rn(4, 6),)),
    Sample(aten.zero_.default, (rn(4, 6),)),
    Sample(aten.copy_.default, (rn(4, 6), rn(6, dtype=torch.int64))),
    Sample(aten.t_.default, (rn(4, 6),)),
    Sample(aten._to_copy.default, (rn(4, 6).t(),), {"dtype": torch.float64}),
    Sample(aten.clone.default, (rn(4, 6).t(),), {"memory_format": torch.contiguous_format}),
    Sample(aten.bernoulli_.float, (rn(4, 6), 0.5)),
]


@pytest.mark.parametrize("sample", TABLE, ids=str)
def test_table(sample: Sample) -> None:
    compared, found = differences(sample)
    assert compared
    assert not found, found


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(shape, None, dtype, mesh_of((2,)), (R,))


def test_wrong_calls_raise_what_torch_raises() -> None:
    for func, args, words in (
        (aten.add.Tensor, (spec(4), spec(3)), r"The size of tensor a \(4\) must match the size of tensor b \(3\)"),
        (aten.mm.default, (spec(4, 3), spec(4, 3)), r"mat1 and mat2 shapes cannot be multiplied \(4x3 and 4x3\)"),
        (aten.view.default, (spec(4, 3), [5]), "invalid for input of size 12"),
        (aten.add_.Tensor, (spec(4, dtype=torch.int64), spec(4)), "can't be cast"),
        (aten.add_.Tensor, (spec(1), spec(4)), "doesn't match the broadcast shape"),
        (aten.mean.default, (spec(4, dtype=torch.int64),), "must be either a floating point or complex|floating point"),
        (aten.cat.default, ([spec(4, 3), spec(4, 2)], 0), "Sizes of tensors must match|expected"),
    ):
        with pytest.raises(RuntimeError, match=words):
            infer(func, args, {})
    with pytest.raises(IndexError):
        infer(aten.sum.dim_IntList, (spec(4), [3]), {})


def test_numbers_decide_by_kind_alone() -> None:
    whole, real = [infer(aten.mul.Tensor, (spec(4, dtype=torch.int64), Num.of(v)), {}) for v in (2, 2.5)]
    assert whole == (OutMeta((4,), (1,), torch.int64),)
    assert real == (OutMeta((4,), (1,), torch.float32),)
    assert infer(aten.mul.Tensor, (spec(4), True), {}) == (OutMeta((4,), (1,), torch.float32),)


def test_undefined_outputs_are_none() -> None:
    grad, x, stat, w = spec(4, 6), spec(4, 6), spec(4, 1), spec(6)
    outs = infer(aten.native_layer_norm_backward.default, (grad, x, [6], stat, stat, w, None, [True, True, False]), {})
    assert outs == (OutMeta((4, 6), (6, 1), torch.float32), OutMeta((6,), (1,), torch.float32), None)
