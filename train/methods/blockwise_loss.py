"""Losses of drafts at labels, computed for a block of labels at a time.

Logits over a vocabulary are the largest arrays of a step, and reading them takes most of its time.
Here they exist for one block only, whose gradients are computed along with its losses (as in Liger
kernels, Hsu et al. 2410.10989); only arrays as wide as the hidden states are kept for the backward
pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.models.layers.matmul import product
from train.data.batches import Batch
from train.methods.losses import LabelLoss, Parts, Truth, cross_entropy, dpace_weights, overlap
from train.methods.packed_rows import ahead, at_rows, label_ahead

_BLOCK = 512
"""The number of labels in a block, over all rows of the batch."""


@dataclass(frozen=True)
class Scoring:
    """How drafts are scored: `parts` are pairs of a label loss and its weight.

    With `trains_kernel` the gradient of the kernel that computes the logits is computed too.
    `multiply` is the dtype of products, None for that of the states. If `ahead`, draft i predicts
    the token i positions after the label; otherwise all drafts predict the label itself.
    `overlaps` requests sum min(p, q) of each draft and label. With `alpha`, weights are multiplied
    by D-PACE's (`dpace_weights`).
    """

    parts: tuple[tuple[LabelLoss, float], ...]
    trains_kernel: bool
    multiply: Any = None
    ahead: bool = True
    overlaps: bool = False
    alpha: float | None = None

    def offset(self, draft: int) -> int:
        """Return how many positions after a label the token is that draft `draft` predicts."""
        return draft if self.ahead else 0


class Teacher(NamedTuple):
    """The reference at each label: the target's feature before it, and the target's output columns.

    `token` is the data's token as an index among the columns, if `known`; other labels are not
    trained on. Since tokens were drawn from the target, this weights each label by the probability
    of the draft vocabulary without a pass over the whole vocabulary. Features and columns are None
    if only the data's tokens are the reference.
    """

    features: Float[Array, "B A D"] | None
    columns: Float[Array, "D Vd"] | None
    token: Int[Array, "B A"]
    known: Bool[Array, "B A"]

    @classmethod
    def of(
        cls,
        batch: Batch,
        columns: Float[Array, "D Vd"] | None,
        draft_ids: Int[Array, "Vd"] | None,
    ) -> Teacher:
        """Return the teacher of a batch with the feature `final_norm`.

        `columns` are the columns of the target's output layer for the tokens `draft_ids`, or for
        all tokens if that is None. Without columns only the batch's tokens are the reference, and
        no features are needed.
        """
        features = None
        if columns is not None:
            features = at_rows(batch.features["final_norm"], batch.labels - 1)
        token = at_rows(batch.tokens, batch.labels)
        if draft_ids is None:
            return cls(features, columns, token, jnp.ones(token.shape, bool))
        index = jnp.searchsorted(draft_ids, token).clip(0, len(draft_ids) - 1)
        return cls(features, columns, index, draft_ids[index] == token)

    def counts(self, labels: Int[Array, "B A"], drafts: int) -> Bool[Array, "K B A"]:
        """Return a mask [K, B, A] of the labels at which draft i predicts a `known` label.

        `labels` are padded with -1, and `drafts` is the number of drafts (K).
        """
        return jnp.stack(
            [label_ahead(labels, draft) & ahead(self.known, draft) for draft in range(drafts)]
        )


class Scores(NamedTuple):
    """Sums of each part of the loss over the counted labels by draft, and which drafts are right.

    A draft is right if it is the target's likeliest token in the draft vocabulary, or the data's
    token if only the data is the reference. `choices` are the drafts' likeliest tokens, as column
    indices. `overlaps`, if requested, are sum min(p, q), the probability that rejection accepts.
    """

    losses: Float[Array, "K P"]
    right: Bool[Array, "K B A"]
    choices: Int[Array, "K B A"]
    overlaps: Float[Array, "K B A"] | None = None

    def named(self, parts: Parts) -> dict[str, Float[Array, ""]]:
        """Return the sum of each of the loss's `parts` over all drafts, by name."""
        return dict(zip(parts, self.losses.sum(axis=0), strict=True))

    def by_draft(self, prefix: str, parts: Parts) -> dict[str, Float[Array, ""]]:
        """Return the loss of each draft as PREFIX_0, ..., and its `parts` by name, if several."""
        weights = jnp.asarray([weight for _, weight in parts.values()])
        each = (self.losses * weights[None]).sum(axis=1)
        each = {f"{prefix}_{draft}": loss for draft, loss in enumerate(each)}
        return each | (self.named(parts) if len(parts) > 1 else {})


