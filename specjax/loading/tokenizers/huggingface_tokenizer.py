"""Tokenizers in Hugging Face's layout: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specjax.errors import InputError, one_line, shown
from specjax.files import json_files
from specjax.files.open_files import open_regular, regular_file
from specjax.loading.tokenizers import chat_templates
from specjax.loading.tokenizers.end_tokens import ends_in_vocabulary, named_ends
from specjax.loading.tokenizers.tokenizer import Tokenizer, refused

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_AGAIN = "download it again, or update the package tokenizers if another version wrote it"
_ROWS = "embedding_rows"
"""The field of tokenizer_config.json in which specjax stores `Tokenizer.rows`."""

INFINITY = {"__float__": "Infinity"}
"""The form of an infinite number in a JSON file that transformers 5 writes."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if there is no such file.

    Infinity, which transformers 4 writes, is read as transformers 5 writes it, as `INFINITY`.
    Raises InputError for a file that is not a JSON object.
    """
    if not path.exists():
        return {}
    value = json_files.read_json_file(path, "download it again", infinity=INFINITY)
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object; download it again")
    return value


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a model directory, or None if it has none.

    Raises InputError if there is only a SentencePiece or slow tokenizer, or if files disagree.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        for other in ("tokenizer.model", "vocab.json", "tekken.json"):
            if (directory / other).exists():
                raise InputError(
                    f"{directory}: has {other} but no tokenizer.json; make one with transformers: "
                    f"AutoTokenizer.from_pretrained({str(directory)!r})"
                    f".save_pretrained({str(directory)!r})"
                )
        return None
    regular_file(path, "download it again")
    settings = read_json(directory / "tokenizer_config.json")
    settings = read_json(directory / "special_tokens_map.json") | settings
    names = {name: text for name in _NAMES if (text := _text(settings.get(name))) is not None}
    with refused(f"{path}: not a tokenizer", _AGAIN):
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_padding()
        backend.no_truncation()
        ids = {name: backend.token_to_id(text) for name, text in names.items()}
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        # As in transformers, special tokens are found in a text before it is split.
        named = [text for name, text in names.items() if ids[name] is not None]
        backend.add_special_tokens([text for text in named if text not in added])
        added_tokens = backend.get_added_tokens_decoder().values()
    for name in ("bos_token", "eos_token"):
        if name in ids and ids[name] is None:
            raise InputError(
                f"{directory}: {name}={shown(names[name])} is not in tokenizer.json; name a token "
                "of it in tokenizer_config.json"
            )
    plain_text = {token.content for token in added_tokens if not token.special}
    ends = [ids["eos_token"]] if "eos_token" in ids else []
    vocabulary = backend.get_vocab()
    ends += stated_ends(directory, max(vocabulary.values(), default=-1) + 1)
    ends += named_ends(vocabulary, plain_text)
    rows = settings.get(_ROWS)
    # Only the post-processor adds tokens to a text: transformers 5 ignores add_bos_token and
    # add_eos_token if there is a tokenizer.json.
    tokenizer = Tokenizer(
        backend=backend,
        bos_id=ids.get("bos_token"),
        eos_ids=tuple(dict.fromkeys(ends)),
        chat_template=_template(directory, settings),
        special_tokens=tuple(names.items()),
    )
    valid = type(rows) is int and rows > 0
    return tokenizer.limited(rows, _ROWS) if valid else tokenizer


def _text(token: Any) -> str | None:
    """Return the text of a special token, or None if it is empty or not valid text.

    `token` is a string, or an object with the key "content".
    """
    token = token.get("content") if isinstance(token, dict) else token
    # JSON can spell half of a surrogate pair, which is not text.
    return token if isinstance(token, str) and token and _is_text(token) else None


def _is_text(value: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in value)


def stated_ends(directory: Path, vocab_size: int) -> list[int]:
    """Return the end-of-sequence ids below `vocab_size` in generation_config.json and config.json.

    Others are logged, except those of config.json if generation_config.json has ids: they may be
    defaults for another vocabulary. Raises InputError for values that are not whole numbers.
    """
    stated: dict[str, dict[int, None]] = {}
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(index) is int for index in listed):
            raise InputError(
                f"{directory / name}: eos_token_id={shown(value)}: must be token ids; repair it"
            )
        stated |= {name: dict.fromkeys(listed)}
    (main, first), (other, second) = stated.items()
    ids = ends_in_vocabulary(f"{directory / main}: eos_token_id", first, vocab_size)
    unseen = [index for index in second if index not in first]
    if ids:
        unseen = [index for index in unseen if 0 <= index < vocab_size]
    return ids + ends_in_vocabulary(f"{directory / other}: eos_token_id", unseen, vocab_size)


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    """Return a tokenizer's chat template from its file, or from `settings`.

    If there are several, the one called default is returned.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            with open_regular(path, "download it again") as file:
                text = file.read().decode("utf-8")
            return chat_templates.check_template(str(path), text)
        except InputError:
            raise
        except (ValueError, OSError) as error:
            raise InputError(
                f"{path}: cannot be read ({one_line(error)}); download it again"
            ) from None
    field = f"{directory / 'tokenizer_config.json'}: chat_template"
    template = settings.get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and "template" in entry for entry in template):
            raise InputError(
                f"{field}={shown(template)}: must be a text, or a list of objects with name and "
                "template; take it out or repair it"
            )
        named = [entry["template"] for entry in template if entry.get("name") == "default"]
        template = named[0] if named else None
    return None if template is None else chat_templates.check_template(field, template)


def write_tokenizer(
    tokenizer: Tokenizer, directory: Path, max_positions: int | None = None
) -> None:
    """Write the files that `read_tokenizer` reads.

    `max_positions`, the longest sequence in tokens, is written for other tools.
    """
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({} if max_positions is None else {"model_max_length": max_positions}),
        "clean_up_tokenization_spaces": False,
        **({} if tokenizer.rows is None else {_ROWS: tokenizer.rows}),
        **dict(tokenizer.special_tokens),
    }
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "generation_config.json", end_fields(tokenizer, tokenizer.eos_ids))
    if tokenizer.chat_template is not None:
        path = directory / "chat_template.jinja"
        path.write_text(tokenizer.chat_template, encoding="utf-8", newline="")


def end_fields(tokenizer: Tokenizer | None, ends: Sequence[int]) -> dict[str, Any]:
    """Return config.json's fields for the ids that begin and end a sequence.

    The begin id is the tokenizer's, and `ends` are the end ids. generation_config.json has the same
    fields.
    """
    fields: dict[str, Any] = {}
    if tokenizer is not None and tokenizer.bos_id is not None:
        fields["bos_token_id"] = tokenizer.bos_id
    if ends:
        fields["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    return fields


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
