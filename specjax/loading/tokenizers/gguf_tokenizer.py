"""Construction of the tokenizer that a GGUF file's metadata describes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from specjax.errors import shown
from specjax.loading.tokenizers import chat_templates
from specjax.loading.tokenizers.end_tokens import ends_in_vocabulary, named_ends
from specjax.loading.tokenizers.tokenizer import Tokenizer, frame, is_filler, refused
from specjax.loading.typed_fields import Fields

_PREFIX = "tokenizer."
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_LONGEST = 1000  # characters; every way to split a SentencePiece token in two is tried
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The keys of tokens that end a sequence in llama.cpp."""

_INSTEAD = "load the model from a directory with its tokenizer.json"

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Splitting(NamedTuple):
    """The rules by which a byte-level vocabulary splits text before merging.

    Each pattern splits the pieces that the previous ones left.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token becomes that token without merging
    add_bos: bool = False


_DEFAULT = _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""llama.cpp's splitting for a file that names none, or "default"."""

_SPLITTINGS = {
    name: splitting
    for splitting, names in (
        (_DEFAULT, ("default",)),
        (
            _Splitting((_GPT2,)),
            ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "gigachat", "a.x-4.0"),
        ),
        (
            _Splitting((r"\p{N}", _GPT2)),
            ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        ),
        (
            _Splitting((_QWEN2,)),
            ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "kormo"),
        ),
        (_Splitting((_LLAMA3,)), ("smaug-bpe", "dbrx", "chatglm-bpe")),
        (_Splitting((_LLAMA3,), whole_words=True), ("glm4",)),
        (
            _Splitting((_LLAMA3,), whole_words=True, add_bos=True),
            ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"),
        ),
        (_Splitting((_TEKKEN,), whole_words=True, add_bos=True), ("tekken",)),
    )
    for name in names
}
"""The splitting for each name of a pre-tokenizer in llama.cpp."""