def score_drafts(
    plan: Scoring,
    states: Float[Array, "K B A D"],
    kernel: Float[Array, "*K D Vd"],
    teacher: Teacher,
    counted: Bool[Array, "K B A"],
    weights: Float[Array, "K"] | Float[Array, "K B A"],
) -> tuple[Float[Array, ""], Scores]:
    """Return the differentiable loss of drafts at labels, and its parts.

    Draft i at a label predicts the token i positions later, or the label itself (`plan.ahead`). It
    contributes if `counted`, in which case that token is as many places later in the list of
    labels. `kernel` computes logits from `states`, one kernel for all drafts or one per draft. The
    loss is summed over drafts and counted labels, with weights of drafts or of drafts and labels.
    """
    drafts, batch, labels, _ = states.shape
    count = max(1, -(-batch * labels // (_BLOCK if plan.ahead else _BLOCK // drafts)))
    size = -(-labels // count)
    room = count * size - labels

    def blocks(x: Array, axis: int, more: int = 0) -> Array:
        """[n, ...]: pieces of `size` labels along an axis, and `more` from the next piece."""
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, room + more)
        x = jnp.pad(x, pad)
        first = range(0, count * size, size)
        return jnp.stack([lax.slice_in_dim(x, i, i + size + more, axis=axis) for i in first])

    def joined(x: Shaped[Array, "n K B _"]) -> Shaped[Array, "K B A"]:
        return jnp.moveaxis(x, 0, 2).reshape(drafts, batch, count * size)[:, :, :labels]

    features = teacher.features
    if features is not None:
        features = lax.stop_gradient(blocks(features.astype(jnp.float32), 1, drafts - 1))
    each = weights if weights.ndim == 3 else weights[:, None, None]
    each = blocks(jnp.broadcast_to(each, counted.shape), 2)
    rest = (features, blocks(teacher.token, 1, drafts - 1), blocks(counted, 2), each)
    total, losses, right, choices, overlaps = _scores(
        plan, blocks(states, 2), kernel, rest, teacher.columns
    )
    overlaps = joined(overlaps) if plan.overlaps else None
    return total, Scores(losses, joined(right), joined(choices), overlaps)


def token_probabilities(
    states: Float[Array, "B N D"],
    kernel: Float[Array, "D Vd"],
    tokens: Int[Array, "B N"],
    multiply: Any = None,
) -> Float[Array, "B N"]:
    """Return the probabilities of `tokens`, without gradients, a block of states at a time.

    `kernel` computes logits from `states`, and `tokens` are indices of its columns.
    """

    def one(x: Array, token: Array) -> Array:
        logits = product("nd,dv->nv", x, kernel, multiply=multiply, out=jnp.float32)
        own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        return jnp.exp(own - jax.nn.logsumexp(logits, axis=-1))

    return _by_blocks(one, states, tokens)


def _by_blocks(
    function: Callable[[Array, Array], Any], states: Float[Array, "B N D"], tokens: Array
) -> Any:
    """Return `function` of all states and tokens, a block of them at a time, without gradients."""
    flat = lax.stop_gradient((states.reshape(-1, states.shape[-1]), tokens.reshape(-1)))
    count = -(-tokens.size // _BLOCK)
    room = count * _BLOCK - tokens.size
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, room),) + ((0, 0),) * (x.ndim - 1)), flat)
    blocks = jax.tree.map(lambda x: x.reshape(count, _BLOCK, *x.shape[1:]), padded)
    results = lax.map(lambda block: function(*block), blocks)
    return jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[: tokens.size].reshape(*tokens.shape, *x.shape[2:]),
        results,
    )


