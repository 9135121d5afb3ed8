"""Random keys and noise: how the noise of every draw is derived from a seed.

Each key derives from another one by a domain and a number (`derive`), so that no two keys below
are the same, whatever the numbers are:

    row key         from key(the request's seed) by REQUEST or, if it has none, from key(seed) by
                    (PROMPT, the prompt's index in the whole input), never by the row's slot in a
                    batch; then by TEXT for the tokens of the prompt, and by SAMPLE for the second
                    and further samples of a request
    `coupled`       row key, (POSITION, absolute position): the noise of drafters and target
    other rules     row key, (ROUND, number of the row's round), TEXT for each text that the draft
                    may copy from, and for the parameters of a trained head, then one of three keys:
      draft         (PART, number) of the drafter among those that take turns, and once more among
                    those that are merged, then (POSITION, depth) and (PARENT, slot of the parent in
                    the drafter's window), 0 in a chain
      accept        a uniform of (POSITION, i) for the i-th drafted token
      final         (POSITION, depth) for the draw after a path of deterministic nodes, else 0

Which draws share their noise:

                                          `coupled`          other rules
    children of one parent                yes (without replacement, by the largest sums)
    children of two parents of a depth    yes                no: `block` may look at both
    several drafters                      yes                no
    a draft and its verification          yes                no
    an earlier output of the same seed    if it is copied    no: the key derives from a text with it

Under `coupled` all of it may be shared, since the output is that of the target's own draws
whatever is drafted. Under other rules a draft must be independent of the noise that verifies it. An
output of the same seed may stand in the prompt (a chat's next turn), or in a text that drafts are
copied from (a corpus, the cached outputs of an engine), and a head may have been trained on it:
with a key from these texts, and from the head's parameters, the noise differs from that which the
output was drawn with. What a draft model learned from outputs is not covered: these need another
seed. A row's noise depends on nothing else: never on the batch,
the draft length or the compiled width; with JAX's default keys (threefry) this holds bit for bit.

Prompts that need separate seeds get them from `derived_seed`, by purpose.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Key, Shaped, UInt32

Parents = Int[Array | np.ndarray, "T"] | Sequence[int]
"""Numbers that tell the nodes of a depth apart, such as their slots."""
_CHUNK = 1 << 20
"""The number of tokens that are hashed at once."""


class Domain(enum.IntEnum):
    """The purposes that keys are derived for."""

    PROMPT = 0
    REQUEST = 1
    SAMPLE = 2
    TEXT = 3
    ROUND = 4
    DRAFT = 5
    ACCEPT = 6
    FINAL = 7
    PART = 8
    POSITION = 9
    PARENT = 10


class RoundKeys(NamedTuple):
    """One key per row for each kind of draw in a round of `rejection` or `block`.

    Drawing drafts and the final token with the same key would bias the output.
    """

    draft: Key[Array, "B"]
    accept: Key[Array, "B"]
    final: Key[Array, "B"]


@dataclass(frozen=True)
class SharedNoise:
    """Gumbel noise for drafts that depends on the depth only, as under `coupled`.

    `at` maps a depth to the noise [B, V] of each row.
    """

    at: Callable[[Any], Float[Array, "B V"]]

    def __call__(
        self, depth: Int[Array, ""] | int, parents: Parents | None = None
    ) -> Float[Array, "B V"] | Float[Array, "B T V"]:
        """Return the noise for draws at `depth`, as `SeparateNoise` does."""
        noise = self.at(depth)
        return noise if parents is None else jnp.repeat(noise[:, None], len(parents), axis=1)

    def part(self, number: int, *, branches: bool) -> SharedNoise:
        """Return the same noise, which all drafters that share a draft use."""
        del number, branches
        return self


@dataclass(frozen=True)
class SeparateNoise:
    """Gumbel noise for drafts in which each parent's children have their own.

    `keys` are one per row. If the draft `branches`, `parents` are required below the root.
    """

    keys: Key[Array, "B"]
    vocab: int
    branches: bool = False

    def __call__(
        self, depth: Int[Array, ""] | int, parents: Parents | None = None
    ) -> Float[Array, "B V"] | Float[Array, "B T V"]:
        """Return the noise for draws at `depth`: [B, V], or [B, T, V] for the children of T nodes.

        Raises ValueError where a draft branches and `parents` are missing.
        """
        at_root = not isinstance(depth, jax.Array) and depth == 0
        if parents is None and self.branches and not at_root:
            raise ValueError(
                f"noise({depth}) in a draft that branches: children of different parents need "
                "noise of their own; pass noise(depth, parents), with the slots of the parents"
            )
        at_depth = derive(self.keys, Domain.POSITION, depth)
        slots = jnp.zeros(1, jnp.int32) if parents is None else jnp.asarray(parents)

        def draw(key: Key[Array, ""], slot: Int[Array, ""]) -> Float[Array, "V"]:
            return _gumbel(derive(key, Domain.PARENT, slot), self.vocab, jnp.float32)

        noise = jax.vmap(lambda key: jax.vmap(lambda slot: draw(key, slot))(slots))(at_depth)
        return noise[:, 0] if parents is None else noise

    def part(self, number: int, *, branches: bool) -> SeparateNoise:
        """Return the noise of drafter `number` (0, 1, ...) of several that share a draft.

        `branches` says whether this drafter's own draft branches.
        """
        return SeparateNoise(derive(self.keys, Domain.PART, number), self.vocab, branches)


def derive(
    keys: Key[Array, "*batch"], domain: Domain, number: Integer[Array, "*#batch"] | int
) -> Key[Array, "*batch"]:
    """Return the keys for `number` in a domain; `number` is one for all keys, or one per key."""
    in_domain = _fold(keys, np.uint32(domain))
    return _fold(in_domain, jnp.broadcast_to(jnp.asarray(number), keys.shape))


def _fold(
    keys: Key[Array, "*batch"], numbers: Integer[Array | np.generic, "*#batch"]
) -> Key[Array, "*batch"]:
    flat = jnp.broadcast_to(numbers, keys.shape).reshape(-1)
    return jax.vmap(jax.random.fold_in)(keys.reshape(-1), flat).reshape(keys.shape)


def derived_seed(seed: int, purpose: str, number: int) -> int:
    """Return the seed of conversation turn or prompt `number`, derived from the common `seed`.

    `purpose` says what the seeds are for. Those of another purpose are others, so that an output
    may be what a drafter was trained on where it is measured with the same common seed.
    """
    of_purpose = int.from_bytes(purpose.encode(), "little")
    return int(np.random.SeedSequence((seed, of_purpose, number)).generate_state(1)[0])


def row_key(
    seed: int,
    index: Int[Array, ""] | int,
    own: int | None = None,
    prompt: Sequence[int] | Integer[np.ndarray, "T"] | None = None,
) -> Key[Array, ""]:
    """Return the key from which all draws of a row derive.

    `index` is the index of the row's prompt in the whole input. `own`, the seed that a request
    specifies for itself, takes precedence over `seed` and `index`. `prompt` are the tokens of the
    prompt: with another prompt, which may contain what was drawn after this one, the key is
    another. None stands for a key that does not depend on the prompt.
    """
    digest = None if prompt is None else text_digest(prompt)
    if own is None:
        return _row_key(np.uint32(seed), Domain.PROMPT, index, digest)
    return _row_key(np.uint32(own), Domain.REQUEST, 0, digest)


@functools.partial(jax.jit, static_argnums=1)
def _row_key(
    seed: Integer[Array, ""],
    domain: Domain,
    number: Integer[Array, ""],
    digest: UInt32[Array, "2"] | None,
) -> Key[Array, ""]:
    key = derive(jax.random.key(seed), domain, number)
    return key if digest is None else derive_from_text(key, digest)


def text_digest(
    tokens: Sequence[int] | Integer[np.ndarray, "T"], after: UInt32[np.ndarray, "2"] | None = None
) -> UInt32[np.ndarray, "2"]:
    """Return a hash of a text's tokens, from which `derive_from_text` derives keys.

    With `after`, the digest of an earlier text in whose place this one is, it is a hash of both.
    """
    tokens, digest = np.asarray(tokens), hashlib.blake2b(digest_size=8)
    if after is not None:
        digest.update(np.asarray(after, "<u4"))
    for first in range(0, len(tokens), _CHUNK):  # a corpus may be mapped from a file
        digest.update(np.ascontiguousarray(tokens[first : first + _CHUNK], dtype="<i4"))
    return np.frombuffer(digest.digest(), "<u4").astype(np.uint32)


def array_digest(arrays: Iterable[Shaped[Array | np.ndarray, "..."]]) -> UInt32[np.ndarray, "2"]:
    """Return a hash of arrays like `text_digest`, for parameters that were trained on a text."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return np.frombuffer(digest.digest(), "<u4").astype(np.uint32)


