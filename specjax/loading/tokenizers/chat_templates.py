"""Chat templates: from a conversation to the text of a prompt.

A template is a Jinja program in a model file, and untrusted. It runs in jinja2's sandbox, in a
separate process with limits (`template_process`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.errors import InputError, one_line, shown
from specjax.loading.tokenizers import template_process

_LARGEST_TEMPLATE = 1 << 20
"""Characters; the longest template in use has some 20,000."""


def check_template(where: str, value: Any) -> str:
    """A chat template as a file holds it; `where` names file and field in errors.

    Raises InputError unless it is a text of at most a million characters that UTF-8 can encode.
    """
    if not isinstance(value, str):
        raise InputError(f"{where}={shown(value)}: must be a text; take it out or repair it")
    if len(value) > _LARGEST_TEMPLATE:
        raise InputError(
            f"{where} has {len(value)} characters, and {_LARGEST_TEMPLATE} are allowed; "
            "use another template"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: character {error.start} is half of a surrogate pair; repair the template"
        ) from None
    return value


def check_messages(messages: Any) -> None:
    """Raise InputError unless `messages` is a non-empty list of {"role", "content"} strings."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            f"messages={shown(messages)}: must be a non-empty list of "
            '{"role": ..., "content": ...} dicts'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise InputError(
                f"messages[{index}]={shown(message)}: must be a dict with string 'role' and "
                "'content'"
            )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text that `template` renders for `messages`, whose values must be JSON.

    `special_tokens` are names such as `bos_token` that the template may print. Raises InputError
    where the messages are malformed, the template fails on them, or it takes more time or memory
    than `template_process.LIMITS` allow.
    """
    check_messages(messages)
    variables = {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    try:
        request = json.dumps([template, variables], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"messages: they hold values that are not JSON ({one_line(error):.160}); "
            "use texts, numbers, lists and dicts"
        ) from None
    return template_process.render(request.encode("utf-8", "surrogatepass"))
