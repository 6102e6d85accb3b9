"""Rules of softmax and of layer, RMS, group and batch norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.errors import PlacementError

from .harness import P, R, S, Sample, SimTensor, check, check_all, mesh_of, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _norms() -> list[Sample]:
    x, w, b = rn(5, 4, 6), rn(6), rn(6)
    _, mean, rstd = aten.native_layer_norm.default(x, [6], w, b, 1e-5)
    layer = aten.native_layer_norm_backward.default
    y, gw, gb = rn(3, 4, 2, 2), rn(4), rn(4)
    _, gm, gr = aten.native_group_norm.default(y, gw, gb, 3, 4, 4, 2, 1e-5)
    group = aten.native_group_norm_backward.default
    return [
        Sample(aten.native_layer_norm.default, (x, [6], w, b, 1e-5)),
        Sample(aten.native_layer_norm.default, (x, [4, 6], None, None, 1e-5)),
        Sample(layer, (rn(5, 4, 6), x, [6], mean, rstd, w, b, [True, True, True])),
        Sample(layer, (rn(5, 4, 6), x, [6], mean, rstd, w, None, [True, True, False])),
        Sample(layer, (rn(5, 4, 6), x, [6], mean, rstd, None, None, [True, False, False])),
        Sample(aten.native_group_norm.default, (y, gw, gb, 3, 4, 4, 2, 1e-5)),
        Sample(group, (rn(3, 4, 2, 2), y, gm, gr, gw, 3, 4, 4, 2, [True, True, True])),
    ]


def _softmaxes() -> list[Sample]:
    x, soft, logs = rn(5, 4), rn(5, 4).softmax(1), rn(5, 4).log_softmax(0)
    return [
        Sample(aten._softmax.default, (x, 1, False)),
        Sample(aten._log_softmax.default, (rn(3, 4, 2), -2, False)),
        Sample(aten._safe_softmax.default, (x, -1)),
        Sample(aten._softmax_backward_data.default, (rn(5, 4), soft, 1, torch.float64)),
        Sample(aten._log_softmax_backward_data.default, (rn(5, 4), logs, 0, torch.float64)),
    ]


SAMPLES = _norms() + _softmaxes()


def test_meshes() -> None:
    report = sweep(SAMPLES, cap=10)
    assert not report.wrong, str(report)
    assert len(report.checked) == 9, str(report)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_placement(sample: Sample) -> None:
    legal, wrong = check_all(sample, 2, kinds=("sum",), cap=150)
    assert legal and not wrong, wrong[:3]


@pytest.mark.parametrize("sample", _softmaxes(), ids=str)
def test_softmax_over_a_sharded_dim_is_refused(sample: Sample) -> None:
    dim = next(a for a in sample.args if type(a) is int)
    with pytest.raises(PlacementError, match="The softmax dim must be whole on every rank"):
        check(sample, (2,), [(S(dim % sample.args[0].ndim),)] * len(sample.tensors()))


@pytest.mark.parametrize("sample", [s for s in _softmaxes() if "safe" not in str(s)], ids=str)
def test_softmax_over_a_sharded_dim_runs_where_communication_is_allowed(sample: Sample) -> None:
    dim = next(a for a in sample.args if type(a) is int)
    for n in (2, 3):
        SimTensor.counts.clear()
        check(sample, (n,), [(S(dim % sample.args[0].ndim),)] * len(sample.tensors()), auto=True)
        # The maximum and the sum; the backward needs the sum alone.
        assert SimTensor.counts["redistribute"] == (1 if "backward" in str(sample) else 2)


def test_layer_norm_over_a_sharded_dim_is_refused() -> None:
    with pytest.raises(PlacementError, match="The normalized dims must be whole"):
        check(SAMPLES[0], (2,), [(S(2),), (S(0),), (S(0),)])


def test_gradient_of_a_replicated_weight_is_partial() -> None:
    plan = check(SAMPLES[2], (3,), [(S(0),), (S(0),), (S(0),), (S(0),), (R,), (R,)])
    assert [s.placements for s in plan.outs] == [(S(0),), (P(),), (P(),)]  # type: ignore[union-attr]
