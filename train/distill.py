"""Distill a draft model from a few layers of a frozen target.

    python -m train.distill [--config=configs/train_distill.py:quick] [--config.FIELD=VALUE ...]

The draft model starts as some of the target's layers between the target's embedding and head, which
it shares. It learns the target's distribution at every token of the target's own responses by KL
divergence, total variation, or both (DistillSpec: Zhou et al. 2310.08461). Exit codes: 0; 2 for bad
input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from specjax.apps.command_line.command import use_compilation_cache
from specjax.fields import Items, Whole
from specjax.loading.model import Model
from train.data.vocabulary import Vocabulary
from train.methods.distill import DistillLoss, distill_method
from train.methods.losses import LabelLoss, with_label_loss
from train.methods.method import Method
from train.run import run
from train.run.config import DraftVocabulary, TrainingConfig
from train.run.precision import multiply_dtype

_LAYERS = Items(Whole(), least=1, remedy="use numbers of the target's layers, from 0")


@dataclass(frozen=True, kw_only=True)
class DistillSection(DraftVocabulary):
    """The target's layers that initialize the draft model, and the tokens that it drafts."""

    layers: Annotated[tuple[int, ...], _LAYERS]
    """The layers of the target from which the draft model is initialized."""


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """The checked config of `train.distill`."""

    DEFAULT = "train_distill"

    distill: DistillSection
    loss: DistillLoss


def make_method(
    target: Model, vocabulary: Vocabulary, config: Config, label_loss: LabelLoss | None = None
) -> Method:
    """Return the training method of a config.

    `vocabulary(size)` returns the ids of the tokens that the draft model drafts, None for all.
    `label_loss` replaces the config's loss of each label. Raises InputError for settings that do
    not fit `target`.
    """
    return distill_method(
        target,
        config.distill.layers,
        vocabulary(config.distill.draft_vocab_size),
        with_label_loss(config.loss, label_loss),
        multiply=multiply_dtype(config.dtype),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run.main(make_method, Config, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