def derive_from_text(
    keys: Key[Array, "*batch"], digest: UInt32[Array | np.ndarray, "2"]
) -> Key[Array, "*batch"]:
    """Return the keys for a text with this `text_digest`, or parameters with `array_digest`."""
    first, second = jnp.asarray(digest)
    return derive(derive(keys, Domain.TEXT, first), Domain.TEXT, second)


def sample_key(row_key: Key[Array, ""], sample: int) -> Key[Array, ""]:
    """Return the row key of sample 0, 1, ... of a request; sample 0 uses `row_key` unchanged."""
    return derive(row_key, Domain.SAMPLE, sample) if sample else row_key


def fold_round(
    row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]
) -> Key[Array, "B"]:
    """Return each row's key for round `number` (0, 1, ...), a scalar or one number per row."""
    return derive(row_keys, Domain.ROUND, number)


def split_keys(keys: Key[Array, "B"]) -> RoundKeys:
    """Return the draft, accept and final keys of a round, derived from `keys`.

    Do not use `keys` for anything else.
    """
    return RoundKeys(
        *(derive(keys, domain, 0) for domain in (Domain.DRAFT, Domain.ACCEPT, Domain.FINAL))
    )


def round_keys(row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]) -> RoundKeys:
    """Return the draft, accept and final keys of each row for round `number` (0, 1, ...)."""
    return split_keys(fold_round(row_keys, number))


