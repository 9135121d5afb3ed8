"""Train a P-EAGLE head for a frozen target.

    python -m train.peagle [--config=configs/train_peagle.py:quick] [--config.FIELD=VALUE ...]

P-EAGLE (2602.01469): an EAGLE-3 head, of one layer or more, that predicts all draft tokens in one
pass. `loss.steps` is the number of tokens. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from specjax.apps.command_line.command import use_compilation_cache
from specjax.errors import InputError
from specjax.fields import Whole, optional
from specjax.loading.model import Model
from specjax.methods.peagle.head import PEagleConfig
from train import eagle
from train.data.vocabulary import Vocabulary
from train.methods.losses import LabelLoss, with_label_loss
from train.methods.method import Method
from train.methods.peagle import peagle_method
from train.run import run
from train.run.precision import multiply_dtype


@dataclass(frozen=True, kw_only=True)
class PEagleSection(eagle.EagleSection):
    """The shape of a head, and its initialization."""

    num_layers: Annotated[int, Whole(1, 64)] = 1
    """The number of layers."""
    mask_token_id: Annotated[int | None, optional(Whole())] = None
    """The token whose embedding stands for the tokens to be drafted; by default one without text,
    or the last.
    """


@dataclass(frozen=True, kw_only=True)
class Config(eagle.Config):
    """The checked config of `train.peagle`."""

    DEFAULT = "train_peagle"

    eagle: PEagleSection


def make_method(
    target: Model, vocabulary: Vocabulary, config: Config, label_loss: LabelLoss | None = None
) -> Method:
    """Return the training method of a config; the arguments are those of `train.eagle`'s."""
    section, mask = config.eagle, config.eagle.mask_token_id
    draft_ids, fields = eagle.head_fields(target, vocabulary, section)
    fields["decoder"] = replace(fields["decoder"], num_layers=section.num_layers)
    if mask is None:
        mask = (*target.config.unused_tokens, target.config.vocab_size - 1)[0]
    try:
        shape = PEagleConfig(**fields, mask_token_id=mask)
    except InputError as error:
        raise InputError(f"eagle.{error}") from None
    loss = with_label_loss(config.loss, label_loss)
    multiply = multiply_dtype(config.dtype)
    return peagle_method(target, shape, draft_ids, loss, start=section.start, multiply=multiply)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run.main(make_method, Config, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
