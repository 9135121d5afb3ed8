"""The loss of EAGLE heads, over several draft steps that read the head's own outputs.

EAGLE-1 (Li et al. 2401.15077): the next feature by smooth L1 and its token by cross-entropy, from
true features with noise. EAGLE-3 (2503.01840): cross-entropy alone ("training-time test").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.errors import InputError
from specjax.fields import Number, Whole, check_instance
from specjax.models.heads.eagle import Eagle
from specjax.models.layers.attention import Partial, attend_in_blocks, merge
from train.data.batches import Batch
from train.methods.draft_losses import LabelLoss, Scoring, Teacher, Truth, score_drafts
from train.methods.losses import smooth_l1, soft_cross_entropy
from train.methods.method import Measures, measure
from train.methods.packed_rows import ahead, at_rows, label_ahead


@dataclass(frozen=True)
class EagleLoss:
    """Weights of the parts of the loss, and over how many draft steps it runs.

    Step i has the weight `decay` ** i. `noise` is the half-width of the uniform noise on features.
    `label_loss` replaces the cross-entropy, whose weight it has. Raises InputError for values out
    of range.
    """

    steps: Annotated[int, Whole(1, 64)] = 4
    decay: Annotated[float, Number()] = 0.8
    cross_entropy: Annotated[float, Number()] = 1.0
    feature: Annotated[float, Number()] = 0.0
    noise: Annotated[float, Number()] = 0.0
    label_loss: LabelLoss | None = None

    def __post_init__(self) -> None:
        check_instance(self, "loss.")
        if not self.cross_entropy + self.feature > 0:
            raise InputError("loss.cross_entropy=0, loss.feature=0: one of them must be positive")

    @property
    def part(self) -> tuple[str, LabelLoss]:
        """The loss of each label, and its name among the measures."""
        if self.label_loss is not None:
            return "label_loss", self.label_loss
        return "cross_entropy", _against_distribution


def eagle_loss(
    head: Eagle,
    params: dict[str, Any],
    target_params: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    key: Key[Array, ""] | None,
    loss: EagleLoss,
) -> tuple[Float[Array, ""], Measures]:
    """The sum of the loss over the batch's labels, and measures of each draft step.

    Step i is scored where the token i positions after a label is a label too; its loss counts where
    that token is in the draft's vocabulary, over which the target's distribution is renormalised.
    Without a key there is no noise.
    """
    labels = batch.labels
    features = {name: value.astype(jnp.float32) for name, value in batch.features.items()}
    taps = {name: features[name] for name in head.config.taps}
    if loss.noise and key is not None:
        keys = jax.random.split(key, len(taps))
        taps = {
            name: value
            + jax.random.uniform(one, value.shape, minval=-loss.noise, maxval=loss.noise)
            for one, (name, value) in zip(keys, taps.items(), strict=True)
        }
    columns = target_params["head"]["kernel"]
    columns = columns if draft_ids is None else jnp.take(columns, draft_ids, axis=1)
    teacher = Teacher.of(batch, columns, draft_ids)
    outputs = jnp.stack(list(unroll(head, params, batch, taps, loss.steps)))
    weights = jnp.asarray([loss.decay**step for step in range(loss.steps)])
    name, part = loss.part
    plan = Scoring(
        parts=((part, loss.cross_entropy),),
        trains_kernel=head.config.version == 3,
        multiply=head.multiply,
    )
    total, scores = score_drafts(
        plan,
        jax.vmap(head.readout, in_axes=(None, 0))(params, outputs),
        head.logit_kernel(params),
        teacher,
        teacher.counts(labels, loss.steps),
        weights,
    )
    scored = jnp.stack([label_ahead(labels, step) for step in range(loss.steps)])
    parts = {name: scores.losses[:, 0].sum()}
    if loss.feature:
        truth = at_rows(features["final_norm"], labels - 1)
        truth = lax.stop_gradient(jnp.stack([ahead(truth, step) for step in range(loss.steps)]))
        distances = jnp.where(scored, smooth_l1(outputs, truth), 0.0).sum(axis=(1, 2))
        parts["feature"] = distances.sum()
        total += loss.feature * jnp.dot(weights, distances)
    return total, measure(parts, scores.right, scored)


def _against_distribution(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    return soft_cross_entropy(logits, jnp.exp(truth.log_probs))


def unroll(
    head: Eagle,
    params: dict[str, Any],
    batch: Batch,
    taps: dict[str, Float[Array, "B T Dt"]],
    steps: int,
) -> Iterator[Float[Array, "B A D"]]:
    """The head's output at each label, draft step by draft step, as decoding would give it.

    Label j is predicted from row r = j - 2, the pair of x_{j-1} and f_{j-2}; step i reads x_{j-1+i}
    and the head's own output. Keys and values are made for all rows, the rest for those of labels
    alone. Step i > 0 attends to the same keys and, at its own row, to those of the steps before:
    scores of [B, H, T, T + i] never exist (EAGLE-3's training-time test).
    """
    labels, tokens = batch.labels, batch.tokens
    # Where there is no label, row 0: what sees nothing is not a number, nor is its gradient.
    rows = jnp.maximum(labels - 2, 0)
    fused = head.fuse(params, taps)
    residual, attended = head.inputs(params, jnp.roll(tokens, -1, axis=1), fused, batch.positions)
    # Its queries are made again below, for fewer rows; XLA drops those that are not read.
    _, keys, values = head.heads(params, attended, batch.positions)
    keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
    positions, segments = at_rows(batch.positions, rows), at_rows(batch.segments, rows)
    same = segments[:, :, None] == batch.segments[:, None, :]
    until = jnp.arange(tokens.shape[1])[None, None, :] <= rows[:, :, None]
    repeats = head.config.decoder.num_heads // head.config.decoder.num_kv_heads
    seen = jnp.repeat(same & until, repeats, axis=1)[:, None]

    earlier: list[tuple[jax.Array, jax.Array]] = []
    residual, attended = at_rows(residual, rows), at_rows(attended, rows)
    for step in range(steps):
        if step:
            token = at_rows(tokens, jnp.minimum(labels - 1 + step, tokens.shape[1] - 1))
            residual, attended = head.inputs(
                params, token, head.next_hidden(params, output), positions + step
            )
        query, key, value = head.heads(params, attended, positions + step)
        mixed = attend_in_blocks(query, keys, values, seen)
        if step:
            earlier.append((_own(key, repeats), _own(value, repeats)))
        for key_own, value_own in earlier:
            mixed = merge(mixed, _attend_own(query, key_own, value_own))
        output = head.finish(params, residual, mixed)
        yield output


def _own(heads: Float[Array, "B A G C"], repeats: int) -> Float[Array, "B G X C"]:
    return jnp.repeat(heads.transpose(0, 2, 1, 3), repeats, axis=2)


def _attend_own(
    query: Float[Array, "B G X C"], key: Float[Array, "B G X C"], value: Float[Array, "B G X C"]
) -> Partial:
    """Each query over the one key at its own row."""
    score = jnp.sum(query * key, axis=-1, keepdims=True)
    return Partial(score, jnp.ones_like(score), value)
