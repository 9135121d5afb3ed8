"""The interface of training methods: a few pure functions, and the measures that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.loading.model import Model
from specjax.methods.heads.head import Head
from specjax.models.config import DecoderConfig
from train.experts.loads import Loads
from train.methods.packed_rows import label_ahead

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]
"""A number as a function of the step."""


@struct.dataclass
class Measures:
    """Sums over labels, which can be added over micro-batches and devices.

    `weight` is the divisor of losses; `losses` are the parts of the loss by name. Draft i (0-based)
    predicts the token i positions after a label: `counts` are the numbers of labels that have such
    a token, `correct` of those at which the draft is the target's likeliest token, and
    `prefix_correct` of those at which all earlier drafts are right too. `loads` are the numbers of
    tokens sent to experts of trained layers. `rates` are further means by name, each a sum and
    its number of labels.
    """

    weight: Float[Array, ""]
    losses: dict[str, Float[Array, ""]]
    correct: Float[Array, "K"]
    prefix_correct: Float[Array, "K"]
    counts: Float[Array, "K"]
    loads: Loads = struct.field(default_factory=dict)
    rates: dict[str, Float[Array, "2"]] = struct.field(default_factory=dict)


class Method(NamedTuple):
    """A way to train a drafter, optionally jointly with its target.

    `init(key) -> params` returns the trained parameters. `loss(params, target_params, batch, key)`
    returns the sum of the loss over labels, and measures; without a key it has no noise. `features`
    are the frozen target's features that the loss reads from the batch. `head(params, training)` is
    the head to measure by decoding, or None; without one, `drafter_options` are those of
    `make_drafter` for a drafter that needs the target alone, if any. `model(params)` is the target
    in its current state; `exports` is what a run writes: the "head", "both" in separate folders, or
    a "model" that
    contains the head.

    `trains_target` says that the target is trained too; `drafter` then names the entry of `params`
    with the head. If `takes_step`, the step, an int32 scalar, is the loss's last argument.
    `schedules` are logged functions of the step by name. A sequence needs `least_tokens` tokens to
    have a label for every draft. `layers` is the config of the decoder layers among `params`, if
    any. After the last step, `calibrate(params, target_params, batches)` of held-out batches, if
    given, returns the parameters to export, and numbers to print.
    """

    name: str
    features: tuple[str, ...]
    init: Callable[[Key[Array, ""]], Any]
    loss: Callable[..., tuple[Float[Array, ""], Measures]]
    head: Callable[[Any, dict[str, Any]], Head] | None
    model: Callable[[Any], Model] | None = None
    exports: Literal["head", "both", "model"] = "head"
    trains_target: bool = False
    drafter: str | None = None
    takes_step: bool = False
    schedules: Mapping[str, Schedule] = MappingProxyType({})
    least_tokens: int = 3
    layers: DecoderConfig | None = None
    calibrate: Callable[..., tuple[Any, dict[str, float]]] | None = None
    drafter_options: Mapping[str, Any] = MappingProxyType({})


def measure(
    losses: dict[str, Float[Array, ""]],
    right: Bool[Array, "K B A"],
    labels: Int[Array, "B A"],
    scored: Bool[Array, "K B A"] | None = None,
) -> Measures:
    """Return the measures of K drafts at each label; K may be 0.

    `losses` are the sums of the parts of the loss, and `right` marks the drafts that are right.
    `scored` marks the drafts whose token is a label too, by default found in the list of `labels`.
    """
    if scored is None:
        ahead = [label_ahead(labels, draft) for draft in range(len(right))]
        scored = jnp.stack(ahead) if ahead else right
    right = right & scored
    along = jax.lax.cumprod(right.astype(jnp.int32), axis=0)
    correct, prefix_correct, counts = (
        values.sum(axis=(1, 2), dtype=jnp.float32) for values in (right, along, scored)
    )
    weight = (labels >= 0).sum(dtype=jnp.float32)
    return Measures(weight, losses, correct, prefix_correct, counts)
