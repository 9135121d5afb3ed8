"""Loading of models by name, file, directory or hub id; saving; random models for tests."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.distributed import device_memory, sharding
from specjax.errors import InputError, shown
from specjax.fields import Choice, Flag, Instance, Text, optional
from specjax.files.path_checks import input_file, output_folder, user_path
from specjax.loading import checkpoints
from specjax.loading.formats import (
    build_parameters,
    gguf,
    huggingface,
    huggingface_config,
    mtp_layers,
    parameter_names,
)
from specjax.loading.formats.families import registry
from specjax.loading.formats.gguf_parts import open_parts
from specjax.loading.formats.safetensors_files import HALVES, PICKLES, refuse_pickle
from specjax.loading.hub import DEFAULT_MODEL, default_model_file, download
from specjax.loading.layer_layout import stack_layers
from specjax.loading.model import (
    CACHE_DTYPE,
    MESH_KIND,
    MODEL_KIND,
    Model,
    array_table,
    split_arrays,
)
from specjax.loading.quantize import (
    ACTIVATIONS,
    WEIGHTS,
    check_groups,
    float_model,
    in_stacked_form,
    is_quantized,
    kernel_bits,
    quantized_model,
    rounds_drafts,
    stacked_form,
    with_activations,
)
from specjax.loading.storage.checkpoint_directory import is_checkpoint
from specjax.loading.tokenizers import huggingface_tokenizer as files
from specjax.loading.tokenizers.gguf_tokenizer import read_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.loading.user_messages import note
from specjax.models.config import DecoderConfig
from specjax.models.cpu import library as cpu_library
from specjax.models.form import Form
from specjax.models.layers.quantized import bytes_per_weight
from specjax.models.layers.tiled_kernel import Layout
from specjax.models.mtp import MtpConfig

DTYPE = Choice(("auto", "float32", "bfloat16", "float16"))
"""The dtypes in which models can be loaded; `auto` is float32 on CPU and bfloat16 elsewhere."""


Kept = Mapping[tuple[str, ...], Layout]
"""The layouts of kernels that keep the types of a GGUF file, by path."""
_NONE_KEPT: Kept = MappingProxyType({})


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    replicated: bool = False,
    form: Form | None = None,
    weights: str = "auto",
    activations: str | int = "auto",
    kv_cache_dtype: str = "auto",
    field: str = "name_or_path",
) -> Model:
    """Load a model by built-in name, .gguf file, directory, or the hub's org/name.

    A directory is a checkpoint of specjax or in Hugging Face's layout. For a GGUF in several parts
    (NAME-00001-of-00003.gguf) pass the first.

    `dtype` is float32, bfloat16, float16, or auto: float32 on CPU, bfloat16 elsewhere. On a `mesh`
    (`sharding.make_mesh`) each device gets its own part of each tensor, sharded over `model`, or
    the whole tensor with `replicated`. `form` defaults to the backend's (`Form.of`). `weights` is
    the storage of kernels (`quantize.WEIGHTS`): float, int8, int4, file (as in the file), or auto.
    `activations` are the bits to which products with kernels in few bits round their inputs on one
    CPU (`quantize.ACTIVATIONS`): 24, 16, 8, float, or auto, as precise as float. `kv_cache_dtype`
    is the storage of keys and values: auto (as activations), bfloat16 or int8.
    `field` is the name of the first argument in errors. Raises InputError for anything but an
    intact model of a known family, for a mesh over which its heads cannot be sharded, and for
    weights that the file, the mesh or the machine does not support.
    """
    Flag().check("replicated", replicated)
    MESH_KIND.check("mesh", mesh)
    optional(Instance(Form, "use a Form")).check("form", form)
    Text().check("field", field)
    weights_field = _beside(field, "weights")
    WEIGHTS.check(weights_field, weights)
    rounds = weights in ("int8", "int4")
    target = _Target(
        *(resolve_dtype(dtype), mesh, _shards(mesh, replicated), form, dtype == "auto", weights),
        is_rounded_later=rounds,
        weights_field=weights_field,
    )
    CACHE_DTYPE.check("kv_cache_dtype", kv_cache_dtype)
    activations_field = _beside(field, "activations")
    ACTIVATIONS.check(activations_field, str(activations))
    loaded = replace(_load(field, name_or_path, target), kv_cache_dtype=kv_cache_dtype)
    if rounds:
        loaded = quantized_model(loaded, weights, field=weights_field)
    return with_activations(loaded, activations, activations_field)


def _beside(field: str, setting: str) -> str:
    """Return the name of a setting beside the path `field`, such as drafter.path."""
    owner, dot, _ = field.rpartition(".")
    return f"{owner}{dot}{setting}"


def load_draft_model(
    name_or_path: str | Path,
    target: Model,
    weights: str = "auto",
    *,
    dtype: str = "auto",
    replicated: bool = False,
    field: str = "name_or_path",
) -> Model:
    """Load a model that is to draft for `target`, on its mesh, with kernels in `weights`.

    `weights` is one of `DRAFT_WEIGHTS`; the other arguments are those of `load_model`. Raises
    InputError as `load_model` does.
    """
    options = {"dtype": dtype, "mesh": target.mesh, "replicated": replicated}
    if not rounds_drafts(weights, target):
        return load_model(name_or_path, weights=weights, field=field, **options)
    # Kernels in floating point would cost what such a target saves.
    how = _Target(
        *(resolve_dtype(dtype), target.mesh, _shards(target.mesh, replicated), None),
        *(dtype == "auto", "auto"),
        is_rounded_later=True,
    )
    return quantized_model(in_stacked_form(_load(field, name_or_path, how)), "int8", fitting=True)


def _load(field: str, name_or_path: str | Path, target: _Target) -> Model:
    """Return a model by name or path, with kernels in floating point or as in the file."""
    if name_or_path == DEFAULT_MODEL:
        return _load_gguf(DEFAULT_MODEL, default_model_file(), target)
    path, name = user_path(field, name_or_path), str(name_or_path)
    if is_checkpoint(path):
        return _load_checkpoint(name, path, target)
    if path.is_dir():
        return _load_directory(name, path, target)
    if path.suffix in PICKLES:
        raise refuse_pickle(path)
    if path.exists() or path.suffix == ".gguf":
        return _load_gguf(name, input_file(field, path), target)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _load_directory(name, download(field, name), target)
    raise InputError(
        f"{field}={shown(name)}: no such file, directory or built-in model; use {DEFAULT_MODEL}, "
        "a .gguf file, a Hugging Face directory, or org/name"
    )


def place_model(model: Model, mesh: Mesh | None, *, replicated: bool = False) -> Model:
    """Return a loaded model on another mesh, or with None on the default device.

    On several devices separate layers are stacked (`Form.of`). Raises InputError if its heads
    cannot be sharded over the mesh.
    """
    MODEL_KIND.check("target", model)
    MESH_KIND.check("mesh", mesh)
    shards = _shards(mesh, replicated)
    if (mesh, shards) == (model.mesh, model.shards):
        return model
    model = float_model(model)
    if mesh is None:
        arrays = jax.device_put(model.arrays, jax.devices()[0])
    else:
        build_parameters.check_shards(model.config, shards)
        arrays = jax.device_put(model.arrays, _shardings(model, model.form, mesh, shards))
    params, mtp = split_arrays(arrays, model.mtp and model.mtp.config)
    form = model.form
    if form.layers == "apart" and mesh is not None and mesh.size > 1:
        form = replace(form, layers="stacked")
        params = stack_layers(params, _shardings(model, form, mesh, shards), model.config)
    return replace(model, params=params, mtp=mtp, mesh=mesh, shards=shards, form=form)


def with_vocabulary(model: Model, size: int) -> Model:
    """Return a model whose vocabulary has `size` tokens, so that it can draft for a target.

    Tokens beyond `size` are dropped. Tokens that the model lacks are never drafted, and their
    embeddings are zero.
    """
    have = model.config.vocab_size
    if size == have:
        return model

    def fitted(value: jax.Array, axis: int) -> jax.Array:
        if size < have:
            return jax.lax.slice_in_dim(value, 0, size, axis=axis)
        widths = [(0, size - have if index == axis else 0) for index in range(value.ndim)]
        return jnp.pad(value, widths)

    params = dict(model.params)
    for name, leaf, axis in (("embed", "embedding", 0), ("head", "kernel", 1)):
        if name in params:
            value = params[name][leaf]
            new = value.resized(size) if is_quantized(value) else fitted(value, axis)
            params[name] = {**params[name], leaf: new}
    unused = [token for token in (*model.config.unused_tokens, *range(have, size)) if token < size]
    config = replace(model.config, vocab_size=size, unused_tokens=tuple(unused))
    # The model's MTP modules predict tokens of its original vocabulary, and are dropped.
    changed = replace(model, config=config, params=params, mtp=None, padding_embeddings=None)
    if model.mesh is None:
        return changed
    table = _shardings(changed, model.form, model.mesh, model.shards)
    return replace(changed, params=jax.device_put(params, table))


def _shardings(model: Model, form: Form, mesh: Mesh, shards: int) -> dict[str, Any]:
    """Return the shardings that a model's arrays have on a mesh in a given form."""
    table = array_table(model.config, model.mtp and model.mtp.config, form.stacked)
    return build_parameters.table_shardings(table, mesh, shards)


