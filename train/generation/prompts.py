"""Prompts for a target to answer, read from JSONL files and TFDS datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.engine.requests import encode_prompt
from specjax.errors import InputError, shown
from specjax.fields import Text
from specjax.files.json_files import read_json_lines
from specjax.files.path_checks import input_file
from specjax.loading.model import Model
from specjax.loading.texts.tfds_texts import FieldNames, open_texts
from specjax.loading.tokenizers.chat_templates import check_messages, texts_of

_FORMS = ("prompt", "messages", "turns")
"""The keys of a line of a file, which has one of them: a text, a conversation, or a list of turns.
"""
_NOTES = ("category", "source", "licence")


@dataclass(frozen=True)
class Request:
    """A prompt for a target, with its number `id` and notes about its origin.

    `prompt` is a string, or a conversation whose next turn is the target's. `left_out` is the
    number of later turns, which are dropped. `where` names the prompt in errors: its file and line,
    if any. Prompts of one `group` are held out from training together, by default equal prompts.
    """

    id: int
    prompt: str | Sequence[Mapping[str, Any]]
    category: str = ""
    source: str = ""
    licence: str = "unknown"
    left_out: int = 0
    where: str = ""
    group: str = ""


def read_requests(path: str | Path) -> list[Request]:
    """Return the prompts in a JSONL file, numbered in order.

    Each line is {"prompt"}, {"messages"} or {"turns"}, with optional notes. Raises InputError with
    file and line for anything else.
    """
    requests: list[Request] = []
    for where, row in read_json_lines(input_file("prompts", path, pipe=True), "prompts"):
        requests.append(_request(row, len(requests), Path(path).name, where))
    if not requests:
        raise InputError(f"prompts={str(path)!r} holds no prompts: one JSON object a line")
    return requests


def _request(row: dict[str, Any], number: int, name: str, where: str) -> Request:
    forms = [form for form in _FORMS if form in row]
    if len(forms) != 1:
        raise InputError(f"{where}: must be an object with one of {', '.join(_FORMS)}")
    value, left_out = row[forms[0]], 0
    if forms[0] == "turns":
        good = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
        value, left_out = (value[0], len(value) - 1) if good else (None, 0)
    elif forms[0] == "messages":
        check_messages(value, f"{where}: messages")
        value = None if value[-1]["role"] == "assistant" else value
    elif not isinstance(value, str):
        value = None
    if not value:
        raise InputError(
            f"{where}: {forms[0]}={shown(row[forms[0]])} is of no use; give a text, messages whose "
            "last one is not the assistant's, or a list of texts"
        )
    for text in [value] if isinstance(value, str) else [t for one in value for t in texts_of(one)]:
        Text(empty=True).check(f"{where}: {forms[0]}", text)
    notes = {name: row[name] for name in _NOTES if name in row}
    for note, text in notes.items():
        Text(empty=True).check(f"{where}: {note}", text)  # they are stored as UTF-8
    return Request(number, value, **{"source": name} | notes, left_out=left_out, where=where)


def read_dataset(
    name: str,
    data_dir: Path | None = None,
    split: str = "train",
    prompt_field: str = "prompt",
) -> list[Request]:
    """Return the prompts in a split of a TFDS dataset, numbered in order.

    `name` is the dataset's directory or name, `data_dir` TFDS's folder of datasets, and
    `prompt_field` the field that has the prompt. Raises InputError as `tfds_texts.open_texts` does,
    for records without a text, and for an empty dataset.
    """
    names = FieldNames("prompts", "tfds.prompt_field", "a JSONL file, or a dataset with its split")
    texts = open_texts(name, data_dir, split, prompt_field, names)
    requests = []
    for index, (text, notes) in enumerate(texts):
        if not text:
            raise InputError(
                f"tfds.prompt_field={prompt_field!r}: record {index} of {texts.label} holds no "
                "text there; use a field of texts"
            )
        kept = {note: notes[note] for note in _NOTES if note in notes}
        requests.append(Request(index, text, **{"source": texts.label} | kept))
    if not requests:
        raise InputError(f"prompts={name!r}: split {split!r} holds no prompts; use another one")
    return requests


def encode_requests(
    model: Model, requests: Sequence[Request], chat: str
) -> Iterator[tuple[Request, list[int]]]:
    """Yield each request with the token ids of its prompt.

    `chat` says whether strings go through the chat template: "true", "false", or "auto", if the
    model has one. Raises InputError if chat=true and the model has no chat template, or if a prompt
    is a conversation and no template is applied.
    """
    has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
    if chat == "true" and not has_template:
        raise InputError(f"chat=true: {model.name} has no chat template; use chat=false")
    templated = has_template if chat == "auto" else chat == "true"
    for request in requests:
        prompt, name = request.prompt, request.where or f"prompt {request.id}"
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}] if templated else prompt
        elif not templated:
            reason = "chat=false" if has_template else f"{model.name} has no chat template"
            raise InputError(f"{name}: a conversation, and {reason}; give plain texts")
        yield request, encode_prompt(model, prompt, name)
