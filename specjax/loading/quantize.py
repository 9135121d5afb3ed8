"""Conversion of models between floating-point and low-bit weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from specjax.core.parameter_sizes import is_quantized
from specjax.errors import InputError
from specjax.fields import Choice
from specjax.files.log import share_logger
from specjax.loading.layer_layout import stack_layers
from specjax.loading.model import Model, array_table, split_arrays
from specjax.models.cpu import library
from specjax.models.form import Form
from specjax.models.layers.quantized import (
    GROUP,
    GroupedKernel,
    QuantizedKernel,
    array_partitions,
    has_one_scale,
    quantize,
)
from specjax.models.layers.tiled_kernel import TiledKernel, tiled
from specjax.models.parameter_table import parameter_table
from specjax.models.parameters import Parameter

WEIGHTS = Choice(("auto", "float", "file", "int8", "int4"))
"""Ways to store a model's weights.

`float` is the model's dtype; `file` keeps the types of a GGUF file; `int8` and `int4` round in
groups of 32, with the output head in 8 bits; `auto` is `file` where possible (on one CPU, if
neither a dtype nor a form is requested), and otherwise `float`.
"""
DRAFT_WEIGHTS = Choice(("auto", "float", "int8", "int4"))
"""Ways to store the weights of a trained head or draft model.

`auto` is int8 if the target has quantized kernels: kernels that are wider are rounded, if they have
inputs in groups of 32. Otherwise it is float or, for a draft model, the `auto` of `WEIGHTS`.
"""
ACTIVATIONS = Choice(("auto", "float", "24", "16", "8"))
"""The bits to which products with quantized kernels round activations, in fixed point, on one CPU.