def save_model(model: Model, directory: str | Path) -> None:
    """Write a model as a Hugging Face directory, which `load_model` and transformers read.

    A single process writes all of it; for a model on many devices use
    `checkpoints.save_checkpoint`. Raises InputError if the directory has any file that specjax did
    not write.
    """
    MODEL_KIND.check("model", model)
    path = output_folder("directory", directory)
    if model.mtp is not None:
        raise InputError(
            f"{path}: the model has MTP modules, for which this layout has no names; use "
            "specjax.save_checkpoint, or dataclasses.replace(model, mtp=None) to leave them out"
        )
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(model.params)):
        raise InputError(
            f"{path}: the model is spread over processes, and one cannot write it; "
            "use specjax.save_checkpoint"
        )
    model = float_model(model)
    huggingface.save(
        path, model.config, model.params, model.tokenizer, model.ends, np.dtype(model.dtype)
    )


def random_model(
    config: DecoderConfig,
    seed: int,
    tokenizer: Tokenizer | None = None,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    form: Form | None = None,
) -> Model:
    """Return a model with random weights that depend only on the seed, not on the machine.

    Kernels are scaled by 1/sqrt(inputs), so that logits have a spread of about one. Norm scales and
    biases differ from their neutral values, so that tests fail if one is ignored. `dtype`, `mesh`
    and `form` are as in `load_model`. Raises InputError for a mesh over which the heads cannot be
    sharded.
    """
    target = _Target(resolve_dtype(dtype), mesh, _shards(mesh, replicated=False), form)
    stacks = target.stacks(config)
    rng = np.random.default_rng(seed)

    def rows_of(location: parameter_names.Location) -> np.ndarray:
        noise = rng.standard_normal(location.shape, np.float32)
        kind = location.path[-1]
        if kind == "kernel":
            return (noise * np.float32(location.shape[0] ** -0.5)).T
        if kind == "embedding":
            return noise
        if "taps" in location.path:
            return noise * np.float32(location.shape[-1] ** -0.5)
        # A scale is stored minus the norms' offset, except in recurrent layers.
        with_offset = config.norm.offset and "recurrence" not in location.path
        neutral = kind == "scale" and not with_offset
        return np.float32(neutral) + np.float32(0.1) * noise

    locations = list(parameter_names.locations(registry.tensors(config), config))
    # All arrays are drawn in this order before any is placed on a device.
    drawn = {location: rows_of(location) for location in locations}

    def read(location: parameter_names.Location, rows: slice, inputs: slice) -> np.ndarray:
        values = drawn[location][rows]
        return values[:, inputs] if values.ndim > 1 else values

    params = build_parameters.build(
        config, None, target.dtype, locations, read, mesh, target.shards, stacks
    )
    return target.model(f"random-{seed}", config, params, tokenizer)


