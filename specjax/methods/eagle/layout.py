"""EAGLE heads in SafeAILab's layouts, and EAGLE-3 heads in the layout of the speculators library.

EAGLE-1 and 2: `fc`, whose input is concat(embedding, feature), and `layers.0` without an input norm
(model/cnets1.py of SafeAILab/EAGLE). EAGLE-3: `fc` over the taps, `midlayer`, `norm`, `lm_head` and
the maps `d2t` and `t2d` (model/cnets.py). Speculators (config version 0.9) has the same tensors,
with `layers.0` for `midlayer`, and the layer's fields in the section `transformer_layer_config`.
Rotary dimensions are in two halves, as in transformers and specjax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from specjax.errors import InputError
from specjax.loading.formats import tensor_layout
from specjax.loading.formats.families import schema
from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.parameter_names import Shape, TensorEntry
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.methods.eagle.head import EagleConfig
from specjax.methods.heads import eagle3_layer_ids
from specjax.methods.heads.config_fields import (
    TARGET_DEPTH,
    TARGET_WIDTH,
    ignored,
    layers,
    only,
    section,
    shown_by_tensors,
    speculators,
    unwritten,
)
from specjax.methods.heads.draft_vocabulary import WHOLE
from specjax.methods.heads.head import Head
from specjax.methods.heads.head_fields import LAYERS, Export, HeadFields, HeadPart
from specjax.methods.heads.published_layout import (
    Copy,
    PublishedLayout,
    Signs,
    layer_tensors,
    linear,
    norm,
)
from specjax.methods.heads.shared_with_target import target_embedding, target_head

_EMBEDDING = "embed_tokens.weight"
_SPECULATIVE_TOKENS = 4
# EAGLE's code for Qwen2 copies the target's type; its layer is Llama's with biases.
_LAYER = layers(LLAMA, ("llama", "qwen2"), "layer is Llama's", most=1)


def _tensors(layer: str) -> tuple[TensorEntry, ...]:
    """Return the rows of the tensors of all versions; `layer` begins those of the head's layer."""
    return (
        *linear("fc", "fc"),
        *layer_tensors(LLAMA.tensors, layer, ("layer",)),
        norm(f"{layer}.input_layernorm", "layer", "embedding_norm"),
        norm(f"{layer}.hidden_norm", "layer", "hidden_norm"),
        norm("norm", "final_norm"),
        TensorEntry("lm_head.weight", ("head", "kernel")),
        norm("input_norm", "input_norm"),
        norm("fc_norm.{tap}", "fc_norm", "{tap}"),
        TensorEntry(_EMBEDDING, ("embed", "embedding")),
    )


def _output_bias(layer: str) -> Callable[[EagleConfig], Mapping[str, Shape]]:
    """Return a function of a config that returns the name and shape of the output's bias.

    In transformers `attention_bias` adds one, which these heads lack.
    """

    def zeros(config: EagleConfig) -> Mapping[str, Shape]:
        biased = config.decoder.attention_bias
        return {f"{layer}.self_attn.o_proj.bias": (config.decoder.hidden_size,)} if biased else {}

    return zeros


def _first_version(head: Head, target: Model, where: str) -> Head:
    """Return the head; raise InputError if it has a draft vocabulary."""
    if head.draft_ids is not None:
        raise InputError(
            f"{where}: the layout has no draft vocabulary, and this head has "
            f"{head.config.draft_vocab_size} of {head.target.vocab_size} tokens; export "
            "it with whole_vocabulary, so that it uses the target's whole head"
        )
    return head


def _read_size(fields: Fields, known: Values) -> Values:
    fields.only("truncated_vocab_size", fields.get("vocab_size"))
    return {}


_EAGLE1 = PublishedLayout(
    name="eagle",
    kind="eagle",
    config=EagleConfig,
    # Complete models have such layers too.
    signs=Signs((r"fc\.weight", r"layers\.0\..*"), r"midlayer\..*|(.*\.)?hidden_norm\.weight"),
    fields={
        "": (
            schema.written({"architectures": ["LlamaForCausalLM"]}),
            _LAYER,
            unwritten(TARGET_WIDTH),
            schema.fixed({"version": 1, "taps": ("final_norm",)}),
            shown_by_tensors(
                "fc_bias",
                ("bias", "eagle_fc_bias"),
                lambda tensors: "fc.bias" in tensors,
                lambda has: f"the file has {'' if has else 'no '}fc.bias; repair config.json",
            ),
            # Fields of vLLM's EAGLEConfig.
            only({"method": "eagle", "skip_prenorm": True, "skip_output_norm": True}),
            Part(_read_size),
            ignored("num_lookahead_tokens"),
        )
    },
    tensors=_tensors("layers.0"),
    what="an EAGLE head",
    vocabulary=WHOLE,
    zeros=_output_bias("layers.0"),
    copies=(
        Copy(_EMBEDDING, "embedding", "EAGLE-1 uses"),
        Copy("lm_head.weight", "head", "EAGLE-1 uses"),
    ),
    prepare=_first_version,
)


def _read_taps(fields: HeadFields, known: Values) -> Values:
    return {"taps": eagle3_layer_ids.read(fields, fields.target, fields.layer_ids)}


def _write_taps(export: Export) -> dict[str, Any]:
    taps, depth = export.config.taps, export.head.target.num_layers
    return {eagle3_layer_ids.IDS: eagle3_layer_ids.write(taps, depth, export.layer_ids)}


