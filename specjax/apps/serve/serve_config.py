"""The config of `specjax.serve`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from specjax.apps.command_line.mesh_config import MeshFields
from specjax.apps.run.decode_config import DecodingFields
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import check_pages_on_mesh
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.fields import Inline, InputFile, Number, Text, Whole, optional, read_values
from specjax.files.open_files import open_regular

_OPTIONS = DecodeOptions(rounds_per_step=4)
_LONGEST_KEY = 4096
"""The maximum size of an API key in bytes."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(MeshFields, DecodingFields):
    """The config of a server; None means that specjax chooses.

    `sampling` are the parameters for fields that a request leaves out. With `logprobs` requests may
    ask for log-probabilities, which every step then computes. Raises InputError for drafters that
    a server cannot have.
    """

    options: Annotated[DecodeOptions, Inline({"rounds_per_step": 4})] = _OPTIONS
    sampling: SamplingParams = SamplingParams(temperature=1.0, max_new_tokens=512)  # noqa: RUF009

    host: Annotated[str, Text()] = "127.0.0.1"
    """The address to listen on; by default only this machine can connect."""
    port: Annotated[int, Whole(0, 65535)] = 8000
    """The port to listen on; 0 chooses a free one."""
    served_model_name: Annotated[str | None, optional(Text())] = None
    """The model's name in requests; by default `target`."""
    api_key_file: Annotated[Path | None, optional(InputFile())] = None
    """A file with the key that requests to /v1 must send; by default they need none."""
    max_waiting: Annotated[int, Whole()] = 256
    """The number of samples that may wait for a slot; further requests are refused with status 429.
    """
    max_body_bytes: Annotated[int, Whole(1)] = 1 << 20
    """The maximum size of a request; larger ones are refused with status 413."""
    shutdown_s: Annotated[float, Number(0.0, 1e6)] = 30.0
    """Seconds that running requests get after Ctrl-C or SIGTERM, before they are aborted."""

    written: Mapping[str, Any] = field(default_factory=dict)
    """The fields as they were given, by section."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.drafters) > 1:
            raise InputError(
                f"drafter.name={self.drafter['name']!r}: a server has one drafter; name one, or "
                "join them by + or |"
            )
        if (only := self.drafters[0]).replays:
            raise InputError(
                f"drafter.name={only.name!r}: it drafts the tokens of an earlier plain run, which "
                "a server does not have; use another drafter"
            )
        check_pages_on_mesh(self.options.num_kv_pages, self.mesh.data)
        _ = self.api_key

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or self.target

    @functools.cached_property
    def api_key(self) -> str | None:
        """The key in `api_key_file`, None without such a file."""
        return None if self.api_key_file is None else _read_key(self.api_key_file)


def read_serve_config(written: Mapping[str, Any]) -> ServeConfig:
    """Return the checked config, given the fields of a config file by section.

    Checks that need the model are made later. Raises InputError for an invalid field.
    """
    return replace(read_values(ServeConfig, written), written=written)


def _read_key(path: Path) -> str:
    """Return the key in a file, without surrounding spaces and line ends. Raises InputError."""
    try:
        with open_regular(path, "give another file") as file:
            key = file.read(_LONGEST_KEY + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"api_key_file={str(path)!r} cannot be read ({error}); give a file with a key in ASCII"
        ) from None
    if not key.isprintable() or not 0 < len(key) <= _LONGEST_KEY:
        raise InputError(
            f"api_key_file={str(path)!r}: holds no key on one line; give a file with a key of 1 "
            f"to {_LONGEST_KEY} printable characters"
        )
    return key
