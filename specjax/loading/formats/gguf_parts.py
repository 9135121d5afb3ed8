"""Models in one GGUF file, or in several parts as written by llama.cpp's gguf-split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from specjax.errors import InputError
from specjax.loading.formats.gguf_file import GgufFile, Tensor, open_gguf, short
from specjax.loading.typed_fields import Fields

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@contextmanager
def open_parts(path: Path) -> Iterator[GgufFile]:
    """Map a GGUF file, or all parts of a split one, given the first part.

    Yields a `GgufFile` with the metadata of the first part and the tensors of all. Raises
    InputError as `open_gguf` does, for a part other than the first, and for missing or mismatched
    parts.
    """
    with ExitStack() as files:
        first = files.enter_context(open_gguf(path))
        # In a file that gguf-split has merged the count is 0.
        if _whole(first, _COUNT, 0) > 1:
            first = replace(first, tensors=_all_tensors(first, files))
        yield first


def _all_tensors(first: GgufFile, files: ExitStack) -> dict[str, Tensor]:
    count = _whole(first, _COUNT)
    tensors = dict(first.tensors)
    for number, path in enumerate(_other_parts(first, count), 1):
        if not path.exists():
            raise InputError(
                f"{first.path}: its part {path.name} is missing; put all parts into one folder"
            )
        part = files.enter_context(open_gguf(path))
        numbers = _whole(part, _NUMBER), _whole(part, _COUNT)
        if numbers != (number, count):
            raise InputError(
                f"{first.path}: {path.name} has {_NUMBER}={numbers[0]} and {_COUNT}={numbers[1]}, "
                f"not {number} and {count}; download the parts again"
            )
        for name in filter(tensors.__contains__, part.tensors):
            raise InputError(
                f"{first.path}: the tensor {short(name)} is in {path.name} and in a part before "
                "it; download the parts again"
            )
        tensors |= part.tensors
    total = _whole(first, _TENSORS)
    if len(tensors) != total:
        raise InputError(
            f"{first.path}: its parts hold {len(tensors)} tensors, not {_TENSORS}={total}; "
            "download the parts again"
        )
    return tensors


def _other_parts(first: GgufFile, count: int) -> Iterator[Path]:
    """Yield the paths of the parts after the first; raise InputError unless `first` is one."""
    path, number = first.path, _whole(first, _NUMBER)
    ending = _ending(number, count)
    if not path.name.endswith(ending):
        raise InputError(
            f"{path}: {_NUMBER}={number} and {_COUNT}={count}, but its name does not end in "
            f"{ending}; give all parts the names that they were published with"
        )
    name = path.name.removesuffix(ending)
    if number != 0:
        raise InputError(
            f"{path}: {_NUMBER}={number}, so it is not the first part; "
            f"load {name}{_ending(0, count)}"
        )
    return (path.with_name(name + _ending(other, count)) for other in range(1, count))


def _ending(number: int, count: int) -> str:
    return f"-{number + 1:05}-of-{count:05}.gguf"


def _whole(file: GgufFile, key: str, default: int | None = None) -> int:
    return Fields(str(file.path), file.metadata, "download the file again").integer(key, default)
