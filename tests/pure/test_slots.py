"""Slots: completions are matched by slot and generation; tombstones free late results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtorch.errors import RunAheadError
from dtorch.runtime.config import Config
from dtorch.runtime.shared import DEAD, DONE, ERROR, SharedState
from dtorch.runtime.slots import Slots, Ticket


@pytest.fixture
def state() -> Iterator[SharedState]:
    s = SharedState.create(Config(ring_bytes=1 << 12, arena_bytes=4096, slots=16, max_executors=4))
    yield s
    s.close()


def answer(state: SharedState, ticket: Ticket, executor: int, word: int = DONE) -> None:
    state.control[state.slot_word(ticket.slot, executor)] = ticket.generation << 2 | word


def test_done_when_all_have_answered(state: SharedState) -> None:
    ticket = Slots(state).take((0, 2))
    assert not ticket.is_done() and ticket.unanswered() == (0, 2)
    answer(state, ticket, 2)
    answer(state, ticket, 1)  # not asked
    assert not ticket.is_done() and ticket.unanswered() == (0,)
    answer(state, ticket, 0, ERROR)
    assert ticket.is_done() and ticket.answered()
    assert ticket.failed() == (0,) and ticket.unanswered() == ()


def test_a_slot_is_used_again_under_a_new_generation(state: SharedState) -> None:
    slots = Slots(state)
    first = slots.take((0,))
    answer(state, first, 0)
    slots.give(first)
    second = slots.take((0,))
    assert (second.slot, second.generation) == (first.slot, first.generation + 1)
    assert not second.is_done()
    answer(state, first, 0)  # late, from the use before
    assert not second.is_done()
    answer(state, second, 0)
    assert second.is_done()


def test_tombstones_wait_for_late_answers(state: SharedState) -> None:
    slots = Slots(state)
    freed: list[str] = []
    ticket = slots.take((0, 1))
    slots.give(ticket, lambda: freed.append("late"))
    answer(state, ticket, 0)
    assert slots.sweep() == 1
    other = slots.take((0,))
    assert other.slot != ticket.slot and freed == []
    answer(state, ticket, 1)
    assert slots.take((0,)).slot == ticket.slot and freed == ["late"]
    assert slots.sweep() == 0


def test_tombstones_die_out_as_slots_are_taken(state: SharedState) -> None:
    slots = Slots(state)
    freed: list[int] = []
    tickets = [slots.take((0,)) for _ in range(12)]
    for ticket in tickets:
        slots.give(ticket, lambda t=ticket: freed.append(t.slot))
    assert slots.sweep() == 12
    for ticket in tickets[6:]:
        answer(state, ticket, 0)
    for _ in range(4):
        answer(state, t := slots.take((0,)), 0)
        slots.give(t)
    assert sorted(freed) == sorted(t.slot for t in tickets[6:])


def test_all_slots_in_use(state: SharedState) -> None:
    slots = Slots(state)
    tickets = [slots.take((0,)) for _ in range(16)]
    assert len({t.slot for t in tickets}) == 16
    with pytest.raises(RunAheadError, match=r"16 results are awaited at once.*configure\(slots=32\)"):
        slots.take((0,))
    slots.give(tickets[3])
    with pytest.raises(RunAheadError):
        slots.take((0,))
    answer(state, tickets[3], 0)
    assert slots.take((0,)).slot == tickets[3].slot


def test_a_death_ends_waiting_but_is_no_answer(state: SharedState) -> None:
    ticket = Slots(state).take((0, 1))
    answer(state, ticket, 0)
    state.control[DEAD] = 2
    assert ticket.is_done() and not ticket.answered() and ticket.unanswered() == (1,)


def test_a_slot_is_given_out_again_only_after_its_late_answer_was_looked_at(state: SharedState) -> None:
    slots = Slots(state)
    ticket = slots.take((0,))
    seen: list[tuple[int, bool]] = []

    def arrived() -> None:
        other = slots.take((0,))  # another thread, meanwhile
        seen.append((other.slot, bool(ticket.failed())))

    slots.give(ticket, arrived)
    answer(state, ticket, 0, ERROR)
    assert slots.sweep() == 0
    assert seen == [(1, True)]
    assert slots.take((0,)).slot == ticket.slot


def test_a_callback_that_raises_loses_no_slot(state: SharedState) -> None:
    slots = Slots(state)
    ticket = slots.take((0,))

    def arrived() -> None:
        raise ValueError

    slots.give(ticket, arrived)
    answer(state, ticket, 0)
    with pytest.raises(ValueError):
        slots.sweep()
    assert slots.in_use() == 0 and slots.take((0,)).slot == ticket.slot
