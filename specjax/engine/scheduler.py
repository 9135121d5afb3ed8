"""Assignment of requests to slots in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specjax.engine.outputs import Follower, RequestId, Times
from specjax.engine.rows import Row


@dataclass(eq=False)
class Request:
    """A row that is waiting, being read or decoding; times are clock readings in seconds."""

    id: RequestId
    row: Row
    follower: Follower
    added: float
    begun: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the output so far."""
        return (*self.row.prompt, *self.follower.token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of these tokens."""
        return len(self.row.prompt) + len(self.follower.token_ids)

    @property
    def ended(self) -> bool:
        """Whether the request's output is complete."""
        return self.follower.finish_reason is not None

    def leave_out(self, seconds: float) -> None:
        """Leave the last `seconds`, such as those of compiling, out of the request's times."""
        for name in ("added", "begun", "first_token", "last_token"):
            if (time := getattr(self, name)) is not None:
                setattr(self, name, time + seconds)

    def see_tokens(self, count: int, now: float) -> float | None:
        """Record `count` new tokens; return the seconds per token since the previous ones.

        Tokens that arrive together count as evenly spaced. The result is None without new tokens
        and for the first ones.
        """
        if not count:
            return None
        before, self.last_token = self.last_token, now
        if before is None:
            self.first_token = now
            return None
        return (now - before) / count

    def times(self, now: float) -> Times:
        """Return the latencies of a request that ends at the clock reading `now`."""
        begun, first = (
            None if time is None else time - self.added for time in (self.begun, self.first_token)
        )
        return Times(begun, first, now - self.added)


@dataclass
class Scheduler:
    """A queue of requests, and the slots that they occupy, `num_slots` in all.

    All methods but iteration take a time that is independent of the number of waiting requests.
    """

    num_slots: int

    def __post_init__(self) -> None:
        self.slots: list[Request | None] = [None] * self.num_slots
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._by_id: dict[RequestId, dict[Request, None]] = {}

    @property
    def free_slots(self) -> list[int]:
        """The slots that no request has."""
        return [slot for slot, request in enumerate(self.slots) if request is None]

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Append a request to the queue; requests with the same id are its samples."""
        self._waiting[request] = None
        self._by_id.setdefault(request.id, {})[request] = None

    def samples(self, id: RequestId) -> list[Request]:
        """Return the waiting and running requests of an id, in the order they were added."""
        return list(self._by_id.get(id, ()))

    def take(self, slots: Sequence[int]) -> list[tuple[int, Request]]:
        """Assign waiting requests to free `slots`, in order; return (slot, request) pairs."""
        taken = []
        for slot in slots[: len(self._waiting)]:
            self.slots[slot], _ = self._waiting.popitem(last=False)
            taken.append((slot, self.slots[slot]))
        return taken

    @property
    def next_waiting(self) -> Request | None:
        """The request that gets the next slot; None if none waits."""
        return next(iter(self._waiting), None)

    def put_back(self, request: Request) -> int:
        """Let a request that has a slot wait again, before all others; return its slot."""
        slot = self.slots.index(request)
        self.slots[slot] = None
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)
        return slot

    def free(self, request: Request) -> int | None:
        """Remove a request; return its slot, or None if it had none."""
        samples = self._by_id[request.id]
        del samples[request]
        if not samples:
            del self._by_id[request.id]
        if request in self._waiting:
            del self._waiting[request]
            return None
        slot = self.slots.index(request)
        self.slots[slot] = None
        return slot

    def has(self, id: RequestId) -> bool:
        """Return whether a request with this id is waiting or has a slot."""
        return id in self._by_id

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that have a slot, then those that wait."""
        yield from (request for request in self.slots if request is not None)
        yield from self._waiting

    def __len__(self) -> int:
        return self.num_slots - self.slots.count(None) + self.num_waiting
