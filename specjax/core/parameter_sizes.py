"""The sizes of parameters: numbers of weights, bytes, and the forms in which they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def count_weights(params: Any) -> int:
    """Return the number of weights in a tree of parameters, quantized or not."""
    return sum(leaf.size for leaf in jax.tree.leaves(params, is_leaf=is_quantized))


def count_bytes(params: Any) -> int:
    """Return the size of a tree of parameters in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def bytes_by_form(params: Any) -> dict[str, int]:
    """Return how many bytes of a tree of parameters are in each form, the largest first.

    A form is a dtype, or for quantized kernels, with their scales, a type of GGUF or "8-bit".
    """
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(params, is_leaf=is_quantized):
        forms = leaf.bytes_by_form() if is_quantized(leaf) else {str(leaf.dtype): leaf.nbytes}
        for form, size in forms.items():
            sizes[form] = sizes.get(form, 0) + size
    return dict(sorted(sizes.items(), key=lambda entry: -entry[1]))


def weights_in_words(params: Any) -> str:
    """Return the form of a tree of parameters as text, or if it has several, the bytes of each.

    Forms of less than a hundredth, such as that of norms beside quantized kernels, are left out.
    Activations that are rounded to fewer bits than floats have are named.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    bits = {leaf.activation_bits for leaf in leaves if is_quantized(leaf)} & set(range(24))
    rounded = f", with activations of {min(bits)} bits" if bits else ""
    return _forms_in_words(bytes_by_form(params)) + rounded


def _forms_in_words(sizes: Mapping[str, int]) -> str:
    least = sum(sizes.values()) / 100
    shown = {form: size for form, size in sizes.items() if size >= least}
    if len(shown) == 1:
        return next(iter(shown))
    *first, last = (f"{form} ({megabytes(size)})" for form, size in shown.items())
    return f"{', '.join(first)} and {last}"


def megabytes(size: int) -> str:
    """Return a number of bytes as text, in MB, with three digits if it is small."""
    return f"{size / 1e6:,.0f} MB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def is_quantized(node: Any) -> bool:
    """Return whether a node of a parameter tree is a quantized kernel (`QuantizedKernel`)."""
    return hasattr(node, "bytes_by_form")
