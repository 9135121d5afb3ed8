"""EAGLE heads in SafeAILab's layouts, and EAGLE-3 heads in the layout of the speculators library.

EAGLE-1 and 2: `fc`, whose input is concat(embedding, feature), and `layers.0` without an input norm
(model/cnets1.py of SafeAILab/EAGLE). EAGLE-3: `fc` over the taps, `midlayer`, `norm`, `lm_head` and
the maps `d2t` and `t2d` (model/cnets.py). Speculators (config version 0.9) has the same tensors,
with `layers.0` for `midlayer`, and the layer's fields in the section `transformer_layer_config`.
Rotary dimensions are in two halves, as in transformers and specjax.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from specjax.errors import InputError
from specjax.loading.formats import tensor_layout
from specjax.loading.formats.families import schema
from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.formats.families.schema import Values
from specjax.loading.formats.parameter_names import Shape, TensorEntry
from specjax.loading.formats.unread_fields import check_unread
from specjax.loading.model import Model
from specjax.methods.eagle.head import EagleConfig
from specjax.methods.heads import config_fields, eagle3_layer_ids
from specjax.methods.heads.config_fields import Export, HeadFields, HeadPart
from specjax.methods.heads.draft_vocabulary import WHOLE
from specjax.methods.heads.head import Head
from specjax.methods.heads.published_layout import Copy, PublishedLayout, Signs, decoder_tensors
from specjax.methods.heads.shared_with_target import target_embedding, target_head

_SECTION, _EMBEDDING = "eagle_config", "embed_tokens.weight"
SPECULATIVE_TOKENS = 4
_OF_OTHER_TOOLS = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1,),
}
"""Fields of `eagle_config`, written by tools of vLLM and ModelOpt, with the supported values."""


def _tensors(layer: str) -> tuple[TensorEntry, ...]:
    """Return the rows of the tensors of all versions; `layer` begins those of the head's layer."""
    return (
        TensorEntry("fc.weight", ("fc", "kernel")),
        TensorEntry("fc.bias", ("fc", "bias")),
        *decoder_tensors(layer, ("layer",)),
        TensorEntry(f"{layer}.input_layernorm.weight", ("layer", "embedding_norm", "scale")),
        TensorEntry(f"{layer}.hidden_norm.weight", ("layer", "hidden_norm", "scale")),
        TensorEntry("input_norm.weight", ("input_norm", "scale")),
        TensorEntry("fc_norm.{tap}.weight", ("fc_norm", "{tap}", "scale")),
    )


def _output_bias(layer: str, config: EagleConfig) -> Mapping[str, Shape]:
    """Return the name and shape of the bias that `attention_bias` adds in transformers alone."""
    biased = config.decoder.attention_bias
    return {f"{layer}.self_attn.o_proj.bias": (config.decoder.hidden_size,)} if biased else {}


def _renamed(names: Collection[str], other: str, own: str) -> Mapping[str, str]:
    """Return the names of tensors of a layer that a file calls `other` instead of `own`."""
    if f"{other}.hidden_norm.weight" not in names:
        return {}
    return {name: own + name[len(other) :] for name in names if name.startswith(f"{other}.")}


def _read_bias(fields: HeadFields, known: Values) -> Values:
    """State, as the tensors show, whether queries, keys and values have biases, if nothing does."""
    biased = any(name.endswith(".q_proj.bias") for name in fields.tensors)
    fields.values = {"attention_bias": fields.flag("qkv_bias", biased), **fields.values}
    return {}


def _read_eagle1(fields: HeadFields, known: Values) -> Values:
    """Return whether there is a bias, which the tensors show; check fields of vLLM's EAGLEConfig.

    Raises InputError for what only vLLM can do.
    """
    size, bias = fields.get("vocab_size"), "fc.bias" in fields.tensors
    ours = {"method": "eagle", "skip_prenorm": True, "skip_output_norm": True}
    for name, value in {**ours, "truncated_vocab_size": size}.items():
        fields.only(name, value)
    for name in ("bias", "eagle_fc_bias"):
        fields.agree(name, bias, f"the file has {'' if bias else 'no '}fc.bias; repair config.json")
    return {"fc_bias": bias}


def _without_map(head: Head, target: Model, format: str) -> Head:
    """Return the head; raise InputError if it has a draft vocabulary."""
    if head.draft_ids is not None:
        raise InputError(
            f"format={format!r}: the layout has no draft vocabulary, and this head has "
            f"{head.config.draft_vocab_size} of {head.target.vocab_size} tokens; export "
            "it with whole_vocabulary, so that it uses the target's whole head"
        )
    return head


MASK = "mask_hidden"
"""A tensor of heads with masks, whose layouts are otherwise the same."""
# EAGLE's code for Qwen2 copies the target's type; its layer is Llama's with biases.
MODEL_TYPES = "llama", "qwen2"
ONE_LAYER = config_fields.layers(LLAMA, MODEL_TYPES, "layer is Llama's", most=1)
_LAYER = HeadPart(_read_bias), ONE_LAYER
_EAGLE1 = PublishedLayout(
    name="eagle",
    kind="eagle",
    config=EagleConfig,
    # Complete models have such layers too.
    signs=Signs((r"fc\.weight", r"layers\.0\..*"), r"midlayer\..*|(.*\.)?hidden_norm\.weight"),
    fields={
        "": (
            schema.written({"architectures": ["LlamaForCausalLM"]}),
            *_LAYER,
            config_fields.unwritten(config_fields.TARGET_WIDTH),
            schema.fixed({"version": 1, "taps": ("final_norm",)}),
            HeadPart(_read_eagle1, lambda export: {"bias": export.config.fc_bias}),
            config_fields.ignored("num_lookahead_tokens"),
        ),
    },
    tensors=_tensors("layers.0"),
    what="a head's layer",
    vocabulary=WHOLE,
    zeros=lambda config: _output_bias("layers.0", config),
    copies=(
        Copy(_EMBEDDING, "embedding", "EAGLE-1 uses"),
        Copy("lm_head.weight", "head", "EAGLE-1 uses"),
    ),
    prepare=_without_map,
)


