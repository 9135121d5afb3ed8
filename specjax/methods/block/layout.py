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

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats import tensor_layout
from specjax.loading.formats.families import schema
from specjax.loading.formats.families.qwen import QWEN3
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.methods.block.head import BlockConfig
from specjax.methods.heads import eagle3_layer_ids
from specjax.methods.heads.config_fields import (
    TARGET_DEPTH,
    TARGET_WIDTH,
    ignored,
    layers,
    shown_by_tensors,
    speculators,
    unwritten,
)
from specjax.methods.heads.eagle3_layer_ids import OUTPUTS, Convention
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

_SECTION = "dflash_config"
"""A section of the config; tools state its fields there or at the top."""
_MARKOV, _CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"
_SELECTOR, _EMBEDDING = "candidate_selector", "embed_tokens.weight"
_MASK_PICKLE = "mask_embedding.pt"
"""A file from which vLLM takes the embedding of mask tokens, if there is one."""
_CLASSES_OF_SPECULATORS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_LAYER = "layers.{layer}"
_PATH = ("layers", "{layer}")
_TENSORS = (
    *linear("fc", "fc"),
    norm("hidden_norm", "hidden_norm"),
    *layer_tensors(QWEN3.tensors, _LAYER, _PATH),
    *(
        entry
        for name in ("attention_conv", "mlp_conv")
        for entry in (
            *linear(f"{_LAYER}.{name}.kernel_projection", *_PATH, name, "projection"),
            TensorEntry(f"{_LAYER}.{name}.base_kernel", (*_PATH, name, "base")),
        )
    ),
    norm("norm", "final_norm"),
    TensorEntry(f"{_MARKOV}1.weight", ("markov", "embed", "embedding")),
    TensorEntry(f"{_MARKOV}2.weight", ("markov", "projection", "kernel")),
    # A linear layer with one output, whose weight is a row.
    TensorEntry(f"{_CONFIDENCE}.weight", ("confidence", "scale"), merged=True),
    TensorEntry(f"{_CONFIDENCE}.bias", ("confidence", "bias")),
    *linear(f"{_SELECTOR}.hidden_projection", "selector", "projection"),
    TensorEntry(f"{_SELECTOR}.predecessor_codebook", ("selector", "predecessors", "embedding")),
    TensorEntry(f"{_SELECTOR}.successor_codebook", ("selector", "successors", "embedding")),
)
_OF_DSPARK = r"markov_head\.markov_w.*|confidence_head\.proj.*"


def _taps(name: str, convention: Convention) -> HeadPart:
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


def _read_window(fields: Fields, known: Values) -> Values:
    if known["decoder"].sliding_window is not None:
        raise fields.fail(
            "sliding_window",
            "block drafters have full attention in all layers here; use a head that was trained so "
            "(speculators: --full-attention-indices with all layers)",
        )
    return {}


def _read_causal(fields: Fields, known: Values) -> Values:
    """Return whether slots attend to earlier ones only, by any of the names that tools use."""
    flags = {fields.flag(name) for name in ("causal_head", "causal", "is_causal")}
    return {"causal": True in flags}


def _read_sizes(fields: HeadFields, known: Values) -> Values:
    """Return the sizes of what a checkpoint has of DFlash2."""
    there = {
        "conv": "layers.0.attention_conv.base_kernel" in fields.tensors,
        "selector": f"{_SELECTOR}.predecessor_codebook" in fields.tensors,
    }
    fields.asked |= set(_SIZES)
    return {name: fields.count(name) for name in _SIZES if there[name.split("_")[0]]}


def _write_sizes(export: Export) -> dict[str, Any]:
    sizes = {name: getattr(export.config, name) for name in _SIZES}
    return sizes if export.config.conv_kernel_size else {}


def _read_selector(fields: HeadFields, known: Values) -> Values:
    """Raise InputError for a selector over a draft vocabulary."""
    whole = (None, fields.stated, fields.target.config.vocab_size)
    if "selector_rank" in known and fields.get("draft_vocab_size") not in whole:
        raise fields.fail("draft_vocab_size", "a selector's candidates are of the whole vocabulary")
    return {}


def _read_pickle(fields: HeadFields, known: Values) -> Values:
    """Raise InputError if there is another embedding of mask tokens than the target's."""
    if (fields.directory / _MASK_PICKLE).exists():
        raise InputError(
            f"{fields.directory}: {_MASK_PICKLE} has another embedding for mask tokens than the "
            "target's, and pickles are not read; use a head without it"
        )
    return {}


def _rank(tensors: Mapping[str, np.ndarray]) -> int:
    found = tensors.get(f"{_MARKOV}1.weight")
    return 0 if found is None or not found.ndim else found.shape[-1]


def _estimates(tensors: Mapping[str, np.ndarray]) -> bool:
    return f"{_CONFIDENCE}.weight" in tensors


