"""EAGLE heads for a frozen target: initialization, loss and export.

EAGLE-1 (Li et al. 2401.15077) learns the target's next feature by smooth L1 and its token by
cross-entropy, from true features with noise. EAGLE-3 (2503.01840) uses cross-entropy only, over
several draft steps that read the head's own outputs ("training-time test").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.errors import InputError
from specjax.fields import Choice, Number, Whole
from specjax.loading.model import Model
from specjax.loading.user_messages import note
from specjax.methods.eagle.head import Eagle, EagleConfig
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.heads.shared_parameters import share
from specjax.methods.heads.shared_with_target import target_embedding
from train.data.batches import Batch
from train.methods.blockwise_loss import Scoring, Teacher, score_drafts
from train.methods.losses import (
    LossName,
    Parts,
    PositionWeights,
    Truth,
    parts_of,
    smooth_l1,
    soft_cross_entropy,
)
from train.methods.method import Measures, Method, measure
from train.methods.packed_rows import ahead, at_rows, label_ahead
from train.methods.target_layers import last_layer, with_kv_heads
from train.methods.unroll import DraftStep, unroll

START = Choice(("target", "last_layer", "random"))
"""The initial weights of a new head: copies of the target's beside random weights, exactly the
target's last layer and output head (`from_target`), or random weights alone.
"""


@dataclass(frozen=True)
class EagleLoss(PositionWeights):
    """Weights of the parts of the loss, and the number of draft steps.

    Step i has the weight `decay` ** i, or D-PACE's in the label loss. `noise` is the half-width of
    the uniform noise on features. `label_loss` replaces the cross-entropy and keeps its weight.
    Raises InputError if both parts have weight 0.
    """

    steps: Annotated[int, Whole(1, 64)] = 4
    """The number of draft steps that are unrolled."""
    decay: Annotated[float, Number()] = 0.8
    """Step i has the weight decay ** i, unless weights=dpace."""
    cross_entropy: Annotated[float, Number()] = 1.0
    """The weight of the cross-entropy with the target's distribution."""
    feature: Annotated[float, Number()] = 0.0
    """The weight of the smooth L1 distance to the target's next feature."""
    noise: Annotated[float, Number()] = 0.0
    """The half-width of the uniform noise on features."""
    label_loss: LossName = None
    """A loss that replaces the cross-entropy and keeps its weight: ce (with the data's token), kl,
    reverse_kl, tv, lk, lk_blend, or several as ce:0.1,tv:0.9.
    """

    def __post_init__(self) -> None:
        if not self.cross_entropy + self.feature > 0:
            raise InputError("loss.cross_entropy=0, loss.feature=0: one of them must be positive")

    @property
    def parts(self) -> Parts:
        """Return the parts of the label loss and their weights, by name."""
        if self.label_loss is None:
            return {"cross_entropy": (_against_distribution, self.cross_entropy)}
        parts = parts_of(self.label_loss).items()
        return {name: (part, self.cross_entropy * weight) for name, (part, weight) in parts}


def eagle_method(
    target: Model,
    config: EagleConfig,
    draft_ids: np.ndarray | None,
    loss: EagleLoss,
    *,
    start: str = "target",
    multiply: Any = None,
    functions: type[Eagle] = Eagle,
    drafts: Callable[..., Iterable[DraftStep]] = unroll,
) -> Method:
    """Return a method that trains an EAGLE head for a frozen target.

    `draft_ids` are the token ids that the head drafts, None for all. `start` is one of `START`;
    `multiply` is the dtype of products. `functions` are the head's, and `drafts` its draft steps.
    """
    head = functions(config, jnp.dtype(jnp.float32), multiply)
    ids = None if draft_ids is None else jnp.asarray(draft_ids)

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        params = meta.unbox(head.init(key))
        if start == "random":
            return params
        return from_target(params, target, config, draft_ids, exactly=start == "last_layer")

    def loss_of(
        params: Any, target_params: Any, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Measures]:
        params = {**params, "shared": share(target_params, ids, head=config.shares_output)}
        return eagle_loss(head, params, target_params, ids, batch, key, loss, drafts)

    def head_of(params: Any, training: dict[str, Any]) -> Head:
        return Head(config.kind, config, params, draft_ids, TargetMetadata.of(target), training)

    features = tuple(dict.fromkeys((*config.taps, "final_norm")))
    return Method(config.kind, features, init, loss_of, head_of, layers=config.decoder)


