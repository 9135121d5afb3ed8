"""Block drafters for a frozen target: initialization, loss and export.

DFlash (2602.06036): cross-entropy with the data's tokens at random anchors, with weights that
decay along the block. DSpark (DeepSpec): 0.1 cross-entropy + 0.9 ||p - q||_1, given the true token
before each draft, and binary cross-entropy of the estimated acceptance with 1 - ||p - q||_1 / 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import meta
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import InputError
from specjax.fields import Choice, Number, Whole
from specjax.loading.model import Model
from specjax.methods.block.head import BlockConfig, BlockHead
from specjax.methods.heads.calibration import calibration_error, fit_temperature
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.heads.shared_parameters import share
from train.data.batches import Batch
from train.methods.blocks.anchors import Blocks, choose_blocks, run_blocks
from train.methods.blockwise_loss import (
    Scores,
    Scoring,
    Teacher,
    score_drafts,
    token_probabilities,
    top_candidates,
)
from train.methods.losses import (
    LossName,
    Parts,
    PositionWeights,
    dpace_weights,
    parts_for,
)
from train.methods.method import Measures, Method, measure
from train.methods.packed_rows import at_rows, fill_features
from train.methods.target_layers import some_layers

START = Choice(("target", "random"))
"""The initial weights of a new drafter's layers."""
_EVALUATION_SEED = 0
"""The seed of the anchors at which losses are evaluated."""


@dataclass(frozen=True)
class BlockLoss(PositionWeights):
    """Settings of the loss of a block drafter, which is a sum over blocks at random labels."""

    anchors: Annotated[int, Whole(1, 1 << 16)] = 64
    """The number of blocks per row, at random labels."""
    gamma: Annotated[float, Number(above=True)] = 4.0
    """With weights=decay, the weight of position k of a block is exp(-k / gamma), from k = 0."""
    label_loss: LossName = None
    """The loss per label: ce (by default), kl, reverse_kl, tv, lk, lk_blend, or several as
    ce:0.1,tv:0.9.
    """
    confidence: Annotated[float, Number()] = 1.0
    """The weight of the confidence head's binary cross-entropy."""
    selector: Annotated[float, Number()] = 1.0
    """The weight of the selector's cross-entropy with the data's token, among candidates."""

    @property
    def parts(self) -> Parts:
        """The parts of the loss of each label and their weights, by name."""
        return parts_for("tokens", self.label_loss)


def block_method(
    target: Model,
    config: BlockConfig,
    draft_ids: np.ndarray | None,
    loss: BlockLoss,
    *,
    start: str = "target",
    multiply: Any = None,
) -> Method:
    """Return a method that trains a block drafter for a frozen target.

    `draft_ids` are the token ids that it drafts, None for all. `start` is "target" (the layers
    begin as the target's last ones) or "random"; `multiply` is the dtype of products. Raises
    InputError for a mask token that is none of the target's.
    """
    if config.has_mask_embedding:
        raise InputError(
            f"block.mask_token_id={config.mask_token_id}: the target has the tokens "
            f"0..{config.decoder.vocab_size - 1}; name one of them"
        )
    head = BlockHead(config, jnp.dtype(jnp.float32), multiply)
    decoder = replace(target.architecture, multiply=multiply)
    ids = None if draft_ids is None else jnp.asarray(draft_ids)

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        params = meta.unbox(head.init(key))
        return params if start == "random" else from_target(params, target, config)

    def loss_of(
        params: Any, target_params: Any, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Measures]:
        return block_loss(head, params, target_params, ids, batch, key, loss)

    def head_of(params: Any, training: dict[str, Any]) -> Head:
        return Head(config.kind, config, params, draft_ids, TargetMetadata.of(target), training)

    features = tuple(dict.fromkeys((*config.taps, "final_norm")))

    @jax.jit
    def confidence_of(params: Any, target_params: Any, batch: Batch) -> tuple[Any, ...]:
        stored = {name: value.astype(jnp.float32) for name, value in batch.features.items()}
        batch = fill_features(decoder, target_params, batch.replace(features=stored), features)
        shared = share(target_params, ids, head=True)
        columns, params = shared["draft_head"]["kernel"], {**params, "shared": shared}
        scored = _score(head, params, columns, ids, batch, None, loss)
        return *_confidence(head, params, scored), scored.counted

    def calibrate(
        params: Any, target_params: Any, batches: Iterable[Batch]
    ) -> tuple[Any, dict[str, float]]:
        """Return parameters whose confidence has the best temperature, and what that changes."""
        found = []
        for batch in batches:
            logit, accepted, counted = map(np.asarray, confidence_of(params, target_params, batch))
            found.append(np.stack([logit[counted], accepted[counted]]))
        logit, accepted = np.concatenate(found, axis=1) if found else np.zeros((2, 0))
        temperature = fit_temperature(logit, accepted)
        scaled = jax.tree.map(lambda leaf: leaf / temperature, params["confidence"])
        numbers = {
            "temperature": temperature,
            "error_before": calibration_error(logit, accepted),
            "error": calibration_error(logit / temperature, accepted),
        }
        return {**params, "confidence": scaled}, numbers

    return Method(
        config.kind,
        features,
        init,
        loss_of,
        head_of,
        layers=config.decoder,
        calibrate=calibrate if config.confidence else None,
    )


