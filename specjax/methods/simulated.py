"""A drafter of known quality that replays the tokens of plain decoding with random mistakes.

It shows which speed-up a given acceptance rate, such as 0.8, brings with any weights, for
comparison with `specjax.theory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from specjax import trees
from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Context, Drafter, LoadedDrafter, Noise
from specjax.fields import Items, Number, Whole, check_instance
from specjax.loading.model import Model
from specjax.methods.method import Method
from specjax.sampling import text_digest
from specjax.trees import Draft

CONTINUATIONS = Items(
    Items(Whole()), least=1, remedy="pass the token ids of a plain run, one list per prompt"
)


class Replay(NamedTuple):
    """The tokens to propose for each prompt, padded with -1, and their `sampling.text_digest`."""

    tokens: Int[Array, "prompts longest"]
    digest: UInt32[Array | np.ndarray, "2"]


@dataclass(frozen=True, kw_only=True)
class Simulated(Drafter):
    """A drafter that replays a plain run, with each token correct at the rate `acceptance`.

    `of_target` makes its parameters from `continuations[i]` for prompt i: the token ids of plain
    decoding, in the order of the prompts. Decoding emits the same tokens, so that they are correct,
    if it is greedy or `coupled` with the same seed. The wrong tokens depend only on `mistake_seed`,
    the prompt and the position. Raises InputError for a rate outside [0, 1] or missing
    continuations.
    """

    num_speculative_tokens: Annotated[int, DRAFT_TOKENS] = 4
    # These fields determine only the parameters: drafters that differ in them share programs.
    acceptance: Annotated[float, Number(0.0, 1.0)] = field(default=0.8, compare=False)
    """The probability that a draft token is right."""
    mistake_seed: Annotated[int, Whole()] = field(default=0, compare=False)
    """The seed that chooses which tokens are wrong."""

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")

    @classmethod
    def of_target(
        cls,
        target: Model,
        *,
        continuations: Annotated[Sequence[Sequence[int]], CONTINUATIONS],
        **options: Any,
    ) -> LoadedDrafter:
        """Return the drafter that replays `continuations`; raise InputError if they are invalid."""
        CONTINUATIONS.check("drafter.continuations", continuations)
        drafter = cls(**options)
        return LoadedDrafter(drafter, drafter.replay(continuations, target.config.vocab_size))

    def text_digests(self, params: Replay) -> tuple[UInt32[Array | np.ndarray, "2"], ...]:
        """Return the digest of the replay, which may have been drawn with the same seed."""
        return (params.digest,)

    def replay(self, continuations: Sequence[Sequence[int]], vocab_size: int) -> Replay:
        """Return the tokens to propose for each prompt, mistakes included."""
        longest = max(1, *(len(tokens) for tokens in continuations))
        replay = np.full((len(continuations), longest), -1, np.int32)
        for row, tokens in enumerate(continuations):
            replay[row, : len(tokens)] = tokens
        for row in range(len(replay)):
            rng = np.random.default_rng((self.mistake_seed, row))
            wrong = (rng.random(longest) >= self.acceptance) & (replay[row] >= 0)
            replay[row] = np.where(wrong, (replay[row] + 1) % vocab_size, replay[row])
        return Replay(jnp.asarray(replay), text_digest(np.ravel(replay)))

    def propose(
        self, params: Replay, state: Any, context: Context, noise: Noise
    ) -> tuple[Draft, Any]:
        """Propose the next tokens of each row's replay."""
        del noise
        step = jnp.arange(self.num_speculative_tokens)
        offset = (context.length - context.prompt_length)[:, None] + step[None, :]
        known = params.tokens.at[context.index[:, None], offset].get(mode="fill", fill_value=-1)
        count = jnp.minimum((known >= 0).sum(axis=1), context.limit)
        return trees.chain(jnp.maximum(known, 0), count.astype(jnp.int32)), state


SIMULATED = Method(
    name="simulated",
    paper="",
    drafter=Simulated,
    of_target=Simulated.of_target,
    alone="it is recorded for one run",
    in_all=False,
    replays=True,
)
