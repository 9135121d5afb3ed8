"""A head's directory in other tools' layouts: config.json and safetensors, read and written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.errors import InputError, one_line
from specjax.files import folder_marker, folders
from specjax.files.open_files import regular_file
from specjax.loading.formats.huggingface import BUFFERS, PICKLES, PRODUCER, write_tensors
from specjax.loading.tokenizers.huggingface_tokenizer import read_json, write_json

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS, MEDUSA_WEIGHTS = "model.safetensors", "medusa_lm_head.safetensors"
_WRAPPERS = re.compile(r"^((model|module|_orig_mod|draft_model|eagle_module)\.)+")
"""Names of modules around a head, which tools put in front of its tensors' names."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds: its config, its tensors by name, and the notes in their header."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(repr=False)
    notes: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_ours(self) -> bool:
        """Whether specjax wrote it."""
        return self.notes.get("producer") == PRODUCER["producer"]


def read_checkpoint(directory: Path) -> Checkpoint:
    """A directory's config and all of its tensors.

    Raises InputError for pickles, damaged files, numbers that are not finite, a missing config, and
    a directory that is not what specjax wrote there.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; download the head and give its folder")
    config = read_json(directory / _CONFIG)
    files = _weight_files(directory)
    if not config:
        raise InputError(f"{directory}: no {_CONFIG}; download it beside {files[0].name}")
    tensors: dict[str, np.ndarray] = {}
    notes: dict[str, str] = {}
    for path in files:
        with _open(path) as file:
            notes |= file.metadata() or {}
            for name, short in _names(file).items():
                if short in tensors:
                    raise InputError(
                        f"{path}: {name} is there twice, once without its prefix; delete one"
                    )
                tensors[short] = file.get_tensor(name)
    found = Checkpoint(directory, _with_layers_fields(config), tensors, notes)
    read = [_CONFIG, *(path.name for path in files)]
    folder_marker.verify(directory, ("head",), found.is_ours, read)
    for name, tensor in tensors.items():
        if tensor.dtype.kind not in "iub" and not np.isfinite(tensor.astype(np.float32)).all():
            raise InputError(
                f"{directory}: {name} holds numbers that are not finite; download it again"
            )
    return found


def _with_layers_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields of the head's layer, which vLLM's EAGLEConfig keeps in "model"."""
    inner = config.get("model")
    if config.get("model_type") != "eagle" or not isinstance(inner, dict):
        return config
    outer = {name: value for name, value in config.items() if name not in ("model", "model_type")}
    return {**inner, **outer}


def tensor_names(directory: Path) -> set[str]:
    """The names of a directory's tensors, as `read_checkpoint` gives them."""
    names: set[str] = set()
    for path in _weight_files(directory):
        with _open(path) as file:
            names |= set(_names(file).values())
    return names


def _names(file: Any) -> dict[str, str]:
    """The tensors of a file, by their names there, with those that a head has for them."""
    names = [name for name in file.keys() if not BUFFERS.fullmatch(name)]  # noqa: SIM118
    return {name: _WRAPPERS.sub("", name) for name in names}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    regular_file(path, "download it again")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError, TypeError) as error:
        raise InputError(
            f"{path}: not safetensors that can be read ({one_line(error)}); download it again"
        ) from None


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).exists():
        shards = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in shards.values()
        ):
            raise InputError(f"{directory / _INDEX}: names no files; download it again")
        files = [directory / name for name in sorted(set(shards.values()))]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise InputError(f"{directory}: missing shard {missing[0]}; download it again")
        return files
    for name in (WEIGHTS, MEDUSA_WEIGHTS):
        if (directory / name).exists():
            return [directory / name]
    pickles = [path for path in sorted(directory.iterdir()) if path.suffix in PICKLES]
    if pickles:
        raise InputError(
            f"{pickles[0]}: a pickle can run code and is not read; convert it where torch is "
            'installed: python -c "import torch, safetensors.torch as s; '
            f"t = torch.load('{pickles[0]}', map_location='cpu', weights_only=True); "
            "s.save_file({k: v.clone().contiguous() for k, v in t.items()}, "
            f"'{directory / WEIGHTS}')\""
        )
    raise InputError(f"{directory}: no weights; it needs {WEIGHTS} or {MEDUSA_WEIGHTS}")


def check_target(path: Path, where: str | None = None) -> None:
    """Raise InputError unless a directory can be written: it is new, empty, or an earlier export.

    Writing replaces an earlier export, which must hold nothing else. `where` begins the message;
    the default is the path.
    """
    folders.check_replaceable(path, "head", where or str(path))


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    tensors: Mapping[str, np.ndarray],
    notes: Mapping[str, str],
    weights: str = WEIGHTS,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a directory that `read_checkpoint` reads, whole or not at all.

    `check` is called with the written directory before it replaces an earlier export, and raises
    where it is wrong. Raises InputError as `check_target` does, and where writing fails.
    """

    def write(part: Path) -> None:
        write_json(part / _CONFIG, config)
        whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        write_tensors(whole, part / weights, notes)

    folders.write_folder(directory, "head", write, check=check)


def match(
    where: Path,
    found: Mapping[str, np.ndarray],
    wanted: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> None:
    """Raise InputError, listing what is missing, unexpected, mis-shaped or not of floats.

    `optional` names may be there in any shape and type.
    """
    known = {*wanted, *optional}
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in known],
        "mis-shaped": [
            f"{name} {list(found[name].shape)}, not {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name].shape != shape
        ],
        "of another type than floats": [
            f"{name} ({found[name].dtype})"
            for name in wanted
            if name in found and found[name].dtype.name not in _FLOATS
        ],
    }
    listed = [f"{label}: {_some(names)}" for label, names in problems.items() if names]
    if listed:
        raise InputError(
            f"{where}: the tensors do not fit the config ({'; '.join(listed)}); "
            "download it again if it is cut off; otherwise it is in a layout that is not read, or "
            "config.json is another head's"
        )


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
