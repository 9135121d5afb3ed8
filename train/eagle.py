"""Train an EAGLE head for a frozen target.

    python -m train.eagle --config=configs/train_eagle3.py --config.workdir=W

EAGLE-1 (Li et al. 2401.15077): the next feature by smooth L1 and its token by cross-entropy, from
true features with noise. EAGLE-3 (2503.01840): cross-entropy alone, over several draft steps that
read the head's own outputs ("training-time test"). Exit codes: 0; 2 for bad input; 130 after
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax import lax
from jaxtyping import Array, Float, Int, Key
from ml_collections import ConfigDict

from specjax.cli.command import use_compilation_cache
from specjax.errors import InputError
from specjax.fields import (
    Choice,
    Fields,
    Flag,
    Items,
    Number,
    Text,
    Whole,
    check_instance,
    fields_of,
)
from specjax.loading.head_formats.borrowed import target_embedding
from specjax.loading.heads.head import Head, TargetMetadata
from specjax.loading.model import Model
from specjax.models.decoder import check_features
from specjax.models.heads.eagle import Eagle, EagleConfig, default_taps
from specjax.models.heads.shared_parameters import share
from specjax.models.layers.attention import Partial, attend_in_blocks, merge
from train.data.batches import Batch
from train.data.vocabulary import Vocabulary
from train.methods.draft_losses import Scoring, Teacher, Truth, score_drafts
from train.methods.labels import ahead, at_rows, label_ahead
from train.methods.losses import smooth_l1, soft_cross_entropy
from train.methods.method import Measures, Method, measure
from train.run import run
from train.run.config import DRAFT_VOCAB_SIZE, TRAINING_FIELDS
from train.run.precision import multiply_dtype

CONFIG = "train_eagle3"
START = Choice(("target", "random"))
"""What a new head starts from."""


@dataclass(frozen=True)
class EagleLoss:
    """Weights of the parts of the loss, and over how many draft steps it runs.

    Step i counts `decay` ** i. `noise` is the half-width of the uniform noise on features. Raises
    InputError for values out of range.
    """

    steps: Annotated[int, Whole(1, 64)] = 4
    decay: Annotated[float, Number()] = 0.8
    cross_entropy: Annotated[float, Number()] = 1.0
    feature: Annotated[float, Number()] = 0.0
    noise: Annotated[float, Number()] = 0.0

    def __post_init__(self) -> None:
        check_instance(self, "loss.")
        if not self.cross_entropy + self.feature > 0:
            raise InputError("loss.cross_entropy=0, loss.feature=0: one of them must be positive")


def eagle_method(
    target: Model,
    config: EagleConfig,
    draft_ids: np.ndarray | None,
    loss: EagleLoss,
    *,
    start: str = "target",
    multiply: Any = None,
) -> Method:
    """How to train an EAGLE head; `start` is "target" (its weights where they fit) or "random"."""
    START.check("eagle.start", start)
    head = Eagle(config, jnp.dtype(jnp.float32), multiply)
    ids = None if draft_ids is None else jnp.asarray(draft_ids)
    kind = "eagle3" if config.version == 3 else "eagle"

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        params = meta.unbox(head.init(key))
        return params if start == "random" else from_target(params, target, config, draft_ids)

    def summed(
        params: Any, target_params: Any, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Measures]:
        params = {**params, "shared": share(target_params, ids, head=config.version == 1)}
        return eagle_loss(head, params, target_params, ids, batch, key, loss)

    def finished(params: Any, training: dict[str, Any]) -> Head:
        return Head(kind, config, params, draft_ids, TargetMetadata.of(target), training)

    features = tuple(dict.fromkeys((*config.taps, "final_norm")))
    return Method(kind, features, init, summed, finished)


def from_target(
    params: dict[str, Any], target: Model, config: EagleConfig, draft_ids: np.ndarray | None
) -> dict[str, Any]:
    """Random parameters with those that the target has too taken from its last layer and its head.

    The layer's inputs are wider than the target's: what reads the feature starts as the target's
    projection, what reads the embedding stays random, and the fusion starts as the last tap. Raises
    InputError where the head's layer is of another shape than the target's.
    """
    shape = dataclasses.replace(target.config, num_layers=1)
    if dataclasses.replace(config.decoder, num_layers=1) != shape:
        raise InputError("start='target': the head's layer has another shape; use start=random")
    layers = target.params["layers"]
    if target.form.scan_layers:
        last = jax.tree.map(lambda leaf: np.asarray(leaf[-1], np.float32), layers)
    else:
        last = layers[str(target.config.num_layers - 1)]
        last = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), last)
    width = shape.hidden_size
    layer = {**params["layer"], "mlp": last["mlp"], "mlp_norm": last["mlp_norm"]}
    attention = {"output": last["attention"]["output"]}
    for name in ("query", "key", "value"):
        kernel = np.array(params["layer"]["attention"][name]["kernel"])
        kernel[-width:] = last["attention"][name]["kernel"]
        attention[name] = {**last["attention"][name], "kernel": kernel}
    layer["attention"] = attention
    fc = np.array(params["fc"]["kernel"])
    fc[-width:] += np.eye(width, dtype=np.float32)
    params = {**params, "layer": layer, "fc": {**params["fc"], "kernel": fc}}
    if config.version == 3:
        layer["hidden_norm"] = last["attention_norm"]
        layer["embedding_norm"] = last["attention_norm"]
        params["final_norm"] = {"scale": np.asarray(target.params["final_norm"]["scale"])}
        kernel = np.asarray(target.params["head"]["kernel"], np.float32)
        kernel = kernel if draft_ids is None else kernel[:, draft_ids]
        params["head"] = {"kernel": kernel}
    if config.own_embedding:
        params["embed"] = {"embedding": target_embedding(target)}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


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

    Step i counts where the token i positions after a label is a label too, and its cross-entropy
    where that token is in the draft's vocabulary, over which the target's distribution is
    renormalised. Without a key there is no noise.
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
    plan = Scoring(
        parts=((_against_distribution, loss.cross_entropy),),
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
    parts = {"cross_entropy": scores.losses[:, 0].sum()}
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
    residual, attended = head.inputs(params, jnp.roll(tokens, -1, axis=1), fused)
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
            residual, attended = head.inputs(params, token, head.next_hidden(params, output))
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


FIELDS: Fields = {
    **TRAINING_FIELDS,
    "eagle": {
        "version": Whole(1, 3, remedy="use 1 or 3"),
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "taps": Items(Text(), remedy="use names of features, such as ('layer_input:2',)"),
        "start": START,
        **dict.fromkeys(
            (
                "fc_bias",
                "own_embedding",
                "norm_before_residual",
                "norm_before_fc",
                "fc_norm",
                "norm_output",
            ),
            Flag(),
        ),
    },
    "loss": fields_of(EagleLoss),
}


def make_method(target: Model, vocabulary: Vocabulary, config: ConfigDict) -> Method:
    """The method of a config; raises InputError for values that make no sense."""
    options = config.eagle.to_dict()
    loss = EagleLoss(**config.loss.to_dict())
    start, size = options.pop("start"), options.pop("draft_vocab_size")
    taps = options.pop("taps")
    if not taps:
        version_1 = options["version"] == 1
        taps = ("final_norm",) if version_1 else default_taps(target.config.num_layers)
    check_features(taps, target.config.num_layers)
    draft_ids = vocabulary(size)
    shape = EagleConfig(
        decoder=dataclasses.replace(target.config, num_layers=1),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=target.config.vocab_size if draft_ids is None else len(draft_ids),
        taps=tuple(taps),
        **options,
    )
    multiply = multiply_dtype(config.dtype)
    return eagle_method(target, shape, draft_ids, loss, start=start, multiply=multiply)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run.main(make_method, FIELDS, CONFIG, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
