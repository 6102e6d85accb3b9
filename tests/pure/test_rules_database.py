"""Rules against torch's operator database: all of it in the long run, a seeded slice otherwise."""

from __future__ import annotations

import random

import pytest
import torch

from .database import database, entries
from .harness import WIDE, Sample
from .soundness import prove, widened

aten = torch.ops.aten


@pytest.mark.timeout(7200 if WIDE else 120)
def test_what_is_legal_is_right() -> None:
    chosen = None if WIDE else random.Random(2).sample(entries(), 12)
    samples = database(chosen).samples
    meshes = ((2,), (3,), (2, 2), (2, 3), (2, 2, 2)) if WIDE else ((3,), (2, 2))
    counts = prove(
        samples, per_overload=12 if WIDE else 2, cap=12 if WIDE else 4, seeds=3 if WIDE else 1, meshes=meshes
    )
    assert not counts.wrong, "\n".join([str(counts), *counts.wrong[:20]])
    assert sum(counts.checks.values()) > (100_000 if WIDE else 100), str(counts)


def test_wide_integers_are_values_and_never_places() -> None:
    x = torch.arange(6)
    wide = widened(Sample(aten.sum.default, (x,)))
    assert wide is not None and int(wide.args[0].max()) > 1 << 24
    assert widened(Sample(aten.index_select.default, (x, 0, x))) is None
    assert widened(Sample(aten.mul.Tensor, (x, x.double()))) is None
