"""EAGLE heads: one decoder layer that predicts the target's next feature from its last ones.

EAGLE-1 (Li et al. 2401.15077) reads concat(embedding, feature) through a linear layer and uses the
target's output head. EAGLE-3 (Li et al. 2503.01840) fuses features of three layers, attends to
concat(norm(embedding), norm(feature)) and usually has its own output head. The head's input at
position t is the pair (x_{t+1}, f_t), and its output there predicts x_{t+2}.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.core.draft_vocabulary import check_draft_vocab_size
from specjax.errors import InputError
from specjax.fields import Whole
from specjax.models.config import DecoderConfig
from specjax.models.head_config import HeadConfig
from specjax.models.layers.decoder_layer import embed
from specjax.models.layers.norm import rms_norm
from specjax.models.pair_head import PairHead
from specjax.models.parameter_table import attention_table, linear, mlp_table, norm_table
from specjax.models.parameters import Parameter

VERSIONS = {"eagle": 1, "eagle3": 3}
"""The version of each kind of head; a kind is also the drafter's name."""


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """The version and the published flags of an EAGLE head; all but `fc_bias` are of version 3."""

    version: Annotated[int, Whole(1, 3, remedy="use 1 or 3")]
    """1 for EAGLE, 3 for EAGLE-3."""
    fc_bias: bool = False
    """Whether the layer that joins features has a bias."""
    own_embedding: bool = False
    """Whether the head has an embedding of its own; otherwise it uses the target's."""
    own_head: bool = True
    """Whether the head has an output layer of its own; otherwise, and always in EAGLE, it uses the
    target's.
    """
    norm_before_residual: bool = False
    """Whether the residual is the normed feature."""
    norm_before_fc: bool = False
    """Whether features are normed together before they are joined."""
    fc_norm: bool = False
    """Whether features are normed one by one before they are joined."""
    norm_output: bool = False
    """Whether the next draft step reads the output after the norm."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig(EagleShape, HeadConfig):
    """The config of an EAGLE head.

    `decoder` describes the head's layer, with the target's vocabulary (V). `taps` are the names of
    the target's features that the head reads, each of width `target_hidden_size` (Dt);
    `draft_vocab_size` (Vd) is the number of logits. Raises InputError for inconsistent sizes or
    flags.
    """

    decoder: DecoderConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[str, ...]
    most_layers = 1  # without a type, since it is no field

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise InputError(f"version={self.version}: use 1 (EAGLE-1 and 2) or 3")
        if self.decoder.num_layers > self.most_layers:
            raise InputError(f"num_layers={self.decoder.num_layers}: an EAGLE head has one layer")
        if (unlike_llama := self.decoder.unlike_llama) is not None:
            raise InputError(f"{unlike_llama}: an EAGLE head's layer is Llama's; use its values")
        check_draft_vocab_size(self.draft_vocab_size, self.decoder.vocab_size)
        if not self.taps:
            raise InputError("taps is empty: name the target's features that the head reads")
        if self.version == 1:
            flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            set_flags = [flag for flag in (*flags, "own_embedding") if getattr(self, flag)]
            if set_flags:
                raise InputError(f"{set_flags[0]}=True: version 1 has no such part; leave it out")
            if self.taps != ("final_norm",):
                raise InputError(f"taps={self.taps}: version 1 reads one feature, final_norm")
        if self.shares_output and self.target_hidden_size != self.decoder.hidden_size:
            raise InputError(
                f"hidden_size={self.decoder.hidden_size}: must be as wide as its target, "
                f"{self.target_hidden_size}, whose output head it uses"
            )

    @property
    def kind(self) -> str:
        """The kind of head: "eagle" or "eagle3"."""
        return next(kind for kind, version in VERSIONS.items() if version == self.version)

    def check_kind(self, kind: str) -> None:
        """Raise InputError unless heads with this config are of the given kind."""
        if (version := VERSIONS.get(kind, self.version)) != self.version:
            raise InputError(f"head: {kind} needs version={version}")
        super().check_kind(kind)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that the head reads."""
        return self.taps

    @property
    def attention_width(self) -> int:
        """The input width of the query, key and value projections."""
        return self.decoder.hidden_size * (2 if self.version == 3 else 1)

    @property
    def shares_output(self) -> bool:
        """Whether logits are computed with the target's output head, from this head's features."""
        return self.version == 1 or not self.own_head

    @property
    def num_modules(self) -> int:
        """The number of modules: 1, since all draft steps run the same module."""
        return 1

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the head's parameters, as a nested dict of `Parameter`.

        It is laid out as in `models.parameter_table`.
        """
        decoder = self.decoder
        width, norm = decoder.hidden_size, functools.partial(norm_table, decoder)
        taps = len(self.taps) * self.target_hidden_size
        attention = attention_table(decoder, self.attention_width)
        attention["output"].pop("bias", None)
        layer = {"attention": attention, "mlp_norm": norm(), "mlp": mlp_table(decoder)}
        fused = 2 * width if self.version == 1 else taps
        table: dict[str, Any] = {
            "fc": linear(fused, width, axes=(None, "embed"), bias=self.fc_bias),
            "layer": layer,
        }
        if self.version == 3:
            layer["embedding_norm"] = layer["hidden_norm"] = table["final_norm"] = norm()
        if not self.shares_output:
            table["head"] = linear(width, self.draft_vocab_size, axes=("embed", "vocab"))
        if self.norm_before_fc:
            table["input_norm"] = norm(taps)
        if self.fc_norm:
            table["fc_norm"] = {
                str(tap): norm(self.target_hidden_size) for tap in range(len(self.taps))
            }
        if self.own_embedding:
            table["embed"] = {
                "embedding": Parameter((decoder.vocab_size, width), ("vocab", "embed"))
            }
        return table


def default_taps(num_layers: int) -> tuple[str, ...]:
    """Return EAGLE-3's published taps for a target with L layers.

    They are the names of the inputs of layers 2, L/2 and L - 3.
    """
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if not 0 < low < middle < high:
        low, middle, high = 0, num_layers // 2, num_layers - 1
    return tuple(f"layer_input:{layer}" for layer in (low, middle, high))


@dataclass(frozen=True)
class Eagle(PairHead):
    """An EAGLE head as plain functions of its parameters; hashable.

    "shared" holds the target's embedding and, for a config that `shares_output`, the columns of its
    output head.
    """

    config: EagleConfig

    def module(self, params: dict[str, Any], index: int) -> dict[str, Any]:
        """Return all parameters, since the head has a single module."""
        assert index == 0, index
        return params

    def fuse(
        self, params: dict[str, Any], features: dict[str, Float[Array, "B T Dt"]]
    ) -> Float[Array, "B T D"]:
        """Return the hidden states that the head reads first: a linear layer over all taps.

        `features` are the target's features by the names in `config.taps`.
        """
        taps = [features[name].astype(self.dtype) for name in self.config.taps]
        if self.config.version == 1:
            return taps[0]
        eps = self.config.decoder.rms_norm_eps
        if self.config.fc_norm:
            taps = [
                rms_norm(tap, params["fc_norm"][str(index)]["scale"], eps)
                for index, tap in enumerate(taps)
            ]
        fused = jnp.concatenate(taps, axis=-1)
        if self.config.norm_before_fc:
            fused = rms_norm(fused, params["input_norm"]["scale"], eps)
        return self.arithmetic.project("btd,dn->btn", fused, params["fc"])

    def inputs(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T Din"]]:
        """Return the residual stream and attention's input for pairs of a token and a hidden state.

        `positions` are the positions of the pairs.
        """
        del positions
        source = params if self.config.own_embedding else params["shared"]
        embedded = embed(source, tokens, self.dtype)
        if self.config.version == 1:
            both = jnp.concatenate([embedded, hidden], axis=-1)
            fused = self.arithmetic.project("btd,dn->btn", both, params["fc"])
            return fused, fused
        layer = params["layer"]
        normed = self.arithmetic.norm(hidden, layer["hidden_norm"])
        both = jnp.concatenate(
            [self.arithmetic.norm(embedded, layer["embedding_norm"]), normed], -1
        )
        return (normed if self.config.norm_before_residual else hidden), both

    def next_hidden(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Return the hidden state that the next draft step reads in place of a target feature."""
        return super().readout(params, output) if self.config.norm_output else output

    def readout(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Return the layer's outputs after the final norm, which `logit_kernel` projects."""
        return super().readout(params, output) if self.config.version == 3 else output

    def logit_kernel(self, params: dict[str, Any]) -> Float[Array, "D Vd"]:
        """Return the matrix that maps the result of `readout` to draft logits.

        It is the head's own, or columns of the target's output head.
        """
        shares = self.config.shares_output
        return (params["shared"]["draft_head"] if shares else params["head"])["kernel"]
