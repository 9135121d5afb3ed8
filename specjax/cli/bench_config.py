"""The config of `specjax.bench`: its fields, with their values by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specjax.cli.mesh_config import ONE_DEVICE, ONE_PROCESS, DistributedConfig, MeshConfig
from specjax.decoding.options import AUTO, DRAFT_LENGTH
from specjax.fields import InputFile, Items, Number, OutputFile, PathOrName, Text, Whole, optional
from specjax.loading.load import DEFAULT_MODEL, DTYPE
from specjax.loading.weights import WEIGHTS

_SIZES = Items(Whole(1), least=1, remedy="use whole numbers of at least 1, such as (1, 4)")
_DRAFTERS = Items(Text(), remedy="use names of drafters, such as ('ngram', 'ngram+eagle3')")
_LENGTHS = Items(DRAFT_LENGTH, least=1, remedy="use 'auto', 'fixed' or numbers, as ('auto', 4)")
_TEMPERATURES = Items(Number(0.0), least=1, remedy="use numbers of at least 0, such as (0.0, 1.0)")


@dataclass(frozen=True)
class BenchConfig:
    """What to measure."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    dtype: Annotated[str, DTYPE] = "auto"
    weights: Annotated[str, WEIGHTS] = "auto"
    """The target's, as in a decode config."""

    widths: Annotated[tuple[int, ...], _SIZES] = (1, 2, 4, 8, 16, 32)
    """T(width) is measured at these window sizes, batch sizes and capacities, after `committed`."""
    batch_sizes: Annotated[tuple[int, ...], _SIZES] = (1, 4, 8, 16)
    capacities: Annotated[tuple[int, ...], _SIZES] = (512, 8192)
    committed: Annotated[int, Whole()] = 100

    prompts: Annotated[Path | None, optional(InputFile(pipe=True))] = None
    """JSONL in Spec-Bench's schema; without one the built-in prompts."""
    num_prompts: Annotated[int, Whole(1)] = 12
    max_new_tokens: Annotated[int, Whole(1)] = 48
    drafters: Annotated[tuple[str, ...], _DRAFTERS] = (
        "ngram",
        "draft_model",
        "eagle3",
        "ngram+eagle3",
    )
    """Each is compared with plain decoding, with these draft lengths, batches and temperatures."""
    num_speculative_tokens: Annotated[tuple[int | str, ...], _LENGTHS] = (AUTO, 4)
    decoded_batch_sizes: Annotated[tuple[int, ...], _SIZES] = (1, 8)
    temperatures: Annotated[tuple[float, ...], _TEMPERATURES] = (0.0, 1.0)
    runs: Annotated[int, Whole(1)] = 5
    """A mean whose 95 % interval is wider than 3 % to a side is called unresolved: take more."""

    report: Annotated[Path | None, optional(OutputFile())] = None
    """A file of JSON lines."""
    mesh: MeshConfig = ONE_DEVICE
    distributed: DistributedConfig = ONE_PROCESS