def from_target(
    params: dict[str, Any],
    target: Model,
    config: EagleConfig,
    draft_ids: np.ndarray | None,
    *,
    exactly: bool = False,
) -> dict[str, Any]:
    """Return random parameters in which those of the target's last layer and head are copied.

    The layer's inputs are wider than the target's: the part that reads the feature starts as the
    target's projection, and the part that reads the embedding stays random. The fusion of taps
    starts as the last tap, added to random weights. More key/value heads than the target's are
    copies of its own.

    With `exactly` the random weights are zero: the fusion returns the latest of the taps that are
    layers' inputs, and attention reads only it. If that is the input of the last layer, then the
    head's first draft step at position t has the target's own logits at t, which predict x_{t+1},
    for the tokens that it drafts; the step is trained to predict x_{t+2}. (A bias of attention's
    output, which a head has no room for, is left out.) With an earlier layer's input, which a line
    on stderr names, the layers between are left out.

    Raises InputError if the head's layer has another shape than the target's, and with `exactly`
    for version 1 and for norms that the target lacks.
    """
    start = f"start={'last_layer' if exactly else 'target'}"
    shape = target.config.llama_layers(1)
    if (other := target.config.unlike_llama) is not None:
        raise InputError(f"{start}: the target's layers have {other}; use start=random")
    num_kv_heads = config.decoder.num_kv_heads
    if num_kv_heads % shape.num_kv_heads:
        raise InputError(
            f"num_kv_heads={num_kv_heads}: {start} repeats the target's {shape.num_kv_heads}; use "
            "a multiple of them, or start=random"
        )
    if replace(config.decoder, num_layers=1) != replace(shape, num_kv_heads=num_kv_heads):
        raise InputError(f"{start}: the head's layer has another shape; use start=random")
    last = last_layer(target)
    width = shape.hidden_size
    layer = {**params["layer"], "mlp": last["mlp"], "mlp_norm": last["mlp_norm"]}
    attention = last["attention"]
    copied = with_kv_heads(attention["qkv"], shape, num_kv_heads)
    qkv, fc = (
        np.array(kernel) * (not exactly)
        for kernel in (params["layer"]["attention"]["qkv"]["kernel"], params["fc"]["kernel"])
    )
    qkv[-width:] = copied["kernel"]
    layer["attention"] = {
        "qkv": {**copied, "kernel": qkv},
        "output": {"kernel": attention["output"]["kernel"]},
    }
    tap = _latest_input(config, target) if exactly else len(fc) // width - 1
    fc[tap * width : (tap + 1) * width] += np.eye(width, dtype=np.float32)
    params = {**params, "layer": layer, "fc": {**params["fc"], "kernel": fc}}
    if config.version == 3:
        layer["hidden_norm"] = last["attention_norm"]
        layer["embedding_norm"] = last["attention_norm"]
        params["final_norm"] = {"scale": np.asarray(target.params["final_norm"]["scale"])}
    if not config.shares_output:
        kernel = np.asarray(target.params["head"]["kernel"], np.float32)
        kernel = kernel if draft_ids is None else kernel[:, draft_ids]
        params["head"] = {"kernel": kernel}
    if config.own_embedding:
        params["embed"] = {"embedding": target_embedding(target)}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def _latest_input(config: EagleConfig, target: Model) -> int:
    """Return the index of the tap that is the input of the latest layer.

    Raises InputError if no tap is a layer's input, or if the head cannot pass it on unchanged.
    """
    remedy = "use start=target or random"
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm"):
        if getattr(config, flag):
            raise InputError(f"start=last_layer: {flag}=True changes the layer's input; {remedy}")
    layers = {
        int(name.partition(":")[2]): index
        for index, name in enumerate(config.taps)
        if name.startswith("layer_input:")
    }
    if not layers:
        raise InputError(f"start=last_layer: no tap is the input of a layer; {remedy}")
    latest, last = max(layers), target.config.num_layers - 1
    if latest < last:
        note(
            f"start=last_layer: the taps lack layer_input:{last}, the input of the last layer, "
            f"which starts from layer_input:{latest} instead"
        )
    return layers[latest]


def eagle_loss(
    head: Eagle,
    params: dict[str, Any],
    target_params: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    key: Key[Array, ""] | None,
    loss: EagleLoss,
    drafts: Callable[..., Iterable[DraftStep]] = unroll,
) -> tuple[Float[Array, ""], Measures]:
    """Return the sum of the loss over the batch's labels, and measures of each draft step.

    Step i is scored if the token i positions after a label is a label too; its loss counts if that
    token is in the draft vocabulary, over which the target's distribution is renormalized. Without
    a key there is no noise.
    """
    labels = batch.labels
    features = {name: value.astype(jnp.float32) for name, value in batch.features.items()}
    taps = {name: features[name] for name in head.config.taps}
    if loss.noise and key is not None:
        keys = dict(zip(taps, jax.random.split(key, len(taps)), strict=True))
        for name, value in taps.items():
            noise = jax.random.uniform(
                keys[name], value.shape, minval=-loss.noise, maxval=loss.noise
            )
            taps[name] = value + noise
    columns = share(target_params, draft_ids, head=True)["draft_head"]["kernel"]
    teacher = Teacher.of(batch, columns, draft_ids)
    steps = list(drafts(head, params, batch, taps, loss.steps))
    outputs = jnp.stack([step.output for step in steps])
    states = jnp.stack([step.state for step in steps])
    weights = loss.of_drafts(loss.decay, loss.steps)
    plan = Scoring(
        parts=tuple(loss.parts.values()),
        trains_kernel=not head.config.shares_output,
        multiply=head.multiply,
        alpha=loss.dpace_alpha,
    )
    total, scores = score_drafts(
        plan,
        states,
        head.logit_kernel(params),
        teacher,
        teacher.counts(labels, loss.steps),
        weights,
    )
    parts = scores.named(loss.parts)
    if loss.feature:
        truth = at_rows(features["final_norm"], labels - 1)
        truth = lax.stop_gradient(jnp.stack([ahead(truth, step) for step in range(loss.steps)]))
        scored = jnp.stack([label_ahead(labels, step) for step in range(loss.steps)])
        distances = jnp.where(scored, smooth_l1(outputs, truth), 0.0).sum(axis=(1, 2))
        parts["feature"] = distances.sum()
        total += loss.feature * jnp.dot(weights, distances)
    return total, measure(parts, scores.right, labels)


def _against_distribution(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    return soft_cross_entropy(logits, jnp.exp(truth.log_probs))
