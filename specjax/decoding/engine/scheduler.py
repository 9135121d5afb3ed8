"""Which request is in which slot, and which one is next: in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from specjax.decoding.engine.outputs import Follower, RequestId, Times
from specjax.decoding.rows import Row


@dataclass(eq=False)
class Request:
    """A row that waits, is being read or decodes; times are those of a clock, in seconds."""

    id: RequestId
    row: Row
    follower: Follower
    added: float
    begun: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def ended(self) -> bool:
        """Whether its output is complete."""
        return self.follower.finish_reason is not None

    def leave_out(self, seconds: float) -> None:
        """Let its times begin later by so many seconds that have just passed."""
        for name in ("added", "begun", "first_token", "last_token"):
            if (time := getattr(self, name)) is not None:
                setattr(self, name, time + seconds)

    def see_tokens(self, count: int, now: float) -> float | None:
        """Note that new tokens were seen; seconds for each since the last ones, None for the first.

        Of tokens that were seen together each is counted as if they had come evenly.
        """
        if not count:
            return None
        before, self.last_token = self.last_token, now
        if before is None:
            self.first_token = now
            return None
        return (now - before) / count

    def times(self, now: float) -> Times:
        """Its times, where it ends `now`."""
        begun, first = (
            None if one is None else one - self.added for one in (self.begun, self.first_token)
        )
        return Times(begun, first, now - self.added)


@dataclass
class Scheduler:
    """A queue, and slots, each with the request that has it.

    Nothing but a pass over all requests takes longer where more of them wait.
    """

    num_slots: int

    def __post_init__(self) -> None:
        self.slots: list[Request | None] = [None] * self.num_slots
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._by_id: dict[RequestId, dict[Request, None]] = {}

    @property
    def num_free(self) -> int:
        """Slots that no request has."""
        return self.slots.count(None)

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue; those of one id are its samples."""
        self._waiting[request] = None
        self._by_id.setdefault(request.id, {})[request] = None

    def samples(self, id: RequestId) -> list[Request]:
        """The requests of an id that wait or have a slot, in the order in which they were added."""
        return list(self._by_id.get(id, ()))

    def take(self, most: int) -> list[tuple[int, Request]]:
        """Free slots, at most `most`, each with the request that gets it now."""
        taken = []
        for slot, request in enumerate(self.slots):
            if len(taken) == most or not self._waiting:
                break
            if request is None:
                self.slots[slot], _ = self._waiting.popitem(last=False)
                taken.append((slot, self.slots[slot]))
        return taken

    def free(self, request: Request) -> int | None:
        """Take a request out; the slot that it had, if it had one."""
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
        """Whether a request of this id waits or has a slot."""
        return id in self._by_id

    def __iter__(self) -> Iterator[Request]:
        """The requests that have a slot, then those that wait."""
        yield from (request for request in self.slots if request is not None)
        yield from self._waiting

    def __len__(self) -> int:
        return self.num_slots - self.num_free + self.num_waiting
