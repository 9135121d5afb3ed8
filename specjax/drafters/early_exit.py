"""The target's own first layers draft, through its final norm and head.

They read the target's cache, which holds exactly what they would have written; only the round's
window is their own. (LayerSkip: Elhoushi et al. 2404.16710.)
"""

from __future__ import annotations

from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.cache import Window
from specjax.drafters.autoregressive import LeastProbability, SampleMethod, draft_chain
from specjax.drafters.base import Context, Drafter, Noise, stateless, unmoved
from specjax.errors import InputError
from specjax.fields import Whole, check_arguments
from specjax.models.masks import causal
from specjax.trees import Draft


def make(
    num_layers: int,
    *,
    exit_layer: Annotated[int, Whole(1)] | None = None,
    draft_sample_method: SampleMethod = "probabilistic",
    draft_p_min: LeastProbability = 0.0,
) -> Drafter:
    """A drafter that runs the first `exit_layer` of the target's `num_layers` (half by default).

    Raises InputError for a layer out of range or bad options.
    """
    check_arguments(
        make,
        "drafter.",
        exit_layer=exit_layer,
        draft_sample_method=draft_sample_method,
        draft_p_min=draft_p_min,
    )
    exit_layer = max(1, num_layers // 2) if exit_layer is None else exit_layer
    if exit_layer > num_layers:
        raise InputError(
            f"drafter.exit_layer={exit_layer}: the target has {num_layers} layers; use 1 to "
            f"{num_layers}"
        )

    def propose(params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        del params
        slots = max(context.num_tokens, 1)

        def step(
            depth: Int[Array, ""] | int, token: Int[Array, "B"], window: Window
        ) -> tuple[Float[Array, "B V"], Window]:
            result = context.target.extend(
                context.params,
                token[:, None],
                (context.length - 1 + depth)[:, None],
                context.cache,
                window,
                depth,
                causal(jnp.asarray(depth)[None], slots),
                num_layers=exit_layer,
            )
            return result.logits[:, 0], result.window

        window = context.target.make_window(context.length.shape[0], slots)
        draft, _ = draft_chain(
            step,
            window,
            context,
            noise,
            sampled=draft_sample_method == "probabilistic",
            p_min=draft_p_min,
        )
        return draft, state

    return Drafter(
        "early_exit",
        stateless,
        propose,
        unmoved,
        num_speculative_tokens=4,
        sampled=draft_sample_method == "probabilistic",
    )
