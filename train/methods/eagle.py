"""EAGLE heads for a frozen target: what they start from, learn and become."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jaxtyping import Array, Float, Key

from specjax.errors import InputError
from specjax.fields import Choice
from specjax.loading.head_formats.shared_with_target import target_embedding
from specjax.loading.heads.head import Head, TargetMetadata
from specjax.loading.model import Model
from specjax.models.heads.eagle import Eagle, EagleConfig
from specjax.models.heads.shared_parameters import share
from train.data.batches import Batch
from train.methods.eagle_loss import EagleLoss, eagle_loss
from train.methods.method import Measures, Method
from train.methods.target_layers import last_layer

START = Choice(("target", "random"))
"""What a new head starts from."""


def eagle_method(
    target: Model,
    config: EagleConfig,
    draft_ids: np.ndarray | None,
    loss: EagleLoss,
    *,
    start: str = "target",
    multiply: Any = None,
) -> Method:
    """How to train an EAGLE head for a frozen target.

    `draft_ids` are the tokens that the head drafts, None for all. `start` is "target" (the target's
    weights where they fit) or "random"; `multiply` is the dtype of products. Raises InputError for
    another start.
    """
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
        params = {**params, "shared": share(target_params, ids, head=config.shares_output)}
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
    shape = target.config.llama_layers(1)
    if (other := target.config.unlike_llama) is not None:
        raise InputError(f"start='target': the target's layers have {other}; use start=random")
    if config.decoder != shape:
        raise InputError("start='target': the head's layer has another shape; use start=random")
    last = last_layer(target)
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
