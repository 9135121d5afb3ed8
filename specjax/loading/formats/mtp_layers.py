"""Multi-token prediction modules in checkpoints, among the decoder's own tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from specjax.errors import InputError
from specjax.loading.formats.family import MtpLayout
from specjax.loading.formats.parameter_names import Location, TensorEntry, of_entry
from specjax.loading.model import MTP
from specjax.loading.typed_fields import Fields
from specjax.loading.user_messages import note
from specjax.models.config import DecoderConfig
from specjax.models.joined_kernels import parts
from specjax.models.mtp import MtpConfig

_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_num_layers",
    "n_predict",
)
"""Names of the number of modules in config.json: DeepSeek, GLM and MiMo; Qwen; other tools."""

_MOST_MODULES = 64
_OF_MODULE = re.compile(
    r"(model\.)?mtp(_layers)?\.|model\.layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\."
)
"""Matches the tensor names of DeepSeek's, GLM's, MiMo's, Qwen's and Step's modules."""


def announced(fields: Fields) -> int:
    """Return the number of modules that config.json announces.

    Raises InputError if its fields contradict each other.
    """
    counts = {name: fields.integer(name) for name in _COUNTS if fields.get(name) is not None}
    if len(set(counts.values())) > 1:
        raise fields.fail(min(counts), f"disagrees with {max(counts)}; repair config.json")
    return max(0, *counts.values()) if counts else 0


def stored(
    source: str,
    count: int,
    config: DecoderConfig,
    layout: MtpLayout | None,
    names: Collection[str],
) -> int:
    """Return how many modules to read from a checkpoint: all that are announced, or none.

    `count` is the number that the config announces, and `names` are those of the checkpoint's
    tensors. Some tools drop all modules but keep the announcement, which is logged. If only some of
    the tensors are missing, the checkpoint is truncated, and reading it fails later. Raises
    InputError for more modules than the family's files have, and for tensors of modules that the
    family lacks or that are not announced, unless the layout allows that; `source` begins the
    message.
    """
    if layout is not None and count > 1 and "{" not in layout.prefix:
        raise InputError(
            f"{source}: {count} MTP modules are announced, and those of "
            f"model_type={config.family!r} have one; use a model with one"
        )
    starts: tuple[str, ...] = ()
    if layout is not None:
        modules = range(min(count, _MOST_MODULES))
        starts = tuple(_prefix(layout, config, module) + "." for module in modules)
    module_tensors = [
        name for name in sorted(names) if _OF_MODULE.match(name) or name.startswith(starts)
    ]
    if module_tensors and layout is not None and layout.unannounced:
        return max(count, 1)
    if module_tensors and (layout is None or not count):
        remedy = (
            f"model_type={config.family!r} does not have; use a checkpoint without it"
            if layout is None
            else "config.json does not announce; set num_nextn_predict_layers there, or delete its "
            "tensors to use the model without"
        )
        raise InputError(
            f"{source}: {module_tensors[0]} belongs to an MTP layer ({len(module_tensors)} tensors "
            f"in all), which {remedy}"
        )
    if module_tensors:
        return count
    if count:
        note(
            f"{source}: MTP modules are announced ({count}), and their tensors are not there; "
            "loaded without them"
        )
    return 0


def module_config(config: DecoderConfig, count: int, layout: MtpLayout | None) -> MtpConfig | None:
    """Return the config of a checkpoint's `count` modules, or None if there are none.

    The modules read the decoder's state after its final norm, and each other's after the module's
    norm; their other conventions are those of `layout`. If the model has experts, so does a
    module's layer.
    """
    if not count or layout is None:
        return None
    return MtpConfig(
        decoder=config.one_layer(experts=True),
        draft_vocab_size=config.vocab_size,
        num_modules=count,
        concat=layout.concat,
        zero_first_embedding=layout.zero_first_embedding,
    )


def locations(
    config: DecoderConfig,
    mtp: MtpConfig | None,
    layout: MtpLayout | None,
    tensors: Iterable[TensorEntry],
) -> list[Location]:
    """Return the locations of all modules' tensors in the tree of `array_table`.

    `tensors` are the entries of the decoder, which also name the tensors of a module's layer.
    """
    if mtp is None or layout is None:
        return []
    in_order = []
    known = parts({MTP: mtp.parameter_table()}, mtp.decoder)
    entries = [entry for entry in tensors if entry.path[0] == "layers"]
    for module in range(mtp.num_modules):
        root, prefix = (MTP, "modules", str(module)), _prefix(layout, config, module)
        for part, name in layout.names.items():
            path = (*root, part, "kernel" if part == "projection" else "scale")
            added = 0 if part == "projection" else layout.norms_added
            entry = TensorEntry(f"{prefix}.{name}.weight", path, added=added)
            in_order += of_entry(entry, known[path], config)
        for entry in entries:
            path = (*root, "layer", *entry.path[1:])
            if path in known:
                name = prefix + layout.layer + entry.name.partition("{layer}")[2]
                in_order += of_entry(entry._replace(name=name, path=path), known[path], config)
    return in_order


def copies(
    config: DecoderConfig, mtp: MtpConfig | None, layout: MtpLayout | None
) -> dict[str, str]:
    """Return, for the modules' optional tensors by name, the tensors of the decoder they repeat."""
    if mtp is None or layout is None:
        return {}
    return {
        f"{_prefix(layout, config, module)}.{name}.weight": f"{original}.weight"
        for module in range(mtp.num_modules)
        for name, original in layout.copies.items()
    }


def _prefix(layout: MtpLayout, config: DecoderConfig, module: int) -> str:
    return layout.prefix.format(layer=config.num_layers + module, module=module)