def position_gumbel(
    row_keys: Key[Array, "B"],
    positions: Int[Array, "B"],
    vocab: int,
    dtype: jnp.dtype | type = jnp.float32,
) -> Float[Array, "B V"]:
    """Return Gumbel noise for one position per row; argmax(logp + noise) is a draw from p.

    Given row keys and absolute positions, this is the noise that `coupled` decoding shares with
    plain decoding; given a round's keys and depths, it serves the other draws of that round.
    """
    keys = derive(row_keys, Domain.POSITION, positions)
    return jax.vmap(lambda key: _gumbel(key, vocab, dtype))(keys)


def _gumbel(key: Key[Array, ""], vocab: int, dtype: jnp.dtype | type) -> Float[Array, "V"]:
    # The default mode truncates the upper tail of float32 noise at about 16.6.
    return jax.random.gumbel(key, (vocab,), dtype, mode="high")


def coupled_noise(
    row_keys: Key[Array, "B"],
    first: Int[Array, "B"],
    vocab: int,
    dtype: jnp.dtype | type = jnp.float32,
) -> Callable[[Any], Float[Array, "B V"]]:
    """Return a function from an offset to the noise of `coupled` at position `first` + offset.

    Drafter and target use the same noise. An offset is one for all rows, or one per row.
    """
    return lambda offset: position_gumbel(row_keys, first + offset, vocab, dtype)


def draft_noise(keys: Key[Array, "B"], vocab: int) -> SeparateNoise:
    """Return the noise for drafting under `rejection` or `block`.

    `keys` are the round's keys, as returned by `fold_round`.
    """
    return SeparateNoise(split_keys(keys).draft, vocab)


def uniforms(
    keys: Key[Array, "B"], count: int, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "B K"]:
    """Return `count` uniforms in [0, 1) per row; the i-th depends only on the row's key and i."""

    def draw(key: Key[Array, ""]) -> Float[Array, "K"]:
        token_keys = jax.vmap(lambda i: derive(key, Domain.POSITION, i))(
            jnp.arange(count, dtype=jnp.uint32)
        )
        return jax.vmap(lambda token_key: jax.random.uniform(token_key, (), dtype))(token_keys)

    return jax.vmap(draw)(keys)
