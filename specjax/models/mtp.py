"""Multi-token prediction modules: decoder layers that predict tokens after the next one.

DeepSeek-V3 (2412.19437, section 2.2) and successors: module k (0-based) projects the normed
embedding of x_{t+1+k} and the normed hidden state at t to one vector, runs one decoder layer on it,
and predicts x_{t+k+2} with its own norm and the target's output head. FastMTP (2509.18362) trains
one module to run on its own outputs. `MtpConfig` covers the conventions in which checkpoints
differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.core.draft_vocabulary import check_draft_vocab_size
from specjax.errors import InputError
from specjax.fields import Whole, check_instance
from specjax.models.config import DecoderConfig
from specjax.models.head_config import HeadConfig
from specjax.models.layers.decoder_layer import embed
from specjax.models.pair_head import PairHead
from specjax.models.parameter_table import linear, norm_table
from specjax.models.parameter_table import parameter_table as decoder_table

Concat = Literal["embedding_first", "hidden_first"]
"""The order of the two inputs of the projection."""


@dataclass(frozen=True, kw_only=True)
class MtpConventions:
    """The conventions in which checkpoints of MTP modules differ."""

    concat: Concat = "embedding_first"
    """The order in which embedding and hidden state are joined."""
    hidden: Literal["final_norm", "pre_norm"] = "final_norm"
    """The target's feature that module 0 reads: after or before the target's final norm."""
    recursion: Literal["normed", "raw"] = "normed"
    """Whether the next step reads a module's output after its own final norm or before it."""
    zero_first_embedding: bool = False
    """Whether the embedding of the pair at position 0 is zero."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(MtpConventions, HeadConfig):
    """The config of MTP modules.

    `decoder` describes the layer of each of the `num_modules` modules, with the target's width and
    vocabulary (V); `draft_vocab_size` (Vd) is the number of logits. Raises InputError for values
    out of range.
    """

    decoder: DecoderConfig
    draft_vocab_size: Annotated[int, Whole(1)]
    num_modules: Annotated[int, Whole(1, 64)] = 1

    def __post_init__(self) -> None:
        check_instance(self, "")
        if self.decoder.num_layers != 1:
            raise InputError(f"num_layers={self.decoder.num_layers}: an MTP module has one layer")
        supported = self.decoder.one_layer(experts=True)
        names = ("sliding_window", "attention", "embedding", "logit_divisor", "logit_softcap")
        for name in (*names, "experts"):
            value = getattr(self.decoder, name)
            if value != getattr(supported, name):
                raise InputError(
                    f"{name}={value}: an MTP module has no sliding window, no soft cap, no divisor "
                    "of logits, no dense layers before experts, no layer without rotation, and no "
                    "scale or position of embeddings; leave them out"
                )
        check_draft_vocab_size(self.draft_vocab_size, self.decoder.vocab_size)

    @property
    def kind(self) -> str:
        """The kind of head."""
        return "mtp"

    @property
    def features(self) -> tuple[str, ...]:
        """The name of the target's feature that module 0 reads."""
        return (self.hidden,)

    @property
    def target_hidden_size(self) -> int:
        """The width of the target's features, equal to the modules' width."""
        return self.decoder.hidden_size

    def check_target(self, target: DecoderConfig) -> None:
        """Raise InputError unless the modules have the width and vocabulary of `target`."""
        for name, own_size, target_size in (
            ("hidden_size", self.decoder.hidden_size, target.hidden_size),
            ("vocab_size", self.decoder.vocab_size, target.vocab_size),
            ("draft_vocab_size", self.draft_vocab_size, target.vocab_size),
        ):
            if own_size != target_size:
                raise InputError(
                    f"mtp: {name}={own_size}, and the model has {target_size}; use modules that "
                    "were trained with it"
                )

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the modules' parameters, as a nested dict of `Parameter`.

        The modules are "0", "1", ... under "modules".
        """
        width = self.decoder.hidden_size
        module = {
            "embedding_norm": norm_table(self.decoder),
            "hidden_norm": norm_table(self.decoder),
            "projection": linear(2 * width, width, axes=(None, "embed")),
            "layer": decoder_table(self.decoder, scan_layers=False)["layers"]["0"],
            "final_norm": norm_table(self.decoder),
        }
        return {"modules": {str(index): module for index in range(self.num_modules)}}


@dataclass(frozen=True, eq=False)
class MtpModules:
    """The MTP modules of a model: their config, and the parameters that its table lists."""

    config: MtpConfig
    params: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Mtp(PairHead):
    """MTP modules as pure functions of their parameters; hashable.

    `params` has, under "shared", the target's embedding and the columns of its output head.
    """

    config: MtpConfig

    def module(self, params: dict[str, Any], index: int) -> dict[str, Any]:
        """Return the parameters of module `index`, with the shared ones under "shared"."""
        return {**params["modules"][str(index)], "shared": params["shared"]}

    def fuse(
        self, params: dict[str, Any], features: dict[str, Float[Array, "B T D"]]
    ) -> Float[Array, "B T D"]:
        """Return the target's feature for module 0, unchanged, since modules norm their inputs."""
        del params
        return features[self.config.hidden].astype(self.dtype)

    def inputs(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Return the residual stream and attention's input for pairs of a token and a hidden state.

        `params` are those of one module, and `positions` the positions of the pairs.
        """
        embedded = embed(params["shared"], tokens, self.dtype)
        if self.config.zero_first_embedding:
            embedded = jnp.where((positions == 0)[:, :, None], 0, embedded)
        inputs = [
            self.arithmetic.norm(embedded, params["embedding_norm"]),
            self.arithmetic.norm(hidden, params["hidden_norm"]),
        ]
        if self.config.concat == "hidden_first":
            inputs.reverse()
        joined = jnp.concatenate(inputs, axis=-1)
        x = self.arithmetic.whole(
            self.arithmetic.project("btd,dn->btn", joined, params["projection"])
        )
        return x, self.arithmetic.normed_input(x, params["layer"], "attention_norm")

    def next_hidden(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Return the hidden state for the next module or draft step: the output, normed or not."""
        return self.readout(params, output) if self.config.recursion == "normed" else output

    def logit_kernel(self, params: dict[str, Any]) -> Float[Array, "D Vd"]:
        """Return the matrix that maps the result of `readout` to draft logits.

        It has the columns of the target's output head for the draft vocabulary.
        """
        return params["shared"]["draft_head"]["kernel"]
