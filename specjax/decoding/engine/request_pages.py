"""The pages of an engine's requests: reserved before a step, and taken back after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from specjax.decoding.engine.page_pool import PagePool
from specjax.decoding.engine.scheduler import Request
from specjax.decoding.session import Session


class RequestPages:
    """A pool of pages, and what the requests of an engine need of it.

    A request's caches hold all its tokens but the last. In each round they may grow by as many
    tokens as a round commits, up to the request's longest output.
    """

    def __init__(self, session: Session) -> None:
        plan = session.plan
        shares = session.options.enable_prefix_caching
        following = plan.drafter.following_tokens if shares else None
        self.pool = PagePool(plan.num_pages, plan.page_size, following)
        self._shape = session.num_rows, plan.capacity // plan.page_size
        self._most_per_round = plan.drafter.num_speculative_tokens + 1
        self._max_length = session.max_length

    def has_room(self, request: Request, rounds: Mapping[Request, int]) -> bool:
        """Return whether a request can begin, beside others that may run so many rounds."""
        new = -(-self._cached(request, max(rounds.values(), default=0)) // self.pool.size)
        others = sum(
            self.pool.needed(other, self._cached(other, count)) for other, count in rounds.items()
        )
        if new + others <= self.pool.num_unused:
            return True
        known = self.pool.known_prefix(request.tokens, request.num_tokens - 2)
        unused = self.pool.num_unused - self.pool.count_unused(known)
        return new - len(known) + others <= unused

    def begin(self, request: Request) -> int:
        """Let a request hold pages for its tokens; return how many of these are in them already."""
        found = self.pool.open(request, request.tokens, request.num_tokens - 2)
        reserved = self.pool.reserve(request, self._cached(request, 0))
        assert reserved
        return found

    def reserve(self, rounds: Mapping[Request, int]) -> bool:
        """Let requests hold pages for so many rounds; if too few are left, return False."""
        lengths = {request: self._cached(request, count) for request, count in rounds.items()}
        needed = sum(self.pool.needed(request, length) for request, length in lengths.items())
        if needed > self.pool.num_unused:
            return False
        return all(self.pool.reserve(request, length) for request, length in lengths.items())

    def take_back(self, request: Request, cached: int, rounds: int) -> None:
        """Take the pages that a request does not need for the `rounds` that have begun.

        Later requests may share its full pages, of which all caches hold `cached` tokens.
        """
        filled = min(cached, request.num_tokens - 1)
        if self.pool.can_publish(request, filled):
            self.pool.publish(request, request.tokens, filled)
        self.pool.take_back(request, self._cached(request, rounds))

    def table(self, requests: Sequence[Request | None]) -> Int[np.ndarray, "B N"]:
        """Return the pages of each row's request, and numbers out of range where it has none."""
        table = np.full(self._shape, self.pool.num_pages, np.int32)
        for row, request in enumerate(requests):
            pages = self.pool.pages(request)
            table[row, : len(pages)] = pages
        return table

    def _cached(self, request: Request, rounds: int) -> int:
        """Return the most tokens that a request's caches can hold after some more rounds."""
        row = request.row
        longest = min(len(row.prompt) + row.sampling.max_new_tokens, self._max_length)
        return min(request.num_tokens + rounds * self._most_per_round, longest) - 1
