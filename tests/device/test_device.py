"""Every check of check.py as a test. `make device` runs check.py itself, which prints figures as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import gpus

from . import check

_WHY = "torch was built without CUDA" if torch.version.cuda is None else "no GPU is visible to CUDA"

pytestmark = [pytest.mark.skipif(gpus.count() == 0, reason=f"needs a GPU: {_WHY}"), pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _a_pool_of_its_own_after_a_failure() -> Iterator[None]:
    yield
    if dtorch.runtime.client.current_client() is not None:
        dtorch.shutdown()


@pytest.mark.parametrize("name", check.CHECKS)
def test_device(name: str) -> None:
    check.CHECKS[name]()
