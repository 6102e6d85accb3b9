"""Soak: hundreds of deaths, a thousand random programs, a million operators; nothing may hang, leak or be wrong.

    python -m tests.soak                       every part in full, about 20 minutes
    python -m tests.soak --seconds 120         a slice: what CI runs
    python -m tests.soak --only executors --seed 17 --count 1        one trial again

Each part is a module with a class ``Trials``: trial number n is made from seed + n alone. Parts run in processes of
their own, one after the other, so that a hang or a crash is a violation of one trial and not the end of the run.
"""
