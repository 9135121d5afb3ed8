"""A training method: a few pure functions, and the sums that measure it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.loading.heads.head import Head
from specjax.loading.model import Model
from train.experts.loads import Loads
from train.methods.packed_rows import label_ahead

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]
"""A number by the step."""


@struct.dataclass
class Measures:
    """Sums over labels, which add over micro-batches and devices.

    `weight` is what a loss is divided by; `losses` are its parts by name. Draft i (0-based) is
    of the token i positions after a label: `counts` are the labels where there is one, `correct`
    those where the draft is the target's likeliest token, `prefix_correct` those where all drafts
    before are right too. `loads` are the tokens that experts of trained layers were sent.
    """

    weight: Float[Array, ""]
    losses: dict[str, Float[Array, ""]]
    correct: Float[Array, "K"]
    prefix_correct: Float[Array, "K"]
    counts: Float[Array, "K"]
    loads: Loads = struct.field(default_factory=dict)


class Method(NamedTuple):
    """A way to train a drafter, perhaps along with its target.

    `init(key) -> params` gives what is trained. `loss(params, target_params, batch, key)` gives the
    sum of the loss over labels, and measures; without a key there is no noise in it. `features` are
    the frozen target's features that it reads from the batch. `head(params, training)` is what is
    measured by decoding, None where nothing drafts. `model(params)` is the target as it then is;
    `exports` says what a run leaves: the "head", "both" in a folder each, or a "model" that holds
    the head too. `trains_target` where the target is trained too; `drafter` then names the entry of
    `params` that is the head's, which elsewhere is all of them. With `takes_step` the loss has the
    step, an int32 scalar, as its last argument. `schedules` are numbers that follow from the step
    alone, by the names under which they are logged. A sequence needs `least_tokens` to have a label
    for every draft.
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


def measure(
    losses: dict[str, Float[Array, ""]], right: Bool[Array, "K B A"], labels: Int[Array, "B A"]
) -> Measures:
    """Measures of K drafts at each label; there may be none."""
    scored = [label_ahead(labels, draft) for draft in range(len(right))]
    scored = jnp.stack(scored) if scored else right
    right = right & scored
    along = jax.lax.cumprod(right.astype(jnp.int32), axis=0)
    correct, prefix_correct, counts = (
        values.sum(axis=(1, 2), dtype=jnp.float32) for values in (right, along, scored)
    )
    weight = (labels >= 0).sum(dtype=jnp.float32)
    return Measures(weight, losses, correct, prefix_correct, counts)
