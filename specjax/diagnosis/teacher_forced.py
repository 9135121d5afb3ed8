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

from specjax.core.drafter import Drafter
from specjax.diagnosis.answers import Answers, warp_arguments
from specjax.engine.requests import SamplingParams
from specjax.methods.block.drafter import BlockDrafter
from specjax.methods.block.rows import run_blocks
from specjax.methods.draft_model.drafter import DraftModel
from specjax.methods.heads.pair_drafter import PairDrafter
from specjax.methods.medusa.drafter import MedusaDrafter
from specjax.sampling import WarpFlags, warp

Examined = PairDrafter | MedusaDrafter | DraftModel | BlockDrafter
"""The drafters whose proposals at all positions are computed in one pass."""
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
    """Return the logits of a block drafter's estimates that each draft token is accepted.

    They belong to the entries of `Scores`; the drafter has a confidence head.
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
        logits = draft_logits(drafter, params, tokens, features, reading.window, labels)
        overlaps, agreements, likeliest = [], [], []
        for step in range(drafter.num_speculative_tokens):
            target = jnp.minimum(drafts + step, logp.shape[0] - 1)
            # A draft model's logits depend on the prefix only, not on where the draft began.
            draft = logits[0][target] if isinstance(drafter, DraftModel) else logits[step]
            p, chosen = logp[target], jnp.argmax(draft, axis=-1)
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
        states, previous = _run_blocks(drafter, params, tokens, features, reading.window, labels)
        embedded = [drafter.head.embed_previous(params, each) for each in previous]
        pairs = zip(states, embedded, strict=True)
        return jnp.stack([drafter.head.confidence_logit(params, *pair)[0] for pair in pairs], -1)

    return lax.map(one, (answers.tokens, answers.first, reading.features))


def draft_logits(
    drafter: Examined,
    params: Any,
    tokens: Int[Array, "T"],
    features: dict[str, Float[Array, "T D"]],
    window: Int[Array, ""] | np.integer,
    labels: Int[Array, "A"],
) -> list[Float[Array, "A Vd"]]:
    """Return the logits of each draft token, for the drafts of one row that begin at `labels`.

    `labels` are positions, and `params` are the drafter's parameters. For a draft model there is a
    single entry: its logits of the labels themselves.
    """
    features = {name: value[None] for name, value in features.items()}
    if isinstance(drafter, PairDrafter):
        return _pair_logits(drafter, params, tokens, features, window, labels)
    if isinstance(drafter, BlockDrafter):
        return _block_logits(drafter, params, tokens, features, window, labels)
    if isinstance(drafter, MedusaDrafter):
        states = drafter.head.states(params, features["final_norm"])[:, :, labels - 2]
        heads = range(drafter.num_speculative_tokens)
        return [drafter.head.logits(params, states[head], head)[0] for head in heads]
    width = tokens.shape[0]
    result = drafter.model.extend(
        params,
        tokens[None],
        jnp.arange(width)[None],
        drafter.model.make_cache(1, 64),
        drafter.model.make_window(1, width),
        0,
        _within(window, width)[None],
    )
    return [result.logits[0, labels - 1]]


def _pair_logits(
    drafter: PairDrafter,
    params: Any,
    tokens: Int[Array, "T"],
    features: dict[str, Float[Array, "1 T D"]],
    window: Int[Array, ""] | np.integer,
    labels: Int[Array, "A"],
) -> list[Float[Array, "A Vd"]]:
    """Return the logits of a pair head's drafts, with each draft step at all positions at once.

    Each module reads the true pairs up to a position. After the last module, the head reads its own
    output, which attends to those pairs and, at its own position, to the steps before it.
    """
    head, width = drafter.head, tokens.shape[0]
    last, length = head.config.num_modules - 1, drafter.num_speculative_tokens
    slots = width * max(length - last, 1)
    itself = jnp.eye(width, dtype=bool)
    cache = head.make_cache(1, 64)
    hidden, logits = head.fuse(params, features), []
    for step in range(length):
        further = max(step - last, 0)
        if not further:
            module, kept = head.module(params, step), head.make_window(1, slots)
        seen = jnp.concatenate([_within(window, width), *[itself] * further], axis=1)
        output, kept = head.extend(
            module,
            jnp.roll(tokens, -1 - step)[None],
            hidden,
            jnp.arange(width)[None] + further,
            cache,
            kept,
            further * width,
            jnp.pad(seen, ((0, 0), (0, slots - seen.shape[1])))[None],
        )
        logits.append(head.logits(module, output[:, labels - 2])[0])
        hidden = head.next_hidden(module, output)
    return logits


def _block_logits(
    drafter: BlockDrafter,
    params: Any,
    tokens: Int[Array, "T"],
    features: dict[str, Float[Array, "1 T D"]],
    window: Int[Array, ""] | np.integer,
    labels: Int[Array, "A"],
) -> list[Float[Array, "A Vd"]]:
    """Return the logits of a block drafter's drafts, each given the true token before it."""
    head, logits = drafter.head, []
    states, previous = _run_blocks(drafter, params, tokens, features, window, labels)
    for state, before in zip(states, previous, strict=True):
        unary = head.logits(params, state)
        candidates = head.candidates(unary)
        logits.append(head.logits_after(params, unary, candidates, state, before)[0])
    return logits


def _run_blocks(
    drafter: BlockDrafter,
    params: Any,
    tokens: Int[Array, "T"],
    features: dict[str, Float[Array, "1 T D"]],
    window: Int[Array, ""] | np.integer,
    labels: Int[Array, "A"],
) -> tuple[list[Float[Array, "1 A D"]], list[Int[Array, "1 A"]]]:
    """Return the states of each draft token of the blocks before `labels`, and the true tokens.

    The latter are those before each draft token. A block reads the features of the latest `window`
    positions before its anchor.
    """
    positions, anchors = jnp.arange(tokens.shape[0]), labels - 1
    ago = anchors[:, None] - positions[None, :]
    drafts = drafter.num_speculative_tokens
    states = run_blocks(
        drafter.head,
        params,
        features,
        positions[None],
        tokens[anchors][None],
        anchors[None],
        ((ago > 0) & (ago <= window))[None],
        drafts,
    )
    before = [jnp.minimum(anchors + draft, tokens.shape[0] - 1) for draft in range(drafts)]
    return [states[:, :, draft] for draft in range(drafts)], [tokens[at][None] for at in before]


def _within(window: Int[Array, ""] | np.integer, width: int) -> Bool[Array, "T T"]:
    """Return the attention mask of each token's latest `window` tokens, itself included."""
    ago = jnp.arange(width)[:, None] - jnp.arange(width)[None, :]
    return (ago >= 0) & (ago < window)
