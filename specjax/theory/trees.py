"""The fastest token tree on a chip, if each pass takes its minimum time."""

from __future__ import annotations

import numpy as np

from specjax.errors import InputError
from specjax.theory.argument_checks import checked, checked_count
from specjax.theory.chip_roofline import Chip, ModelShape, pass_seconds
from specjax.trees.fastest import FastestTree, fastest_tree
from specjax.trees.shapes import Rates

_ONE = "{name} = {value}: give one number; call again for each tree"


def roofline_tree(
    shape: ModelShape,
    chip: Chip | str,
    acceptance: Rates,
    *,
    batch: int,
    context: int,
    draft_cost: float | ModelShape = 0.0,
    candidates: int = 8,
    itemsize: int = 2,
    weight_bits: float | None = None,
    draft_weight_bits: float | None = None,
) -> FastestTree:
    """Return the tree with the most tokens per second, if each pass takes its minimum time.

    `acceptance` is as in `specjax.trees.fastest_tree`. Each level of the draft costs `draft_cost`
    target passes over one token per row, or, if `draft_cost` is a model shape, one pass of that
    model over `candidates` tokens per row. `itemsize` and the bits of weights are as in
    `pass_seconds`. `context` is the number of committed tokens per row. For several chips, pass
    `CHIPS[name].times(num_chips)`. Raises InputError for arrays and for numbers out of range.
    """
    deployment = {"batch": batch, "context": context, "itemsize": itemsize}
    for name, value in {**deployment, "candidates": candidates}.items():
        if np.ndim(checked_count(name, value, 0 if name == "context" else 1)):
            raise InputError(_ONE.format(name=name, value=value))
    bits = 8.0 * itemsize if weight_bits is None else weight_bits
    draft_bits = bits if draft_weight_bits is None else draft_weight_bits
    for name, value in {"weight_bits": bits, "draft_weight_bits": draft_bits}.items():
        if checked(name, value, above=True).ndim:
            raise InputError(_ONE.format(name=name, value=value))
    target = {**deployment, "weight_bits": bits}
    if isinstance(draft_cost, ModelShape):
        draft = {**deployment, "weight_bits": draft_bits}
        level_seconds = float(pass_seconds(draft_cost, chip, tokens=candidates, **draft))
    else:
        plain_seconds = float(pass_seconds(shape, chip, tokens=1, **target))
        level_seconds = float(checked("draft_cost", draft_cost)) * plain_seconds
    return fastest_tree(
        acceptance,
        lambda width: float(pass_seconds(shape, chip, tokens=width, **target)),
        lambda depth: depth * level_seconds,
    )
