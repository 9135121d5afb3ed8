"""The config of `specjax.bench`: its fields, with their values by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specjax.cli.mesh_config import ONE_DEVICE, ONE_PROCESS, DistributedConfig, MeshConfig
from specjax.drafters import DRAFT_TOKENS
from specjax.fields import InputFile, Items, Number, OutputFile, PathOrName, Text, Whole, optional
from specjax.loading.load import DEFAULT_MODEL, DTYPE

_SIZES = Items(Whole(1), least=1, remedy="use whole numbers of at least 1, such as (1, 4)")
_SHARES = Items(Number(0.0, 1.0), remedy="use numbers from 0 to 1, such as (0.6, 0.8)")
_DRAFTERS = Items(Text(), remedy="use names of drafters, such as ('ngram', 'ngram+eagle3')")
_TEMPERATURES = Items(Number(0.0), least=1, remedy="use numbers of at least 0, such as (0.0, 1.0)")
_LAYERS = Items(Whole(1), remedy="use numbers of layers, such as (15, 24)")


@dataclass(frozen=True)
class AutoConfig:
    """Draft lengths that follow costs against plain decoding, by drafter, batch and temperature.

    A mean whose 95 % interval is wider than 3 % to a side is called unresolved: take more repeats.
    """

    drafters: Annotated[tuple[str, ...], _DRAFTERS] = (
        "ngram",
        "draft_model",
        "eagle3",
        "ngram+eagle3",
    )
    batch_sizes: Annotated[tuple[int, ...], _SIZES] = (1, 8)
    temperatures: Annotated[tuple[float, ...], _TEMPERATURES] = (0.0, 1.0)
    prompts: Annotated[int, Whole(1)] = 12
    repeats: Annotated[int, Whole(1)] = 5


@dataclass(frozen=True)
class BenchConfig:
    """What to measure."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    dtype: Annotated[str, DTYPE] = "auto"
    prompts: Annotated[Path | None, optional(InputFile(pipe=True))] = None
    """JSONL in Spec-Bench's schema; without one the built-in prompts."""
    per_task: Annotated[int, Whole(1)] = 1
    max_new_tokens: Annotated[int, Whole(1)] = 48
    widths: Annotated[tuple[int, ...], _SIZES] = (1, 2, 4, 8, 16, 32)
    """T(width) is measured at these window sizes, batch sizes and capacities, after `committed`."""
    batch_sizes: Annotated[tuple[int, ...], _SIZES] = (1, 4, 8, 16)
    capacities: Annotated[tuple[int, ...], _SIZES] = (512, 8192)
    committed: Annotated[int, Whole()] = 100
    num_speculative_tokens: Annotated[int, DRAFT_TOKENS] = 4
    """With this fixed length, beside its prediction: prompt lookup, which has a length of its own,
    and a drafter of each acceptance."""
    ngram_tokens: Annotated[int, DRAFT_TOKENS] = 8
    acceptances: Annotated[tuple[float, ...], _SHARES] = (0.6, 0.8, 0.9)
    exit_layers: Annotated[tuple[int, ...], _LAYERS] = (15, 24)
    """At the first batch size only, as the target itself: drafters that cost too much here."""
    self_draft: bool = True
    runs: Annotated[int, Whole(1)] = 3
    auto: AutoConfig = AutoConfig()
    report: Annotated[Path | None, optional(OutputFile())] = None
    """A file of JSON lines."""
    mesh: MeshConfig = ONE_DEVICE
    distributed: DistributedConfig = ONE_PROCESS