class _Target(NamedTuple):
    """How to load a model: dtype, placement, storage of weights, and the form if requested.

    `auto` says whether the dtype is the default, and `is_rounded_later` whether kernels in floating
    point are rounded once they are loaded.
    """

    dtype: np.dtype
    mesh: Mesh | None
    shards: int
    requested: Form | None
    auto: bool = False
    weights: str = "float"
    is_rounded_later: bool = False
    weights_field: str = "weights"
    """The name of the setting `weights` in errors."""

    def form(self, config: DecoderConfig) -> Form:
        """Return the form for a model; raise InputError if its config does not support it."""
        num_devices = 1 if self.mesh is None else self.mesh.size
        form = self.requested or Form.of(jax.default_backend(), config, num_devices)
        if self.requested is None and self.weights in ("int8", "int4"):
            form = stacked_form(form)
        form.check(config)
        return form

    def keeps_types(self, path: Path, *, is_gguf: bool) -> bool:
        """Return whether kernels keep the types of a GGUF file.

        A line says so if that was requested of a device that does not multiply them as they are.
        Raises InputError if it was requested of another file, or there is no library.
        """
        by_itself = self.weights == "auto" and self.auto and self.requested is None
        if not by_itself and self.weights != "file":
            return False
        asked = self.weights == "file"
        if not is_gguf:
            if asked:
                raise InputError(
                    f"{path}: weights='file' is for GGUF files; use weights='float' or 'int8'"
                )
            return False
        if jax.default_backend() != "cpu" or self.mesh is not None:
            if asked:
                note(
                    f"{path.name}: weights='file' is for one CPU; the kernels are dequantized to "
                    f"{self.dtype} here"
                )
            return False
        if not cpu_library.available():
            if asked:
                raise InputError(
                    f"{path}: weights='file': the CPU kernel is not there, which needs a C++ "
                    "compiler; use weights='float' or 'int8'"
                )
            return False
        return True

    def stacks(self, config: DecoderConfig) -> bool:
        """Return whether the layers of a model with this config are stacked."""
        return self.form(config).stacked

    def layout(self, config: DecoderConfig) -> tuple[np.dtype, Mesh | None, int, bool]:
        """Return the arguments of readers: dtype, mesh, shards, and whether layers are stacked."""
        return self.dtype, self.mesh, self.shards, self.stacks(config)

    def say_size(
        self,
        name: str,
        config: DecoderConfig,
        mtp: MtpConfig | None,
        kept: Kept = _NONE_KEPT,
        types: Collection[str] = (),
    ) -> None:
        """Log the size of the weights if `auto` makes them larger than in their file.

        `kept` are the kernels that keep the types of the file, and `types` those of the file that
        have no products of their own.
        """
        is_wide = self.auto and self.dtype == np.float32 and not self.is_rounded_later
        if not is_wide or name == DEFAULT_MODEL:
            return
        table = array_table(config, mtp, scan_layers=True)
        if kept.keys() >= kernel_bits(table, "int8").keys():
            return
        reason, others = "in float32 (dtype=auto on a CPU)", {"dtype=bfloat16": ("bfloat16", {})}
        if kept or types:
            names = ", ".join(sorted(types)) or "F32"
            reason = f"since kernels of the type {names} have no products in few bits"
            others = {
                f"weights={weights}": ("float32", kernel_bits(table, weights))
                for weights in ("int8", "int4")
            }
        size = self._bytes(config, mtp, "float32", kept)
        smaller = " and ".join(
            f"{setting} takes {self._bytes(config, mtp, *form) / 1e9:.2g} GB"
            for setting, form in others.items()
        )
        note(f"{name}: the weights take {size / 1e9:.2g} GB {reason}; {smaller}")

    @property
    def rounds_while_loading(self) -> bool:
        """Whether kernels are rounded as they are read, so that they are never whole in memory."""
        return self.mesh is not None or jax.default_backend() != "cpu"

    def bits(self, config: DecoderConfig, mtp: MtpConfig | None) -> dict[tuple[str, ...], int]:
        """Return the bits of the kernels that are rounded as they are read, by path.

        Raises InputError for weights whose groups do not fit the mesh.
        """
        if not self.rounds_while_loading:
            return {}
        table, shardings = array_table(config, mtp, self.stacks(config)), None
        if self.mesh is not None:
            build_parameters.check_shards(config, self.shards)
            shardings = build_parameters.table_shardings(table, self.mesh, self.shards)
        check_groups(table, self.weights, shardings, self.weights_field)
        return kernel_bits(table, self.weights)

    def check_memory(
        self,
        config: DecoderConfig,
        mtp: MtpConfig | None,
        *,
        rounds: bool = True,
        kept: Kept = _NONE_KEPT,
    ) -> None:
        """Raise InputError, before any is read, if the weights do not fit into free memory.

        The error says which dtype or bits would. `rounds` says whether this kind of file can be
        rounded as it is read, and `kept` are the kernels that keep its types.
        """
        rounds &= self.rounds_while_loading
        first = "weights=file" if kept else f"dtype={self.dtype}"
        sizes = {first: self._bytes(config, mtp, self.dtype, kept)}
        if self.dtype == np.float32:
            sizes["dtype=bfloat16"] = self._bytes(config, mtp, "bfloat16")
        if rounds:
            table = array_table(config, mtp, scan_layers=True)
            for weights in ("int8", "int4"):
                bits = kernel_bits(table, weights)
                sizes[f"weights={weights}"] = self._bytes(config, mtp, self.dtype, bits)
        chosen = f"weights={self.weights}"
        device_memory.check_weights(chosen if chosen in sizes else first, sizes)

    def _bytes(
        self,
        config: DecoderConfig,
        mtp: MtpConfig | None,
        dtype: Any,
        quantized: Mapping[tuple[str, ...], int | Layout] = _NONE_KEPT,
    ) -> int:
        """Return the bytes of the weights on each device, on a CPU of all devices.

        `quantized` are the bits or the layouts of kernels, by their paths with stacked layers.
        """
        table = array_table(config, mtp, scan_layers=True)
        on_cpu = jax.default_backend() == "cpu"
        shapes = jax.tree.map(lambda entry: entry.shape, table)
        if self.mesh is not None:
            places = build_parameters.table_shardings(table, self.mesh, self.shards)
            shapes = jax.tree.map(
                lambda entry, place: place.shard_shape(entry.shape), table, places
            )
        total = 0.0
        for path, entry in jax.tree_util.tree_leaves_with_path(table):
            shape = functools.reduce(lambda node, step: node[step.key], path, shapes)
            form = quantized.get(tuple(step.key for step in path))
            if isinstance(form, Layout):
                total += form.num_bytes
                continue
            each = bytes_per_weight(form) if form else entry.dtype(np.dtype(dtype)).itemsize
            total += math.prod(shape) * each
        return int(total * (self.mesh.size if self.mesh is not None and on_cpu else 1))

    def model(
        self, name: str, config: DecoderConfig, params: dict[str, Any], tokenizer: Tokenizer | None
    ) -> Model:
        form = self.form(config)
        return Model(name, config, params, tokenizer, self.dtype, self.mesh, self.shards, form)