def from_target(params: dict[str, Any], target: Model, config: BlockConfig) -> dict[str, Any]:
    """Return random parameters in which the layers are copies of the target's last ones.

    Norms of queries and keys stay ones. Raises InputError for layers that are not Llama's, and for
    more layers than the target has.
    """
    if (other := target.config.unlike_llama) is not None:
        raise InputError(f"start='target': the target's layers have {other}; use start=random")
    count, num_layers = target.config.num_layers, config.decoder.num_layers
    if num_layers > count:
        raise InputError(
            f"block.num_layers={num_layers}: the target has {count} to start from; use fewer, or "
            "start=random"
        )
    copied = some_layers(target, range(count - num_layers, count))
    layers = {}
    for name, layer in params["layers"].items():
        theirs = jax.tree.map(lambda leaf, index=int(name): leaf[index], copied["layers"])
        attention = {**layer["attention"], **theirs["attention"]}
        layers[name] = {**layer, **theirs, "attention": attention}
    final_norm = jnp.asarray(target.params["final_norm"]["scale"], jnp.float32)
    return {**params, "layers": layers, "final_norm": {"scale": final_norm}}


class _Scored(NamedTuple):
    """The drafts of a batch's blocks, in a list of N = A K per row, and their scores.

    `embedded` are the Markov head's embeddings of the `previous` tokens, and `total` is the loss
    without the parts of the confidence head and the selector.
    """

    blocks: Blocks
    states: Float[Array, "B N D"]
    previous: Int[Array, "B N"]
    embedded: Float[Array, "B N R"]
    teacher: Teacher
    counted: Bool[Array, "B N"]
    weights: Float[Array, "B N"]
    total: Float[Array, ""]
    scores: Scores


def block_loss(
    head: BlockHead,
    params: dict[str, Any],
    target_params: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    key: Key[Array, ""] | None,
    loss: BlockLoss,
) -> tuple[Float[Array, ""], Measures]:
    """Return the sum of the loss over blocks at random anchors, and measures of each position.

    A position is scored if its token and all before it in the block are labels; its loss counts if
    the token is in the draft vocabulary, over which the target's distribution is renormalized.
    Without a key the anchors are always the same.
    """
    config = head.config
    shared = share(target_params, draft_ids, head=True)
    columns, params = shared["draft_head"]["kernel"], {**params, "shared": shared}
    scored = _score(head, params, columns, draft_ids, batch, key, loss)
    total, counted, weights = scored.total, scored.counted, scored.weights
    losses = scored.scores.named(loss.parts)
    rates: dict[str, Float[Array, "2"]] = {}
    if config.confidence:
        logit, accepted = _confidence(head, params, scored)
        errors = jnp.where(counted, optax.sigmoid_binary_cross_entropy(logit, accepted), 0.0)
        losses["confidence"] = errors.sum()
        total += loss.confidence * (errors * weights).sum()
        estimate = jax.nn.sigmoid(logit)
        apart = jnp.abs(estimate - accepted)
        means = {"confidence": estimate, "overlap": accepted, "confidence_error": apart}
        rates |= {name: _mean(values, counted) for name, values in means.items()}
    if config.selector_rank:
        errors, right = _select(head, params, columns, scored)
        losses["selector"] = errors.sum()
        total += loss.selector * (errors * weights).sum()
        rates |= {name: _mean(values, counted) for name, values in right.items()}
    shape = (len(batch.tokens), -1, len(scored.blocks.scored))
    right = scored.scores.right[0].reshape(shape).transpose(2, 0, 1)
    measures = measure(losses, right, scored.blocks.labels, scored.blocks.scored)
    return total, measures.replace(rates=rates)


