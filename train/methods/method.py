"""A training method: a few pure functions, and the sums that measure it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Key

from specjax.loading.heads.head import Head
from specjax.loading.model import Model


@struct.dataclass
class Measures:
    """Sums over labels, which add over micro-batches and devices.

    `weight` is what a loss is divided by; `losses` are its parts by name. Draft i (0-based) is
    of the token i positions after a label: `counts` are the labels where there is one, `correct`
    those where the draft is the target's likeliest token, `prefix_correct` those where all drafts
    before are right too.
    """

    weight: Float[Array, ""]
    losses: dict[str, Float[Array, ""]]
    correct: Float[Array, "K"]
    prefix_correct: Float[Array, "K"]
    counts: Float[Array, "K"]


class Method(NamedTuple):
    """A way to train a drafter.

    `init(key) -> params` gives what is trained. `loss(params, target_params, batch, key)` gives the
    sum of the loss over labels, and measures; without a key there is no noise in it. `features` are
    the target's features it reads from the batch. `head(params, training)` is what is exported, and
    measured by decoding. A method that trains the target too gives the model as it then is as
    `tuned(params)`, and is exported with it. With `takes_step` the loss has the step, an int32
    scalar, as its last argument.
    """

    name: str
    features: tuple[str, ...]
    init: Callable[[Key[Array, ""]], Any]
    loss: Callable[..., tuple[Float[Array, ""], Measures]]
    head: Callable[[Any, dict[str, Any]], Head]
    tuned: Callable[[Any], Model] | None = None
    takes_step: bool = False


def measure(
    losses: dict[str, Float[Array, ""]],
    right: Bool[Array, "K B A"],
    scored: Bool[Array, "K B A"],
) -> Measures:
    """Measures of drafts that are `right`, among those that can be `scored`."""
    right = right & scored
    along = jax.lax.cumprod(right.astype(jnp.int32), axis=0)
    total = lambda x: x.sum(axis=(1, 2), dtype=jnp.float32)  # noqa: E731
    return Measures(
        weight=scored[0].sum(dtype=jnp.float32),
        losses=losses,
        correct=total(right),
        prefix_correct=total(along),
        counts=total(scored),
    )
