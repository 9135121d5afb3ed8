"""Modules for multi-token prediction inside checkpoints, among the decoder's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.errors import InputError
from specjax.loading.formats.build_parameters import table_shardings
from specjax.loading.formats.family import Family, MtpLayout
from specjax.loading.formats.json_fields import Fields
from specjax.loading.formats.parameter_names import Location, TensorEntry, lookup, of_entry
from specjax.models.config import DecoderConfig
from specjax.models.heads.mtp import MtpConfig

_FIELD = "num_nextn_predict_layers"


def count_modules(fields: Fields, family: Family) -> int:
    """How many modules config.json announces; raises InputError for a family that has none."""
    count = 0 if fields.get(_FIELD) is None else fields.integer(_FIELD)
    if count and family.mtp is None:
        raise InputError(
            f"{_FIELD}={count} is not supported for model_type={family.model_type!r}; remove the "
            "field and its tensors to use the model without MTP modules"
        )
    return count


def module_config(config: DecoderConfig, count: int, layout: MtpLayout | None) -> MtpConfig | None:
    """The modules of a checkpoint that announces so many; None for none.

    They read the state after the final norm, and their own after theirs; the embedding of the pair
    at position 0 is zero, as in vLLM. With experts in the model, a module's layer has them too.
    """
    if not count or layout is None:
        return None
    return MtpConfig(
        decoder=config.one_layer(experts=True),
        draft_vocab_size=config.vocab_size,
        num_modules=count,
        concat=layout.concat,
        zero_first_embedding=True,
    )


def locations(
    config: DecoderConfig,
    mtp: MtpConfig | None,
    layout: MtpLayout | None,
    tensors: Iterable[TensorEntry],
) -> list[Location]:
    """The tensors of all modules, in the tree of `mtp.parameter_table`.

    `tensors` are the names of the decoder's, whose layers end in those of a module's layer.
    """
    if mtp is None or layout is None:
        return []
    found = []
    shapes = jax.tree.map(lambda entry: entry.shape, mtp.parameter_table())
    entries = [entry for entry in tensors if entry.path[0] == "layers"]
    for module in range(mtp.num_modules):
        own, prefix = ("modules", str(module)), _prefix(layout, config, module)
        for part, name in layout.names.items():
            projects = part == "projection"
            path = (*own, part, "kernel" if projects else "scale")
            entry = TensorEntry(f"{prefix}.{name}.weight", path, int(projects))
            found.append(Location(entry.name, entry, None, lookup(shapes, path)))
        for entry in entries:
            path = (*own, "layer", *entry.path[1:])
            shape = lookup(shapes, path)
            if shape is not None:
                name = prefix + entry.name.partition("{layer}")[2]
                found += of_entry(entry._replace(name=name, path=path), shape, config.rotary_width)
    return found


def copies(
    config: DecoderConfig, mtp: MtpConfig | None, layout: MtpLayout | None
) -> dict[str, str]:
    """Names of tensors that modules may hold, each with that of the decoder's which it repeats."""
    if mtp is None or layout is None:
        return {}
    return {
        f"{_prefix(layout, config, module)}.{name}.weight": f"{original}.weight"
        for module in range(mtp.num_modules)
        for name, original in layout.copies.items()
    }


def build(
    mtp: MtpConfig,
    dtype: np.dtype,
    tensors: Collection[Location],
    fill: Callable[[Location, np.ndarray], None],
    mesh: Mesh | None,
    shards: int,
) -> dict[str, Any]:
    """The modules' parameters on the devices, of tensors that `fill` writes."""
    table = mtp.parameter_table()
    params = jax.tree.map(lambda entry: np.empty(entry.shape, entry.dtype(dtype)), table)
    for location in tensors:
        path, index = location.within(scan_layers=True)
        fill(location, lookup(params, path)[index])
    if mesh is None:
        return jax.device_put(params)
    targets = table_shardings(table, mesh, shards)
    return jax.tree.map(
        lambda leaf, target: jax.make_array_from_callback(
            leaf.shape, target, lambda part: leaf[part]
        ),
        params,
        targets,
    )


def _prefix(layout: MtpLayout, config: DecoderConfig, module: int) -> str:
    return layout.prefix.format(layer=config.num_layers + module, module=module)
