"""What the files of a head and a target declare, read before any weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import InputError
from specjax.files.path_checks import user_path
from specjax.loading.formats.gguf_file import open_gguf
from specjax.loading.hub import DEFAULT_MODEL, default_model_file
from specjax.loading.storage.checkpoint_directory import is_checkpoint, read_metadata
from specjax.loading.tokenizers.huggingface_tokenizer import read_json
from specjax.methods.find_head import check_kind, head_directory, kind_of_head
from specjax.methods.registry import METHODS

_IDS = "eagle_aux_hidden_state_layer_ids"
_OF_BLOCKS = {"aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}
"""The fields of block drafters, ids of inputs (speculators) and of outputs of layers, and how much
later the input is that they stand for.
"""


class _Declared(NamedTuple):
    """The layers whose states a head reads, from 0 to the number of layers, and its target.

    `field` is the one that names the layers.
    """

    layers: Sequence[int]
    target: str | None
    field: str


def check_files(drafter: str, path: str | None, target: str) -> tuple[str, ...]:
    """Check the path and the taps of a drafter's head; return notes on the target it declares.

    `drafter` is the name of the drafter, `target` a name or path as of `load_model`. Only metadata
    and headers are read. Raises InputError if the path is no head of this drafter, and if the head
    reads layers that the target lacks.
    """
    method = METHODS.get(drafter)
    if path is None or method is None or not method.reads_only_heads:
        return ()
    folder = head_directory("drafter.path", path)
    kind = kind_of_head(folder)
    if kind is not None:
        check_kind(kind, drafter, path)
    elif not is_checkpoint(folder) and not is_checkpoint(folder / "head"):
        raise InputError(
            f"drafter.path={path!r}: holds no head in a known layout; give what training exported, "
            "or a downloaded head"
        )
    declared = _of_head(folder)
    num_layers = _num_layers(target)
    if num_layers is not None and (beyond := [i for i in declared.layers if i > num_layers]):
        raise InputError(
            f"drafter.path={path!r}: reads the state of layer {beyond[0]}, and {target} has "
            f"{num_layers}; use a head of this target, or repair its taps ({declared.field})"
        )
    if declared.target is None or _same_name(declared.target, target):
        return ()
    return (
        f"drafter.path: made for {declared.target} by its own files, and the target is {target}; "
        "right only if these are the same weights",
    )


def _of_head(folder: Path) -> _Declared:
    if is_checkpoint(folder):
        with suppress(InputError):  # which its reader reports
            metadata = read_metadata(folder, "drafter")
            taps = _section(metadata, "config").get("taps") or ()
            layers = [int(tap.rpartition(":")[2]) for tap in taps if ":" in tap]
            return _Declared(layers, _section(metadata, "target").get("name"), "taps")
        return _Declared((), None, "taps")
    config, field, after = read_json(folder / "config.json"), _IDS, 0
    ids = config.get(_IDS) or _section(config, "eagle_config").get(_IDS)
    for name, by in _OF_BLOCKS.items() if ids is None else ():
        if stated := _section(config, "dflash_config").get(name) or config.get(name):
            ids, field, after = stated, name, by
    verifier = _section(_section(config, "speculators_config"), "verifier")
    target = config.get("base_model_name_or_path") or verifier.get("name_or_path")
    ids = ids if isinstance(ids, list) else ()
    layers = [index + after for index in ids if isinstance(index, int)]
    return _Declared(layers, target if isinstance(target, str) else None, field)


def _num_layers(target: str) -> int | None:
    """Return the number of a target's layers; None where its files do not say it."""
    with suppress(InputError):  # which its reader reports
        path = default_model_file() if target == DEFAULT_MODEL else user_path("target", target)
        if is_checkpoint(path):
            found = _section(read_metadata(path, "model"), "config").get("num_layers")
        elif path.is_dir():
            config = read_json(path / "config.json")
            found = _section(config, "text_config").get("num_hidden_layers")
            found = found or config.get("num_hidden_layers")
        else:
            with open_gguf(path) as file:
                name = file.metadata.get("general.architecture")
                found = file.metadata.get(f"{name}.block_count")
        return found if isinstance(found, int) else None
    return None


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _same_name(one: str, other: str) -> bool:
    """Return whether two names or paths may mean one model: one's last part begins the other's."""
    short = [re.sub(r"[^a-z0-9]", "", Path(name).name.lower()) for name in (one, other)]
    return short[0].startswith(short[1]) or short[1].startswith(short[0])
