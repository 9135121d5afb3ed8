"""GGUF files: bounds-checked reading of the header and tensor list, and tensors as float32.

Every count, length and offset is compared with the file's size before memory is allocated, so that
a damaged or hostile file raises an error instead of hanging. (Format: ggml-org/ggml docs/gguf.md.)

The reader of the gguf package is no substitute. It treats bytes beyond the end as empty arrays, so
that a length of 2^40 in a file of 130 bytes keeps it allocating, and it needs 5 seconds for the
98,000 strings of the default model, which take 0.1 seconds here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float, UInt8

from specjax.errors import InputError
from specjax.files.open_files import open_regular

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_CHUNK = 1 << 17  # values dequantized at a time: what the second-level cache holds


class Tensor(NamedTuple):
    """A tensor in a mapped file: its shape, outermost axis first, and where its bytes are.

    `offset` and `size` are in bytes.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: mmap.mmap
    offset: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """A mapped GGUF file with a scanned header: metadata by key, and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def raw(self, tensor: Tensor) -> UInt8[np.ndarray, "bytes"]:
        """Return the bytes of a tensor."""
        return np.frombuffer(tensor.data, np.uint8, tensor.size, tensor.offset)

    def release(self, tensor: Tensor) -> None:
        """Let the system drop the pages read of a tensor, which count as memory of the process."""
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        tensor.data.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.size - start)

    def values(
        self, tensor: Tensor, index: tuple[int | slice, ...] = ()
    ) -> Float[np.ndarray, "..."]:
        """Return the values of a tensor as float32.

        `index`, slices and integers for its first axes, selects a part; by default all are
        returned.
        """
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        *lead, width = tensor.shape
        *rows, inputs = (*index, *[slice(None)] * (len(tensor.shape) - len(index)))
        first, stop, _ = inputs.indices(width)
        of_row = slice(first // block, -(-stop // block))
        blocks = self.raw(tensor).reshape(*lead, -1, block_bytes)[(*rows, of_row)]
        raw: UInt8[np.ndarray, "N bytes"] = blocks.reshape(-1, block_bytes)
        out = np.empty((len(raw), block), np.float32)
        step = _CHUNK // block
        for start in range(0, len(raw), step):
            # As one long row: the package loops over groups of sixteen rows, which is slow.
            piece = raw[start : start + step].reshape(1, -1)
            # A hostile half-precision scale may overflow; the values are then inf, as stored.
            with np.errstate(all="ignore"):
                out[start : start + step] = dequantize(piece, tensor.kind).reshape(-1, block)
        before = of_row.start * block
        return out.reshape(*blocks.shape[:-2], -1)[..., first - before : stop - before]


class _Reader:
    """A cursor over the header that never reads or allocates more than the file's size."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def fail(self, problem: str) -> InputError:
        return InputError(f"{self.path}: {problem}; download or convert the file again")

    def take(self, count: int, what: str) -> int:
        """Advance the cursor by `count` bytes; return the offset before them."""
        if count > self.size - self.at:
            raise self.fail(
                f"GGUF truncated: {what} needs {count} bytes at {self.at}, the file has {self.size}"
            )
        start, self.at = self.at, self.at + count
        return start

    def number(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize(code), what)
        return struct.unpack_from(code, self.data, start)[0]

    def string(self, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def value(self, what: str) -> Any:
        kind = self.number("<I", f"the type of {what}")
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self.scalars(kind, 1, what)[0].item()
        kind = self.number("<I", f"the element type of {what}")
        count = self.number("<Q", f"the length of {what}")
        if kind != _STRING:
            return self.scalars(kind, count, what)
        if count > (self.size - self.at) // 8:
            raise self.fail(f"GGUF truncated: {what} claims {count} strings")
        return [self.string(f"a string of {what}") for _ in range(count)]

    def scalars(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, what)
        # A copy: a view would keep the file mapped for as long as the metadata exist.
        return np.frombuffer(self.data, dtype, count, start).copy()


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """Map a GGUF file and scan its header.

    Raises InputError for a file that is missing, truncated, big-endian, of an unknown version, or
    inconsistent with its own size.
    """
    try:
        with open_regular(path, "give a GGUF file") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except InputError:
        raise
    except ValueError:
        raise InputError(f"{path}: the file is empty; download it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a GGUF file") from None
    try:
        reader = _Reader(path, data)
        tensor_count, key_count = _read_preamble(reader)
        metadata = _read_metadata(reader, key_count)
        yield GgufFile(path, metadata, _read_tensors(reader, tensor_count, metadata))
    finally:
        # Numpy views of the mapping may outlive this block in errors; it is closed with the last.
        with suppress(BufferError):
            data.close()


def _read_preamble(reader: _Reader) -> tuple[int, int]:
    if reader.data[:4] != b"GGUF":
        raise InputError(f"{reader.path}: not a GGUF file (no GGUF magic); give a .gguf model")
    reader.at = 4
    version = reader.number("<I", "the version")
    if version & 0xFFFF == 0 and version:
        raise InputError(f"{reader.path}: a big-endian GGUF; convert it with gguf-convert-endian")
    if version not in (2, 3):
        raise InputError(f"{reader.path}: GGUF version {version}; convert it to version 2 or 3")
    tensor_count = reader.number("<Q", "the tensor count")
    key_count = reader.number("<Q", "the key count")
    # The shortest key is an empty name, a type and one byte; the shortest tensor has no axes.
    for what, count, least in (("tensors", tensor_count, 24), ("keys", key_count, 13)):
        if count > reader.size // least:
            raise reader.fail(f"GGUF truncated: the header claims {count} {what}")
    return tensor_count, key_count


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = reader.string(f"the name of key {index}")
        if key in metadata:
            raise reader.fail(f"the key {short(key)} appears twice")
        metadata[key] = reader.value(f"the key {short(key)}")
    return metadata


def _read_tensors(reader: _Reader, count: int, metadata: dict[str, Any]) -> dict[str, Tensor]:
    headers = []
    for index in range(count):
        name = reader.string(f"the name of tensor {index}")
        axes = reader.number("<I", "a tensor's axis count")
        if axes > 4:
            raise reader.fail(f"the tensor {short(name)} has {axes} axes")
        start = reader.take(8 * axes, "a tensor's shape")
        sizes = struct.unpack_from(f"<{axes}Q", reader.data, start)
        kind = reader.number("<I", "a tensor's type")
        headers.append((name, sizes[::-1], kind, reader.number("<Q", "a tensor's offset")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment={alignment!r}, not a power of two")
    base = -(-reader.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in headers:
        label = f"the tensor {short(name)}"
        if name in tensors:
            raise reader.fail(f"{label} appears twice")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise reader.fail(f"{label} has the unknown ggml type {number}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise reader.fail(f"{label}: rows of {shape[-1]} values, {kind.name} wants {block}s")
        size = math.prod(shape) // block * block_bytes
        if offset % alignment or base + offset + size > reader.size:
            raise reader.fail(
                f"GGUF truncated: {label} ends at byte {base + offset + size}, "
                f"the file has {reader.size}"
            )
        tensors[name] = Tensor(tuple(shape), kind, reader.data, base + offset, size)
    return tensors


def short(name: str) -> str:
    """Return a name for an error message, quoted and truncated to about half a line."""
    return repr(name if len(name) <= 60 else name[:57] + "...")


def check_type(file: GgufFile, name: str) -> None:
    """Raise InputError if the gguf package cannot dequantize the type of a tensor."""
    kind = file.tensors[name].kind
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise InputError(
            f"{file.path}: the tensor {name} has the ggml type {kind.name}, which the gguf "
            "package cannot dequantise; use another quantisation"
        ) from None
