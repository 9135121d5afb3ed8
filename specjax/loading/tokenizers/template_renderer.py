"""The program of the process in which chat templates run; started by `template_process`.

    python template_renderer.py SECONDS MEMORY TEXT     (a socket as standard input)

Globals and filters are those of transformers, so that a template renders as it does there. The
program imports nothing of specjax, so that it starts quickly.
"""

from __future__ import annotations

import json
import pprint
import resource
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST_ERROR = 400
_IMPORTED_LATE = (jinja2.constants, jinja2.debug, pprint, textwrap)
"""Modules that jinja2 would import on first use, when files can no longer be opened."""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks text to be trained on; rendering outputs its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no chat template wants.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=4)
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


def _answer(request: bytes, longest: int) -> tuple[str, str]:
    """Return the kind of the answer to a request ("text", "error" or "over"), and its text."""
    try:
        template, variables = json.loads(request.decode("utf-8", "surrogatepass"))
        parts, size = [], 0
        for part in _compile(template).generate(**variables):
            parts.append(part)
            size += len(part)
            if size > longest:
                return "over", "text"
        return "text", "".join(parts)
    except MemoryError:
        return "over", "memory"
    except Exception as error:  # the template is foreign code: whatever it raises is its failure
        message = " ".join(str(error)[:_LONGEST_ERROR].split()) or type(error).__name__
        return "error", message


def _limit(memory: int) -> None:
    """Limit memory, and forbid what rendering does not need: files, processes, core dumps."""
    for name, value in (("CORE", 0), ("FSIZE", 0), ("NOFILE", 0), ("NPROC", 0), ("AS", memory)):
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError):
                # macOS refuses some; the time limit of `template_process` remains.
                continue


def main() -> None:
    """Answer requests until the connection is closed."""
    seconds, memory, longest = map(int, sys.argv[1:])
    connection = Connection(0)
    _compile("{{ strftime_now('%Y') }}").render()  # modules are loaded while files can be opened
    _limit(memory)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)

    def send(kind: str, text: str) -> None:
        connection.send_bytes(f"{kind}\n{text}".encode("utf-8", "surrogatepass"))

    send("text", "")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        # The parent process enforces the time limit; this is for when it has ended.
        soon = int(time.process_time()) + seconds + 2
        soon = soon if hard == resource.RLIM_INFINITY else min(soon, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soon, hard))
        send(*_answer(request, longest))


if __name__ == "__main__":
    main()
