"""The pages of a paged cache: which request holds which, and which prefixes they contain.

Like the block manager of vLLM (Kwon et al. 2023, arXiv:2309.06180): full pages are shared by
requests that begin with the same tokens, and stay known after the last of these has ended until
their memory is needed, least recently used first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_ROOT = 0
"""The serial number of what precedes the first page."""


@dataclass
class _Held:
    """The pages of a request in order; the first `published` are known, the last as `serial`."""

    pages: list[int] = field(default_factory=list)
    published: int = 0
    serial: int = _ROOT


class PagePool:
    """The pages 0 to `num_pages` - 1, each with `size` tokens, and the requests that hold them.

    What caches store of a page's tokens depends on these, all earlier ones, and the next
    `following` ones (a drafter may read pairs of a position and the token after it). With None,
    pages are not shared. Prefixes are found by a dict of whole pages of tokens, which compares them
    where their hashes are equal.
    """

    def __init__(self, num_pages: int, size: int, following: int | None = None) -> None:
        self.num_pages, self.size, self.following = num_pages, size, following
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        """The pages that no request holds, in the order in which they are taken."""
        self._holders = [0] * num_pages
        self._held: dict[Hashable, _Held] = {}
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """The page, and its serial number, with these tokens after the page of a serial number."""
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        """The key in `_known` of each page that has one."""
        self._serials = itertools.count(_ROOT + 1)

    @property
    def num_unused(self) -> int:
        """The number of pages that no request holds."""
        return len(self._unused)

    def count_unused(self, pages: Sequence[int]) -> int:
        """Return how many of some pages no request holds."""
        return sum(page in self._unused for page in pages)

    def pages(self, request: Hashable) -> Sequence[int]:
        """Return the pages that a request holds, in order."""
        return self._held[request].pages if request in self._held else ()

    def needed(self, request: Hashable, num_tokens: int) -> int:
        """Return the number of further pages that a request needs for `num_tokens` tokens."""
        return max(-(-num_tokens // self.size) - len(self.pages(request)), 0)

    def known_prefix(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the known pages with the first `tokens` of a row, of at most `most` tokens."""
        return [page for page, _ in self._prefix(tokens, most)]

    def open(self, request: Hashable, tokens: Sequence[int], most: int) -> int:
        """Let a new request hold `known_prefix`; return the number of tokens in it."""
        found = self._prefix(tokens, most)
        held = self._held[request] = _Held([page for page, _ in found], len(found))
        for page, held.serial in found:
            self._holders[page] += 1
            self._unused.pop(page, None)
        return len(found) * self.size

    def reserve(self, request: Hashable, num_tokens: int) -> bool:
        """Let a request hold pages for `num_tokens` tokens; if too few are unused, return False.

        In that case nothing changes.
        """
        needed = self.needed(request, num_tokens)
        if needed > self.num_unused:
            return False
        for _ in range(needed):
            page, _ = self._unused.popitem(last=False)
            if page in self._key:
                del self._known[self._key.pop(page)]
            self._holders[page] = 1
            self._held[request].pages.append(page)
        return True

    def take_back(self, request: Hashable, num_tokens: int) -> None:
        """Take from a request the pages that it does not need for `num_tokens` tokens."""
        pages = self._held[request].pages
        kept = -(-num_tokens // self.size)
        self._release(pages[kept:])
        del pages[kept:]

    def can_publish(self, request: Hashable, filled: int) -> bool:
        """Return whether `filled` tokens of a request fill a page that `publish` has not shared."""
        published = self._held[request].published
        return self.following is not None and (published + 1) * self.size <= filled

    def publish(self, request: Hashable, tokens: Sequence[int], filled: int) -> None:
        """Let later requests share the full pages of a request whose row begins with `tokens`.

        All caches hold its first `filled` tokens.
        """
        held = self._held[request]
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

    def close(self, request: Hashable) -> None:
        """Take all pages from a request, if it has any; what is published stays known."""
        if request in self._held:
            self._release(self._held.pop(request).pages)

    def forget(self) -> None:
        """Forget all prefixes, since what they hold is not what would be read now."""
        self._known.clear()
        self._key.clear()
        for held in self._held.values():
            # What these requests fill from now on follows tokens that were read before.
            held.published, held.serial = self.num_pages, _ROOT

    def _prefix(self, tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return the known pages with the first `tokens`, each with its serial number."""
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
