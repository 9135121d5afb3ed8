"""P-EAGLE heads for a frozen target: all depths of all labels in one pass (2602.01469).

The loss is EAGLE-3's, over depths rather than over draft steps that read each other's outputs.
Every label has all depths: the paper drops most labels of the deeper ones (COD), which saves memory
in long rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from specjax.loading.model import Model
from specjax.methods.peagle.head import PEagle, PEagleConfig
from specjax.methods.peagle.rows import run_depths
from train.data.batches import Batch
from train.methods.eagle import EagleLoss, eagle_method
from train.methods.method import Method
from train.methods.packed_rows import visible
from train.methods.target_layers import last_layer, with_kv_heads
from train.methods.unroll import DraftStep


def peagle_method(
    target: Model,
    config: PEagleConfig,
    draft_ids: np.ndarray | None,
    loss: EagleLoss,
    *,
    start: str = "target",
    multiply: Any = None,
) -> Method:
    """Return a method that trains a P-EAGLE head for a frozen target.

    The arguments are those of `eagle_method`. `loss.steps` is the number of depths. Unless `start`
    is "random", the layers after the first are copies of the target's last one.
    """
    method = eagle_method(
        *(target, config, draft_ids, loss),
        start=start,
        multiply=multiply,
        functions=PEagle,
        drafts=depths_at_labels,
    )

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        params = method.init(key)
        if start == "random" or "layers" not in params:
            return params
        layer, shape = last_layer(target), target.config.llama_layers(1)
        qkv = with_kv_heads(layer["attention"]["qkv"], shape, config.decoder.num_kv_heads)
        layer = {**layer, "attention": {**layer["attention"], "qkv": qkv}}
        # Each its own arrays, since a step donates them.
        copies = {number: jax.tree.map(jnp.array, layer) for number in params["layers"]}
        return {**params, "layers": copies}

    return method._replace(init=init)


def depths_at_labels(
    head: PEagle,
    params: dict[str, Any],
    batch: Batch,
    taps: dict[str, Float[Array, "B T Dt"]],
    depths: int,
) -> Iterator[DraftStep]:
    """Yield the outputs of each depth at each label, as `unroll` yields those of draft steps.

    Label j is predicted from row j - 2, and depth i predicts x_{j+i}.
    """
    rows = jnp.maximum(batch.labels - 2, 0)
    seen, positions = visible(batch.segments), batch.positions
    outputs = run_depths(head, params, batch.tokens, taps, positions, seen, rows, depths)
    states = jax.vmap(functools.partial(head.readout, params))(outputs)
    for depth in range(depths):
        yield DraftStep(outputs[depth], states[depth], None)