def _score(
    head: BlockHead,
    params: dict[str, Any],
    columns: Float[Array, "D Vd"],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    key: Key[Array, ""] | None,
    loss: BlockLoss,
) -> _Scored:
    """Run blocks at random anchors, and score their drafts.

    `columns` are those of the target's output head for the tokens that can be drafted.
    """
    config = head.config
    key = jax.random.key(_EVALUATION_SEED) if key is None else key
    blocks = choose_blocks(batch.labels, loss.anchors, config.longest_draft, key)
    taps = {name: batch.features[name].astype(jnp.float32) for name in config.taps}
    states = run_blocks(head, params, batch, taps, blocks)
    shape = states.shape[:3]
    states = states.reshape(shape[0], -1, states.shape[-1])

    drafted = blocks.drafted(batch.tokens.shape[1])
    previous = at_rows(batch.tokens, drafted - 1)
    embedded = head.embed_previous(params, previous)
    kernel, inputs = columns, states
    if config.markov_rank:
        projection = params["markov"]["projection"]["kernel"]
        kernel = jnp.concatenate([lax.stop_gradient(columns), projection])
        inputs = jnp.concatenate([states, embedded], axis=-1)
    teacher = Teacher.of(batch.replace(labels=drafted), columns, draft_ids)
    by_draft = blocks.scored & teacher.known.reshape(shape).transpose(2, 0, 1)
    counted, probabilities = _flat(by_draft), None
    if loss.weights == "dpace":
        q = token_probabilities(inputs, kernel, teacher.token, head.multiply)
        probabilities = q.reshape(shape).transpose(2, 0, 1)
    weights = _flat(position_weights(loss, by_draft, probabilities))
    plan = Scoring(
        tuple(loss.parts.values()),
        trains_kernel=bool(config.markov_rank),
        multiply=head.multiply,
        overlaps=config.confidence,
    )
    total, scores = score_drafts(plan, inputs[None], kernel, teacher, counted, weights)
    return _Scored(
        blocks, states, previous, embedded, teacher, counted[0], weights[0], total, scores
    )


def _confidence(
    head: BlockHead, params: dict[str, Any], scored: _Scored
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Return the logits of the estimated acceptance, and the true one.

    Gradients reach the confidence head alone.
    """
    states, embedded = lax.stop_gradient((scored.states, scored.embedded))
    logit = head.confidence_logit(params, states, embedded)
    return logit, lax.stop_gradient(scored.scores.overlaps[0])


def _select(
    head: BlockHead, params: dict[str, Any], columns: Float[Array, "D Vd"], scored: _Scored
) -> tuple[Float[Array, "B N"], dict[str, Bool[Array, "B N"]]]:
    """Return the selector's cross-entropy at counted drafts, and what holds for the data's tokens.

    The data's token takes the place of the last candidate if it is none. Gradients reach the
    selector alone. Tokens are the likeliest (`unary_right`), among the candidates
    (`candidate_recall`), and the selector's choice (`selector_right`).
    """
    count = min(head.config.selector_top_k, columns.shape[1])
    states, token = lax.stop_gradient(scored.states), scored.teacher.token
    unary, candidates, own = top_candidates(states, columns, token, count, head.multiply)
    is_token = candidates == token[:, :, None]
    recalled = is_token.any(axis=2)
    choice = jnp.argmax(unary + head.edges(params, states, scored.previous, candidates), axis=2)
    chosen = jnp.take_along_axis(is_token, choice[:, :, None], axis=2)[:, :, 0]
    swapped = (jnp.arange(count) == count - 1)[None, None, :] & ~recalled[:, :, None]
    unary = jnp.where(swapped, own[:, :, None], unary)
    candidates = jnp.where(swapped, token[:, :, None], candidates)
    logits = unary + head.edges(params, states, scored.previous, candidates)
    own = jnp.where(candidates == token[:, :, None], jax.nn.log_softmax(logits, axis=2), 0.0)
    right = {
        "unary_right": is_token[:, :, 0],
        "candidate_recall": recalled,
        "selector_right": chosen,
    }
    return jnp.where(scored.counted, -own.sum(axis=2), 0.0), right


def position_weights(
    loss: BlockLoss,
    counted: Bool[Array, "K B A"],
    probabilities: Float[Array, "K B A"] | None,
) -> Float[Array, "K B A"]:
    """Return the weights of a block's positions; `probabilities` of its tokens are for "dpace"."""
    if loss.weights == "decay":
        falling = jnp.exp(-jnp.arange(len(counted), dtype=jnp.float32) / loss.gamma)
        return jnp.broadcast_to(falling[:, None, None], counted.shape)
    return dpace_weights(probabilities, counted, loss.alpha)


def _flat(of_drafts: Array) -> Array:
    """Return values of K drafts of blocks as those of one draft at a list of labels [1, B, A K]."""
    drafts, batch, blocks = of_drafts.shape
    return jnp.moveaxis(of_drafts, 0, 2).reshape(1, batch, blocks * drafts)


def _mean(values: Array, counted: Bool[Array, "B N"]) -> Float[Array, "2"]:
    """Return the sum of the counted values, and their number."""
    both = jnp.where(counted, values, 0.0), counted
    return jnp.stack([each.sum(dtype=jnp.float32) for each in both])
