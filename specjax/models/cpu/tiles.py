"""Kernels in tiles for the C++ library: their formats, and arrays of them on the host.

A tile holds 16 rows (outputs) of the integers and scales of a GGUF type (`tile_formats.h`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from specjax.models.cpu import library

ROWS = 16
"""The number of rows of a tile, which are packed by one thread at a time."""


class Format(NamedTuple):
    """A format: the name of its GGUF type, its number, a tile's inputs, and a weight's bits."""

    name: str
    number: int
    inputs: int
    bits: int


@functools.cache
def formats() -> dict[str, Format]:
    """Return the formats that the library has, by the name of the GGUF type.

    There are none without the library.
    """
    if not library.available():
        return {}
    functions, found = _functions(), {}
    for number in range(library.NUM_FORMATS):
        name = functions.specjax_format_name(number)
        sizes = functions.specjax_format_inputs(number), functions.specjax_format_bits(number)
        found[name.decode()] = Format(name.decode(), number, *sizes)
    return found


def num_bytes(name: str, rows: int, inputs: int) -> int:
    """Return the bytes of a kernel of `rows` rows in the format `name`."""
    return _functions().specjax_kernel_bytes(formats()[name].number, rows, inputs)


def pack(
    name: str,
    blocks: UInt8[np.ndarray, "rows row_bytes"],
    inputs: int,
    first: int,
    tiles: UInt8[np.ndarray, "bytes"],
) -> bool:
    """Write rows, as blocks of the GGUF type `name`, as rows `first`, ... of a kernel's tiles.

    Returns whether all of their scales are finite. `tiles` was zero before. Calls that write into
    the same 16 rows must not run at the same time.
    """
    assert tiles.flags.c_contiguous
    blocks = np.ascontiguousarray(blocks)
    return _functions().specjax_pack(
        formats()[name].number, blocks.ctypes.data, len(blocks), inputs, first, tiles.ctypes.data
    )


def take(
    name: str, tiles: UInt8[np.ndarray, "bytes"], inputs: int, ids: Int32[np.ndarray, "N"]
) -> UInt8[np.ndarray, " taken"]:
    """Return the tiles of a kernel whose rows are the rows `ids` of another; zero where id < 0."""
    taken = np.zeros(num_bytes(name, len(ids), inputs), np.uint8)
    tiles, ids = np.ascontiguousarray(tiles), np.ascontiguousarray(ids, np.int32)
    _functions().specjax_take(
        *(formats()[name].number, tiles.ctypes.data, inputs, ids.ctypes.data, len(ids)),
        taken.ctypes.data,
    )
    return taken


@functools.cache
def _functions() -> ctypes.CDLL:
    """Return the library, with the types of its functions on arrays of the host declared."""
    functions, pointer, size = library.loaded(), ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("format_name", ctypes.c_char_p, [ctypes.c_int]),
        ("format_inputs", ctypes.c_int, [ctypes.c_int]),
        ("format_bits", ctypes.c_int, [ctypes.c_int]),
        ("kernel_bytes", size, [ctypes.c_int, size, size]),
        ("pack", ctypes.c_bool, [ctypes.c_int, pointer, size, size, size, pointer]),
        ("take", None, [ctypes.c_int, pointer, size, pointer, size, pointer]),
    ):
        function = getattr(functions, f"specjax_{name}")
        function.restype, function.argtypes = result, arguments
    return functions
