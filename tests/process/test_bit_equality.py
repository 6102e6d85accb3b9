"""On one device an unmodified script is bit-equal to plain torch, whether torch has one thread or several."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .scripts import ROOT, run_script


@pytest.mark.parametrize("threads", ["1", "2"])
def test_plain_script_is_bit_equal_step_by_step(tmp_path: Path, threads: str) -> None:
    source = (ROOT / "examples/plain_script.py").read_text()
    changed = re.sub(r"(?m)^import torch$", "import dtorch as torch", source)
    assert changed != source
    (tmp_path / "with_dtorch.py").write_text(changed)

    plain = run_script("examples/plain_script.py", OMP_NUM_THREADS=threads).splitlines()
    ours = run_script(tmp_path / "with_dtorch.py", OMP_NUM_THREADS=threads).splitlines()

    assert len(plain) == 2 * 31
    assert ours == plain
