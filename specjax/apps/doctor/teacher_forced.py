"""Teacher-forced acceptance: what a drafter proposes after every true prefix.

Everything that a change replaces (features, parameters, token ids, attention window) is an operand,
so that one program measures nearly all changes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.apps.doctor.answers import Answers, warp_arguments
from specjax.core.drafter import Drafter
from specjax.engine.requests import SamplingParams
from specjax.methods.heads.examined import Examined, TrueText
from specjax.sampling import WarpFlags, warp

UNLIMITED = np.int32(1 << 30)


@struct.dataclass
class Reading:
    """A drafter with its parameters, the features [B, T, D] that it reads, and its window.

    `window` is the number of latest tokens to which it attends.
    """

    drafter: Examined = struct.field(pytree_node=False)
    params: Any
    features: dict[str, Float[Array, "B T D"]]
    window: Int[Array, ""] | np.integer = UNLIMITED


@struct.dataclass
class Scores:
    """The overlap sum_x min(p, q) and the greedy agreement of each draft token.

    Entry [b, a, i] belongs to token i of the draft that begins at label a of row b. Entries that do
    not exist (`tested` is False) are arbitrary. `likeliest` is p of q's likeliest token.
    """

    overlap: Float[np.ndarray, "B A K"]
    agrees: Bool[np.ndarray, "B A K"]
    likeliest: Float[np.ndarray, "B A K"]
    tested: Bool[np.ndarray, "B A K"]

    @property
    def values(self) -> Float[np.ndarray, "N"]:
        """The overlaps of all tested draft tokens, in a fixed order."""
        return self.overlap[self.tested]

    def first(self, count: int) -> Scores:
        """Return the scores of the first `count` draft tokens."""
        arrays = self.overlap, self.agrees, self.likeliest, self.tested
        return Scores(*(array[..., :count] for array in arrays))


def score(reading: Reading, answers: Answers, sampling: SamplingParams) -> Scores:
    """Return how well a drafter predicts each token of answers, given the true tokens before.

    `reading` is the drafter with what it reads. p and q are those under the parameters `sampling`.
    """
    arrays = map(np.asarray, _score(reading, answers, *warp_arguments(sampling)))
    return Scores(*arrays, _tested(reading.drafter, answers))


def confidence(reading: Reading, answers: Answers) -> Float[np.ndarray, "B A K"]:
    """Return the logits of a drafter's estimates that each draft token is accepted.

    They belong to the entries of `Scores`; the drafter `has_confidence`.
    """
    return np.asarray(_confidence(reading, answers))


def num_programs() -> int:
    """Return how many programs `score` has compiled so far in this process."""
    return _score._cache_size()


def _tested(drafter: Drafter, answers: Answers) -> Bool[np.ndarray, "B A K"]:
    """Return a mask of the draft tokens that exist: their draft begins and ends at labels."""
    steps = np.arange(drafter.num_speculative_tokens)
    is_label = answers.is_label
    last = np.arange(is_label.shape[1])[None, :, None] + steps[None, None, :]
    return is_label[:, :, None] & (last < np.asarray(answers.count)[:, None, None])


@functools.partial(jax.jit, static_argnums=3)
def _score(
    reading: Reading, answers: Answers, parameters: tuple, flags: WarpFlags
) -> tuple[Float[Array, "B A K"], Bool[Array, "B A K"], Float[Array, "B A K"]]:
    """Return the arrays of `Scores`, but for `tested`.

    `parameters` and `flags` are the results of `warp_arguments`.
    """
    drafter, params = reading.drafter, reading.params
    ids = params.get("draft_ids") if isinstance(params, dict) else None

    def one(row: tuple) -> tuple[Float[Array, "A K"], Bool[Array, "A K"], Float[Array, "A K"]]:
        tokens, first, logp, best, features = row
        drafts = jnp.arange(logp.shape[0])
        labels = jnp.clip(first + drafts, 2, tokens.shape[0] - 1)
        features = {name: value[None] for name, value in features.items()}
        text = TrueText(tokens, features, reading.window, labels)
        logits = drafter.teacher_forced(params, text)
        overlaps, agreements, likeliest = [], [], []
        for step in range(drafter.num_speculative_tokens):
            target = jnp.minimum(drafts + step, logp.shape[0] - 1)
            draft, p = logits[step], logp[target]
            chosen = jnp.argmax(draft, axis=-1)
            chosen = chosen if ids is None else ids[chosen]
            likeliest.append(jnp.exp(jnp.take_along_axis(p, chosen[:, None], axis=1))[:, 0])
            p = p if ids is None else p[:, ids]
            size = min(p.shape[-1], draft.shape[-1])
            q = warp(draft, *parameters, flags=flags)
            shared = jnp.minimum(p[:, :size], q[:, :size])
            overlaps.append(jnp.exp(shared).sum(axis=-1))
            agreements.append(chosen == best[target])
        return tuple(jnp.stack(each, axis=-1) for each in (overlaps, agreements, likeliest))

    rows = (answers.tokens, answers.first, answers.logp, answers.best, reading.features)
    return lax.map(one, rows)


@jax.jit
def _confidence(reading: Reading, answers: Answers) -> Float[Array, "B A K"]:
    """Return the logits of estimated acceptance of each draft token, as `confidence`."""
    drafter, params = reading.drafter, reading.params

    def one(row: tuple) -> Float[Array, "A K"]:
        tokens, first, features = row
        drafts = jnp.arange(answers.logp.shape[1])
        labels = jnp.clip(first + drafts, 2, tokens.shape[0] - 1)
        features = {name: value[None] for name, value in features.items()}
        text = TrueText(tokens, features, reading.window, labels)
        return drafter.teacher_forced_confidence(params, text)

    return lax.map(one, (answers.tokens, answers.first, reading.features))
