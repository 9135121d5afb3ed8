"""The number of tokens sent to each expert, by the name of its router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.config import Experts
from specjax.models.decoder import Decoder
from specjax.models.features import EXPERTS
from train.data.batches import Batch

Loads = dict[str, Float[Array, "... E"]]
"""Loads by a router's dotted name among the trained parameters, with a layer axis if stacked."""


def of_target(decoder: Decoder, chosen: Int[Array, "B T M K"] | None, batch: Batch) -> Loads:
    """Return the numbers of tokens of each expert in a decoder, by the name of its router.

    `chosen` is the decoder's feature `experts`: for each token and layer the experts that read it.
    None stands for loads of 0. Padding is not counted. The result is empty without experts.
    """
    experts, count = decoder.config.experts, decoder.config.num_sparse
    if experts is None or not count:
        return {}
    loads = jnp.zeros((count, experts.num_experts), jnp.float32)
    if chosen is not None:
        tokens = batch.segments > 0
        loads = jax.vmap(lambda ids: _counted(ids, tokens, experts), in_axes=2)(chosen)
    if decoder.form.stacked:
        return {"layers.mlp.router": loads}
    first = decoder.config.num_layers - count
    return {f"layers.{first + layer}.mlp.router": loads[layer] for layer in range(count)}


def feature_of(decoder: Decoder) -> tuple[str, ...]:
    """Return the names of the features that `of_target` reads, which are none without experts."""
    return (EXPERTS,) if decoder.config.num_sparse else ()


def of_modules(
    chosen: Iterable[Int[Array, "B A K"] | None],
    num_modules: int,
    experts: Experts | None,
    labels: Int[Array, "B A"],
) -> Loads:
    """Return the numbers of tokens of each expert in MTP modules, by the name of its router.

    `chosen` has for each draft step the experts that read each label, or None without experts.
    Steps beyond the number of modules run the last module. The result is empty if `experts` is
    None.
    """
    loads: Loads = {}
    for step, step_experts in enumerate(chosen):
        if experts is None or step_experts is None:
            continue
        name = f"modules.{min(step, num_modules - 1)}.layer.mlp.router"
        loads[name] = loads.get(name, 0) + _counted(step_experts, labels >= 0, experts)
    return loads


def below(name: str, loads: Mapping[str, Array]) -> Loads:
    """Return the loads with `name`, an entry of the parameters, put before each router's name."""
    return {f"{name}.{router}": load for router, load in loads.items()}


def _counted(
    chosen: Int[Array, "B N K"], tokens: Bool[Array, "B N"], experts: Experts
) -> Float[Array, " E"]:
    """Return the number of the marked `tokens` that each expert was chosen for."""
    where = jnp.where(tokens[:, :, None], chosen, experts.num_experts).reshape(-1)
    return jnp.zeros(experts.num_experts, jnp.float32).at[where].add(1.0, mode="drop")