def _strings(fields: Fields, name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise fields.fail(name, f"must be a list of texts; {fields.remedy}")
    return value


def _numbers(fields: Fields, name: str, size: int, kind: type[np.generic]) -> np.ndarray:
    value = fields.get(name)
    numeric = isinstance(value, np.ndarray) and np.issubdtype(value.dtype, kind)
    if not numeric or value.size != size:
        raise fields.fail(
            name, f"must be {kind.__name__}s, one for each of the {size} tokens; {fields.remedy}"
        )
    return value


def read_tokenizer(source: str, metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file; `source` names the file in errors.

    Entries for embedding rows without a token (padding) are ignored. Raises InputError, by name,
    for an unsupported tokenizer model or pre-tokenizer, and for inconsistent metadata.
    """
    values = {
        key.removeprefix(_PREFIX): value
        for key, value in metadata.items()
        if key.startswith(_PREFIX)
    }
    fields = Fields(source, values, "convert the model again", _PREFIX)
    tokens = _strings(fields, "ggml.tokens")
    kinds = np.full(len(tokens), _NORMAL)
    if "ggml.token_type" in values:
        kinds = _numbers(fields, "ggml.token_type", len(tokens), np.integer)
    vocabulary: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds.tolist(), strict=True)):
        if kind == _UNUSED or is_filler(token, index):
            continue
        if vocabulary.setdefault(token, index) != index:
            raise fields.fail("ggml.tokens", f"{shown(token)} appears twice; {fields.remedy}")
    model = fields.get("ggml.model")
    with refused(f"{source}: the tokenizer is inconsistent", "convert the model again"):
        if model == "gpt2":
            backend, add_bos = _byte_level(fields, vocabulary)
        elif model == "llama":
            backend, add_bos = _sentencepiece(fields, tokens, vocabulary, kinds), True
        else:
            raise fields.fail(
                "ggml.model", f"is not supported (only gpt2 and llama are); {_INSTEAD}"
            )
        plain_text = {token for token, index in vocabulary.items() if kinds[index] == _USER_DEFINED}
        ends = named_ends(vocabulary, plain_text)
        special = {*ends, *(index for index in vocabulary.values() if kinds[index] == _CONTROL)}
        _add_tokens(backend, vocabulary, special, plain_text)
        return _assemble(fields, backend, tokens, ends, add_bos)


def _byte_level(fields: Fields, vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the byte-level BPE tokenizer, and whether its family starts text with bos."""
    splitting = _SPLITTINGS.get(fields.text("ggml.pre", "default"))
    if splitting is None:
        raise fields.fail(
            "ggml.pre", f"is not supported (only {', '.join(_SPLITTINGS)}); {_INSTEAD}"
        )
    merges = [tuple(merge.split(" ")) for merge in _strings(fields, "ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise fields.fail("ggml.merges", f"an entry is not two tokens; {fields.remedy}")
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words)
    )
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in splitting.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.add_bos


def _sentencepiece(
    fields: Fields, tokens: list[str], vocabulary: dict[str, int], kinds: np.ndarray
) -> tokenizers.Tokenizer:
    """Return the SentencePiece BPE tokenizer, which merges the piece with the best score first."""
    scores = _numbers(fields, "ggml.scores", len(tokens), np.floating).tolist()
    unknown = _token_id(fields, "unknown", len(tokens), 0)
    if max(map(len, tokens)) > _LONGEST:
        raise fields.fail(
            "ggml.tokens", f"one is longer than {_LONGEST} characters; {fields.remedy}"
        )
    merged = (_NORMAL, _USER_DEFINED)
    plain = {token for token, index in vocabulary.items() if kinds[index] in merged}
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
    prefix = fields.flag("ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    backend.decoder = decoders.Sequence(undo + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return backend


def _token_id(fields: Fields, name: str, size: int, default: int | None = None) -> int:
    key = f"ggml.{name}_token_id"
    index = fields.integer(key, default)
    if not 0 <= index < size:
        raise fields.fail(key, f"is outside the {size} tokens; {fields.remedy}")
    return index


def _special_ids(fields: Fields, size: int) -> dict[str, int]:
    """Return the ids of special tokens, by the names of the file's keys.

    As in llama.cpp, an end outside of the vocabulary counts as missing; so does a padding token,
    which nothing uses. Raises InputError if the first token or that of unknown text is outside.
    """
    # llama.cpp's own ids for a SentencePiece file that does not state them.
    sentencepiece = fields.get("ggml.model") == "llama"
    ids = {"bos": 1, "eos": 2} if sentencepiece and size > 2 else {}
    for name in ("bos", "unknown", "padding", *_ENDS):
        key = f"ggml.{name}_token_id"
        if fields.get(key) is None:
            continue
        if name in ("bos", "unknown"):
            ids[name] = _token_id(fields, name, size)
            continue
        index = fields.integer(key)
        if name in _ENDS:
            inside = ends_in_vocabulary(f"{fields.where}: {_PREFIX}{key}", [index], size)
        else:
            inside = 0 <= index < size
        if inside:
            ids[name] = index
    return ids


def _add_tokens(
    backend: tokenizers.Tokenizer,
    vocabulary: dict[str, int],
    special: Collection[int],
    plain_text: Collection[str],
) -> None:
    """Add special and user-defined tokens, which are found in text before it is split."""
    in_order = sorted(vocabulary.items(), key=operator.itemgetter(1))
    specials = [token for token, index in in_order if token and index in special]
    others = [token for token, index in in_order if token in plain_text and index not in special]
    for tokens, is_special in ((specials, True), (others, False)):
        added = [
            tokenizers.AddedToken(token, normalized=False, special=is_special) for token in tokens
        ]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)


def _assemble(
    fields: Fields,
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    named: Sequence[int],
    add_bos: bool,
) -> Tokenizer:
    """Return the tokenizer with the special ids and added tokens that the file states.

    `named` are the end-of-sequence ids recognized by name; `add_bos` says whether tokenizers of
    this kind start text with bos unless the file states it.
    """
    ids = _special_ids(fields, len(tokens))
    ends = dict.fromkeys([*(ids[name] for name in _ENDS if name in ids), *named])
    around = []
    for name, default in (("bos", add_bos), ("eos", False)):
        adds = fields.flag(f"ggml.add_{name}_token", default) and name in ids
        around.append((tokens[ids[name]], ids[name]) if adds else None)
    frame(backend, *around)
    template = fields.get("chat_template")
    if template is not None:
        template = chat_templates.check_template(
            f"{fields.where}: {_PREFIX}chat_template", template
        )
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return Tokenizer(
        backend=backend,
        bos_id=ids.get("bos"),
        eos_ids=tuple(ends),
        chat_template=template,
        special_tokens=tuple(
            (f"{short}_token", tokens[ids[name]]) for name, short in names.items() if name in ids
        ),
    )
