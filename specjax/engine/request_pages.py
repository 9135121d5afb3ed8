"""The pages of an engine's requests: reserved before a step, and taken back after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from specjax.engine.page_pool import PagePool
from specjax.engine.scheduler import Request
from specjax.engine.session import Session


class RequestPages:
    """Pools of pages, one for each device along `data`, and what an engine's requests need of them.

    A request has pages of the device on which its row is. Its caches hold all its tokens but the
    last. In each round they may grow by as many tokens as a round commits, up to the request's
    longest output.
    """

    def __init__(self, session: Session) -> None:
        plan, shards = session.plan, session.prefill_rows
        shares = session.options.enable_prefix_caching
        following = plan.drafter.following_tokens if shares else None
        num_pages = plan.num_pages // shards
        self.pools = [PagePool(num_pages, plan.page_size, following) for _ in range(shards)]
        self._pool_of: dict[Request, PagePool] = {}
        self._shape = session.num_rows, plan.capacity // plan.page_size
        self._most_per_round = plan.drafter.num_speculative_tokens + 1
        self._max_length = session.max_length

    def pool(self, slot: int) -> PagePool:
        """Return the pool of the device that has the row of a slot."""
        return self.pools[slot * len(self.pools) // self._shape[0]]

    def find_slot(
        self, request: Request, free: Iterable[int], rounds: Mapping[Request, int]
    ) -> int | None:
        """Return the slot of some free ones in which a request can begin, or None.

        It can beside others that may run so many rounds, and always where there is no other. A slot
        is preferred whose pool has the most of the request's tokens, then the most unused pages.
        """
        first_slots: dict[PagePool, int] = {}
        for slot in free:
            first_slots.setdefault(self.pool(slot), slot)
        slots = [
            slot for pool, slot in first_slots.items() if self._has_room(pool, request, rounds)
        ]
        if len(slots) < 2:
            return slots[0] if slots else None
        known = {slot: self.known_tokens(request, slot) for slot in slots}
        return max(slots, key=lambda slot: (known[slot], self.pool(slot).num_unused))

    def _has_room(self, pool: PagePool, request: Request, rounds: Mapping[Request, int]) -> bool:
        beside = {one: count for one, count in rounds.items() if self._pool_of[one] is pool}
        if not beside:
            return True
        new = -(-self._cached(request, max(beside.values())) // pool.size)
        others = sum(pool.needed(one, self._cached(one, count)) for one, count in beside.items())
        if new + others <= pool.num_unused:
            return True
        known = pool.known_prefix(request.tokens, request.num_tokens - 2)
        unused = pool.num_unused - pool.count_unused(known)
        return new - len(known) + others <= unused

    def known_tokens(self, request: Request, slot: int) -> int:
        """Return how many tokens of a request pages have already that it can share in a slot."""
        pool = self.pool(slot)
        return pool.size * len(pool.known_prefix(request.tokens, request.num_tokens - 2))

    def begin(self, request: Request, slot: int) -> int:
        """Let a request hold pages for its tokens; return how many of these are in them already."""
        pool = self._pool_of[request] = self.pool(slot)
        found = pool.open(request, request.tokens, request.num_tokens - 2)
        reserved = pool.reserve(request, self._cached(request, 0))
        assert reserved
        return found

    def reserve(self, rounds: Mapping[Request, int]) -> PagePool | None:
        """Let requests hold pages for so many rounds; return a pool that has too few, if any.

        In that case nothing changes.
        """
        lengths = {request: self._cached(request, count) for request, count in rounds.items()}
        needed = dict.fromkeys(self.pools, 0)
        for request, length in lengths.items():
            pool = self._pool_of[request]
            needed[pool] += pool.needed(request, length)
        for pool, count in needed.items():
            if count > pool.num_unused:
                return pool
        for request, length in lengths.items():
            self._pool_of[request].reserve(request, length)
        return None

    def take_back(self, request: Request, cached: int, rounds: int) -> None:
        """Take the pages that a request does not need for the `rounds` that have begun.

        Later requests may share its full pages, of which all caches hold `cached` tokens.
        """
        pool, filled = self._pool_of[request], min(cached, request.num_tokens - 1)
        if pool.can_publish(request, filled):
            pool.publish(request, request.tokens, filled)
        pool.take_back(request, self._cached(request, rounds))

    def close(self, request: Request) -> None:
        """Take all pages from a request, if it has any; what is published stays known."""
        if request in self._pool_of:
            self._pool_of.pop(request).close(request)

    def forget(self) -> None:
        """Forget all prefixes, since what they hold is not what would be read now."""
        for pool in self.pools:
            pool.forget()

    def table(self, requests: Sequence[Request | None]) -> Int[np.ndarray, "B N"]:
        """Return the pages of each row's request, and numbers out of range where it has none.

        They count from the first page of the row's pool.
        """
        table = np.full(self._shape, self.pools[0].num_pages, np.int32)
        for row, request in enumerate(requests):
            if request in self._pool_of:
                pages = self._pool_of[request].pages(request)
                table[row, : len(pages)] = pages
        return table

    def _cached(self, request: Request, rounds: int) -> int:
        """Return the most tokens that a request's caches can hold after some more rounds."""
        row = request.row
        longest = min(len(row.prompt) + row.sampling.max_new_tokens, self._max_length)
        return min(request.num_tokens + rounds * self._most_per_round, longest) - 1