def top_candidates(
    states: Float[Array, "B N D"],
    kernel: Float[Array, "D Vd"],
    tokens: Int[Array, "B N"],
    count: int,
    multiply: Any = None,
) -> tuple[Float[Array, "B N k"], Int[Array, "B N k"], Float[Array, "B N"]]:
    """Return the `count` largest logits and their indices, and the logits of `tokens`.

    The arguments are those of `token_probabilities`, which has no gradients either.
    """

    def one(x: Array, token: Array) -> tuple[Array, Array, Array]:
        logits = product("nd,dv->nv", x, kernel, multiply=multiply, out=jnp.float32)
        own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        return *lax.top_k(logits, count), own

    return _by_blocks(one, states, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(
    plan: Scoring, states: Array, kernel: Array, rest: tuple, columns: Array | None
) -> tuple[Array, Array, Array, Array, Array | None]:
    def one(block: tuple) -> tuple[Array, _OfBlock]:
        return _block(plan, block[0], kernel, block[1], columns)

    total, scores = lax.map(one, (states, rest))
    return total.sum(), scores.losses.sum(axis=0), *scores[1:]


def _forward(
    plan: Scoring, states: Array, kernel: Array, rest: tuple, columns: Array | None
) -> tuple[Any, Any]:
    inputs = (0, 1) if plan.trains_kernel else (0,)

    def one(kernel_sum: Array | None, block: tuple) -> tuple[Any, Any]:
        def loss(states: Array, kernel: Array) -> Any:
            return _block(plan, states, kernel, block[1], columns)

        (total, scores), grads = jax.value_and_grad(loss, inputs, has_aux=True)(block[0], kernel)
        if plan.trains_kernel:
            kernel_sum = kernel_sum + grads[1]
        return kernel_sum, (total, scores, grads[0])

    begin = jnp.zeros_like(kernel) if plan.trains_kernel else None
    to_kernel, (total, scores, to_states) = lax.scan(one, begin, (states, rest))
    return (total.sum(), scores.losses.sum(axis=0), *scores[1:]), (to_states, to_kernel)


def _backward(plan: Scoring, kept: tuple, gradient: tuple) -> tuple:
    to_states, to_kernel = kept
    to_kernel = gradient[0] * to_kernel if plan.trains_kernel else None
    return gradient[0] * to_states, to_kernel, None, None


_scores.defvjp(_forward, _backward)


class _OfBlock(NamedTuple):
    """The scores of a block of labels, as in `Scores`."""

    losses: Float[Array, "K P"]
    right: Bool[Array, "K B _"]
    choices: Int[Array, "K B _"]
    overlaps: Float[Array, "K B _"] | None


def _block(
    plan: Scoring, states: Array, kernel: Array, rest: tuple, columns: Array | None
) -> tuple[Array, _OfBlock]:
    features, tokens, counted, weights = rest
    size = states.shape[2]

    def logits_of(x: Array, kernel: Array) -> Array:
        return product("bad,dv->bav", x, kernel, multiply=plan.multiply, out=jnp.float32)

    likeliest, log_probs = tokens, None
    if features is not None:
        logits = logits_of(features, columns)
        likeliest, log_probs = jnp.argmax(logits, axis=-1), jax.nn.log_softmax(logits, axis=-1)
    values, losses, choices, overlaps, probabilities = [], [], [], [], []
    for draft in range(states.shape[0]):
        logits = logits_of(states[draft], kernel if kernel.ndim == 2 else kernel[draft])
        here = slice(plan.offset(draft), plan.offset(draft) + size)
        truth = Truth(None if log_probs is None else log_probs[:, here], tokens[:, here])
        parts = [jnp.where(counted[draft], part(logits, truth), 0.0) for part, _ in plan.parts]
        values.append(sum(w * part for part, (_, w) in zip(parts, plan.parts, strict=True)))
        losses.append(jnp.stack([part.sum() for part in parts]))
        choices.append(jnp.argmax(logits, axis=-1))
        if plan.overlaps:
            overlaps.append(overlap(logits, truth))
        if plan.alpha is not None:
            probabilities.append(jnp.exp(-cross_entropy(logits, truth)))
    if plan.alpha is not None:
        weights = weights * dpace_weights(jnp.stack(probabilities), counted, plan.alpha)
    total = (weights * jnp.stack(values)).sum()
    offsets = [plan.offset(draft) for draft in range(len(choices))]
    aims = jnp.stack([likeliest[:, offset : offset + size] for offset in offsets])
    choices = jnp.stack(choices)
    right = counted & (choices == aims)
    return total, _OfBlock(
        jnp.stack(losses), right, choices, jnp.stack(overlaps) if plan.overlaps else None
    )