def _read_section(fields: HeadFields, known: Values) -> Values:
    """Raise InputError for fields of the section that would change the head."""
    section = fields.sections[_SECTION]
    section.asked |= {"norm_before_fc", *eagle3_layer_ids.KEYS}
    check_unread(section, _OF_OTHER_TOOLS, "an EAGLE-3 head")
    fields.asked |= section.values.keys()
    return {}


def _read_taps(fields: HeadFields, known: Values) -> Values:
    return {"taps": eagle3_layer_ids.read(fields, fields.target, fields.layer_ids)}


def _write_taps(export: Export) -> dict[str, Any]:
    taps, depth = export.config.taps, export.head.target.num_layers
    return {eagle3_layer_ids.IDS: eagle3_layer_ids.write(taps, depth, export.layer_ids)}


def _check_norms(where: str, norms: Mapping[str, Any]) -> None:
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise InputError(
            f"{where}: norm_before_fc and fc_norm are both true; tools apply them in different "
            "orders, or refuse both"
        )


def _read_eagle3(fields: HeadFields, known: Values) -> Values:
    """Return whether the embedding is the head's own; one that equals the target's is borrowed."""
    _check_norms(fields.where, known)
    target, stored = fields.target, fields.tensors.get(_EMBEDDING)
    if stored is None:
        return {"own_embedding": known["decoder"].hidden_size != target.config.hidden_size}
    rows = stored[: target.config.vocab_size] if stored.ndim else stored
    same = tensor_layout.same_numbers(rows.astype(target.dtype), target_embedding(target))
    return {"own_embedding": fields.is_ours or not same}


def _with_own_head(head: Head, target: Model, format: str) -> Head:
    """Return a head that stores the columns of the target's output head that it uses.

    Columns keep the target's dtype, so that the logits are the same. A head that has an output head
    of its own is returned unchanged. Raises InputError for parts that the layouts lack.
    """
    if head.config.fc_bias:
        raise InputError(f"format={format!r}: the layout has no fc.bias, and this head has one")
    _check_norms(f"format={format!r}", vars(head.config))
    if not head.config.shares_output:
        return head
    params = {**head.params, "head": {"kernel": target_head(target, head.draft_ids).T}}
    return replace(head, config=replace(head.config, own_head=True), params=params)


_TAPS = HeadPart(_read_taps, _write_taps)
_EAGLE3_FIELDS = (
    schema.fixed({"version": 3}),
    HeadPart(write=lambda export: {"draft_vocab_size": export.config.draft_vocab_size}),
    config_fields.TARGET_WIDTH,
    # All tools share the names of these flags.
    schema.flag("norm_before_residual", "norm_before_residual"),
    schema.flag("norm_before_fc", "norm_before_fc"),
    schema.flag("fc_norm", "fc_norm"),
    schema.flag("norm_output", "norm_output"),
    HeadPart(_read_eagle3),
    config_fields.unwritten(config_fields.TARGET_DEPTH),
)
EAGLE3 = PublishedLayout(
    name="eagle3",
    kind="eagle3",
    config=EagleConfig,
    signs=Signs((r"midlayer\..*|.*\.hidden_norm\.weight",), MASK),
    fields={
        _SECTION: (
            HeadPart(_read_section),
            schema.written({"use_aux_hidden_state": True}),
            _TAPS,
        ),
        "": (
            schema.written({"architectures": ["LlamaForCausalLMEagle3"]}),
            *_LAYER,
            *_EAGLE3_FIELDS,
            # Of training.
            config_fields.ignored(
                "reuse_target_lm_head", "target_model_type", "target_model_name_or_path"
            ),
            config_fields.ignored("ttt_length", "step_loss_decay", "draft_num_hidden_layers"),
        ),
    },
    tensors=_tensors("midlayer"),
    what="a head's layer",
    zeros=lambda config: _output_bias("midlayer", config),
    copies=(Copy(_EMBEDDING, "embedding", "EAGLE-3 uses"),),
    renamed=lambda names: _renamed(names, "layers.0", "midlayer"),
    prepare=_with_own_head,
)


def _read_stated(fields: HeadFields, known: Values) -> Values:
    """Raise InputError unless the fields are there whose defaults tools disagree about."""
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


OF_SPECULATORS = config_fields.speculators(
    {"eagle3": "Eagle3Speculator"}, lambda _: "eagle3", lambda _: SPECULATIVE_TOKENS
)
SPECULATORS = replace(
    EAGLE3,
    name="speculators",
    signs=Signs(without=rf"hidden_norm\.weight|{MASK}", key=config_fields.OF_SPECULATORS),
    fields={
        config_fields.LAYERS: (*_LAYER, HeadPart(write=_write_count)),
        "": (
            OF_SPECULATORS,
            HeadPart(_read_stated),
            _TAPS,
            *_EAGLE3_FIELDS,
            HeadPart(write=lambda export: {"embed_requires_grad": export.config.own_embedding}),
            config_fields.ignored("mask_token_id"),
        ),
    },
    tensors=_tensors("layers.0"),
    zeros=lambda config: _output_bias("layers.0", config),
    renamed=lambda names: _renamed(names, "midlayer", "layers.0"),
)
LAYOUTS = (_EAGLE1, EAGLE3, SPECULATORS)
