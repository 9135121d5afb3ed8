"""The pages of paged caches: which row holds which, and which prefixes they contain.

Like the block manager of vLLM (Kwon et al. 2023, arXiv:2309.06180): full pages are shared by
rows that begin with the same tokens, and stay known after the last of these has ended until
their memory is needed, least recently used first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from specjax.engine.plan import MOST_STATES_OF_PROMPT, DecodePlan
from specjax.engine.rows import Row

_ROOT = 0
"""The serial number of what precedes the first page."""


@dataclass
class _Held:
    """The pages of a row in order; the first `published` are known, the last as `serial`."""

    pages: list[int] = field(default_factory=list)
    published: int = 0
    serial: int = _ROOT
    states: dict[int, Any] = field(default_factory=dict)
    """The states of recurrent layers after some numbers of tokens, whose pages are unpublished."""


class PagePool:
    """The pages 0 to `num_pages` - 1, each with `size` tokens, and the rows that hold them.

    What caches store of a page's tokens depends on these, all earlier ones, and the next
    `following` ones (a drafter may read pairs of a position and the token after it). With None,
    pages are not shared. Prefixes are found by a dict of whole pages of tokens, which compares them
    where their hashes are equal. A model with recurrent layers can only continue after a page if
    their state there was kept, as at most `num_states` are, the latest used ones; others have None.
    """

    def __init__(
        self,
        num_pages: int,
        size: int,
        following: int | None = None,
        num_states: int | None = None,
    ) -> None:
        self.num_pages, self.size, self.following = num_pages, size, following
        self.num_states = num_states
        self._states: OrderedDict[int, Any] = OrderedDict()
        """The states of recurrent layers after the pages with these serial numbers."""
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        """The pages that no row holds, in the order in which they are taken."""
        self._holders = [0] * num_pages
        self._held: dict[Hashable, _Held] = {}
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """The page, and its serial number, with these tokens after the page of a serial number."""
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        """The key in `_known` of each page that has one."""
        self._serials = itertools.count(_ROOT + 1)

    @property
    def num_unused(self) -> int:
        """The number of pages that no row holds."""
        return len(self._unused)

    def count_unused(self, pages: Sequence[int]) -> int:
        """Return how many of some pages no row holds."""
        return sum(page in self._unused for page in pages)

    def pages(self, row: Hashable) -> Sequence[int]:
        """Return the pages that a row holds, in order."""
        return self._held[row].pages if row in self._held else ()

    def needed(self, row: Hashable, num_tokens: int) -> int:
        """Return the number of further pages that a row needs for `num_tokens` tokens."""
        return max(-(-num_tokens // self.size) - len(self.pages(row)), 0)

    def known_prefix(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the known pages with the first `tokens` of a row, of at most `most` tokens."""
        return [page for page, _ in self._prefix(tokens, most)]

    def open(self, row: Hashable, tokens: Sequence[int], most: int) -> int:
        """Let a new row hold `known_prefix`; return the number of tokens in it."""
        found = self._prefix(tokens, most)
        held = self._held[row] = _Held([page for page, _ in found], len(found))
        for page, held.serial in found:
            self._holders[page] += 1
            self._unused.pop(page, None)
        if held.serial in self._states:
            self._states.move_to_end(held.serial)
        return len(found) * self.size

    def kept(self, row: Hashable) -> Any:
        """Return the states that were kept after a row's published pages, None if none were."""
        return self._states.get(self._held[row].serial)

    def keep(self, row: Hashable, num_tokens: int, states: Any) -> None:
        """Keep the states of recurrent layers after a row's first `num_tokens`, of whole pages.

        Later rows can use them once these pages are published.
        """
        held = self._held[row]
        if held.published * self.size < num_tokens:
            held.states[num_tokens] = states

    def reserve(self, row: Hashable, num_tokens: int) -> bool:
        """Let a row hold pages for `num_tokens` tokens; if too few are unused, return False.

        In that case nothing changes.
        """
        needed = self.needed(row, num_tokens)
        if needed > self.num_unused:
            return False
        for _ in range(needed):
            page, _ = self._unused.popitem(last=False)
            if page in self._key:
                _, serial = self._known.pop(self._key.pop(page))
                self._states.pop(serial, None)
            self._holders[page] = 1
            self._held[row].pages.append(page)
        return True

    def take_back(self, row: Hashable, num_tokens: int) -> None:
        """Take from a row the pages that it does not need for `num_tokens` tokens."""
        pages = self._held[row].pages
        kept = -(-num_tokens // self.size)
        self._release(pages[kept:])
        del pages[kept:]

    def can_publish(self, row: Hashable, filled: int) -> bool:
        """Return whether `filled` tokens of a row fill a page that `publish` has not shared."""
        published = self._held[row].published
        return self.following is not None and (published + 1) * self.size <= filled

    def publish(self, row: Hashable, tokens: Sequence[int], filled: int) -> None:
        """Let later rows share the full pages of a row whose row begins with `tokens`.

        All caches hold its first `filled` tokens.
        """
        held = self._held[row]
        while self.following is not None:
            end = (held.published + 1) * self.size
            if end > filled or end + self.following > len(tokens):
                return
            key = self._page_key(held.serial, tokens, held.published)
            page = held.pages[held.published]
            if key not in self._known:
                self._known[key] = page, next(self._serials)
                self._key[page] = key
            held.serial = self._known[key][1]
            held.published += 1
            if (states := held.states.pop(end, None)) is not None:
                self._states[held.serial] = states
                self._states.move_to_end(held.serial)
                if len(self._states) > self.num_states:
                    self._states.popitem(last=False)

    def close(self, row: Hashable) -> None:
        """Take all pages from a row, if it has any; what is published stays known."""
        if row in self._held:
            self._release(self._held.pop(row).pages)

    def forget(self) -> None:
        """Forget all prefixes, since what they hold is not what would be read now."""
        self._known.clear()
        self._key.clear()
        self._states.clear()
        for held in self._held.values():
            # What these rows fill from now on follows tokens that were read before.
            held.published, held.serial = self.num_pages, _ROOT
            held.states.clear()

    def _prefix(self, tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return the known pages with the first `tokens` that a row can continue after.

        Each is beside its serial number.
        """
        found = self._known_pages(tokens, most)
        while self.num_states is not None and found and found[-1][1] not in self._states:
            found.pop()
        return found

    def without_state(self, tokens: Sequence[int], most: int) -> int:
        """Return how many of the first `tokens` are in known pages after which no row can continue.

        No state of recurrent layers was kept there.
        """
        pages = len(self._known_pages(tokens, most)) - len(self._prefix(tokens, most))
        return pages * self.size

    def _known_pages(self, tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return all known pages with the first `tokens`, each with its serial number."""
        found: list[tuple[int, int]] = []
        while self.following is not None:
            end = (len(found) + 1) * self.size
            if end > most or end + self.following > len(tokens):
                break
            serial = found[-1][1] if found else _ROOT
            known = self._known.get(self._page_key(serial, tokens, len(found)))
            if known is None:
                break
            found.append(known)
        return found

    def _page_key(
        self, serial: int, tokens: Sequence[int], number: int
    ) -> tuple[int, tuple[int, ...]]:
        """Return the key of page `number` of a row's `tokens`, after the page of a `serial`."""
        first = number * self.size
        return serial, tuple(tokens[first : first + self.size + self.following])

    def _release(self, pages: Sequence[int]) -> None:
        # The last page comes first: without an earlier page, a later one cannot be found.
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._unused[page] = None
                if page not in self._key:
                    self._unused.move_to_end(page, last=False)


class RowPages:
    """Pools of pages, one for each device along `data`, and what the rows of a plan need of them.

    A row has pages of the device on which it is. Its caches hold all its tokens but the last. In
    each round they may grow by as many tokens as a round commits, up to the row's longest output.
    """

    def __init__(self, plan: DecodePlan) -> None:
        loop, shards = plan.loop, plan.prefill_rows
        shares = plan.options.enable_prefix_caching
        following = loop.drafter.following_tokens if shares else None
        num_pages = loop.num_pages // shards
        pool = functools.partial(
            PagePool, num_pages, loop.page_size, following, plan.num_kept_states
        )
        self.pools = [pool() for _ in range(shards)]
        self._pool_of: dict[Row, PagePool] = {}
        self._shape = plan.num_rows, loop.capacity // loop.page_size
        self._most_per_round = loop.drafter.num_speculative_tokens + 1
        self._max_length = plan.options.max_length

    def pool(self, slot: int) -> PagePool:
        """Return the pool of the device that has the row of a slot."""
        return self.pools[slot * len(self.pools) // self._shape[0]]

    def find_slot(
        self, row: Row, free: Iterable[int], others: Iterable[Row], rounds: int
    ) -> int | None:
        """Return the slot of some free ones in which a row can begin, or None.

        It can beside `others` that may run so many more rounds, and always where there is no other.
        A slot is preferred whose pool has the most of the row's tokens, then the most unused pages.
        """
        first_slots: dict[PagePool, int] = {}
        for slot in free:
            first_slots.setdefault(self.pool(slot), slot)
        others = list(others)
        slots = [
            slot
            for pool, slot in first_slots.items()
            if self._has_room(
                pool, row, [one for one in others if self._pool_of[one] is pool], rounds
            )
        ]
        if len(slots) < 2:
            return slots[0] if slots else None
        known = {slot: self.known_tokens(row, slot) for slot in slots}
        return max(slots, key=lambda slot: (known[slot], self.pool(slot).num_unused))

    def _has_room(self, pool: PagePool, row: Row, beside: Sequence[Row], rounds: int) -> bool:
        if not beside:
            return True
        most = max(rounds + one.rounds_under_way for one in beside)
        new = -(-self._cached(row, most) // pool.size)
        others = sum(self._needed(one, rounds) for one in beside)
        if new + others <= pool.num_unused:
            return True
        known = pool.known_prefix(row.tokens, row.num_tokens - 2)
        unused = pool.num_unused - pool.count_unused(known)
        return new - len(known) + others <= unused

    def known_tokens(self, row: Row, slot: int) -> int:
        """Return how many tokens of a row pages have already that it can share in a slot."""
        pool = self.pool(slot)
        return pool.size * len(pool.known_prefix(row.tokens, row.num_tokens - 2))

    def begin(self, row: Row, slot: int) -> int:
        """Let a row hold pages for its tokens; return how many of these are in them already."""
        pool = self._pool_of[row] = self.pool(slot)
        found = pool.open(row, row.tokens, row.num_tokens - 2)
        reserved = pool.reserve(row, self._cached(row, 0))
        assert reserved
        return found

    def without_state(self, row: Row) -> int:
        """Return how many tokens of a row that begins pages have, but after which no state is."""
        return self._pool_of[row].without_state(row.tokens, row.num_tokens - 2)

    def kept(self, row: Row) -> Any:
        """Return the states of recurrent layers where a row begins, None if none were kept."""
        return self._pool_of[row].kept(row)

    def next_kept(self, row: Row, position: int, chunks: Sequence[int]) -> int | None:
        """Return the next position after which a row's states of recurrent layers are kept.

        It ends a page and a chunk, of which a prompt is read in `chunks` of these sizes: the last
        one that an equal prompt would share, or one of a few before it. None if there is none, or
        nothing is kept.
        """
        pool = self._pool_of[row]
        if pool.num_states is None or pool.following is None:
            return None
        often, step = (math.lcm(chunk, pool.size) for chunk in (chunks[-1], chunks[0]))
        last = (row.num_tokens - 2) // often * often
        step *= max(-(-last // (step * MOST_STATES_OF_PROMPT)), 1)
        return min(last, position - position % step + step) if position < last else None

    def keep(self, row: Row, position: int, states: Any) -> None:
        """Keep a row's states of recurrent layers after the first `position` tokens."""
        self._pool_of[row].keep(row, position, states)

    def reserve(self, rows: Sequence[Row], rounds: int) -> PagePool | None:
        """Let rows hold pages for so many more rounds; return a pool that has too few, if any.

        In that case nothing changes.
        """
        needed = dict.fromkeys(self.pools, 0)
        for row in rows:
            needed[self._pool_of[row]] += self._needed(row, rounds)
        for pool, count in needed.items():
            if count > pool.num_unused:
                return pool
        for row in rows:
            self._pool_of[row].reserve(row, self._cached(row, rounds + row.rounds_under_way))
        return None

    def take_back(self, row: Row, cached: int) -> None:
        """Take the pages that a row does not need for the rounds that are under way.

        Later rows may share its full pages, of which all caches hold `cached` tokens.
        """
        pool, filled = self._pool_of[row], min(cached, row.num_tokens - 1)
        if pool.can_publish(row, filled):
            pool.publish(row, row.tokens, filled)
        pool.take_back(row, self._cached(row, row.rounds_under_way))

    def close(self, row: Row) -> None:
        """Take all pages from a row, if it has any; what is published stays known."""
        if row in self._pool_of:
            self._pool_of.pop(row).close(row)

    def forget(self) -> None:
        """Forget all prefixes, since what they hold is not what would be read now."""
        for pool in self.pools:
            pool.forget()

    def table(self, rows: Mapping[int, Row]) -> Int[np.ndarray, "B N"]:
        """Return the pages of some rows by their slots, and numbers out of range elsewhere.

        They count from the first page of the slot's pool.
        """
        table = np.full(self._shape, self.pools[0].num_pages, np.int32)
        for slot, row in rows.items():
            if row in self._pool_of:
                pages = self._pool_of[row].pages(row)
                table[slot, : len(pages)] = pages
        return table

    def _needed(self, row: Row, rounds: int) -> int:
        """Return how many more pages a row needs for so many rounds after those under way."""
        return self._pool_of[row].needed(row, self._cached(row, rounds + row.rounds_under_way))

    def _cached(self, row: Row, rounds: int) -> int:
        """Return the most tokens that a row's caches can hold after some more rounds."""
        longest = len(row.request.prompt) + row.most_tokens(self._max_length)
        return min(row.num_tokens + rounds * self._most_per_round, longest) - 1
