"""Rendering of chat templates, which convert a conversation to the text of a prompt.

A template is an untrusted Jinja program in a model file. It runs in jinja2's sandbox, in a separate
process with limits (`template_process`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.errors import InputError, one_line, shown
from specjax.fields import Text
from specjax.loading.tokenizers import template_process

_LARGEST_TEMPLATE = 1 << 20
"""The maximum length of a template in characters; the longest in use has some 20,000."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning may have, in the order in which transformers tries them."""
_MARK = "~#"
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", *_REASONING)


def check_template(where: str, value: Any) -> str:
    """Return `value`, a chat template from a file; `where` names file and field in errors.

    Raises InputError unless it is a string of at most a million characters that UTF-8 can encode.
    """
    template = Text(empty=True).check(where, value)
    if len(template) > _LARGEST_TEMPLATE:
        raise InputError(
            f"{where} has {len(template)} characters, and {_LARGEST_TEMPLATE} are allowed; "
            "use another template"
        )
    return template


def check_messages(messages: Any, where: str = "messages") -> None:
    """Raise InputError unless `messages` is a non-empty list of messages.

    A message is a dict with a "role" and a "content": a string, or a list of parts {"type": "text",
    "text": ...}. The content may be missing if there are tool calls or reasoning. Other fields are
    passed to the template unchecked. `where` names the list in errors.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            f'{where}={shown(messages)}: must be a non-empty list of {{"role": ..., "content": '
            "...} dicts"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f"{where}[{index}]={shown(message)}: must be a dict with string 'role', and "
                "'content'"
            )
        calls, name = message.get("tool_calls"), f"{where}[{index}]"
        if calls is not None and not (
            isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)
        ):
            raise InputError(f"{name}.tool_calls={shown(calls)}: must be a list of dicts")
        _check_content(message, name)


def _check_content(message: Mapping[str, Any], name: str) -> None:
    content = message.get("content")
    if content is None:
        if not any(message.get(field) for field in _INSTEAD_OF_CONTENT):
            raise InputError(
                f"{name}.content is missing: give a text, or a list of text parts; only a message "
                "with tool_calls may lack it"
            )
    elif isinstance(content, list | tuple):
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                wrong = f".type={shown(kind)}" if isinstance(kind, str) and kind != "text" else ""
                raise InputError(
                    f"{name}.content[{index}]{wrong or f'={shown(part)}'}: must be a text part, "
                    '{"type": "text", "text": ...}'
                )
    elif not isinstance(content, str):
        raise InputError(
            f"{name}.content={shown(content)}: must be a text, or a list of text parts "
            '{"type": "text", "text": ...}'
        )


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the role of a checked message, followed by its text or the texts of its parts."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [message["role"], *texts]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt text that `template` renders for `messages`, as transformers does.

    Values must be JSON. A content that is a list of parts is passed to the template as a list if
    the template prints parts, and otherwise joined to one text with a line per part, as in vLLM.
    `special_tokens` maps names such as `bos_token` to the texts that the template may print. Raises
    InputError if the messages are malformed, the template fails, or it exceeds
    `template_process.LIMITS`.
    """
    check_messages(messages)
    chat = [_as_in_transformers(message) for message in messages]
    variables = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    return _render(template, variables, _with_printed_parts(template, variables, chat))


def _render(template: str, variables: Mapping[str, Any], chat: Sequence[dict[str, Any]]) -> str:
    try:
        request = json.dumps([template, {"messages": chat, **variables}], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"messages: they hold values that are not JSON ({one_line(error):.160}); "
            "use texts, numbers, lists and dicts"
        ) from None
    return template_process.render(request.encode("utf-8", "surrogatepass"))


def _as_in_transformers(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are None, with its reasoning under known names."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_printed_parts(
    template: str, variables: Mapping[str, Any], chat: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the chat, with parts kept as lists for the roles whose parts the template prints.

    Given a list, a template may instead fail, omit it, or print it as Python does. To find out, the
    template is rendered with a distinct mark at the end of each part's text.
    """
    joined = [_with_joined_parts(message) for message in chat]
    chosen = list(joined)
    lists = [index for index, message in enumerate(chat) if joined[index] is not message]
    for role in dict.fromkeys(chat[index]["role"] for index in lists):
        of_role = [i for i in lists if chat[i]["role"] == role and chat[i]["content"]]
        marked = list(joined)
        for index in of_role:
            marked[index] = _with_marks(chat[index], index)
        try:
            text = _render(template, variables, marked)
        except InputError:
            continue
        parts = [part for index in of_role for part in marked[index]["content"]]
        if all(_mark_of(part) in text and str(part) not in text for part in parts):
            for index in of_role:
                chosen[index] = chat[index]
    return chosen


def _mark_of(part: Mapping[str, Any]) -> str:
    return part["text"][part["text"].rindex(_MARK) :]


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": "\n".join(texts_of(message)[1:])}


def _with_marks(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the message with a distinct mark at the end of each part's text."""
    marked = [
        {**part, "text": f"{part['text']}{_MARK}{number}.{index}~"}
        for index, part in enumerate(message["content"])
    ]
    return {**message, "content": marked}
