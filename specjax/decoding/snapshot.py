"""What the host sees of a batch between two steps: status and lengths, and the rest if asked for.

A step takes over the buffers of the state. What the host may look at is copied on the device, so
that the next step can be under way, and the copies stay what they are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax.decoding.state import Rounds, State
from specjax.decoding.stop_strings import truncate_rounds


@struct.dataclass
class Seen:
    """The parts of a state that the host may look at, whole on each device."""

    status: Int[Array | np.ndarray, "B"]
    lengths: Int[Array | np.ndarray, "B"]
    tokens: Int[Array | np.ndarray, "B S"]
    rounds: Rounds
    logprobs: Float[Array | np.ndarray, "B S"] | None
    overlaps: Float[Array | np.ndarray, "B R K"] | None


def look_at(state: State, mesh: Mesh | None) -> Seen:
    """Copies that are made once the state is there, without waiting for it."""
    parts = Seen(
        state.status, state.length, state.tokens, state.rounds, state.logprobs, state.overlaps
    )
    seen = _copies(mesh)(parts)
    for part in (seen.status, seen.lengths):
        part.copy_to_host_async()
    return seen


@functools.lru_cache(maxsize=64)
def _copies(mesh: Mesh | None) -> Any:
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda parts: jax.tree.map(jnp.copy, parts), out_shardings=whole)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One batch between two steps, on the host; `index` are its prompts.

    `lengths` count committed tokens, `kept` the new tokens that a stop string left (or -1).
    `tokens`, `rounds`, `logprobs` and `overlaps`, as in `State`, are fetched when they are first
    asked for. `decode_s` are the seconds in which steps were under way.
    """

    index: list[int]
    status: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray
    finished: bool
    prefill_s: float
    decode_s: float
    seen: Seen = field(repr=False)

    @functools.cached_property
    def _on_host(self) -> Seen:
        count = len(self.index)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], self.seen)

    @property
    def tokens(self) -> Int[np.ndarray, "B S"]:
        """Each row's tokens, prompt first; those at and after `lengths` are not committed."""
        return self._on_host.tokens

    @property
    def rounds(self) -> Rounds:
        """The counts of all rounds so far."""
        return self._on_host.rounds

    @property
    def logprobs(self) -> Float[np.ndarray, "B S"] | None:
        """The log-probabilities of committed tokens, where a request asks for them."""
        return self._on_host.logprobs

    @property
    def overlaps(self) -> Float[np.ndarray, "B R K"] | None:
        """The overlaps of p and q, where the plan records them."""
        return self._on_host.overlaps

    def kept_rounds(self) -> Rounds:
        """The counts without those of tokens after a stop string."""
        return truncate_rounds(self.rounds, self.kept)
