"""Random programs give torch's values on every mesh, or refuse; they never give others, hang, or break inside.

``DTORCH_PROGRAMS=5000`` runs that many.  What a failure shrinks to is kept below, as a test with the right value.
"""

from __future__ import annotations

import os
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dtorch import init_device_mesh

from . import program_futures, program_values, program_views  # noqa: F401  they register operators
from .programs import MESHES, OPERATORS, Program, Steps

COUNT = int(os.environ.get("DTORCH_PROGRAMS", "0"))

NUMBERS = st.tuples(*[st.integers(0, 23)] * 6)
NEW = st.tuples(st.just("new"), NUMBERS)
STEP = st.tuples(st.sampled_from(["new", *sorted(OPERATORS)]), NUMBERS)
PROGRAMS = st.builds(
    lambda new, steps: new + steps, st.lists(NEW, min_size=2, max_size=4), st.lists(STEP, min_size=2, max_size=14)
)


@pytest.mark.timeout(120 + COUNT)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("auto", [False, True], ids=["strict", "auto"])
@pytest.mark.parametrize("mesh", MESHES)
def test_random_programs(mesh: str, auto: bool) -> None:
    @settings(
        max_examples=COUNT or 30,
        derandomize=not COUNT,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(steps=PROGRAMS)
    def run(steps: Steps) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Program(init_device_mesh("cpu", MESHES[mesh]), auto=auto).run(steps)

    run()
