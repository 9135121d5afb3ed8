"""Train Medusa heads, for a frozen target (Medusa-1) or jointly with it (Medusa-2).

    python -m train.medusa [--config=configs/train_medusa.py:quick] [--config.FIELD=VALUE ...]

Cai et al. 2401.10774. Head i predicts the token i + 1 positions after the one that the target
itself predicts from the same feature. The loss is a sum over heads, weighted by decay ** i, of KL(p
|| q) or, as published, of the cross-entropy with the data's token. With configs/train_medusa2.py
the target is also trained, and exported along with the heads. Exit codes: 0; 2 for bad input; 130
after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from specjax.apps.command_line.command import use_compilation_cache
from specjax.fields import Inline
from specjax.loading.model import Model
from specjax.methods.medusa.head import MedusaConfig, MedusaShape
from train.data.vocabulary import Vocabulary
from train.methods.losses import LabelLoss, with_label_loss
from train.methods.medusa import MedusaLoss, medusa_method
from train.methods.medusa2 import JointLoss, JointOptions, medusa2_method
from train.methods.method import Method
from train.run import run
from train.run.config import DraftVocabulary, TrainingConfig
from train.run.precision import multiply_dtype

_SHAPE = {"num_heads": 4, "num_layers": 1, "original_lm_head": True, "projection": True}


@dataclass(frozen=True, kw_only=True)
class MedusaSection(DraftVocabulary):
    """The shape of the heads, and the tokens that they draft."""

    shape: Annotated[MedusaShape, Inline(_SHAPE)]


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """The checked config of `train.medusa`; with the section `joint` the target is trained too."""

    DEFAULT = "train_medusa"

    medusa: MedusaSection
    loss: MedusaLoss
    joint: JointOptions | None = None

    @property
    def reads_decay_steps(self) -> bool:
        """Whether the loss depends on where the schedule ends, as with the ramp of Medusa-2."""
        return super().reads_decay_steps or self.joint is not None


def make_method(
    target: Model, vocabulary: Vocabulary, config: Config, label_loss: LabelLoss | None = None
) -> Method:
    """Return the training method of a config.

    `vocabulary(size)` returns the ids of the tokens that the heads draft, None for all.
    `label_loss` replaces the config's loss of each label. Raises InputError for settings that do
    not fit `target`.
    """
    vocab_size = target.config.vocab_size
    draft_ids = vocabulary(config.medusa.draft_vocab_size)
    shape = MedusaConfig(
        hidden_size=target.config.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if draft_ids is None else len(draft_ids),
        **vars(config.medusa.shape),
    )
    loss = with_label_loss(config.loss, label_loss)
    multiply = multiply_dtype(config.dtype)
    if config.joint is None:
        return medusa_method(target, shape, draft_ids, loss, multiply=multiply)
    joint = JointLoss(**vars(config.joint), steps=config.optimization.decay_steps)
    return medusa2_method(target, shape, draft_ids, loss, joint, multiply=multiply)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run.main(make_method, Config, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
