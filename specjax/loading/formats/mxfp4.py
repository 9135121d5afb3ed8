"""Experts' kernels in MXFP4, as gpt-oss is published, dequantised as they are read.

A tensor NAME [E, in, out] is stored as NAME_blocks [E, out, in/32, 16], two numbers of four bits
per byte, and NAME_scales [E, out, in/32], the power of two, plus 127, that each group of 32 inputs
is multiplied by (OCP Microscaling Formats 1.0: E2M1 and E8M0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float32, UInt8

from specjax.errors import InputError
from specjax.loading.formats.safetensors_files import FLOATS, StoredTensor

BYTES = "U8"
"""The type of both tensors in the header of a safetensors file."""
KIND = "MXFP4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32

_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_POSITIVE, -_POSITIVE])
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)
"""The two numbers in each byte; the first is in the lower bits."""
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
"""The factor for each scale; the last one means no number."""


def with_kernels(source: str, stored: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Return a checkpoint's tensors, with one in place of each pair of blocks and scales.

    Raises InputError, which begins with `source`, for other tensors of bytes, and for pairs that do
    not fit each other.
    """
    tensors, kernels = {tensor.name: tensor for tensor in stored}, []
    for name in [name for name in tensors if name.endswith(_BLOCKS)]:
        base = name.removesuffix(_BLOCKS)
        if (scales := tensors.get(base + _SCALES)) is None:
            raise InputError(f"{source}: {base + _SCALES} is missing; download the model again")
        blocks = tensors.pop(name)
        del tensors[scales.name]
        both = {blocks.dtype, scales.dtype}
        if (
            len(blocks.shape) != 4
            or blocks.shape != (*scales.shape, _GROUP // 2)
            or both != {BYTES}
        ):
            raise InputError(
                f"{source}: {name} {list(blocks.shape)} and {scales.name} {list(scales.shape)} are "
                "not the two parts of a tensor in MXFP4; use the model in bfloat16 or as a GGUF"
            )
        count, outputs, groups, _ = blocks.shape
        shape, parts = (count, groups * _GROUP, outputs), (blocks, scales)
        kernels.append(StoredTensor(blocks.path, base, shape, KIND, parts))
    for tensor in tensors.values():
        if tensor.dtype == BYTES:
            raise InputError(
                f"{source}: {tensor.name} has the type {BYTES}, which is not supported; use a "
                f"checkpoint in {', '.join(FLOATS)}"
            )
    return [*tensors.values(), *kernels]


def reader(read: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return `read(tensor, index)` for tensors in MXFP4 too, given that of tensors in files.

    The index of a tensor in MXFP4 is an expert, inputs and outputs.
    """

    def read_any(tensor: StoredTensor, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        if not tensor.parts:
            return read(tensor, index)
        expert, inputs, outputs = index
        blocks, scales = (read(part, (expert, outputs)) for part in tensor.parts)
        return dequantised(blocks, scales).T[inputs]

    return read_any


def dequantised(
    blocks: UInt8[np.ndarray, "*N groups 16"], scales: UInt8[np.ndarray, "*N groups"]
) -> Float32[np.ndarray, "*N inputs"]:
    """Return the numbers of some groups, 32 in each."""
    numbers = _PAIRS[blocks].reshape(*scales.shape, _GROUP)
    return (numbers * _POWERS[scales][..., None]).reshape(*scales.shape[:-1], -1)