def _shards(mesh: Mesh | None, replicated: bool) -> int:
    return 1 if replicated else sharding.axis_size(mesh, sharding.MODEL)


def resolve_dtype(dtype: str) -> np.dtype:
    """Return the NumPy dtype called `dtype`: float32, bfloat16, float16 or auto.

    "auto" is float32 on a CPU and bfloat16 elsewhere. Raises InputError for another name.
    """
    if DTYPE.check("dtype", dtype) == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return np.dtype(jnp.dtype(dtype))


def _load_gguf(name: str, path: Path, target: _Target) -> Model:
    with _naming(path), open_parts(path) as file:
        gguf.family_of(file)
        tokenizer = read_tokenizer(str(path), file.metadata)
        if (rows := gguf.embedding_rows(file)) is not None:
            tokenizer = tokenizer.limited(rows, "rows of token_embd.weight")
        config, modules = gguf.read_config(file, tokenizer.vocab_size, tokenizer.unused_ids)
        keep = target.keeps_types(path, is_gguf=True)
        kept = gguf.kept_layouts(file, config) if keep else {}
        if kept:
            target = target._replace(requested=stacked_form(target.form(config)))
        types = gguf.types_without_products(file) if keep else ()
        if any(tensor.kind.name != "F32" for tensor in file.tensors.values()):
            target.say_size(name, config, modules, kept, types)
        bits = target.bits(config, modules)
        target.check_memory(config, modules, kept=kept)
        layout = target.layout(config)
        arrays = gguf.read_params(*(file, config, *layout), mtp=modules, kept=kept, bits=bits)
        params, mtp = split_arrays(arrays, modules)
        padding = gguf.read_padding(file, config, target.dtype)
    model = target.model(name, config, params, tokenizer)
    return replace(model, mtp=mtp, padding_embeddings=padding)


