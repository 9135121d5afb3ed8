"""Train an EAGLE head for a frozen target.

    python -m train.eagle [--config=configs/train_eagle3.py:quick] [--config.FIELD=VALUE ...]

EAGLE-1 (Li et al. 2401.15077, configs/train_eagle1.py): the next feature by smooth L1 and its token
by cross-entropy, from true features with noise. EAGLE-3 (2503.01840): cross-entropy only, over
several draft steps that read the head's own outputs ("training-time test"). Exit codes: 0; 2 for
bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from specjax.apps.command_line.command import use_compilation_cache
from specjax.errors import InputError
from specjax.fields import Inline, Items, Text, Whole, optional
from specjax.loading.model import Model
from specjax.methods.eagle.head import EagleConfig, EagleShape, default_taps
from specjax.models.features import check_features
from train.data.vocabulary import Vocabulary
from train.methods.eagle import START, EagleLoss, eagle_method
from train.methods.losses import LabelLoss, with_label_loss
from train.methods.method import Method
from train.run import run
from train.run.config import DraftVocabulary, TrainingConfig
from train.run.precision import multiply_dtype

_TAPS = Items(Text(), remedy="use names of features, such as ('layer_input:2',)")


@dataclass(frozen=True, kw_only=True)
class EagleSection(DraftVocabulary):
    """The shape of a head, and its initialization."""

    shape: Annotated[EagleShape, Inline({"version": 3})]
    taps: Annotated[tuple[str, ...], _TAPS] = ()
    """The target features that it reads; () for the inputs of layers 2, L/2 and L - 3 (EAGLE-3) or
    the final norm (EAGLE).
    """
    num_kv_heads: Annotated[int | None, optional(Whole(1))] = None
    """The number of key/value heads of its attention, a divisor of the query heads; those of the
    target by default.
    """
    start: Annotated[str, START] = "target"
    """The initial weights: the target's last layer and output layer beside random weights (target),
    nothing else (last_layer), or random ones.
    """


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """The checked config of `train.eagle`."""

    DEFAULT = "train_eagle3"

    eagle: EagleSection
    loss: EagleLoss


def make_method(
    target: Model, vocabulary: Vocabulary, config: Config, label_loss: LabelLoss | None = None
) -> Method:
    """Return the training method of a config.

    `vocabulary(size)` returns the ids of the tokens that the head drafts, None for all.
    `label_loss` replaces the config's loss of each label. Raises InputError for settings that do
    not fit `target`.
    """
    draft_ids, fields = head_fields(target, vocabulary, config.eagle)
    loss = with_label_loss(config.loss, label_loss)
    multiply, start = multiply_dtype(config.dtype), config.eagle.start
    return eagle_method(
        target, EagleConfig(**fields), draft_ids, loss, start=start, multiply=multiply
    )


def head_fields(
    target: Model, vocabulary: Vocabulary, section: EagleSection
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Return the token ids of a section's head, None for all, and the fields of its config.

    Raises InputError for settings that do not fit `target`.
    """
    num_kv_heads = section.num_kv_heads
    taps = section.taps
    if not taps:
        version_1 = section.shape.version == 1
        taps = ("final_norm",) if version_1 else default_taps(target.config.num_layers)
    check_features(taps, target.config.num_layers, "eagle.taps: ")
    decoder = target.config.llama_layers(1)
    if num_kv_heads is not None:
        if decoder.num_heads % num_kv_heads:
            raise InputError(
                f"eagle.num_kv_heads={num_kv_heads}: must divide the {decoder.num_heads} query "
                f"heads of {target.name}; use a divisor"
            )
        decoder = replace(decoder, num_kv_heads=num_kv_heads)
    draft_ids = vocabulary(section.draft_vocab_size)
    return draft_ids, dict(
        decoder=decoder,
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=target.config.vocab_size if draft_ids is None else len(draft_ids),
        taps=taps,
        **vars(section.shape),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run.main(make_method, Config, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
