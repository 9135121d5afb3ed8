"""The config of `specjax.bench`: its fields and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specjax.apps.command_line.mesh_config import DeviceFields
from specjax.apps.run.decode_config import TargetFields
from specjax.engine.options import DRAFT_LENGTH, FIXED
from specjax.fields import InputFile, Items, Number, OutputFile, Text, Whole, optional

_SIZES = Items(Whole(1), least=1, remedy="use whole numbers of at least 1, such as (1, 4)")
_DRAFTERS = Items(Text(), remedy="use names of drafters, such as ('ngram', 'ngram+eagle3')")
_LENGTHS = Items(DRAFT_LENGTH, least=1, remedy="use 'fixed', 'auto' or numbers, as ('fixed', 4)")
_TEMPERATURES = Items(Number(0.0), least=1, remedy="use numbers of at least 0, such as (0.0, 1.0)")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(DeviceFields, TargetFields):
    """The fields of `specjax.bench`'s config, with their defaults."""

    widths: Annotated[tuple[int, ...], _SIZES] = (1, 2, 4, 8, 16, 32)
    """The numbers of tokens per row of the passes that are timed, T(width)."""
    batch_sizes: Annotated[tuple[int, ...], _SIZES] = (1, 4, 8, 16)
    """The numbers of rows of the passes that are timed."""
    capacities: Annotated[tuple[int, ...], _SIZES] = (512, 8192)
    """The cache sizes of the passes that are timed, in tokens."""
    committed: Annotated[int, Whole()] = 100
    """The number of tokens in the cache of such a pass."""

    prompts: Annotated[Path | None, optional(InputFile(pipe=True))] = None
    """A JSONL file in Spec-Bench's format; without it a few built-in prompts are used."""
    num_prompts: Annotated[int, Whole(1)] = 12
    """The maximum number of prompts, spread evenly over the tasks."""
    max_new_tokens: Annotated[int, Whole(1)] = 48
    """The number of tokens that every row emits; ends of sequence are ignored."""
    drafters: Annotated[tuple[str, ...], _DRAFTERS] = (
        "ngram",
        "draft_model",
        "eagle3",
        "ngram+eagle3",
    )
    """The drafters to compare with plain decoding, at each draft length, batch size and
    temperature.
    """
    num_speculative_tokens: Annotated[tuple[int | str, ...], _LENGTHS] = (FIXED,)
    """Draft lengths: fixed, each drafter's own; auto, by the clock; or numbers."""
    decoded_batch_sizes: Annotated[tuple[int, ...], _SIZES] = (1, 8)
    """The numbers of rows that decode together."""
    temperatures: Annotated[tuple[float, ...], _TEMPERATURES] = (0.0, 1.0)
    """The sampling temperatures; 0 is greedy."""
    runs: Annotated[int, Whole(1)] = 5
    """The number of repeats. A mean whose 95 % interval is wider than 3 % to a side is called
    unresolved and needs more.
    """

    report: Annotated[Path | None, optional(OutputFile())] = None
    """The file of JSON lines to write; its folder is created."""
