"""One level of a growing draft: the input of the drafter, and the choice of its children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.draft_vocabulary import expand
from specjax.core.drafter import Context, Noise
from specjax.core.top_tokens import likeliest


@struct.dataclass
class Level:
    """The tokens at one depth, which a drafter processes together; in a chain, a single token.

    `depth` is 0 at the root; leaves that run together have one each. `parents` are indices among
    the tokens of the previous level. The tokens occupy slots start..start+T of a window with the
    root in slot 0, and attend to the slots in `visible`: their ancestors and themselves.
    """

    depth: Int[Array, ""] | Int[np.ndarray, "T"] | int
    tokens: Int[Array, "B T"]
    parents: Int[Array, "B T"]
    start: Int[Array, ""] | int
    visible: Bool[Array, "#B T W"]

    def positions(self, context: Context) -> Int[Array, "B T"]:
        """Return the absolute position of each token."""
        depths = jnp.asarray(self.depth).reshape(1, -1)
        return jnp.broadcast_to((context.length - 1)[:, None] + depths, self.tokens.shape)


Step = Callable[[Level, Any], tuple[Float[Array, "B #T Vd"], Any]]
"""A function (level, carry) that returns the logits after each token of the level, and a new carry.

The logits have a single entry along the level if they are the same after all tokens.
"""


class Children(NamedTuple):
    """The best k candidates after each token of a level, best first.

    `exists` is False where there are fewer than k. `sampled` marks rows whose candidates were
    drawn, and `logq` are the log-probabilities that they were drawn from, None unless the rule
    reads them.
    """

    tokens: Int[Array, "B #T k"]
    exists: Bool[Array, "B #T k"]
    sampled: Bool[Array, "B"]
    logq: Float[Array, "B #T V"] | None


def root_level(context: Context, slots: int) -> Level:
    """Return the root of each row's draft as a level, for a window of W = `slots` slots."""
    root = context.token_at(context.length - 1)[:, None]
    visible = (jnp.arange(slots) == 0)[None, None, :]
    return Level(0, root, jnp.zeros_like(root), 0, visible)


def draw_children(
    logits: Float[Array, "B #T Vd"],
    count: int,
    context: Context,
    noise: Noise,
    depth: int,
    slots: Int[np.ndarray, "T"],
    *,
    sampled: bool,
    draft_ids: Int[Array, "Vd"] | None,
) -> Children:
    """Return `count` candidates after each token of a level: drawn without replacement, or best.

    `logits` follow each token of the level, whose children are at `depth`. Candidates are drawn by
    the largest sums of log-probability and noise (Gumbel top-k: Kool et al. 1903.06059). `slots`
    number the tokens of the level, each of which has noise of its own (`sampling.keys`), even if
    the logits after all of them are the same. Rows with temperature 0, and all rows unless
    `sampled`, take the most likely candidates. `draft_ids` are the token ids of the logits, None if
    these cover the whole vocabulary.
    """
    greedy = context.sampling.temperature <= 0
    if not (sampled and context.flags.sampled):
        scores, ids = top(logits, count)
        tokens = ids if draft_ids is None else draft_ids[ids]
        return Children(tokens, scores > -jnp.inf, jnp.zeros_like(greedy), None)
    expanded = expand(logits, draft_ids, context.target.vocab_size)
    distribution = context.warp(expanded)
    scores = distribution + noise(depth, slots)
    if context.flags.greedy:
        scores = jnp.where(greedy[:, None, None], expanded, scores)
    best, tokens = top(scores, count)
    return Children(tokens, best > -jnp.inf, ~greedy, distribution if context.needs_logq else None)


def top(scores: Float[Array, "B T V"], count: int) -> tuple[Array, Array]:
    """Return the `count` largest scores of each token, and the token ids that have them.

    If there are fewer, the missing scores are -inf.
    """
    available = min(count, scores.shape[2])
    best_scores, index = likeliest(scores, available)
    # NaN is never a candidate.
    best_scores = jnp.where(jnp.isnan(best_scores), -jnp.inf, best_scores)
    padding = ((0, 0), (0, 0), (0, count - available))
    return jnp.pad(best_scores, padding, constant_values=-jnp.inf), jnp.pad(index, padding)


def likeliest_probability(logits: Float[Array, "*rows Vd"]) -> Float[Array, "*rows"]:
    """Return the probability of the most likely token, before sampling parameters apply."""
    return jnp.exp(logits.max(axis=-1) - logsumexp(logits, axis=-1)).astype(jnp.float32)
