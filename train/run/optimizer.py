"""AdamW or Muon with a warm-up and a schedule, by config.

Loshchilov and Hutter 1711.05101; Jordan et al. 2024, "Muon", with the step size of Liu et al.
2502.16982, so that both use the same learning rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax
import optax
import optax.contrib

from specjax.errors import InputError
from specjax.fields import Number, Text, Whole, optional
from specjax.loading.compare_arrays import leaf_name
from specjax.models.config import DecoderConfig
from specjax.models.joined_kernels import in_parts, with_joined

_VOCABULARY = frozenset(("embed", "head", "markov"))
"""Modules whose kernels have an axis over the vocabulary, which Muon leaves to Adam."""


@dataclass(frozen=True)
class Scales:
    """The field type of learning rate factors by parameter name: NAME:FACTOR, comma-separated."""

    def check(self, name: str, value: Any) -> dict[str, float]:
        """Return the factors in a text by parameter name.

        Raises InputError, which names the field `name`, for any other text.
        """
        text = Text(empty=True).check(name, value)
        factors: dict[str, float] = {}
        for pair in text.split(",") if text.strip() else ():
            parameter, mark, factor = map(str.strip, pair.partition(":"))
            if not (parameter and mark) or parameter in factors:
                raise InputError(
                    f"{name}={text!r}: use NAME:FACTOR for each name, with commas, such as "
                    "head:0.5,layers.0:0.1"
                )
            with suppress(ValueError):
                factor = float(factor)
            factors[parameter] = Number().check(f"{name}.{parameter}", factor)
        return factors


@dataclass(frozen=True)
class Optimization:
    """Options of the optimizer; see `train.run.config` for the fields.

    `decay_steps` counts from step 0; None, for all steps, is filled in by the config. The rate ends
    at `final_fraction` of its peak and stays there. The schedule "wsd" (warm-up, stable, decay: Hu
    et al. 2404.06395) keeps the peak until `stable_fraction` of the steps. `optimizer` "muon"
    orthogonalizes the updates of kernels, except those over the vocabulary. `learning_rate_scales`
    multiplies the rate of the parameters below a dotted name; the longest matching name applies.
    `balance_rate` is the rate of the experts' selection biases, which have no gradient.
    """

    learning_rate: Annotated[float, Number(above=True)] = 1e-3
    """The peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The schedule by which the rate falls after the warm-up; wsd is constant, then linear."""
    stable_fraction: Annotated[float, Number(0.0, 1.0)] = 0.8
    """The fraction of decay_steps after which the rate of wsd falls."""
    warmup: Annotated[int, Whole()] = 0
    """The number of steps over which the rate rises."""
    decay_steps: Annotated[int | None, optional(Whole(1))] = 1
    """The step at which the schedule ends; all steps by default."""
    final_fraction: Annotated[float, Number()] = 0.1
    """The rate at the end, as a fraction of the peak."""
    weight_decay: Annotated[float, Number()] = 0.0
    """The weight decay, as in AdamW."""
    clip: Annotated[float, Number()] = 1.0
    """The maximum norm of the gradient; 0 does not clip."""
    learning_rate_scales: Annotated[Mapping[str, float], Scales()] = field(default_factory=dict)
    """Factors of the rate by parameter name, such as head:0.5,layers.0:0.1; the longest match
    applies.
    """
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The optimizer; muon orthogonalizes the updates of kernels, except those over the vocabulary.
    """
    balance_rate: Annotated[float, Number()] = 1e-3
    """The rate of the selection biases of sigmoid routers; 0 leaves them unchanged."""
    average: Annotated[float, Number(0.0, 0.999999, remedy="use a number in [0, 1)")] = 0.0
    """The decay per step of an average of the parameters, which is evaluated and exported; 0 uses
    the parameters themselves.
    """


