"""MTP modules for a frozen target, or trained jointly with a loaded or a new one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jaxtyping import Array, Float, Int, Key

from specjax.errors import InputError
from specjax.fields import Choice, first_difference
from specjax.loading.model import Model
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.models.mtp import Mtp, MtpConfig, MtpModules
from specjax.models.parameters import cast
from train.data.batches import Batch
from train.methods.method import Measures, Method
from train.methods.mtp_loss import MtpLoss, frozen_loss, joint_loss
from train.methods.target_layers import in_float32, with_params

TRAINS = Choice(("modules", "all"))
"""What is trained: the modules of a frozen target, or the target with its modules."""
START = Choice(("target", "random"))
"""The initial modules: the target's own or ones that pass the hidden state through, or random ones.
"""
EXPORTS = Choice(("model", "head"))
"""What a run writes: the target with its modules inside, or the modules alone."""


def mtp_method(
    target: Model,
    config: MtpConfig | None,
    draft_ids: np.ndarray | None,
    loss: MtpLoss,
    *,
    trains: str = "modules",
    start: str = "target",
    exports: str = "model",
    multiply: Any = None,
) -> Method:
    """Return a method that trains MTP modules, or without a `config` (D = 0) the target alone.

    `draft_ids` are the token ids that the modules draft, None for all. `trains` is "modules" or
    "all", in which case parameters are {"target": ..., "mtp": ...}. `start` is "target" or
    "random"; `exports` says whether a run writes the target with its modules inside ("model") or
    the modules alone ("head"); `multiply` is the dtype of products. Raises InputError for settings
    that do not fit the target.
    """
    trains_target = trains == "all"
    if draft_ids is not None and exports == "model":
        raise InputError(
            f"mtp.draft_vocab_size={len(draft_ids)}: modules inside a model draft from all "
            f"{target.config.vocab_size} tokens; leave it out"
            + ("" if trains_target else ", or use mtp.export=head")
        )
    if start == "target":
        _check_own_modules(target, config)
    dtype = jnp.dtype(jnp.float32)
    ids = None if draft_ids is None else jnp.asarray(draft_ids)
    head = None if config is None else Mtp(config, dtype, multiply, differentiable=True)
    decoder = dataclasses.replace(target.architecture, dtype=dtype, multiply=multiply)

    def init_modules(key: Key[Array, ""]) -> dict[str, Any]:
        params = meta.unbox(head.init(key))
        return params if start == "random" else from_target(params, target, config)

    def init_both(key: Key[Array, ""]) -> dict[str, Any]:
        modules = {} if head is None else {"mtp": init_modules(key)}
        return {"target": in_float32(target), **modules}

    def loss_of_modules(
        params: Any, target_params: Any, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Measures]:
        del key
        return frozen_loss(head, params, target_params, ids, batch, loss)

    def loss_of_both(
        params: Any,
        target_params: Any,
        batch: Batch,
        key: Key[Array, ""] | None,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, ""], Measures]:
        del key
        return joint_loss(head, decoder, params, target_params, batch, step, loss)

    def head_of(params: Any, training: dict[str, Any]) -> Head:
        modules = params["mtp"] if trains_target else params
        return Head(config.kind, config, modules, draft_ids, TargetMetadata.of(target), training)

    def model_of(params: Any) -> Model:
        inside = None
        if head is not None:
            modules = params["mtp"] if trains_target else params
            inside = MtpModules(config, cast(modules, config.parameter_table(), target.dtype))
        trained = with_params(target, params["target"]) if trains_target else target
        return dataclasses.replace(trained, mtp=inside)

    if trains_target:
        features = ("final_norm",) if loss.labels == "distributions" else ()
    else:
        features = tuple(dict.fromkeys((*config.features, "final_norm")))
    return Method(
        "mtp",
        features,
        init_both if trains_target else init_modules,
        loss_of_both if trains_target else loss_of_modules,
        None if config is None else head_of,
        model_of if exports == "model" else None,
        exports=exports,
        trains_target=trains_target,
        drafter="mtp" if trains_target else None,
        takes_step=trains_target,
        schedules={"lambda": loss.weight} if trains_target and config is not None else {},
        least_tokens=loss.steps + 2,
        layers=target.config if config is None else config.decoder,
    )


def _check_own_modules(target: Model, config: MtpConfig | None) -> None:
    """Raise InputError if a target's own modules differ from `config`, in number for example."""
    if target.mtp is None or target.mtp.config == config:
        return
    target_config = target.mtp.config
    if config is None:
        name, given, existing = "num_modules", 0, target_config.num_modules
    else:
        name, given, existing = first_difference(config, target_config)
    raise InputError(
        f"mtp.{name}={given!s:.60}: the target's own modules have {existing!s:.60}; give the same, "
        "or use mtp.start=random"
    )


def from_target(params: dict[str, Any], target: Model, config: MtpConfig) -> dict[str, Any]:
    """Return the target's own modules, or new ones that initially pass the hidden state through.

    Nothing else is copied from the target: its last layer and its final norm expect a residual
    stream of another scale, and modules initialized from them learned more slowly.
    """
    if target.mtp is not None:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), target.mtp.params)
    width = config.decoder.hidden_size
    rows = slice(width, None) if config.concat == "embedding_first" else slice(width)

    def started(module: dict[str, Any]) -> dict[str, Any]:
        kernel = module["projection"]["kernel"].at[rows].add(jnp.eye(width))
        return {**module, "projection": {"kernel": kernel}}

    return {"modules": {name: started(module) for name, module in params["modules"].items()}}
