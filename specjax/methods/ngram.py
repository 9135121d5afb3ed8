"""Prompt lookup: copying the tokens after an earlier occurrence of the last tokens (Saxena 2023).

The search is vectorized over all positions and runs inside the decoding loop, so that no token ids
leave the device. A row without a match drafts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax import trees
from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Context, Drafter, Noise
from specjax.errors import InputError
from specjax.fields import Whole, check_instance
from specjax.methods.method import Method, VllmMethod
from specjax.trees import Draft

_LENGTH = Whole(1, 64)
"""The range of match lengths; each further token adds code to the compiled loop."""
_MATCHES = Whole(1, 64)
"""The range of the number of matches, each of which is a branch of the draft."""


@dataclass(frozen=True, kw_only=True)
class Ngram(Drafter):
    """A drafter that copies from the row's own tokens, prompt included.

    It uses the longest match of the last `prompt_lookup_min`..`prompt_lookup_max` tokens; among
    matches of equal length `match` selects the latest or the earliest. With `num_matches` > 1 that
    many matches of this length form a tree with a branch of up to `num_speculative_tokens` tokens
    each, joined as long as they agree. Raises InputError for invalid bounds.
    """

    num_speculative_tokens: Annotated[int, DRAFT_TOKENS] = 8
    prompt_lookup_max: Annotated[int, _LENGTH] = 3
    """The longest match that is searched for, in tokens."""
    prompt_lookup_min: Annotated[int, _LENGTH] = 2
    """The shortest match, in tokens."""
    match: Literal["latest", "earliest"] = "latest"
    """Which of several matches of one length is copied."""
    num_matches: Annotated[int, _MATCHES] = 1
    """The number of matches of one length, each of which is a branch of a tree."""

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise InputError(
                f"drafter.prompt_lookup_max={self.prompt_lookup_max}: must be at least "
                f"prompt_lookup_min={self.prompt_lookup_min}"
            )

    @property
    def num_nodes(self) -> int:
        """The number of nodes (N): a chain of K tokens for each match."""
        return self.num_matches * self.num_speculative_tokens

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Propose the tokens after the latest or earliest matches, in rows that have one."""
        del params, noise
        ends, matched = find_matches(
            context.tokens,
            context.length,
            self.prompt_lookup_max,
            self.prompt_lookup_min,
            self.match == "latest",
            self.num_matches,
        )
        tokens = copied_tokens(context, ends, self.num_speculative_tokens)
        count = jnp.where(matched > 0, context.limit[:, None], 0)
        branches = [
            trees.chain(tokens[:, number], count[:, number]) for number in range(self.num_matches)
        ]
        return (branches[0] if self.num_matches == 1 else trees.merge(*branches)), state


def copied_tokens(context: Context, ends: Int[Array, "B m"], count: int) -> Int[Array, "B m K"]:
    """Return the `count` tokens after each of the positions `ends`, all before the last token.

    Beyond the last committed token, a copy continues with its own tokens.
    """
    period = jnp.maximum(context.length[:, None] - 1 - ends, 1)
    step = jnp.arange(count)[None, None, :] % period[:, :, None]
    positions = (ends[:, :, None] + 1 + step).reshape(len(ends), -1)
    tokens = jnp.take_along_axis(context.tokens, positions, axis=1)
    return tokens.reshape(*ends.shape, count)


def find_matches(
    tokens: Int[Array, "B M"],
    length: Int[Array, "B"],
    longest: int,
    shortest: int,
    latest: bool,
    most: int = 1,
) -> tuple[Int[Array, "B m"], Int[Array, "B m"]]:
    """Return the last positions and the lengths of earlier occurrences of each row's last tokens.

    Row b has `length[b]` tokens, and matches have from `shortest` to `longest` tokens. Up to `most`
    (m) matches of the greatest length are returned, the latest first if `latest`, else the
    earliest. Lengths are 0 if there are no more matches.
    """
    count = tokens.shape[1]
    position = jnp.arange(count)[None, :]
    matched = jnp.zeros(tokens.shape, jnp.int32)
    unbroken = position < (length - 1)[:, None]
    for back in range(longest):
        # [B, M]: does the token `back` before each position equal the one `back` before the end?
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :count]
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)
        unbroken &= (shifted == last) & (back < length)[:, None]
        matched += unbroken
    recency = position if latest else count - 1 - position
    score = jnp.where(matched >= shortest, matched * count + recency, -1)
    if most == 1:
        ends = jnp.argmax(score, axis=1, keepdims=True)
        best = score.max(axis=1, keepdims=True)
    else:
        best, ends = lax.top_k(score, min(most, count))
    lengths = jnp.maximum(best, 0) // count
    lengths = jnp.where(lengths == lengths[:, :1], lengths, 0)
    missing = ((0, 0), (0, most - ends.shape[1]))
    return jnp.pad(ends, missing).astype(jnp.int32), jnp.pad(lengths, missing)


def _vllm_options(values: Mapping[str, int]) -> dict[str, Any]:
    """Return the options of prompt lookup as in vLLM: earliest match, bounds of 5 by default."""
    high, low = values.get("prompt_lookup_max"), values.get("prompt_lookup_min")
    return {
        "prompt_lookup_max": high or low or 5,
        "prompt_lookup_min": low or high or 5,
        "match": "earliest",
    }


NGRAM = Method(
    name="ngram",
    paper="prompt lookup decoding (Saxena 2023)",
    drafter=Ngram,
    vllm=VllmMethod(
        aliases=("ngram", "[ngram]", "ngram_gpu", "prompt_lookup"),
        keys={"prompt_lookup_max": Whole(1), "prompt_lookup_min": Whole(1)},
        options=_vllm_options,
    ),
)