`float` does not round them. `auto` is 24, where that is faster than `float`: as precise as float32,
with one scale for 32 numbers. With 8 bits the model is another one.
"""
_BITS = {"int8": 8, "int4": 4}
_UNCHANGED = frozenset({"router", "mtp", "rates"})


def has_quantized(params: dict[str, Any]) -> bool:
    """Return whether any of the parameters is a quantized kernel."""
    return any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))


def quantized_model(
    model: Model,
    weights: str,
    *,
    fitting: bool = False,
    field: str = "weights",
    remedy: str | None = None,
) -> Model:
    """Return a model with kernels rounded to `weights`, "int8" or "int4", and the head to int8.

    Norms, biases and kernels that already have so few bits are unchanged. On a mesh, the parts of a
    kernel stay on its devices. Raises InputError for a form with separate layers, and for a width
    that, on each device, is not a multiple of 32; with `fitting` such kernels are unchanged. The
    errors call the setting `field`, and advise to set it to 'float' unless there is another
    `remedy` for such a width.
    """
    if model.form.layers == "apart":
        raise InputError(f"{field}={weights!r}: the form has layers apart; use stacked layers")
    arrays = quantized_params(
        *(_table(model), model.arrays, weights), fitting=fitting, field=field, remedy=remedy
    )
    return _with_arrays(model, arrays)


def rounds_drafts(weights: str, target: Model) -> bool:
    """Return whether `weights`, one of `DRAFT_WEIGHTS`, rounds by itself beside this target.

    Raises InputError for any other value.
    """
    return DRAFT_WEIGHTS.check("drafter.weights", weights) == "auto" and has_quantized(
        target.params
    )


def kernel_bits(table: dict[str, Any], weights: str) -> dict[tuple[str, ...], int]:
    """Return the bits to which `weights` rounds the kernels of a table, by path.

    With any weights but "int8" and "int4" there are none. Routers and multi-token prediction
    modules are not rounded, and the head has 8 bits.
    """
    if weights not in _BITS:
        return {}
    return {
        names: 8 if names[0] == "head" else _BITS[weights]
        for names in _entries(table)
        if names[-1] == "kernel" and _UNCHANGED.isdisjoint(names)
    }


def check_groups(
    table: dict[str, Any], weights: str, shardings: dict[str, Any] | None, field: str = "weights"
) -> None:
    """Raise InputError if a kernel that `weights` rounds has inputs that are not whole groups.

    `shardings` are those of the table's entries on a mesh, which split the inputs. Errors call the
    setting `field`.
    """
    entries, wheres = _entries(table), _entries(shardings or {})
    for names in kernel_bits(table, weights):
        *_, inputs, _ = shape = entries[names].shape
        parts = _devices_of_inputs(wheres.get(names), len(shape))
        _check_inputs(names, inputs, parts, f"{field}={weights!r}", f"{field}='float'")


def _entries(tree: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a nested dict by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_entry)
    return {tuple(step.key for step in path): leaf for path, leaf in leaves}


def quantized_params(
    table: dict[str, Any],
    params: dict[str, Any],
    weights: str,
    *,
    fitting: bool = False,
    field: str = "weights",
    remedy: str | None = None,
) -> dict[str, Any]:
    """Return parameters with kernels rounded to `weights`, "int8" or "int4", and the head to int8.

    `table` describes the parameters. Routers and multi-token prediction modules are unchanged. A
    kernel whose number of inputs per device is not a multiple of 32 raises InputError, or with
    `fitting` is left unchanged. `field` and `remedy` are those of `quantized_model`.
    """
    bits_of_path = kernel_bits(table, weights)
    counted, log = itertools.count(1), share_logger(f"rounding the parameters to {weights}")

    def converted(path: tuple[Any, ...], entry: Parameter, leaf: Any) -> Any:
        names = tuple(step.key for step in path)
        bits = bits_of_path.get(names)
        if bits is not None:
            log(next(counted) / (len(bits_of_path) + 1))
        if bits is None or (is_quantized(leaf) and leaf.bits <= bits):
            return leaf
        kernel = float_kernel(leaf)
        inputs, parts = entry.shape[-2], _devices_of_inputs(kernel.sharding, kernel.ndim)
        if fitting and inputs % (parts * GROUP):
            return leaf
        advice = f"{field}='float'" if remedy is None else remedy
        _check_inputs(names, inputs, parts, f"{field}={weights!r}", advice)
        return _quantized(kernel, bits, f"{field}={weights!r}: {'.'.join(names)}", advice)

    return _map(converted, table, params)


def _check_inputs(
    names: tuple[str, ...], inputs: int, parts: int, setting: str, remedy: str
) -> None:
    """Raise InputError unless the inputs of a kernel, in equal parts, are whole groups.

    The message names the `setting` that rounds it and says what to use instead, the `remedy`.
    """
    if inputs % (parts * GROUP) == 0:
        return
    split = f" for each of {parts} devices" if parts > 1 else ""
    raise InputError(
        f"{setting}: {'.'.join(names)} has {inputs} inputs, no multiple of {GROUP}{split}; use "
        f"{remedy}"
    )


def quantized_head_params(
    table: dict[str, Any], params: dict[str, Any], target: Model, weights: str
) -> dict[str, Any]:
    """Return the parameters of a trained head with kernels in `weights`, one of `DRAFT_WEIGHTS`.

    `table` describes the parameters. Raises InputError for widths that are not multiples of 32,
    except with "auto".
    """
    if rounds_drafts(weights, target):
        return quantized_params(table, params, "int8", fitting=True)
    if weights in ("auto", "float"):
        return params
    return quantized_params(table, params, weights, field="drafter.weights")


def float_model(model: Model) -> Model:
    """Return the model with quantized kernels as floating-point arrays of the model's dtype."""
    if not has_quantized(model.arrays):
        return model

    def converted(path: tuple[Any, ...], entry: Parameter, leaf: Any) -> Any:
        if not is_quantized(leaf):
            return leaf
        kernel = _dequantize(leaf).astype(entry.dtype(model.dtype))
        return kernel.T if path[-1].key == "embedding" else kernel

    return _with_arrays(model, _map(converted, _table(model), model.arrays))


def with_activation_bits(params: dict[str, Any], bits: int | None) -> dict[str, Any]:
    """Return parameters whose quantized kernels, but for the head, round activations to `bits`.

    The arrays are shared, not copied.
    """
    return {**_with_activation_bits(params, bits), "head": params["head"]}


def _with_activation_bits(params: Any, bits: int | None) -> Any:
    def rounding(node: Any) -> Any:
        return node.replace(activation_bits=bits) if is_quantized(node) else node

    return jax.tree.map(rounding, params, is_leaf=is_quantized)


