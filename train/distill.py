"""Distil a draft model out of a few layers of a frozen target.

    python -m train.distill [--config=configs/train_distill.py:quick] [--config.FIELD=VALUE ...]

The draft model starts as some of the target's layers between the target's own embedding and head,
which it shares, and learns the target's distribution at every token of its own responses, by KL
divergence, total variation, or both (DistillSpec: Zhou et al. 2310.08461). Exit codes: 0; 2 for bad
input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from specjax.cli.command import use_compilation_cache
from specjax.fields import CrossCheck, Fields, Items, Whole, fields_of
from specjax.loading.model import Model
from train.data.vocabulary import Vocabulary
from train.methods.distill import DistillLoss, distill_method
from train.methods.draft_losses import LabelLoss
from train.methods.method import Method
from train.run import run
from train.run.config import DRAFT_VOCAB_SIZE, TRAINING_FIELDS
from train.run.precision import multiply_dtype

CONFIG = "train_distill"
FIELDS: Fields = {
    **TRAINING_FIELDS,
    "distill": {
        "layers": Items(Whole(), least=1, remedy="use numbers of the target's layers, from 0"),
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
    },
    "loss": fields_of(DistillLoss),
}


def make_method(
    target: Model, vocabulary: Vocabulary, config: ConfigDict, label_loss: LabelLoss | None = None
) -> Method:
    """The method of a config, perhaps with another loss of each label; raises InputError."""
    return distill_method(
        target,
        tuple(config.distill.layers),
        vocabulary(config.distill.draft_vocab_size),
        DistillLoss(**config.loss.to_dict(), label_loss=label_loss),
        multiply=multiply_dtype(config.dtype),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run.main(make_method, FIELDS, CONFIG, argv, (CrossCheck.of(DistillLoss, "loss"),))


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
