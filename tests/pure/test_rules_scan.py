"""Rules of operators along one whole dim: sort, topk, cumsum, …"""

from __future__ import annotations

import pytest
import torch

from dtorch.errors import PlacementError

from .harness import S, Sample, check, check_all, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)
x = torch.randn(5, 4, 3, generator=g, dtype=torch.float64)
edges = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
SAMPLES = [
    Sample(aten.sort.default, (x, 1)),
    Sample(aten.sort.stable, (x,), {"stable": True, "dim": 0, "descending": True}),
    Sample(aten.topk.default, (x, 2, -2)),
    Sample(aten.cumsum.default, (x, 0)),
    Sample(aten.cumprod.default, (x, -1)),
    Sample(aten.cummax.default, (x, 1)),
    Sample(aten.cummin.default, (x, 1)),
    Sample(aten.logcumsumexp.default, (x, 2)),
    Sample(aten.renorm.default, (x, 2.0, 1, 0.5)),
    Sample(aten.searchsorted.Tensor, (edges, x)),
    Sample(aten.searchsorted.Tensor, (x.sort(-1)[0], x)),
    Sample(aten.bucketize.Tensor, (x, edges)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_placement(sample: Sample) -> None:
    for n in (2, 3):
        legal, wrong = check_all(sample, n)
        assert legal >= 2 and not wrong, wrong[:3]


def test_meshes() -> None:
    report = sweep(SAMPLES, cap=6, variants=2)
    assert not report.wrong, str(report)


@pytest.mark.parametrize("sample", SAMPLES[:4], ids=str)
def test_along_a_sharded_dim_is_refused(sample: Sample) -> None:
    dim = sample.kwargs.get("dim", sample.args[-1] if len(sample.args) > 1 else -1)
    with pytest.raises(PlacementError, match="must be whole on every rank"):
        check(sample, (2,), [(S(dim % 3),)])
