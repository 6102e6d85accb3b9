"""The long run: torch's operator database through every rule of indexing, layers, losses and factories."""

from __future__ import annotations

import pytest
import torch

from dtorch.sharding import rule as rules

from .harness import WIDE, capture, sweep

FAMILIES = ("attention", "batch_norm", "cat", "convolution", "factory", "index", "loss", "normalization", "scan")


@pytest.mark.skipif(not WIDE, reason="the long run: DTORCH_WIDE=1")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_operator_database(family: str) -> None:
    stems = {k for k, e in rules._entries.items() if e.make.__module__ == f"dtorch.sharding.{family}"}

    def wanted(func: torch._ops.OpOverload) -> bool:
        random = torch.Tag.nondeterministic_seeded in func.tags
        # What is empty holds no values to compare; what a mask picks has no size before it runs.
        return rules.signature(func).stem in stems and not random and "empty" not in func._schema.name

    samples = [
        s for s in capture(wanted, cap=8, per_op=14, numel=2000) if not ("index" in str(s.func) and "bool" in str(s))
    ]
    report = sweep(samples, cap=8, variants=2)
    assert not report.wrong, str(report)
    assert family == "attention" or sum(report.checked.values()) > 100, str(report)
