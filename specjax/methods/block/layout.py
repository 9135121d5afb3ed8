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

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.loading.formats import build_parameters, parameter_names, tensor_layout
from specjax.loading.formats.families.qwen import QWEN3
from specjax.loading.formats.unread_fields import check_unread, implied
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.methods.block.head import BlockConfig
from specjax.methods.heads import draft_vocabulary
from specjax.methods.heads import eagle3_layer_ids as layer_ids
from specjax.methods.heads.checkpoint import Checkpoint, match
from specjax.methods.heads.config_fields import (
    check_depth,
    say_count,
    speculators_fields,
)
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.heads.shared_with_target import (
    check_copy,
    target_embedding,
    target_head,
)
from specjax.models.config import DecoderConfig
from specjax.models.joined_kernels import parts

_LAYER = re.compile(r"layers\.(\d+)\.")
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
_SECTION = "dflash_config"
"""A section of the config; tools state its fields there or at the top."""
_MARKOV, _CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"
_MASK_PICKLE = "mask_embedding.pt"
"""A file from which vLLM takes the embedding of mask tokens, if there is one."""
_SELECTOR, _EMBEDDING, _HEAD = "candidate_selector", "embed_tokens.weight", "lm_head.weight"
_OVER_VOCABULARY = {
    f"{_MARKOV}1.weight",
    *(f"{_SELECTOR}.{name}_codebook" for name in ("predecessor", "successor")),
}
"""The names of tensors with a row for each token."""
_OVER_DRAFTED = (_HEAD, f"{_MARKOV}2.weight")
"""The names of tensors with a row for each token that can be drafted."""
_CAUSAL = ("causal_head", "causal", "is_causal")
"""The names by which tools say that slots attend to earlier ones only."""
_UNREAD = (
    "num_anchors",
    # Of speculators: of training, of windows, which no layer has, and of Domino's projector.
    *("auf", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma"),
    *("sliding_window_non_causal", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
    *("lambda_base_start", "lambda_base_decay_ratio"),
)
"""Fields without an effect on a stored drafter."""
_SUPPORTED = {"markov_head_type": ("vanilla",), "projector_type": ("dflash",)}
_LAYERS, _INPUTS = "transformer_layer_config", "aux_hidden_state_layer_ids"
_TYPE, _OF_SPECULATORS = "speculators_model_type", "speculators_config"
_SPECULATORS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
"""The kinds of block drafters in speculators, with the names of their classes."""
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CONVOLUTIONS = ("attention_conv", "mlp_conv")
_MODULES = {
    "self_attn.q_proj": ("attention", "query"),
    "self_attn.k_proj": ("attention", "key"),
    "self_attn.v_proj": ("attention", "value"),
    "self_attn.o_proj": ("attention", "output"),
    "self_attn.q_norm": ("attention", "query_norm"),
    "self_attn.k_norm": ("attention", "key_norm"),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.up_proj": ("mlp", "up"),
    "mlp.down_proj": ("mlp", "down"),
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("mlp_norm",),
}
"""The modules of a layer, with their paths in the tree."""


def kind_of(names: Collection[str]) -> str | None:
    """Return the kind of a block drafter, dflash or dspark, by the names of its tensors, or None.

    The first layer of EAGLE-1 has no norm of queries.
    """
    if not {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= set(names):
        return None
    extra = (_MARKOV, _CONFIDENCE)
    return "dspark" if any(name.startswith(extra) for name in names) else "dflash"


def read(
    checkpoint: Checkpoint, target: Model, metadata: TargetMetadata, training: dict[str, Any]
) -> Head:
    """Return a block drafter; an embedding or output head stored with it must equal the target's.

    `metadata` identifies the target, and `training` is stored with the head. Raises InputError for
    inconsistent fields, names or shapes, for a mask token without an embedding, and for layer ids
    out of range.
    """
    where = checkpoint.directory
    if (where / _MASK_PICKLE).exists():
        raise InputError(
            f"{where}: {_MASK_PICKLE} has another embedding for mask tokens than the target's, and "
            "pickles are not read; use a head without it"
        )
    fields = _in_one(Fields(str(where / "config.json"), checkpoint.config))
    kind = kind_of(checkpoint.tensors)
    assert kind is not None
    decoder = _read_layers(fields, target, checkpoint.tensors)
    for name in _UNREAD:
        fields.get(name)
    taps = _read_taps(fields, target, by_inputs=_TYPE in checkpoint.config)
    _check_target(fields, target, len(taps))
    stated = fields.count("vocab_size")
    size = fields.count("draft_vocab_size", stated)
    tensors, draft_ids = draft_vocabulary.read(checkpoint, target, _OVER_DRAFTED, size, stated)
    rank = tensors[f"{_MARKOV}1.weight"].shape[-1] if f"{_MARKOV}1.weight" in tensors else 0
    has_confidence = f"{_CONFIDENCE}.weight" in tensors
    for name, value in (
        ("markov_rank", rank),
        ("enable_confidence_head", has_confidence),
        ("confidence_head_with_markov", has_confidence and rank > 0),
    ):
        if fields.get(name) not in (None, value):
            raise fields.fail(name, f"the tensors say {value}; repair config.json")
    config = BlockConfig(
        decoder=decoder,
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=target.config.vocab_size if draft_ids is None else len(draft_ids),
        taps=taps,
        block_size=fields.count("block_size"),
        mask_token_id=fields.integer("mask_token_id"),
        causal=True in {fields.flag(name) for name in _CAUSAL},
        sample_from_anchor=fields.flag("sample_from_anchor", kind == "dspark"),
        markov_rank=rank,
        confidence=has_confidence,
        **_read_sizes(fields, tensors),
    )
    check_unread(fields, {**implied(decoder), **_SUPPORTED}, "a block drafter")
    if config.selector_rank and draft_ids is not None:
        raise fields.fail("draft_vocab_size", "a selector's candidates are of the whole vocabulary")
    draft_ids, order = draft_vocabulary.ascending(draft_ids)
    tensors |= {name: tensors[name][order] for name in _OVER_DRAFTED if name in tensors}
    params = _read_params(where, tensors, config, target, draft_ids, stated)
    if config.has_mask_embedding:
        row = _mask_embedding(config, target, checkpoint.tensors.get(_EMBEDDING))
        if row is None:
            raise fields.fail(
                "mask_token_id",
                f"the target has the tokens 0..{target.config.vocab_size - 1}, and "
                f"{target.name} has no embedding of this one as loaded; load the target that the "
                "head was made for from its original files",
            )
        params["mask"] = {"embedding": row.astype(tensors["fc.weight"].dtype)}
    return Head(kind, config, params, draft_ids, metadata, training)


def write(
    head: Head, target: Model, *, speculators: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and the tensors of a block drafter, without the target's arrays.

    The layout is that of vLLM or of the speculators library. Tensors over the vocabulary get zeros
    for the target's rows of padding. For a draft vocabulary the target's columns of its tokens are
    written, in the target's dtype. Raises InputError for a selector over a draft vocabulary, for
    convolutions without a selector and the reverse, for taps that are no layers' outputs, for an
    embedding of mask tokens that is not the target's, and for what the layout cannot say.
    """
    config, form = head.config, "speculators" if speculators else head.kind
    assert isinstance(config, BlockConfig)
    if head.draft_ids is not None and config.selector_rank:
        raise InputError(
            f"format={form!r}: the layout of DFlash2 has no draft vocabulary, and this head has "
            f"{config.draft_vocab_size} of {config.decoder.vocab_size} tokens; export it with "
            "whole_vocabulary, so that it uses the target's whole head"
        )
    of_dflash2 = bool(config.conv_kernel_size), bool(config.selector_rank)
    if any(of_dflash2) and not (all(of_dflash2) and head.kind == "dflash"):
        raise InputError(
            f"format={form!r}: there are layouts for heads with convolutions and a selector "
            "(DFlash2) and for those without both, and this one is a "
            f"{head.kind} with conv_kernel_size={config.conv_kernel_size} and "
            f"selector_rank={config.selector_rank}; use it in specjax alone"
        )
    if config.has_mask_embedding:
        own, row = np.asarray(head.params["mask"]["embedding"]), _mask_embedding(config, target)
        if row is None or not tensor_layout.same_numbers(own, row):
            raise InputError(
                f"format={form!r}: the layout takes the embedding of mask_token_id="
                f"{config.mask_token_id} from the target, and {target.name} as loaded has not the "
                "one of this head; load the target from its original files"
            )
    tensors = {
        name: tensor_layout.to_stored(
            np.asarray(parameter_names.lookup(head.params, location.path)), location
        )
        for name, location in _locations(config).items()
    }
    if config.confidence:
        proj = head.params["confidence"]
        tensors[f"{_CONFIDENCE}.weight"] = np.asarray(proj["scale"])[None]
        tensors[f"{_CONFIDENCE}.bias"] = np.asarray(proj["bias"])
    extra = [*_locations_of_extras(config)]
    for name, path in extra:
        tensors[name] = np.asarray(parameter_names.lookup(head.params, path))
    padding = () if target.padding_embeddings is None else target.padding_embeddings
    padded = config.decoder.vocab_size + len(padding)
    over_vocabulary, drafted = {*_OVER_VOCABULARY, *_OVER_DRAFTED}, padded
    if (draft_ids := head.draft_ids) is not None:
        over_vocabulary, drafted = _OVER_VOCABULARY, len(draft_ids)
        tensors |= {_HEAD: target_head(target)[draft_ids]}
        tensors |= draft_vocabulary.offsets(draft_ids, padded)
    for name in over_vocabulary & tensors.keys():
        tensors[name] = np.pad(tensors[name], ((0, len(padding)), (0, 0)))
    dtype = tensors["fc.weight"].dtype.name
    layers = {
        "model_type": "qwen3",
        "vocab_size": padded,
        **QWEN3.write(config.decoder),
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    of_kind: dict[str, Any] = {name: getattr(config, name) for name in _SIZES} if extra else {}
    if head.kind == "dspark":
        of_kind = {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence and config.markov_rank > 0,
        }
    if speculators:
        if config.causal:
            raise InputError(
                "format='speculators': the layout has no causal blocks, and this head's are; use "
                f"format={head.kind}"
            )
        kind = "dflash2" if extra else head.kind
        return {
            **speculators_fields(kind, _SPECULATORS[kind], head.target.name, config.longest_draft),
            _LAYERS: layers,
            _INPUTS: layer_ids.write(config.taps, head.target.num_layers, "input"),
            "draft_vocab_size": drafted,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": config.sample_from_anchor,
            # Of windows, which no layer has; but vLLM takes false for causal blocks.
            "sliding_window_non_causal": True,
            **of_kind,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }, tensors
    section = {
        "mask_token_id": config.mask_token_id,
        layer_ids.OUTPUTS: layer_ids.write(config.taps, head.target.num_layers, "output"),
        "sample_from_anchor": config.sample_from_anchor,
        "causal_head": config.causal,
        "causal": config.causal,
    }
    fields = {
        "architectures": ["DFlash2DraftModel" if extra else _ARCHITECTURES[head.kind]],
        **layers,
        **({} if draft_ids is None else {"draft_vocab_size": drafted}),
        "block_size": config.block_size,
        "num_target_layers": head.target.num_layers,
    }
    if head.kind == "dspark":
        return {**fields, _SECTION: section, **section, **of_kind}, tensors
    return {**fields, _SECTION: section | of_kind}, tensors


def _in_one(file: Fields) -> Fields:
    """Return the fields of a config and of its sections as those of one object.

    Raises InputError for a field with two values.
    """
    if _TYPE not in file.values:
        section = file.section(_SECTION).values
        for name, value in section.items():
            if file.values.get(name) not in (None, value):
                raise file.fail(name, f"{_SECTION} has {shown(value)}; repair config.json")
        values = {**file.values, **section}
        values.pop(_SECTION, None)
        return Fields(file.where, values)
    if file.get(_TYPE) not in _SPECULATORS:
        raise file.fail(_TYPE, f"the tensors are those of {', '.join(_SPECULATORS)}")
    values = {**file.section(_LAYERS).values, **file.values}
    for name in (_TYPE, _OF_SPECULATORS, _LAYERS):
        values.pop(name, None)
    return Fields(file.where, values)


def _read_taps(fields: Fields, target: Model, *, by_inputs: bool) -> tuple[str, ...]:
    """Return the features for a config's layer ids, which number inputs or outputs of layers."""
    name, first, what = (_INPUTS, 1, "inputs") if by_inputs else (layer_ids.OUTPUTS, 0, "outputs")
    last = target.config.num_layers - 2 + first
    ids = fields.integers(name)
    if ids is None or any(not first <= index <= last for index in ids):
        raise fields.fail(
            name,
            f"must name {what} of layers {first}..{last} of {target.name}; use a head that was "
            "made for this target",
        )
    return tuple(f"layer_input:{index + 1 - first}" for index in ids)


def _check_target(fields: Fields, target: Model, num_taps: int) -> None:
    """Raise InputError if a config says that the head's target has another depth or width."""
    check_depth(fields, target, num_taps)
    width = target.config.hidden_size
    if fields.get("target_hidden_size") not in (None, width):
        raise fields.fail(
            "target_hidden_size", f"{target.name} has {width}; use a head made for it"
        )


def _read_sizes(fields: Fields, names: Collection[str]) -> dict[str, int]:
    """Return the sizes of what a checkpoint has of DFlash2, as fields of `BlockConfig`."""
    parts_there = {
        "conv": "layers.0.attention_conv.base_kernel" in names,
        "selector": f"{_SELECTOR}.predecessor_codebook" in names,
    }
    fields.asked |= set(_SIZES)
    return {name: fields.count(name) for name in _SIZES if parts_there[name.split("_")[0]]}


def _read_layers(fields: Fields, target: Model, names: Iterable[str]) -> DecoderConfig:
    """Return the layers that a config describes, with the target's vocabulary."""
    if fields.get("model_type") not in (None, "qwen3"):
        raise fields.fail("model_type", "use a head whose layers are Qwen3's")
    stated, known = fields.count("vocab_size"), target.config.vocab_size
    if stated < known:
        raise fields.fail("vocab_size", f"{target.name} has {known} tokens; use a head made for it")
    count = 1 + max(int(match[1]) for match in map(_LAYER.match, names) if match)
    say_count(fields, "num_hidden_layers", count)
    values = {
        **{name: value for name, value in fields.values.items() if value is not None},
        "num_hidden_layers": count,
        # The target's value: the field is about its embedding and head.
        "tie_word_embeddings": target.config.tie_word_embeddings,
    }
    layers = Fields(fields.where, values)
    decoder = replace(QWEN3.read(layers, known, target.config.unused_tokens), family="llama")
    fields.asked |= layers.asked
    if decoder.sliding_window is not None:
        raise fields.fail(
            "sliding_window",
            "block drafters have full attention in all layers here; use a head that was trained so "
            "(speculators: --full-attention-indices with all layers)",
        )
    return decoder


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


def _read_params(
    where: Path,
    tensors: dict[str, np.ndarray],
    config: BlockConfig,
    target: Model,
    draft_ids: np.ndarray | None,
    padded: int,
) -> dict[str, Any]:
    """Return the parameter tree; raise InputError for tensors that do not fit the config.

    Tensors over the vocabulary may have `padded` rows, of which those after it are dropped.
    `draft_ids` are the tokens of the rows of tensors over a draft vocabulary.
    """
    known, drafted = config.decoder.vocab_size, slice(None) if draft_ids is None else draft_ids
    for name in _OVER_VOCABULARY & tensors.keys():
        if tensors[name].shape[:1] == (padded,):
            tensors[name] = tensors[name][:known]
    for name, own, rows in (
        (_EMBEDDING, target_embedding, slice(None)),
        (_HEAD, target_head, drafted),
    ):
        if name in tensors:
            copy = tensors.pop(name)[:known]
            check_copy(where, name, copy, own(target)[rows], target, "a block drafter uses")
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    table = _locations(config)
    wanted = {name: location.stored_shape for name, location in table.items()}
    if config.confidence:
        width = config.decoder.hidden_size + config.markov_rank
        wanted |= {f"{_CONFIDENCE}.weight": (1, width), f"{_CONFIDENCE}.bias": (1,)}
        # DeepSeek's own have no bias.
        weight = tensors[f"{_CONFIDENCE}.weight"]
        tensors.setdefault(f"{_CONFIDENCE}.bias", np.zeros(1, weight.dtype))
    extras = dict(_locations_of_extras(config))
    shapes = config.parameter_table()
    wanted |= {name: parameter_names.lookup(shapes, path).shape for name, path in extras.items()}
    match(where, tensors, wanted)
    params = build_parameters.stored_tree(table.values(), tensors)
    for name, (*parents, last) in extras.items():
        node = functools.reduce(lambda node, step: node.setdefault(step, {}), parents, params)
        node[last] = tensors[name]
    if config.confidence:
        params["confidence"] = {
            "scale": tensors[f"{_CONFIDENCE}.weight"][0],
            "bias": tensors[f"{_CONFIDENCE}.bias"],
        }
    return params


def _locations(config: BlockConfig) -> dict[str, parameter_names.Location]:
    """Return the place of each tensor in the head's tree by its name, but the confidence head's."""
    modules = {"fc": ("fc",), "hidden_norm": ("hidden_norm",), "norm": ("final_norm",)}
    for layer in map(str, range(config.decoder.num_layers)):
        modules |= {
            f"layers.{layer}.{name}": ("layers", layer, *path) for name, path in _MODULES.items()
        }
        for name in _CONVOLUTIONS:
            modules[f"layers.{layer}.{name}.kernel_projection"] = (
                "layers",
                layer,
                name,
                "projection",
            )
    modules |= {
        f"{_MARKOV}1": ("markov", "embed"),
        f"{_MARKOV}2": ("markov", "projection"),
        f"{_SELECTOR}.hidden_projection": ("selector", "projection"),
    }
    known = parts(config.parameter_table(), config.decoder)
    location_of = {}
    for module, path in modules.items():
        for leaf in ("kernel", "scale", "embedding", "bias"):
            if (part := known.get((*path, leaf))) is not None:
                name = f"{module}.{'bias' if leaf == 'bias' else 'weight'}"
                entry = parameter_names.TensorEntry(name, (*path, leaf))
                (location_of[name],) = parameter_names.of_entry(entry, part, config.decoder)
    return location_of


def _locations_of_extras(config: BlockConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names of tensors of DFlash2 that are no weights of modules, and their paths."""
    if config.conv_kernel_size:
        for layer in map(str, range(config.decoder.num_layers)):
            for name in _CONVOLUTIONS:
                yield f"layers.{layer}.{name}.base_kernel", ("layers", layer, name, "base")
    if config.selector_rank:
        for name in ("predecessor", "successor"):
            yield f"{_SELECTOR}.{name}_codebook", ("selector", f"{name}s", "embedding")
