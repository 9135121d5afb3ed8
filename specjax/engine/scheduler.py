"""Scheduling: which rows wait, are read and decode, in which slots, for how many rounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from specjax.core.cache import KVCache
from specjax.engine.outputs import RequestId
from specjax.engine.pages import PagePool, RowPages
from specjax.engine.plan import DecodePlan, round_up
from specjax.engine.rows import Row

_ROUNDS_WHILE_READING = 4
"""The maximum number of rounds per step while prompts for free slots are being read."""
_ROUNDS_PER_STOP = 8
"""The maximum number of rounds per step while some row has stop strings."""


@dataclass
class Reading:
    """Rows whose prompts are being read, by slot; all are read together, up to `position`.

    `begun` says whether the devices have them. The first `num_shared` tokens of each were found in
    pages, added up, and `states` are those of recurrent layers after them. `num_reread` were found
    too, but are read again, since the state after them was not kept.
    """

    rows: dict[int, Row]
    position: int = 0
    begun: bool = False
    num_shared: int = 0
    num_reread: int = 0
    states: Sequence[KVCache] = ()

    @property
    def longest(self) -> int:
        """The position up to which the longest prompt of an unaborted row must be read."""
        return max((self.position, *self._lengths()))

    def count(self, end: int) -> int:
        """Return the number of tokens of unaborted rows from the position to `end`."""
        return sum(max(min(length, end) - self.position, 0) for length in self._lengths())

    def _lengths(self) -> list[int]:
        """Return how many tokens of each unaborted row are read, which are all but the last."""
        return [len(row.request.tokens) - 1 for row in self.rows.values() if not row.ended]


class Scheduler:
    """A queue of rows, the slots of a plan, and the pages of their caches, if these have pages.

    Rows get slots in order of arrival, with pages as far as there are enough. Methods that are
    called for a single row take a time that is independent of the number of waiting rows.
    """

    def __init__(self, plan: DecodePlan) -> None:
        # The plan itself has parameters, which the engine may replace.
        self._options, self._chunks = plan.options, plan.loop.chunks
        self._num_rows, self._prefill_rows = plan.num_rows, plan.prefill_rows
        self.pages = None if plan.loop.page_size is None else RowPages(plan)
        self.slots: list[Row | None] = [None] * plan.options.batch_size
        self.reading: Reading | None = None
        self.ended_slots: set[int] = set()
        """The slots whose rows the host has ended, while the devices still decode them."""
        self._waiting: OrderedDict[Row, None] = OrderedDict()
        self._by_id: dict[RequestId, dict[Row, None]] = {}

    @property
    def free_slots(self) -> list[int]:
        """The slots that no row has."""
        return [slot for slot, row in enumerate(self.slots) if row is None]

    @property
    def num_waiting(self) -> int:
        """The number of rows without a slot."""
        return len(self._waiting)

    @property
    def decoding(self) -> dict[int, Row]:
        """The rows that decode, and are not being read, by slot."""
        read = self.reading.rows if self.reading else {}
        return {
            slot: row for slot, row in enumerate(self.slots) if row and read.get(slot) is not row
        }

    @property
    def host_may_end_rows(self) -> bool:
        """Whether a row in some slot has stop strings, which only the host finds."""
        return any(row is not None and row.request.sampling.stop for row in self.slots)

    def add(self, row: Row) -> None:
        """Append a row to the queue; rows with the same id are samples of one request."""
        self._waiting[row] = None
        self._by_id.setdefault(row.id, {})[row] = None

    def has(self, id: RequestId) -> bool:
        """Return whether a row with this id is waiting or has a slot."""
        return id in self._by_id

    def samples(self, id: RequestId) -> list[Row]:
        """Return the waiting and running rows of an id, in the order they were added."""
        return list(self._by_id.get(id, ()))

    def take(self, slots: Sequence[int]) -> dict[int, Row]:
        """Assign waiting rows to free `slots`, in order; return the row of each."""
        taken = {}
        for slot in slots[: len(self._waiting)]:
            taken[slot], _ = self._waiting.popitem(last=False)
            self.slots[slot] = taken[slot]
        return taken

    def _slots_for_next(self, without: Collection[PagePool] = ()) -> list[int]:
        """Return the free slots that the next waiting row can get; with pages, one at most.

        With pages it is one where there are pages for it, of another pool than those in `without`.
        """
        row = next(iter(self._waiting), None)
        if self.pages is None or row is None:
            return self.free_slots if row else []
        free = [slot for slot in self.free_slots if self.pages.pool(slot) not in without]
        others = filter(None, self.slots)
        slot = self.pages.find_slot(row, free, others, self._options.rounds_per_step)
        return [] if slot is None else [slot]

    def read_next(self) -> Reading | None:
        """Give slots to the rows that are read next; return them, or None if there are none.

        Each device along `data` reads one, or none of a pool that has other beginnings of it.
        """
        if self.pages is None:
            rows = self.take(self.free_slots[: self._prefill_rows])
            self.reading = Reading(rows) if rows else None
            return self.reading
        reading, pools = Reading({}), set()
        while slots := self._slots_for_next(pools):
            (slot,), row = slots, next(iter(self._waiting))
            if pools and self.pages.known_tokens(row, slot) != reading.position:
                break
            pools.add(self.pages.pool(slot))
            reading.rows |= self.take(slots)
            reading.position = self.pages.begin(row, slot)
            reading.states = self.pages.kept(row) or ()
            reading.num_shared += reading.position
            reading.num_reread += self.pages.without_state(row)
        self.reading = reading if pools else None
        return self.reading

    def next_part(self, budget: int) -> int:
        """Return how many tokens of the prompts being read to read next within `budget`.

        If no row decodes they are all that are left. Otherwise reading stops after a whole chunk of
        the largest size or at the end of the prompts, so that a prompt's chunks do not depend on
        what else is read.
        """
        left, chunks = self._until_kept() - self.reading.position, self._chunks
        if not self.decoding or round_up(left, chunks[-1]) <= budget:
            return left
        if budget == self._options.prefill_budget:
            budget = max(budget, chunks[0])
        budget = max(budget, 0)
        return min(left, budget - budget % chunks[0])

    def _until_kept(self) -> int:
        """Return the position up to which the prompts being read are read without a stop.

        They are read to their ends, or to where their states of recurrent layers are kept.
        """
        reading = self.reading
        if self.pages is not None and len(reading.rows) == 1:
            (row,) = reading.rows.values()
            stop = self.pages.next_kept(row, reading.position, self._chunks)
            if stop is not None:
                return min(stop, reading.longest)
        return reading.longest

    def keeps_states(self, begin: int) -> bool:
        """Return whether states are kept at the position of what is read, which was `begin`."""
        if self.pages is None or len(self.reading.rows) != 1:
            return False
        (row,) = self.reading.rows.values()
        kept = self.pages.next_kept(row, begin, self._chunks)
        return not row.ended and self.reading.position == kept

    def keep(self, states: Sequence[KVCache]) -> None:
        """Keep states of recurrent layers after what has been read of the only row's prompt."""
        (row,) = self.reading.rows.values()
        self.pages.keep(row, self.reading.position, states)

    def admit(self) -> None:
        """Let the rows decode whose prompts have been read, and which the devices have moved."""
        # Rows aborted meanwhile have given up their slots, but the devices decode them there.
        for slot, row in self.reading.rows.items():
            self.ended_slots.discard(slot)
            if row.ended:
                self.ended_slots.add(slot)
            elif self.pages is not None:
                # A draft model's cache is one token behind.
                self.pages.take_back(row, row.num_tokens - 2)
        self.reading = None

    def put_back(self, pool: PagePool) -> None:
        """Let the latest row with pages of a pool wait again, before all others.

        It will read prompt and output, and continue with its next round.
        """
        rows = [(s, row) for s, row in enumerate(self.slots) if row and self.pages.pool(s) is pool]
        slot, last = max(rows, key=lambda pair: (pair[1].request.number, pair[1].request.sample))
        self.slots[slot] = None
        self.ended_slots.add(slot)
        if self.reading and self.reading.rows.get(slot) is last:
            del self.reading.rows[slot]
            self.reading = self.reading if self.reading.rows else None
        self.pages.close(last)
        last.resume_later()
        self._waiting[last] = None
        self._waiting.move_to_end(last, last=False)

    def most_rounds(self) -> int:
        """Return the most rounds that the next step may run before the host looks at its rows."""
        rounds = self._options.rounds_per_step
        if self.reading or self._slots_for_next():
            rounds = min(rounds, _ROUNDS_WHILE_READING)
        return min(rounds, _ROUNDS_PER_STOP) if self.host_may_end_rows else rounds

    def enough_idle(self) -> int:
        """Return how many rows have to be idle, those without a request included, to end a step."""
        if not self._waiting:
            return self._num_rows + 1
        idle = self._num_rows - len(self.decoding)
        return min(idle + self._options.rows_per_refill, self._num_rows)

    def reserve(self, rounds: int) -> tuple[int, PagePool | None]:
        """Reserve pages for a step of up to `rounds` rounds; return how many rounds it may have.

        It is 0 if there are too few pages for a round, and then also returns a pool without pages.
        """
        short = None
        while rounds and self.pages is not None:
            short = self.pages.reserve(list(self.decoding.values()), rounds)
            if short is None:
                break
            rounds //= 2
        return rounds, short

    def free(self, row: Row) -> int | None:
        """Remove a row, with its pages; return its slot, or None if it had none."""
        samples = self._by_id[row.id]
        del samples[row]
        if not samples:
            del self._by_id[row.id]
        if self.pages is not None:
            self.pages.close(row)
        if row in self._waiting:
            del self._waiting[row]
            return None
        slot = self.slots.index(row)
        self.slots[slot] = None
        return slot

    def stop_reading_ended(self) -> None:
        """Read no further if all rows that are being read have ended."""
        if self.reading and all(row.ended for row in self.reading.rows.values()):
            self.reading = None

    def table(self, rows: Mapping[int, Row]) -> Int[np.ndarray, "B N"] | None:
        """Return the pages of some rows by their slots, or None if caches have no pages."""
        return None if self.pages is None else self.pages.table(rows)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows that have a slot, then those that wait."""
        yield from filter(None, self.slots)
        yield from self._waiting

    def __len__(self) -> int:
        return len(self.slots) - self.slots.count(None) + self.num_waiting
