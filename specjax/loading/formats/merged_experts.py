"""Experts' kernels in one tensor per layer, as Qwen3.5 is published, seen as those of each expert.

`experts.gate_up_proj` [E, 2 F, D] has the gates of all experts and then what they gate, and
`experts.down_proj` [E, D, F] the other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from specjax.loading.formats.parameter_names import TensorEntry
from specjax.loading.formats.safetensors_files import StoredTensor

_KERNELS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def with_each_expert(
    table: Collection[TensorEntry], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return tensors by name, with those of all experts replaced by parts of them for each expert.

    Nothing is replaced unless the names in `table` are those of separate experts.
    """
    if not any("experts.{expert}.gate_proj." in entry.name for entry in table):
        return dict(stored)
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        start, _, last = name.rpartition(".")
        kernels = _KERNELS.get(last, ())
        if not (start.endswith("experts") and kernels and len(tensor.shape) == 3):
            tensors[name] = tensor
            continue
        count, rows, inputs = tensor.shape
        if rows % len(kernels) or not math.prod(tensor.shape):
            tensors[name] = tensor
            continue
        size = rows // len(kernels)
        for expert in range(count):
            for number, kernel in enumerate(kernels):
                within = expert, range(number * size, (number + 1) * size)
                part = tensor._replace(shape=(size, inputs), within=within)
                tensors[f"{start}.{expert}.{kernel}.weight"] = part
    return tensors
