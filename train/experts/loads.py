"""The number of tokens sent to each expert, by the name of the layer's router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.config import Experts
from specjax.models.decoder import EXPERTS, Decoder
from train.data.batches import Batch

Loads = dict[str, Float[Array, "... E"]]
"""By a router's dotted name among the trained parameters, with an axis of layers if stacked."""


def of_target(decoder: Decoder, chosen: Int[Array, "B T M K"] | None, batch: Batch) -> Loads:
    """Return the loads of a decoder, given its feature `experts`; empty without experts.

    Padding is not counted. Without the feature all loads are 0.
    """
    experts, count = decoder.config.experts, decoder.config.num_sparse
    if experts is None or not count:
        return {}
    loads = jnp.zeros((count, experts.num_experts), jnp.float32)
    if chosen is not None:
        tokens = batch.segments > 0
        loads = jax.vmap(lambda own: _counted(own, tokens, experts), in_axes=2)(chosen)
    if decoder.form.stacked:
        return {"layers.mlp.router": loads}
    first = decoder.config.num_layers - count
    return {f"layers.{first + layer}.mlp.router": loads[layer] for layer in range(count)}


def feature_of(decoder: Decoder) -> tuple[str, ...]:
    """Return the names of features that `of_target` reads; empty for a decoder without experts."""
    return (EXPERTS,) if decoder.config.num_sparse else ()


def of_modules(
    chosen: Iterable[Int[Array, "B A K"] | None],
    num_modules: int,
    experts: Experts | None,
    labels: Int[Array, "B A"],
) -> Loads:
    """Return the loads of MTP modules, from the experts of each draft step at its labels.

    Steps beyond the number of modules run the last module.
    """
    found: Loads = {}
    for step, own in enumerate(chosen):
        if experts is None or own is None:
            continue
        name = f"modules.{min(step, num_modules - 1)}.layer.mlp.router"
        found[name] = found.get(name, 0) + _counted(own, labels >= 0, experts)
    return found


def below(name: str, loads: Mapping[str, Array]) -> Loads:
    """Return the loads with router names below the entry `name` of the trained parameters."""
    return {f"{name}.{router}": load for router, load in loads.items()}


def _counted(
    chosen: Int[Array, "B N K"], tokens: Bool[Array, "B N"], experts: Experts
) -> Float[Array, " E"]:
    where = jnp.where(tokens[:, :, None], chosen, experts.num_experts).reshape(-1)
    return jnp.zeros(experts.num_experts, jnp.float32).at[where].add(1.0, mode="drop")
