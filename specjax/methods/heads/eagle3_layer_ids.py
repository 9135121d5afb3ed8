"""The target layers that an EAGLE-3 head reads: ids in files, and names of features.

The conventions differ by one. EAGLE's own code, vLLM and speculators number the *inputs* of layers,
as `layer_input:i` does (i = L, after the last layer, is `pre_norm`). SpecForge and SGLang number
the *outputs*: the output of layer i is the input of layer i + 1. Files do not say which they use,
except by the name `target_layer_ids`: those of DeepSpec, as of all block drafters, number outputs,
and -1 is the embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields

Convention = Literal["input", "output"]
CONVENTIONS = ("input", "output")

IDS, COUNT = "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"
OUTPUTS = "target_layer_ids"
"""The field that numbers outputs, whoever wrote it."""
_NAMES = (IDS, "aux_hidden_state_layer_ids", OUTPUTS)
KEYS = (COUNT, *_NAMES)
"""The names of fields that say which layers a head reads."""


def check_convention(layer_ids: str | None) -> None:
    """Raise InputError unless `layer_ids` is None or the name of a convention."""
    if layer_ids not in (None, *CONVENTIONS):
        raise InputError(f"layer_ids={layer_ids!r}: use input or output")


def read(fields: Fields, target: Model, layer_ids: Convention | None) -> tuple[str, ...]:
    """Return the features for the layer ids in a config, by default EAGLE-3's (2, L/2, L - 3).

    Raises InputError for ids out of range or order and for fields that disagree. If `layer_ids` is
    None, ids number inputs, unless `target_layer_ids` says otherwise; SpecForge's default ids,
    which number outputs, raise InputError too.
    """
    layers = target.config.num_layers
    stated = [(name, ids) for name in _NAMES if (ids := fields.integers(name)) is not None]
    unclear = [entry for entry in stated if entry[0] != OUTPUTS]
    outputs = [entry for entry in stated if entry[0] == OUTPUTS]
    if any(ids != unclear[0][1] for _, ids in unclear):
        raise fields.fail(unclear[0][0], "two sections disagree; repair config.json")
    name, ids = [*outputs, *unclear, (IDS, [])][0]
    if outputs:
        inputs = [index + 1 for index in ids]
        same = {None: (ids, inputs), "input": (inputs,), "output": (ids,)}[layer_ids]
        if unclear and unclear[0][1] not in same:
            raise fields.fail(name, f"{unclear[0][0]} names other layers; repair config.json")
    elif unclear:
        if layer_ids is None and ids == [1, layers // 2 - 1, layers - 4]:
            raise fields.fail(
                name,
                "these may count outputs of layers, as SpecForge and SGLang do, or inputs, as "
                "EAGLE and vLLM do; say which with layer_ids=output or layer_ids=input",
            )
        inputs = [index + (layer_ids == "output") for index in ids]
    else:
        inputs = [2, layers // 2, layers - 3]
        if not 0 < inputs[0] < inputs[1] < inputs[2]:
            raise fields.fail(name, f"must name layers of a target that has only {layers}")
    if any(not 0 <= index <= layers for index in inputs):
        raise fields.fail(name, f"out of range: {target.name} has {layers} layers")
    if any(b <= a for a, b in itertools.pairwise(inputs)):
        raise fields.fail(name, "must ascend; engines fuse the layers in that order")
    if fields.count(COUNT, len(inputs)) != len(inputs):
        raise fields.fail(COUNT, f"{len(inputs)} layers are named; repair config.json")
    return tuple("pre_norm" if index == layers else f"layer_input:{index}" for index in inputs)


def write(taps: Sequence[str], num_layers: int, layer_ids: Convention) -> list[int]:
    """Return the layer ids of the features `taps`; raise InputError for a feature that has none."""
    ids = []
    for tap in taps:
        if tap != "pre_norm" and not tap.startswith("layer_input:"):
            raise InputError(f"taps={tuple(taps)}: {tap} is the input of no layer")
        ids.append(num_layers if tap == "pre_norm" else int(tap.partition(":")[2]))
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise InputError(f"taps={tuple(taps)}: must ascend; engines fuse the layers in that order")
    if layer_ids == "output":
        if ids[0] == 0:
            raise InputError(f"layer_ids='output': {taps[0]} is the output of no layer")
        return [index - 1 for index in ids]
    return ids