def _read_embedding(fields: HeadFields, known: Values) -> Values:
    """Return whether the embedding is the head's own; one that equals the target's is borrowed."""
    target = fields.target
    if (stored := fields.tensors.get(_EMBEDDING)) is None:
        return {"own_embedding": known["decoder"].hidden_size != target.config.hidden_size}
    rows = stored[: target.config.vocab_size] if stored.ndim else stored
    same = tensor_layout.same_numbers(rows.astype(target.dtype), target_embedding(target))
    return {"own_embedding": fields.is_ours or not same}


def _check_norms(where: str, norms: Mapping[str, Any]) -> None:
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise InputError(
            f"{where}: norm_before_fc and fc_norm are both true; tools apply them in different "
            "orders, or refuse both"
        )


def _read_norms(fields: HeadFields, known: Values) -> Values:
    _check_norms(fields.where, known)
    return {}


_TAPS = HeadPart(_read_taps, _write_taps)
_EAGLE3_FIELDS = (
    schema.fixed({"version": 3}),
    HeadPart(write=lambda export: {"draft_vocab_size": export.config.draft_vocab_size}),
    TARGET_WIDTH,
    # All tools share the names of these flags.
    *(
        schema.flag(name, name)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    ),
    HeadPart(_read_norms),
    HeadPart(_read_embedding),
    unwritten(TARGET_DEPTH),
)


def _with_own_head(head: Head, target: Model, where: str) -> Head:
    """Return a head that stores the columns of the target's output head that it uses.

    Columns keep the target's dtype, so that the logits are the same. A head that has an output head
    of its own is returned unchanged. Raises InputError for parts that the layouts lack.
    """
    config = head.config
    if config.fc_bias:
        raise InputError(f"{where}: the layout has no fc.bias, and this head has one")
    _check_norms(where, vars(config))
    if not config.shares_output:
        return head
    rows = target_head(target)
    rows = rows if head.draft_ids is None else rows[head.draft_ids]
    params = {**head.params, "head": {"kernel": rows.T}}
    return replace(head, config=replace(config, own_head=True), params=params)


def _renamed(other: str, own: str) -> Callable[[Collection[str]], Mapping[str, str]]:
    """Return a function of a file's names that renames the layer `other` to `own`."""

    def renamed(names: Collection[str]) -> Mapping[str, str]:
        if f"{other}.hidden_norm.weight" not in names:
            return {}
        start = f"{other}."
        return {name: own + name[len(other) :] for name in names if name.startswith(start)}

    return renamed


_OF_OTHER_TOOLS = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1,),
}
"""Fields of `eagle_config`, written by tools of vLLM and ModelOpt, with the supported values."""

_EAGLE3 = PublishedLayout(
    name="eagle3",
    kind="eagle3",
    config=EagleConfig,
    signs=Signs((r"midlayer\..*|.*\.hidden_norm\.weight",)),
    fields={
        "eagle_config": (
            section(
                "eagle_config",
                ("norm_before_fc", *eagle3_layer_ids.KEYS),
                _OF_OTHER_TOOLS,
                "an EAGLE-3 head",
            ),
            schema.written({"use_aux_hidden_state": True}),
            _TAPS,
        ),
        "": (
            schema.written({"architectures": ["LlamaForCausalLMEagle3"]}),
            _LAYER,
            *_EAGLE3_FIELDS,
            # Of training.
            ignored("reuse_target_lm_head", "target_model_type", "target_model_name_or_path"),
            ignored("ttt_length", "step_loss_decay", "draft_num_hidden_layers"),
        ),
    },
    tensors=_tensors("midlayer"),
    what="an EAGLE-3 head",
    zeros=_output_bias("midlayer"),
    copies=(Copy(_EMBEDDING, "embedding", "EAGLE-3 uses"),),
    renamed=_renamed("layers.0", "midlayer"),
    prepare=_with_own_head,
)


def _read_stated(fields: Fields, known: Values) -> Values:
    if fields.get("norm_before_residual") is None:
        raise fields.fail(
            "norm_before_residual",
            "must be true or false: speculators takes a missing one for false, vLLM for true",
        )
    fields.count("draft_vocab_size")
    return {}


def _write_count(export: Export) -> dict[str, Any]:
    """Return the number of taps, which vLLM counts where it is not 3."""
    count = len(export.config.taps)
    return {} if count == 3 else {eagle3_layer_ids.COUNT: count}


_OF_SPECULATORS = replace(
    _EAGLE3,
    name="speculators",
    signs=Signs(without=r"hidden_norm\.weight", key="speculators_model_type"),
    fields={
        LAYERS: (_LAYER, HeadPart(write=_write_count)),
        "": (
            speculators(
                {"eagle3": "Eagle3Speculator"}, lambda _: "eagle3", lambda _: _SPECULATIVE_TOKENS
            ),
            Part(_read_stated),
            _TAPS,
            *_EAGLE3_FIELDS,
            HeadPart(write=lambda export: {"embed_requires_grad": export.config.own_embedding}),
            ignored("mask_token_id"),
        ),
    },
    tensors=_tensors("layers.0"),
    zeros=_output_bias("layers.0"),
    renamed=_renamed("midlayer", "layers.0"),
)
LAYOUTS = (_EAGLE1, _EAGLE3, _OF_SPECULATORS)