def learning_rate(optimization: Optimization) -> optax.Schedule:
    """Return the learning rate as a schedule over updates.

    The first update is number 0, and its rate is above 0.
    """
    peak, warmup = optimization.learning_rate, optimization.warmup
    final, steps = optimization.final_fraction, max(optimization.decay_steps - warmup, 1)
    falls_at = max(round(optimization.stable_fraction * optimization.decay_steps) - warmup, 0)
    after = {
        "wsd": optax.join_schedules(
            [
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, final * peak, max(steps - falls_at, 1)),
            ],
            [falls_at],
        ),
        "cosine": optax.cosine_decay_schedule(peak, steps, final),
        "linear": optax.linear_schedule(peak, final * peak, steps),
        "constant": optax.constant_schedule(peak),
    }[optimization.schedule]
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def make_optimizer(
    optimization: Optimization, params: Any, layers: DecoderConfig | None = None
) -> optax.GradientTransformation:
    """Return the optimizer: clipping by global norm, then AdamW (0.9, 0.95) or Muon (0.95).

    Muon orthogonalizes each part of a joined kernel, such as queries, separately; `layers` is the
    config of the decoder layers among the parameters.

    Weight decay skips parameters named `scale` or `bias`. Raises InputError for a name in
    `learning_rate_scales` that matches no parameter.
    """
    factors = _factors(optimization.learning_rate_scales, params)
    return optax.chain(
        optax.clip_by_global_norm(optimization.clip) if optimization.clip > 0 else optax.identity(),
        _muon(layers) if optimization.optimizer == "muon" else optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(optimization.weight_decay, mask=_decays),
        optax.scale_by_learning_rate(learning_rate(optimization)),
        optax.partition(
            {factor: optax.scale(factor) for factor in jax.tree.leaves(factors)}, factors
        ),
    )


def _muon(layers: DecoderConfig | None) -> optax.GradientTransformation:
    """Return Muon for kernels and Adam for all else, both with Nesterov momentum."""

    def matrices(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _matrix(leaf_name(path), leaf.ndim), params
        )

    # The rate comes last, with its sign, for both optimizers.
    muon = optax.contrib.muon(
        -1.0, consistent_rms=0.2, adam_b2=0.95, muon_weight_dimension_numbers=matrices
    )
    if layers is None:
        return muon

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        split = in_parts(gradients, layers), state, in_parts(params, layers)
        updates, state = muon.update(*split)
        return with_joined(updates, gradients, layers), state

    return optax.GradientTransformation(lambda params: muon.init(in_parts(params, layers)), update)


def _matrix(name: str, rank: int) -> optax.contrib.MuonDimensionNumbers | None:
    """Return the input and output axes of a kernel, given its name and rank.

    Kernels are [..., in, out]; leading axes are layers or heads of a drafter. The result is None
    for other parameters.
    """
    *above, last = name.split(".")
    if last != "kernel" or not _VOCABULARY.isdisjoint(above):
        return None
    return optax.contrib.MuonDimensionNumbers((rank - 2,), (rank - 1,))


def _decays(params: Any) -> Any:
    def decays(path: tuple, _: Any) -> bool:
        return leaf_name(path).rpartition(".")[2] not in ("scale", "bias", "selection_bias")

    return jax.tree_util.tree_map_with_path(decays, params)


def _factors(scales: Mapping[str, float], params: Any) -> Any:
    """Return a tree with each parameter's factor of the learning rate."""
    used = set()

    def factor(path: tuple, _: Any) -> float:
        name = leaf_name(path)
        above = [scaled for scaled in scales if f"{name}.".startswith(f"{scaled}.")]
        used.update(above)
        return float(scales[max(above, key=len)]) if above else 1.0

    factors = jax.tree_util.tree_map_with_path(factor, params)
    for name in scales:
        if name not in used:
            there = ", ".join(sorted(params)) if isinstance(params, dict) else "none"
            raise InputError(
                f"learning_rate_scales.{name}: no parameter is below that name; there are {there}"
            )
    return factors