_LAYERS = (layers(QWEN3, ("qwen3",), "layers are Qwen3's"), Part(_read_window))
_CAUSAL = HeadPart(
    _read_causal, lambda export: dict.fromkeys(("causal_head", "causal"), export.config.causal)
)
_BLOCK_SIZE = schema.count("block_size", "block_size")
_MASK = schema.integer("mask_token_id", "mask_token_id")
_RANK = shown_by_tensors("markov_rank", ("markov_rank",), _rank)
_ESTIMATE = shown_by_tensors("confidence", ("enable_confidence_head",), _estimates)
_WITH_MARKOV = ("confidence_head_with_markov",)
_CHECKS = (
    unwritten(TARGET_WIDTH),
    unwritten(TARGET_DEPTH),
    Part(_read_selector),
    Part(_read_pickle),
    shown_by_tensors(None, _WITH_MARKOV, lambda names: _estimates(names) and _rank(names) > 0),
    ignored(
        "num_anchors",
        # Of speculators: of training, of windows, which no layer has, and of Domino's projector.
        *("auf", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma"),
        *("sliding_window_non_causal", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
        *("lambda_base_start", "lambda_base_decay_ratio"),
    ),
)


def _write_draft_size(export: Export) -> dict[str, Any]:
    ids = export.head.draft_ids
    return {} if ids is None else {"draft_vocab_size": len(ids)}


def _extras(kind: str) -> Part:
    """Return the part for the sizes of DFlash2."""
    part = HeadPart(_read_sizes, _write_sizes)
    return part if kind == "dflash" else unwritten(part)


def _of_kind(kind: str) -> tuple[Part, ...]:
    """Return the parts for the Markov and the confidence head, which only DSpark states."""
    if kind == "dflash":
        return unwritten(_RANK), unwritten(_ESTIMATE)
    with_markov = HeadPart(
        write=lambda export: dict.fromkeys(
            _WITH_MARKOV, export.config.confidence and export.config.markov_rank > 0
        )
    )
    return _RANK, schema.written({"markov_head_type": "vanilla"}), _ESTIMATE, with_markov


def _own_fields(kind: str) -> dict[str, tuple[Part, ...]]:
    """Return the fields of z-lab's and DeepSpec's own layouts, for a kind of head."""
    is_dspark = kind == "dspark"
    section = (
        _MASK,
        _taps(OUTPUTS, "output"),
        schema.flag("sample_from_anchor", "sample_from_anchor", default=is_dspark),
        _CAUSAL,
    )
    return {
        _SECTION: (*section, _extras(kind)),
        "": (
            HeadPart(write=_write_class),
            *_LAYERS,
            HeadPart(write=_write_draft_size),
            _BLOCK_SIZE,
            *(section if is_dspark else ()),
            *_of_kind(kind),
            *_CHECKS,
            TARGET_DEPTH,
        ),
    }


def _write_class(export: Export) -> dict[str, Any]:
    own = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[export.head.kind]
    return {"architectures": ["DFlash2DraftModel" if export.config.selector_rank else own]}


def _fields_of_speculators(kind: str) -> dict[str, tuple[Part, ...]]:
    """Return the fields of the speculators library's layout, for a kind of head."""
    return {
        LAYERS: _LAYERS,
        "": (
            speculators(
                _CLASSES_OF_SPECULATORS,
                lambda config: "dflash2" if config.selector_rank else kind,
                lambda config: config.longest_draft,
            ),
            _taps("aux_hidden_state_layer_ids", "input"),
            HeadPart(write=lambda export: {"draft_vocab_size": export.rows}),
            HeadPart(write=_write_draft_size),
            _BLOCK_SIZE,
            _MASK,
            schema.flag("sample_from_anchor", "sample_from_anchor", default=kind == "dspark"),
            unwritten(_CAUSAL),
            # Of windows, which no layer has; but vLLM takes false for causal blocks.
            schema.written({"sliding_window_non_causal": True}),
            _extras(kind),
            *_of_kind(kind),
            *_CHECKS,
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


def _check(head: Head, target: Model, where: str) -> Head:
    """Return the head; raise InputError for what the layouts cannot say.

    That is a selector over a draft vocabulary, convolutions without a selector and the reverse,
    causal blocks in the layout of speculators, and an embedding of mask tokens that is not the
    target's.
    """
    config = head.config
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
    if config.has_mask_embedding:
        own, row = np.asarray(head.params["mask"]["embedding"]), _mask_embedding(config, target)
        if row is None or not tensor_layout.same_numbers(own, row):
            raise InputError(
                f"{where}: the layout takes the embedding of mask_token_id="
                f"{config.mask_token_id} from the target, and {target.name} as loaded has not the "
                "one of this head; load the target from its original files"
            )
    return head


def _check_causal(head: Head, target: Model, where: str) -> Head:
    head = _check(head, target, where)
    if head.config.causal:
        raise InputError(
            f"{where}: the layout has no causal blocks, and this head's are; use format={head.kind}"
        )
    return head


def _layout(kind: str, *, of_speculators: bool = False) -> PublishedLayout:
    """Return the layout of a kind of block drafter: its own, or that of speculators."""
    # The first layer of EAGLE-1 has no norm of queries.
    names = (r"fc\.weight", r"hidden_norm\.weight", r"layers\.0\.self_attn\.q_norm\.weight")
    return PublishedLayout(
        name="speculators" if of_speculators else kind,
        kind=kind,
        config=BlockConfig,
        signs=Signs(
            (*names, _OF_DSPARK) if kind == "dspark" else names,
            None if kind == "dspark" else _OF_DSPARK,
            "speculators_model_type" if of_speculators else None,
        ),
        fields=_fields_of_speculators(kind) if of_speculators else _own_fields(kind),
        tensors=_TENSORS,
        what="a block drafter",
        supported={"markov_head_type": ("vanilla",), "projector_type": ("dflash",)},
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
        prepare=_check_causal if of_speculators else _check,
        finish=_read_mask,
    )


LAYOUTS = (
    _layout("dflash"),
    _layout("dspark"),
    _layout("dflash", of_speculators=True),
    _layout("dspark", of_speculators=True),
)
