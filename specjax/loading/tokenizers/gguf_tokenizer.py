"""The tokenizer that a GGUF file's metadata describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from specjax.errors import InputError, shown
from specjax.loading.tokenizers import chat_templates
from specjax.loading.tokenizers.tokenizer import Tokenizer, refused, set_bos

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_LONGEST = 1000  # characters; every way to split a SentencePiece token in two is tried
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class _Splitting(NamedTuple):
    """How a byte-level vocabulary splits text before merging; without a pattern, as GPT-2 does."""

    digits: bool = False
    pattern: str | None = None
    whole_words: bool = False  # a piece that is a token is taken without merging
    add_bos: bool = False


# Keys are the names that llama.cpp gives to what the models were trained with.
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "default": _Splitting(),
    "smollm": _Splitting(digits=True),
    "qwen2": _Splitting(pattern=_QWEN2),
    "llama3": _Splitting(pattern=_LLAMA3, whole_words=True, add_bos=True),
    "llama-v3": _Splitting(pattern=_LLAMA3, whole_words=True, add_bos=True),
    "llama-bpe": _Splitting(pattern=_LLAMA3, whole_words=True, add_bos=True),
}


class _Metadata:
    """Typed reading of the `tokenizer.*` keys."""

    def __init__(self, source: str, metadata: dict[str, Any]) -> None:
        self.source, self.metadata = source, metadata

    def fail(self, problem: str) -> InputError:
        return InputError(f"{self.source}: {problem}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.{key}", default)
        if value is not None and type(value) is not kind:
            raise self.fail(
                f"tokenizer.{key} is not of the type {kind.__name__}; convert the model again"
            )
        return value

    def strings(self, key: str) -> list[str]:
        value = self.get(key, list)
        if not value:
            raise self.fail(f"tokenizer.{key} is missing; convert the model again")
        return value

    def numbers(self, key: str, size: int, kind: type[np.generic]) -> np.ndarray:
        value = self.get(key, np.ndarray)
        if value is None or value.size != size or not np.issubdtype(value.dtype, kind):
            raise self.fail(
                f"tokenizer.{key} must have one {kind.__name__} entry for each of the {size} "
                "tokens; convert the model again"
            )
        return value


def read_tokenizer(source: str, metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file; `source` names the file in errors.

    Raises InputError for a tokenizer model or pre-tokenizer that is not supported, by its name,
    and for metadata that contradict each other.
    """
    keys = _Metadata(source, metadata)
    tokens = keys.strings("ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise keys.fail(f"the token {twice[:40]!r} appears twice; convert the model again")
    kinds = keys.numbers("ggml.token_type", len(tokens), np.integer)
    model = keys.get("ggml.model", str)
    with refused(f"{source}: the tokenizer is inconsistent", "convert the model again"):
        if model == "gpt2":
            backend, add_bos = _byte_level(keys, vocabulary)
        elif model == "llama":
            backend, add_bos = _sentencepiece(keys, tokens, vocabulary, kinds), True
        else:
            raise keys.fail(
                f"tokenizer.ggml.model={shown(model)} is not supported; use gpt2 or llama"
            )
        _add_tokens(backend, tokens, kinds)
        return _assemble(keys, backend, tokens, kinds, add_bos)


def _byte_level(keys: _Metadata, vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """The byte-level BPE tokenizer, and whether its family starts text with bos."""
    name = keys.get("ggml.pre", str)
    splitting = _SPLITTINGS.get(name or "")
    if splitting is None:
        raise keys.fail(
            f"tokenizer.ggml.pre={shown(name)} is not supported; "
            f"use one of {', '.join(_SPLITTINGS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in keys.strings("ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise keys.fail("tokenizer.ggml.merges holds an entry that is not two tokens")
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words)
    )
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(splitting.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.add_bos


def _sentencepiece(
    keys: _Metadata, tokens: list[str], vocabulary: dict[str, int], kinds: np.ndarray
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the piece with the best score is merged first."""
    scores = keys.numbers("ggml.scores", len(tokens), np.floating).tolist()
    unknown = keys.get("ggml.unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise keys.fail(f"tokenizer.ggml.unknown_token_id={unknown}, of {len(tokens)} tokens")
    if max(map(len, tokens)) > _LONGEST:
        raise keys.fail(f"a token is longer than {_LONGEST} characters; convert the model again")
    merged = (_NORMAL, _USER_DEFINED)
    plain = {token for token, kind in zip(tokens, kinds.tolist(), strict=True) if kind in merged}
    ranked = []
    for token in plain:
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in plain and right in plain:
                order = (-scores[vocabulary[token]], vocabulary[left], vocabulary[right])
                ranked.append((order, (left, right)))
    merges = [pair for _, pair in sorted(ranked)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = keys.get("ggml.add_space_prefix", bool, True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    backend.decoder = decoders.Sequence(undo + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: np.ndarray) -> None:
    """Control and user-defined tokens are found whole in text, before any splitting."""
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            tokenizers.AddedToken(tokens[index], normalized=False, special=special)
            for index in np.flatnonzero(kinds == kind)
            if tokens[index]
        ]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _assemble(
    keys: _Metadata,
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    kinds: np.ndarray,
    add_bos: bool,
) -> Tokenizer:
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        index = keys.get(f"ggml.{name}_token_id", int)
        if index is not None:
            if not 0 <= index < len(tokens):
                raise keys.fail(
                    f"tokenizer.ggml.{name}_token_id={index} is outside the {len(tokens)} "
                    "tokens; convert the model again"
                )
            ids[name] = index
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends += [index for index in np.flatnonzero(kinds == _CONTROL) if tokens[index] in _TURN_ENDS]
    add_bos = keys.get("ggml.add_bos_token", bool, add_bos) and "bos" in ids
    if add_bos:
        set_bos(backend, (tokens[ids["bos"]], ids["bos"]))
    template = keys.metadata.get("tokenizer.chat_template")
    if template is not None:
        template = chat_templates.check_template(
            f"{keys.source}: tokenizer.chat_template", template
        )
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return Tokenizer(
        backend=backend,
        bos_id=ids.get("bos"),
        eos_ids=tuple(dict.fromkeys(int(index) for index in ends)),
        add_bos=add_bos,
        chat_template=None
        if template is None
        else chat_templates.check_template(f"{keys.source}: tokenizer.chat_template", template),
        special_tokens=tuple(
            (f"{short}_token", tokens[ids[name]]) for name, short in names.items() if name in ids
        ),
    )
