"""Block drafters in the layouts of z-lab's DFlash and DeepSpec's DSpark, as vLLM reads them.

Both have `fc` over the taps, `hidden_norm`, the layers of Qwen3 and `norm`; embedding and output
head are the target's. The layer ids of the taps number *outputs*: that of layer i is the input of
layer i + 1. DSpark adds `markov_head.markov_w1` [V, R] and `markov_w2` [V, R], and
`confidence_head.proj` over the state and the previous token's embedding. DFlash2 adds to each layer
`attention_conv` and `mlp_conv`, and `candidate_selector`. In a config of DSpark the
anchor predicts a token unless `sample_from_anchor` is false; in one of DFlash it does not. The
mask token may be a row of the target's embedding after those of its vocabulary (z-lab's for Qwen3).
Speculators (config version 0.9) has the same tensors, with the layers' fields in the section
`transformer_layer_config`, and layer ids that number inputs. For a draft vocabulary, which DFlash2
cannot have, there are `d2t` and `t2d`, as in EAGLE-3, and its rows of the target's `lm_head`;
`markov_w2` is [Vd, R].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats import tensor_layout
from specjax.loading.formats.families import schema
from specjax.loading.formats.families.qwen import QWEN3
from specjax.loading.formats.families.schema import Values
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.loading.model import Model
from specjax.methods.block.head import BlockConfig
from specjax.methods.heads import config_fields, eagle3_layer_ids
from specjax.methods.heads.config_fields import Export, HeadFields, HeadPart
from specjax.methods.heads.head import Head
from specjax.methods.heads.published_layout import Copy, PublishedLayout, Signs, decoder_tensors

_SECTION = "dflash_config"
"""A section of the config; tools state its fields there or at the top."""
_MARKOV, _CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"
_SELECTOR, _EMBEDDING = "candidate_selector", "embed_tokens.weight"
_MASK_PICKLE = "mask_embedding.pt"
"""A file from which vLLM takes the embedding of mask tokens, if there is one."""
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
_OF_LAYER = "layers", "{layer}"
_TENSORS = (
    TensorEntry("fc.weight", ("fc", "kernel")),
    TensorEntry("hidden_norm.weight", ("hidden_norm", "scale")),
    *decoder_tensors("layers.{layer}", _OF_LAYER),
    *(
        TensorEntry(f"layers.{{layer}}.{name}.{tensor}", (*_OF_LAYER, name, *path))
        for name in ("attention_conv", "mlp_conv")
        for tensor, path in (
            ("kernel_projection.weight", ("projection", "kernel")),
            ("base_kernel", ("base",)),
        )
    ),
    TensorEntry(f"{_MARKOV}1.weight", ("markov", "embed", "embedding")),
    TensorEntry(f"{_MARKOV}2.weight", ("markov", "projection", "kernel")),
    # A linear layer with one output, whose weight is a row.
    TensorEntry(f"{_CONFIDENCE}.weight", ("confidence", "scale"), merged=True),
    TensorEntry(f"{_CONFIDENCE}.bias", ("confidence", "bias")),
    TensorEntry(f"{_SELECTOR}.hidden_projection.weight", ("selector", "projection", "kernel")),
    TensorEntry(f"{_SELECTOR}.predecessor_codebook", ("selector", "predecessors", "embedding")),
    TensorEntry(f"{_SELECTOR}.successor_codebook", ("selector", "successors", "embedding")),
)


def _taps(name: str, convention: eagle3_layer_ids.Convention) -> HeadPart:
    """Return the part for the layer ids in the field `name`, which number inputs or outputs."""
    first = int(convention == "input")

    def read(fields: HeadFields, known: Values) -> Values:
        target, ids = fields.target, fields.integers(name)
        last = target.config.num_layers - 2 + first
        if ids is None or any(not first <= index <= last for index in ids):
            raise fields.fail(
                name,
                f"must name {convention}s of layers {first}..{last} of {target.name}; use a head "
                "that was made for this target",
            )
        return {"taps": tuple(f"layer_input:{index + 1 - first}" for index in ids)}

    def write(export: Export) -> dict[str, Any]:
        taps, depth = export.config.taps, export.head.target.num_layers
        return {name: eagle3_layer_ids.write(taps, depth, convention)}

    return HeadPart(read, write)


def _read_causal(fields: HeadFields, known: Values) -> Values:
    """Return whether slots attend to earlier ones only, by any of the names that tools use."""
    flags = {fields.flag(name) for name in ("causal_head", "causal", "is_causal")}
    return {"causal": True in flags}


def _read_dspark(fields: HeadFields, known: Values) -> Values:
    """Return what the tensors show of DSpark, whether or not the config says it."""
    embedding = fields.tensors.get(f"{_MARKOV}1.weight")
    rank = 0 if embedding is None or not embedding.ndim else embedding.shape[-1]
    confidence = f"{_CONFIDENCE}.weight" in fields.tensors
    for name, value in _named(rank, confidence).items():
        fields.agree(name, value, f"the tensors say {value}; repair config.json")
    return {"markov_rank": rank, "confidence": confidence}


def _write_dspark(export: Export) -> dict[str, Any]:
    if export.head.kind == "dflash":
        return {}
    named = _named(export.config.markov_rank, export.config.confidence)
    return {**named, "markov_head_type": "vanilla"}


def _named(rank: int, confidence: bool) -> dict[str, Any]:
    return {
        "markov_rank": rank,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and rank > 0,
    }


def _read_anchor(fields: HeadFields, known: Values) -> Values:
    is_dspark = any(name.startswith((_MARKOV, _CONFIDENCE)) for name in fields.tensors)
    return {"sample_from_anchor": fields.flag("sample_from_anchor", is_dspark)}


def _read_dflash2(fields: HeadFields, known: Values) -> Values:
    """Return the sizes of what a checkpoint has of DFlash2."""
    there = {
        "conv": "layers.0.attention_conv.base_kernel" in fields.tensors,
        "selector": f"{_SELECTOR}.predecessor_codebook" in fields.tensors,
    }
    fields.asked |= set(_SIZES)
    return {name: fields.count(name) for name in _SIZES if there[name.split("_")[0]]}


def _write_dflash2(export: Export) -> dict[str, Any]:
    sizes = {name: getattr(export.config, name) for name in _SIZES}
    return sizes if export.config.conv_kernel_size else {}


def _read_limits(fields: HeadFields, known: Values) -> Values:
    """Raise InputError for what a stored head may have, and is not read."""
    fields.only("markov_head_type", "vanilla")
    fields.only("projector_type", "dflash")
    if known["decoder"].sliding_window is not None:
        raise fields.fail(
            "sliding_window",
            "block drafters have full attention in all layers here; use a head that was trained so "
            "(speculators: --full-attention-indices with all layers)",
        )
    if (fields.directory / _MASK_PICKLE).exists():
        raise InputError(
            f"{fields.directory}: {_MASK_PICKLE} has another embedding for mask tokens than the "
            "target's, and pickles are not read; use a head without it"
        )
    whole = (None, fields.stated, fields.target.config.vocab_size)
    if "selector_rank" in known and fields.get("draft_vocab_size") not in whole:
        raise fields.fail("draft_vocab_size", "a selector's candidates are of the whole vocabulary")
    return {}


def _write_draft_size(export: Export) -> dict[str, Any]:
    ids = export.head.draft_ids
    return {} if ids is None else {"draft_vocab_size": len(ids)}


def _method(config: BlockConfig) -> str:
    """Return the name of a head's method in the speculators library."""
    return "dflash2" if config.selector_rank else config.kind


