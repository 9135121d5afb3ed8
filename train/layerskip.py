"""Train a model to draft with its first layers: LayerSkip.

    python -m train.layerskip [--config=configs/train_layerskip.py:quick] [--config.FIELD=VALUE ...]

Elhoushi et al. 2404.16710. A loaded model is trained further, or a new one from scratch
(:scratch), with layer dropout that rises with depth, and with a loss at early exits. The run writes
a whole model, with which the drafter `early_exit` drafts. Exit codes: 0; 2 for bad input; 130 after
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from specjax.apps.command_line.command import use_compilation_cache
from specjax.errors import InputError
from specjax.fields import CrossCheck, PathOrName, optional
from specjax.loading.model import Model
from train.data.vocabulary import Vocabulary
from train.methods.layerskip import LayerSkipLoss, LayerSkipOptions, layerskip_method
from train.methods.losses import LabelLoss, reference_check, with_label_loss
from train.methods.method import Method
from train.run import run
from train.run.config import TrainingConfig
from train.run.precision import multiply_dtype


def _check_start(start_from: str | None) -> None:
    if start_from is not None:
        raise InputError(
            f"start_from={start_from!r}: no head is trained, but the model itself; give the model "
            "as target"
        )


def _check_new(target: str | None, labels: str) -> None:
    if target is None and labels != "tokens":
        raise InputError(
            f"layerskip.labels={labels!r}: a new model has nothing to say yet; use "
            "layerskip.labels=tokens, or name a target"
        )


def _check_rotation(curriculum: str, rotation: int, steps: int) -> None:
    if curriculum == "rotational" and rotation > steps:
        raise InputError(
            f"layerskip.rotation={rotation}: the run has steps={steps}, so that some exits would "
            "never be trained; use at most as many"
        )


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """The checked config of `train.layerskip`.

    If there is no target, a new model with the sizes in `model` is trained.
    """

    DEFAULT = "train_layerskip"
    CHECKS = (
        *TrainingConfig.CHECKS,
        CrossCheck(("start_from",), _check_start),
        CrossCheck(("target", "layerskip.labels"), _check_new),
        reference_check("layerskip"),
        CrossCheck(("layerskip.curriculum", "layerskip.rotation", "steps"), _check_rotation),
    )

    target: Annotated[str | None, optional(PathOrName())]
    layerskip: LayerSkipOptions

    @property
    def reads_decay_steps(self) -> bool:
        """Whether the loss depends on where the schedule ends, as curriculum and dropout do."""
        rises = self.layerskip.dropout_schedule != "constant"
        return super().reads_decay_steps or rises or self.layerskip.curriculum == "gradual"


def make_method(
    target: Model, vocabulary: Vocabulary, config: Config, label_loss: LabelLoss | None = None
) -> Method:
    """Return the LayerSkip training method for a config.

    `vocabulary` is not used, since all tokens are drafted. `label_loss` replaces the config's
    per-label loss. Raises InputError for settings that do not fit `target`.
    """
    del vocabulary
    options = config.layerskip
    loss = LayerSkipLoss(
        **vars(with_label_loss(options, label_loss)),
        num_layers=target.config.num_layers,
        steps=config.optimization.decay_steps,
    )
    return layerskip_method(target, loss, multiply=multiply_dtype(config.dtype))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run.main(make_method, Config, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
