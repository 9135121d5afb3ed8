"""Train a drafter that predicts a block of tokens in one pass, for a frozen target.

    python -m train.block [--config=configs/train_dflash.py:quick] [--config.FIELD=VALUE ...]

DFlash (Chen et al. 2602.06036, configs/train_dflash.py): a few layers read the target's features
before a random anchor, the anchor and mask tokens. DSpark (configs/train_dspark.py): the same with
a bias of each token by the one before it, and an estimate of the probability of acceptance. DFlash2
(configs/train_dflash2.py): with convolutions along the block, and a choice among each slot's
likeliest tokens by the one before. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from specjax.apps.command_line.command import use_compilation_cache
from specjax.errors import InputError
from specjax.fields import Inline, Items, Text, Whole, optional
from specjax.loading.model import Model
from specjax.methods.block.head import BlockConfig, BlockShape, default_taps
from specjax.models.config import Attention
from specjax.models.features import check_features
from train.data.vocabulary import Vocabulary
from train.methods.blocks.block import START, BlockLoss, block_method
from train.methods.losses import LabelLoss, with_label_loss
from train.methods.method import Method
from train.run import run
from train.run.config import DraftVocabulary, TrainingConfig
from train.run.precision import multiply_dtype

_TAPS = Items(Text(), remedy="use names of features, such as ('layer_input:2',)")
_USUAL_TAPS = 5


@dataclass(frozen=True, kw_only=True)
class BlockSection(DraftVocabulary):
    """The shape of a block drafter, and its initialization."""

    shape: Annotated[BlockShape, Inline({"block_size": 8})]
    num_layers: Annotated[int, Whole(1, 64)] = 2
    """The number of layers."""
    taps: Annotated[tuple[str, ...], _TAPS] = ()
    """The target features that it reads; () for five, evenly spaced."""
    mask_token_id: Annotated[int | None, optional(Whole())] = None
    """The token whose embedding stands for the tokens to be drafted; by default one without text,
    or the last.
    """
    start: Annotated[str, START] = "target"
    """The initial layers: the target's last ones, or random."""


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """The checked config of `train.block`."""

    DEFAULT = "train_dflash"

    block: BlockSection
    loss: BlockLoss


def make_method(
    target: Model, vocabulary: Vocabulary, config: Config, label_loss: LabelLoss | None = None
) -> Method:
    """Return the training method of a config.

    `vocabulary(size)` returns the ids of the tokens that the head drafts, None for all.
    `label_loss` replaces the config's loss of each label. Raises InputError for settings that do
    not fit `target`.
    """
    section, vocab_size = config.block, target.config.vocab_size
    taps = section.taps or default_taps(target.config.num_layers, _USUAL_TAPS)
    check_features(taps, target.config.num_layers, "block.taps: ")
    draft_ids, mask = vocabulary(section.draft_vocab_size), section.mask_token_id
    if mask is None:
        mask = (*target.config.unused_tokens, vocab_size - 1)[0]
    try:
        shape = BlockConfig(
            decoder=replace(
                target.config.llama_layers(section.num_layers), attention=Attention(qk_norm=True)
            ),
            target_hidden_size=target.config.hidden_size,
            draft_vocab_size=vocab_size if draft_ids is None else len(draft_ids),
            taps=taps,
            mask_token_id=mask,
            **vars(section.shape),
        )
    except InputError as error:
        raise InputError(f"block.{error}") from None
    loss = with_label_loss(config.loss, label_loss)
    multiply = multiply_dtype(config.dtype)
    return block_method(target, shape, draft_ids, loss, start=section.start, multiply=multiply)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run.main(make_method, Config, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