def with_activations(model: Model, activations: str | int, field: str = "activations") -> Model:
    """Return a model whose products round activations to `activations`, one of `ACTIVATIONS`.

    Raises InputError unless it is "auto", or the model has kernels in tiles; `field` is the name of
    the setting in errors.
    """
    activations = ACTIVATIONS.check(field, str(activations))
    if activations == "auto":
        return model
    kernels = jax.tree.leaves(model.params, is_leaf=is_quantized)
    if not any(isinstance(leaf, TiledKernel) for leaf in kernels):
        raise InputError(
            f"{field}={activations!r}: the weights are {model.weights}, and only kernels in few "
            "bits on one CPU round activations; use weights='int8' or 'int4', a GGUF file, or "
            f"{field}='auto'"
        )
    bits = 32 if activations == "float" else int(activations)
    return _with_arrays(model, _with_activation_bits(model.arrays, bits))


def float_kernel(kernel: Any) -> jax.Array:
    """Return a kernel as an array, dequantized to float32 if necessary."""
    return _dequantize(kernel) if is_quantized(kernel) else kernel


def _quantized(kernel: jax.Array, bits: int, setting: str, remedy: str) -> QuantizedKernel:
    """Return a kernel rounded to `bits` bits, on the devices that hold the kernel.

    Raises InputError, which names the `setting` and the `remedy`, for one whose scales do not fit.
    """
    if not isinstance(kernel.sharding, NamedSharding) and library.is_for_this_backend():
        rounded = _program(bits, False, None)(kernel)
        if not all(bool(jnp.isfinite(array).all()) for array in rounded[1:]):
            raise InputError(f"{setting} has weights beyond half precision; use {remedy}")
        return tiled(_grouped(rounded))
    per_channel = has_one_scale(bits)
    shardings = None
    if isinstance(kernel.sharding, NamedSharding):
        mesh, spec = kernel.sharding.mesh, kernel.sharding.spec
        partitions = array_partitions(spec, kernel.ndim, bits, per_channel)
        shardings = tuple(NamedSharding(mesh, partition) for partition in partitions)
    return _grouped(_program(bits, per_channel, shardings)(kernel))


def _grouped(arrays: tuple[jax.Array, ...]) -> GroupedKernel:
    values, scales, *minimums = arrays
    return GroupedKernel(values, scales, minimums[0] if minimums else None)


@functools.cache
def _program(bits: int, per_channel: bool, shardings: tuple[NamedSharding, ...] | None) -> Any:
    """Return a compiled function from a kernel to the arrays of its quantized form."""

    def arrays(kernel: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(quantize(kernel, bits, per_channel)))

    return jax.jit(arrays, out_shardings=shardings)


@jax.jit
def _dequantize(kernel: QuantizedKernel) -> jax.Array:
    return kernel.dequantized()


def _devices_of_inputs(where: Sharding | None, ndim: int) -> int:
    """Return the number of devices over which the input axis of a kernel is sharded."""
    if not isinstance(where, NamedSharding) or len(where.spec) < ndim - 1:
        return 1
    axis = where.spec[ndim - 2]
    return 1 if axis is None else where.mesh.shape[axis]


def _table(model: Model) -> dict[str, Any]:
    return array_table(model.config, model.mtp and model.mtp.config, model.form.stacked)


def _map(convert: Callable[..., Any], table: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """Return a tree with `convert(path, entry, array)` for each array and its entry in a table."""
    return jax.tree_util.tree_map_with_path(convert, table, arrays, is_leaf=_is_entry)


def _is_entry(node: Any) -> bool:
    return isinstance(node, Parameter)


def _with_arrays(model: Model, arrays: dict[str, Any]) -> Model:
    params, mtp = split_arrays(arrays, model.mtp and model.mtp.config)
    return replace(model, params=params, mtp=mtp)


def stacked_form(form: Form) -> Form:
    """Return `form` with stacked layers, from which quantized kernels are read in place."""
    return replace(form, layers="stacked") if form.layers == "apart" else form


def in_stacked_form(model: Model) -> Model:
    """Return the model with stacked layers; its parameters must be on one device."""
    if model.form.layers != "apart":
        return model
    form = stacked_form(model.form)
    where = jax.tree.leaves(model.params)[0].sharding
    shardings = jax.tree.map(lambda _: where, parameter_table(model.config, scan_layers=True))
    # Stacking empties the dict, so that the model's own dict is copied.
    apart = {**model.params, "layers": dict(model.params["layers"])}
    params = stack_layers(apart, shardings, model.config)
    return replace(model, params=params, form=form)
