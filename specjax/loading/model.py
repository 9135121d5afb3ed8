"""A loaded model: its functions, its parameters and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from specjax.core.parameter_sizes import count_weights, weights_in_words
from specjax.fields import Choice, Instance, optional
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.form import DEFAULT_FORM, Form
from specjax.models.mtp import MtpConfig, MtpModules
from specjax.models.parameter_table import parameter_table

CACHE_DTYPE = Choice(("auto", "bfloat16", "int8"))
"""How a cache stores keys and values; `auto` is the dtype of the model's activations."""
MESH_KIND = optional(Instance(Mesh, "use a mesh, as sharding.make_mesh gives it"))
MTP = "mtp"
"""The name under which a model's arrays include those of its MTP modules."""


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A loaded model, the result of `load_model`; `tokenizer` is None if it has none.

    `params` is a plain nested dict of arrays, on a `mesh` sharded over `shards` devices or
    replicated (1). `form` is the layout of layers for the backend. `mtp` are the model's
    multi-token prediction modules, if any. `stated_ends` are the end-of-sequence ids in the config
    of a model without a tokenizer. `kv_cache_dtype` (`CACHE_DTYPE`) is how caches store keys and
    values, including those of drafters. `padding_embeddings` are the rows of the file's embedding
    after those of the vocabulary, one of which may be a drafter's mask token. Raises InputError for
    an unknown `kv_cache_dtype`, and for modules of another model.
    """

    name: str
    config: DecoderConfig
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    dtype: jnp.dtype
    mesh: Mesh | None = None
    shards: int = 1
    form: Form = DEFAULT_FORM
    mtp: MtpModules | None = None
    stated_ends: tuple[int, ...] = ()
    kv_cache_dtype: str = "auto"
    padding_embeddings: Float[np.ndarray, "P D"] | None = None

    def __repr__(self) -> str:
        """Return name, size and placement on one line."""
        size = count_weights(self.params)
        mesh = "" if self.mesh is None else f", mesh {dict(self.mesh.shape)}"
        shape = f"{self.config.num_layers} layers, {self.config.vocab_size} tokens"
        return f"Model({self.name}, {size / 1e6:.1f}M parameters, {shape}, {self.weights}{mesh})"

    def __post_init__(self) -> None:
        CACHE_DTYPE.check("kv_cache_dtype", self.kv_cache_dtype)
        if self.mtp is not None:
            self.mtp.config.check_target(self.config)

    @property
    def ends(self) -> tuple[int, ...]:
        """The end-of-sequence ids stated in all files; the first is the model's own."""
        return self.stated_ends if self.tokenizer is None else self.tokenizer.eos_ids

    @property
    def activation_dtype(self) -> jnp.dtype:
        """The dtype of activations and caches: `dtype`, but float32 for bfloat16 on a CPU.

        On a CPU only products are faster in bfloat16; everything else is converted to float32 and
        back.
        """
        on_cpu = jax.default_backend() == "cpu"
        return jnp.dtype(jnp.float32) if on_cpu and self.dtype == jnp.bfloat16 else self.dtype

    @property
    def multiply(self) -> jnp.dtype | None:
        """The dtype to which products round their operands; None for the activations' dtype."""
        return None if self.activation_dtype == self.dtype else self.dtype

    @property
    def cache_dtype(self) -> jnp.dtype:
        """The dtype of keys and values in caches."""
        is_auto = self.kv_cache_dtype == "auto"
        return self.activation_dtype if is_auto else jnp.dtype(self.kv_cache_dtype)

    @property
    def architecture(self) -> Decoder:
        """The model as pure functions of its parameters; hashable."""
        return Decoder(
            self.config,
            self.activation_dtype,
            self.shards,
            self.form,
            multiply=self.multiply,
            cache_dtype=self.cache_dtype,
        )

    @property
    def num_params(self) -> int:
        """The number of parameters, including MTP modules; a tied head is counted once."""
        return count_weights(self.arrays)

    @property
    def weights(self) -> str:
        """The storage of the weights in words (`weights_in_words`)."""
        return weights_in_words(self.arrays)

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays of the model: `params`, and under "mtp" those of the MTP modules."""
        return self.params if self.mtp is None else {**self.params, MTP: self.mtp.params}


def array_table(config: DecoderConfig, mtp: MtpConfig | None, scan_layers: bool) -> dict[str, Any]:
    """Return the names, shapes and dtypes of a model's arrays, as a nested dict of `Parameter`.

    It has the structure of `Model.arrays`. With `scan_layers` layers are stacked.
    """
    table = parameter_table(config, scan_layers)
    return table if mtp is None else {**table, MTP: mtp.parameter_table()}


def split_arrays(
    arrays: dict[str, Any], mtp: MtpConfig | None
) -> tuple[dict[str, Any], MtpModules | None]:
    """Return a model's `params` and `mtp` from its `arrays` and the modules' config."""
    if mtp is None:
        return arrays, None
    params = {name: part for name, part in arrays.items() if name != MTP}
    return params, MtpModules(mtp, arrays[MTP])


MODEL_KIND = Instance(Model, "use a model, as specjax.load_model gives it")