_CAUSAL = HeadPart(
    _read_causal, lambda export: dict.fromkeys(("causal_head", "causal"), export.config.causal)
)
_MASK = schema.integer("mask_token_id", "mask_token_id")
_ANCHOR = HeadPart(
    _read_anchor, lambda export: {"sample_from_anchor": export.config.sample_from_anchor}
)
_DFLASH2 = HeadPart(_read_dflash2, _write_dflash2)
_OWN_SECTION = (_MASK, _taps(eagle3_layer_ids.OUTPUTS, "output"), _ANCHOR, _CAUSAL)
_LAYERS = config_fields.layers(QWEN3, ("qwen3",), "layers are Qwen3's")
_AT_THE_TOP = (
    HeadPart(write=_write_draft_size),
    schema.count("block_size", "block_size"),
    HeadPart(_read_dspark, _write_dspark),
    config_fields.unwritten(config_fields.TARGET_WIDTH),
    HeadPart(_read_limits),
    config_fields.ignored(
        "num_anchors",
        # Of speculators: of training, of windows, which no layer has, and of Domino's projector.
        *("auf", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma"),
        *("sliding_window_non_causal", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
        *("lambda_base_start", "lambda_base_decay_ratio"),
    ),
)
_OWN_FIELDS = {
    _SECTION: (*_OWN_SECTION, _DFLASH2),
    "": (
        HeadPart(write=lambda export: {"architectures": [_ARCHITECTURES[_method(export.config)]]}),
        _LAYERS,
        *_AT_THE_TOP,
        config_fields.TARGET_DEPTH,
    ),
}
_FIELDS_OF_SPECULATORS = {
    config_fields.LAYERS: (_LAYERS,),
    "": (
        config_fields.speculators(
            {**_ARCHITECTURES, "dspark": "DSparkDraftModel"},
            _method,
            lambda config: config.longest_draft,
        ),
        HeadPart(write=lambda export: {"draft_vocab_size": export.rows}),
        _taps("aux_hidden_state_layer_ids", "input"),
        _MASK,
        _DFLASH2,
        *_AT_THE_TOP,
        _ANCHOR,
        config_fields.unwritten(_CAUSAL),
        # Of windows, which no layer has; but vLLM takes false for causal blocks.
        schema.written({"sliding_window_non_causal": True}),
        config_fields.unwritten(config_fields.TARGET_DEPTH),
    ),
}


def _mask_embedding(
    config: BlockConfig, target: Model, table: np.ndarray | None = None
) -> np.ndarray | None:
    """Return the embedding of a mask token that is not in the vocabulary, or None if unknown.

    It is in the head's own `table`, or among the target's rows of padding.
    """
    token, vocab_size = config.mask_token_id, target.config.vocab_size
    padding = target.padding_embeddings
    if table is not None and token < len(table):
        return table[token]
    if padding is not None and token < vocab_size + len(padding):
        return padding[token - vocab_size]
    return None


def _read_mask(fields: HeadFields, config: BlockConfig) -> dict[str, Any]:
    """Return the embedding of a mask token that is not in the vocabulary, as a parameter.

    Raises InputError if it is unknown.
    """
    if not config.has_mask_embedding:
        return {}
    target = fields.target
    row = _mask_embedding(config, target, fields.tensors.get(_EMBEDDING))
    if row is None:
        raise fields.fail(
            "mask_token_id",
            f"the target has the tokens 0..{target.config.vocab_size - 1}, and {target.name} has "
            "no embedding of this one as loaded; load the target that the head was made for from "
            "its original files",
        )
    return {"mask": {"embedding": row.astype(fields.tensors["fc.weight"].dtype)}}


def _check(head: Head, target: Model, format: str) -> Head:
    """Return the head; raise InputError for what the layouts cannot say.

    That is a selector over a draft vocabulary, convolutions without a selector and the reverse,
    causal blocks in the layout of speculators, and an embedding of mask tokens that is not the
    target's.
    """
    config, where = head.config, f"format={format!r}"
    if head.draft_ids is not None and config.selector_rank:
        raise InputError(
            f"{where}: the layout of DFlash2 has no draft vocabulary, and this head has "
            f"{config.draft_vocab_size} of {config.decoder.vocab_size} tokens; export it with "
            "whole_vocabulary, so that it uses the target's whole head"
        )
    of_dflash2 = bool(config.conv_kernel_size), bool(config.selector_rank)
    if any(of_dflash2) and not (all(of_dflash2) and head.kind == "dflash"):
        raise InputError(
            f"{where}: there are layouts for heads with convolutions and a selector (DFlash2) and "
            f"for those without both, and this one is a {head.kind} with "
            f"conv_kernel_size={config.conv_kernel_size} and selector_rank={config.selector_rank}; "
            "use it in specjax alone"
        )
    if config.causal and format == "speculators":
        raise InputError(
            f"{where}: the layout has no causal blocks, and this head's are; use format={head.kind}"
        )
    if config.has_mask_embedding:
        own, row = np.asarray(head.params["mask"]["embedding"]), _mask_embedding(config, target)
        if row is None or not tensor_layout.same_numbers(own, row):
            raise InputError(
                f"{where}: the layout takes the embedding of mask_token_id="
                f"{config.mask_token_id} from the target, and {target.name} as loaded has not the "
                "one of this head; load the target from its original files"
            )
    return head


# The first layer of EAGLE-1 has no norm of queries.
_NAMES = (r"fc\.weight", r"hidden_norm\.weight", r"layers\.0\.self_attn\.q_norm\.weight")
_NAMES_OF_DSPARK = r"markov_head\.markov_w.*|confidence_head\.proj.*"
_DFLASH = PublishedLayout(
    name="dflash",
    kind="dflash",
    config=BlockConfig,
    signs=Signs(_NAMES, _NAMES_OF_DSPARK),
    fields=_OWN_FIELDS,
    tensors=_TENSORS,
    what="a block drafter",
    # DeepSeek's own have none.
    optional=(("confidence", "bias"),),
    copies=(
        Copy(_EMBEDDING, "embedding", "a block drafter uses"),
        Copy(
            "lm_head.weight",
            "head",
            "a block drafter uses",
            written=lambda head: head.draft_ids is not None,
        ),
    ),
    pads=True,
    prepare=_check,
    finish=_read_mask,
)
_DSPARK = replace(
    _DFLASH,
    name="dspark",
    kind="dspark",
    signs=Signs((*_NAMES, _NAMES_OF_DSPARK)),
    # DeepSpec states the fields of the section at the top.
    fields={**_OWN_FIELDS, "": (*_OWN_FIELDS[""], *_OWN_SECTION)},
)
LAYOUTS = (
    _DFLASH,
    _DSPARK,
    *(
        replace(
            layout,
            name="speculators",
            signs=layout.signs._replace(key=config_fields.OF_SPECULATORS),
            fields=_FIELDS_OF_SPECULATORS,
        )
        for layout in (_DFLASH, _DSPARK)
    ),
)
