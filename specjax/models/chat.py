"""Chat templates: a model file's own Jinja program, run in a sandbox.

The globals and filters are those that transformers gives a template, so that a template renders
here as it does there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specjax.errors import InputError, one_line


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer learns from; for rendering it is its own body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which no chat template wants.
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals |= helpers
    return environment.from_string(template)


def check_messages(messages: Any) -> None:
    """Raise InputError unless `messages` is a non-empty list of {"role", "content"} strings."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            f"messages={messages!r}: must be a non-empty list of "
            '{"role": ..., "content": ...} dicts'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise InputError(
                f"messages[{index}]={message!r}: must be a dict with string 'role' and 'content'"
            )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text that `template` makes of `messages`.

    `special_tokens` are names such as `bos_token` that the template may print. Raises InputError
    where the messages are malformed or the template fails on them.
    """
    check_messages(messages)
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except Exception as error:  # the template is foreign code: whatever it raises is its failure
        raise InputError(
            f"chat template: it fails on these messages ({one_line(error)}); "
            "change the roles or use raw text"
        ) from None