def _load_checkpoint(name: str, path: Path, target: _Target) -> Model:
    target.keeps_types(path, is_gguf=False)
    with _naming(path):
        config, tokenizer, ends, params, mtp = checkpoints.read_model(
            path,
            target.dtype,
            target.mesh,
            target.shards,
            target.stacks,
            functools.partial(target.say_size, name),
            functools.partial(target.check_memory, rounds=False),
        )
    model = target.model(name, config, params, tokenizer)
    return replace(model, mtp=mtp, stated_ends=ends)


def _load_directory(name: str, path: Path, target: _Target) -> Model:
    target.keeps_types(path, is_gguf=False)
    with _naming(path):
        tokenizer, rows = files.read_tokenizer(path), huggingface_config.embedding_rows(path)
        if tokenizer is not None and rows is not None:
            tokenizer = tokenizer.limited(rows, "vocab_size")
        vocabulary = tokenizer and (tokenizer.vocab_size, tokenizer.unused_ids)
        config, announced = huggingface_config.read_config(path, *(vocabulary or (None,)))
        ends = files.stated_ends(path, config.vocab_size) if tokenizer is None else ()
        family = registry.family(config.family)
        tensors = huggingface.read_headers(path, family)
        count = mtp_layers.stored(str(path), announced, config, family.mtp, tensors)
        modules = mtp_layers.module_config(config, count, family.mtp)
        if any(tensor.dtype in HALVES for tensor in tensors.values()):
            target.say_size(name, config, modules)
        bits, layout = target.bits(config, modules), target.layout(config)
        target.check_memory(config, modules)
        arrays = huggingface.read_params(*(path, tensors, config, *layout), mtp=modules, bits=bits)
        params, mtp = split_arrays(arrays, modules)
        padding = huggingface.read_padding(tensors, config, target.dtype)
    model = target.model(name, config, params, tokenizer)
    return replace(model, mtp=mtp, stated_ends=tuple(ends), padding_embeddings=padding)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefix `path` to the messages of InputErrors raised in the `with` block."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from None
