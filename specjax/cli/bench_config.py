"""The config of `specjax.bench`: each field's kind; `configs/bench_smollm2.py` has the values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specjax.cli.mesh_config import DistributedConfig, MeshConfig
from specjax.drafters import DRAFT_TOKENS
from specjax.fields import InputFile, Items, Number, OutputFile, PathOrName, Text, Whole, optional
from specjax.loading.load import DTYPE

_SIZES = Items(Whole(1), least=1, remedy="use whole numbers of at least 1, such as (1, 4)")
_SHARES = Items(Number(0.0, 1.0), remedy="use numbers from 0 to 1, such as (0.6, 0.8)")
_DRAFTERS = Items(Text(), remedy="use names of drafters, such as ('ngram', 'ngram+eagle3')")
_TEMPERATURES = Items(Number(0.0), least=1, remedy="use numbers of at least 0, such as (0.0, 1.0)")
_LAYERS = Items(Whole(1), remedy="use numbers of layers, such as (15, 24)")


@dataclass(frozen=True)
class AutoConfig:
    """The cells in which draft lengths that follow costs are compared with plain decoding."""

    drafters: Annotated[tuple[str, ...], _DRAFTERS]
    batch_sizes: Annotated[tuple[int, ...], _SIZES]
    temperatures: Annotated[tuple[float, ...], _TEMPERATURES]
    prompts: Annotated[int, Whole(1)]
    repeats: Annotated[int, Whole(1)]


@dataclass(frozen=True)
class BenchConfig:
    """What to measure; `configs/bench_smollm2.py` says what each field does."""

    target: Annotated[str, PathOrName()]
    dtype: Annotated[str, DTYPE]
    prompts: Annotated[Path | None, optional(InputFile(pipe=True))]
    per_task: Annotated[int, Whole(1)]
    max_new_tokens: Annotated[int, Whole(1)]
    widths: Annotated[tuple[int, ...], _SIZES]
    batch_sizes: Annotated[tuple[int, ...], _SIZES]
    capacities: Annotated[tuple[int, ...], _SIZES]
    committed: Annotated[int, Whole()]
    num_speculative_tokens: Annotated[int, DRAFT_TOKENS]
    ngram_tokens: Annotated[int, DRAFT_TOKENS]
    acceptances: Annotated[tuple[float, ...], _SHARES]
    exit_layers: Annotated[tuple[int, ...], _LAYERS]
    self_draft: bool
    runs: Annotated[int, Whole(1)]
    auto: AutoConfig
    report: Annotated[Path | None, optional(OutputFile())]
    mesh: MeshConfig
    distributed: DistributedConfig
