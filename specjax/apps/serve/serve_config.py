"""The config of `specjax.serve`: its fields and its checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from specjax.apps.command_line.config_file import config_of
from specjax.apps.command_line.mesh_config import ONE_DEVICE, MeshConfig
from specjax.apps.run.decode_config import (
    DecodeConfig,
    DecodeFields,
    DecodingFields,
    TargetFields,
    read_decode_config,
)
from specjax.engine.options import BATCH_SIZE, MAX_LENGTH, ROUNDS_PER_STEP
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.fields import InputFile, Number, Text, Whole, optional, read_values
from specjax.files.open_files import open_regular

_LONGEST_KEY = 4096
"""The maximum size of an API key in bytes."""


@dataclass(frozen=True, kw_only=True)
class ServeFields(DecodingFields, TargetFields):
    """The fields of a server's config with their defaults; None means that specjax chooses."""

    batch_size: Annotated[int, BATCH_SIZE] = 8
    """Samples that decode together; others wait for a slot."""
    max_length: Annotated[int | None, optional(MAX_LENGTH)] = None
    """The maximum number of tokens of a prompt and its output; by default 2048, or the target's
    positions if they are fewer. Each slot reserves a cache of that size, unless it has pages.
    """
    rounds_per_step: Annotated[int, ROUNDS_PER_STEP] = 4
    """Rounds per step; between steps tokens are sent, and requests enter and leave."""
    sampling: SamplingParams = SamplingParams(temperature=1.0, max_new_tokens=512)  # noqa: RUF009
    """The sampling parameters for fields that a request leaves out. With `logprobs` requests may
    ask for log-probabilities, which every step then computes.
    """

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
    mesh: MeshConfig = ONE_DEVICE
    """data x model devices: rows are sharded over data, weights and heads over model."""

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or self.target


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ServeFields):
    """A checked config of `specjax.serve`.

    `decoding` has the fields of the engine, as a config of `decode`, and `api_key` is the key in
    `api_key_file`, None without such a file. `written` has the fields as they were given.
    """

    decoding: DecodeConfig
    api_key: str | None
    written: Mapping[str, Any]


def read_serve_config(written: Mapping[str, Any]) -> ServeConfig:
    """Return the checked config, given the fields of a config file by section.

    Checks that need the model are made later. Raises InputError for an invalid field.
    """
    given = read_values(ServeFields, written)
    shared = {field.name for field in fields(DecodeFields)} & written.keys()
    # A decode config has prompts: the built-in ones, for which `tree.kind=auto` chooses a tree.
    decoding = read_decode_config(
        {
            **config_of(DecodeFields).to_dict(),
            **{name: written[name] for name in shared},
            "compare": False,
        }
    )
    if len(decoding.drafters) > 1:
        name = written["drafter"]["name"]
        raise InputError(
            f"drafter.name={name!r}: a server has one drafter; name one, or join them by + or |"
        )
    if (drafter := decoding.drafters[0]).replays:
        raise InputError(
            f"drafter.name={drafter.name!r}: it drafts the tokens of an earlier plain run, which a "
            "server does not have; use another drafter"
        )
    options = replace(decoding.options, rounds_per_step=given.rounds_per_step, seed=given.seed)
    return ServeConfig(
        **vars(given),
        decoding=replace(decoding, options=options),
        api_key=None if given.api_key_file is None else _read_key(given.api_key_file),
        written=written,
    )


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
