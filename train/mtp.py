"""Train multi-token prediction modules: for a frozen target, jointly with it, or from scratch.

    python -m train.mtp [--config=configs/train_mtp.py:quick] [--config.FIELD=VALUE ...]

Module k (0-based) predicts the token k + 2 positions after the row that it reads (DeepSeek-V3,
2412.19437). The loss is LM + (lambda / D) * the sum over the D modules, or the modules' alone for a
frozen target. With mtp.steps above D the last module is also trained on its own outputs (FastMTP,
2509.18362). A run writes one model with its modules inside, or with mtp.export=head the modules
alone. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from specjax.apps.command_line.command import use_compilation_cache
from specjax.errors import InputError
from specjax.fields import CrossCheck, Inline, Number, PathOrName, Whole, optional
from specjax.loading.model import Model
from specjax.models.mtp import MtpConfig, MtpConventions
from train.data.vocabulary import Vocabulary
from train.methods.losses import LabelLoss, reference_check, with_label_loss
from train.methods.method import Method
from train.methods.mtp import EXPORTS, START, TRAINS, mtp_method
from train.methods.mtp_loss import MtpLoss, MtpLossOptions
from train.run import run
from train.run.config import DraftVocabulary, TrainingConfig
from train.run.precision import multiply_dtype

_LOSS_WEIGHT = 0.3
"""The default of lambda (DeepSeek-V3, GLM-4.5)."""


@dataclass(frozen=True, kw_only=True)
class MtpSection(DraftVocabulary):
    """What is trained and exported, the modules' shape and conventions, and the loss."""

    trains: Annotated[str, TRAINS] = "modules"
    """What is trained: modules of a frozen target, or all, which includes the target."""
    num_modules: Annotated[int, Whole(0, 64)] = 1
    """D, the number of modules; 0, with trains=all, trains the target alone."""
    steps: Annotated[int | None, optional(Whole(1, 64))] = None
    """The number of draft steps in the loss; by default one per module. The last module runs
    further ones, on its own outputs.
    """
    start: Annotated[str, START] = "target"
    """The initial modules: the target's own, or new ones that pass its feature through; or random
    ones.
    """
    export: Annotated[str, EXPORTS] = "model"
    """What is written: the target with its modules inside, or the modules alone as a head."""
    loss_weight: Annotated[float | None, optional(Number())] = None
    """lambda, the weight of the MTP loss beside the target's own; 0.3 by default, and a frozen
    target has none.
    """
    loss: Annotated[MtpLossOptions, Inline()]
    conventions: Annotated[MtpConventions, Inline()]


def _check_weights(trains: str, weight: float | None, late: float | None) -> None:
    for name, value in (("loss_weight", weight), ("late_loss_weight", late)):
        if trains == "modules" and value is not None:
            raise InputError(
                f"mtp.{name}={value}: weighs the MTP loss beside the target's own, and a frozen "
                "target has none; leave it out, or use mtp.trains=all"
            )


def _check_new(target: str | None, trains: str, labels: str) -> None:
    for name, value, only in (("trains", trains, "all"), ("labels", labels, "tokens")):
        if target is None and value != only:
            raise InputError(
                f"mtp.{name}={value!r}: a new model has nothing to say yet; use mtp.{name}={only}, "
                "or name a target"
            )


def _check_start(target: str | None, start_from: str | None) -> None:
    if target is None and start_from is not None:
        raise InputError(
            f"start_from={start_from!r}: what was trained for a model is of no use to a new one; "
            "name that model as target, or leave it out"
        )


def _check_decoding(modules: int, prompts: int) -> None:
    if not modules and prompts:
        raise InputError(
            f"mtp.num_modules=0: no module to decode eval.prompts={prompts} with; set "
            "eval.prompts=0"
        )


def _check_steps(trains: str, exports: str, modules: int, steps: int | None) -> None:
    """Raise InputError if what is trained and exported, D and `steps` are inconsistent.

    `steps` of None means one per module.
    """
    if not modules and trains == "modules":
        raise InputError("mtp.num_modules=0: a frozen target learns nothing; use mtp.trains=all")
    if trains == "all" and exports == "head":
        raise InputError(
            "mtp.export='head': modules trained along with a target belong to it alone; use "
            "mtp.export=model"
        )
    if steps is not None and (steps < modules or (steps and not modules)):
        raise InputError(
            f"mtp.steps={steps}: mtp.num_modules={modules}, each of which is a step, and the last "
            "of which makes the others; leave mtp.steps out, or change one of them"
        )


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """The checked config of `train.mtp`.

    If there is no target, a new model with the sizes in `model` is trained.
    """

    DEFAULT = "train_mtp"
    CHECKS = (
        *TrainingConfig.CHECKS,
        CrossCheck(("target", "mtp.trains", "mtp.labels"), _check_new),
        CrossCheck(("target", "start_from"), _check_start),
        reference_check("mtp"),
        CrossCheck(("mtp.trains", "mtp.loss_weight", "mtp.late_loss_weight"), _check_weights),
        CrossCheck(("mtp.num_modules", "eval.prompts"), _check_decoding),
        CrossCheck(("mtp.trains", "mtp.export", "mtp.num_modules", "mtp.steps"), _check_steps),
    )

    target: Annotated[str | None, optional(PathOrName())]
    mtp: MtpSection

    @property
    def reads_decay_steps(self) -> bool:
        """Whether the loss depends on where the schedule ends, as with `late_loss_weight`."""
        return super().reads_decay_steps or self.mtp.loss.late_loss_weight is not None


def make_method(
    target: Model, vocabulary: Vocabulary, config: Config, label_loss: LabelLoss | None = None
) -> Method:
    """Return the training method of a config.

    `vocabulary(size)` returns the ids of the tokens that the modules draft, None for all.
    `label_loss` replaces the config's loss of each label. Raises InputError for settings that do
    not fit `target`.
    """
    options = config.mtp
    modules = options.num_modules
    draft_ids = vocabulary(options.draft_vocab_size) if modules else None
    shape = None
    if modules:
        shape = MtpConfig(
            decoder=target.config.one_layer(experts=True),
            draft_vocab_size=target.config.vocab_size if draft_ids is None else len(draft_ids),
            num_modules=modules,
            **vars(options.conventions),
        )
    loss = MtpLoss(
        **vars(with_label_loss(options.loss, label_loss)),
        steps=modules if options.steps is None else options.steps,
        loss_weight=_LOSS_WEIGHT if options.loss_weight is None else options.loss_weight,
        schedule_steps=config.optimization.decay_steps,
    )
    return mtp_method(
        target,
        shape,
        draft_ids,
        loss,
        trains=options.trains,
        start=options.start,
        exports=options.export,
        multiply=multiply_dtype(config.dtype),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run.main(make_method, Config, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
