"""A slice of the soak (tests/soak): a few deaths, programs, errors and spoilt words of each kind.

`pytest -m "not soak"` leaves it out; `make soak` runs all of it.
"""

from __future__ import annotations

import pytest

from ..soak.driver import Result, run_part, table
from ..soak.parts import PARTS, Part

# Seconds that all parts together take at most, by their weights; each tries once at least.
SECONDS = 60.0


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_a_slice(part: Part) -> None:
    share = SECONDS * part.weight / sum(p.weight for p in PARTS)
    result: Result = run_part(part, 0, part.wanted, share)
    print(table([result]))
    assert result.done
    assert not result.violations, "\n".join(result.violations[:3])
