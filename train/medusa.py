"""Train Medusa heads: for a frozen target (Medusa-1), or along with it (Medusa-2).

    python -m train.medusa --config=configs/train_medusa.py --config.workdir=W

Cai et al. 2401.10774. Head i predicts the token i + 1 places behind the one that the target itself
predicts from the same feature; the loss is the sum over heads of KL(p || q) there, or of the
cross-entropy with the data's token as published, weighed decay ** i.
With configs/train_medusa2.py the target is trained too (`train.medusa2`), and is exported beside
the heads. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jaxtyping import Array, Float, Int, Key
from ml_collections import ConfigDict

from specjax.errors import InputError
from specjax.frontdoor import use_compilation_cache
from specjax.heads.head import Head, TargetFacts
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.models.model import Model
from specjax.models.shared import share
from train import run
from train.batches import Batch
from train.data.vocabulary import Vocabulary
from train.judging import Judge, Teacher, Verdict, cross_entropy, judge, kl_divergence
from train.method import Measures, Method, measure
from train.precision import multiply_dtype
from train.teacher import at_rows, label_ahead

CONFIG = "configs/train_medusa.py"


@dataclass(frozen=True)
class MedusaLoss:
    """What the heads learn: `labels` are the data's "tokens", or the target's "laws" at them.

    Head i (0-based) counts `decay` ** i. Raises InputError for values that make no sense.
    """

    labels: str = "laws"
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.labels not in ("tokens", "laws"):
            raise InputError(f"loss.labels={self.labels!r}: use tokens or laws")
        # A NaN fails this too.
        if not 0 < self.decay < float("inf"):
            raise InputError(f"loss.decay={self.decay}: use a number above 0")


def medusa_method(
    target: Model,
    config: MedusaConfig,
    draft_ids: np.ndarray | None,
    loss: MedusaLoss,
    *,
    multiply: Any = None,
) -> Method:
    """How to train heads for a frozen target; they start as the target's own."""
    head = Medusa(config, jnp.dtype(jnp.float32), multiply)
    ids = None if draft_ids is None else jnp.asarray(draft_ids)

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        return first_params(head, target, draft_ids, key)

    def summed(
        params: Any, target_params: Any, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Measures]:
        del key
        columns = share(target_params, ids, head=True)["draft_head"]["kernel"]
        teacher = Teacher.of(batch, columns, ids)
        total, verdict = heads_loss(
            head, params, columns, batch.features["final_norm"], batch.labels, teacher, loss
        )
        return total, heads_measures(verdict, batch.labels, {})

    def finished(params: Any, training: dict[str, Any]) -> Head:
        return Head("medusa", config, params, draft_ids, TargetFacts.of(target), training)

    return Method("medusa", ("final_norm",), init, summed, finished)


def first_params(
    head: Medusa, target: Model, draft_ids: np.ndarray | None, key: Key[Array, ""]
) -> dict[str, Any]:
    """Blocks that change nothing, and heads that are copies of the target's: all say its law."""
    params = meta.unbox(head.init(key))
    if not head.config.original_lm_head:
        kernel = np.asarray(target.params["head"]["kernel"], np.float32)
        kernel = kernel if draft_ids is None else kernel[:, draft_ids]
        params["head"] = {"kernel": jnp.asarray(np.stack([kernel] * head.config.num_heads))}
    return params


def heads_loss(
    head: Medusa,
    params: dict[str, Any],
    columns: Float[Array, "D Vd"],
    final_norm: Float[Array, "B T D"],
    labels: Int[Array, "B A"],
    teacher: Teacher,
    loss: MedusaLoss,
    trains_columns: bool = False,
) -> tuple[Float[Array, ""], Verdict]:
    """The weighted sum over heads and labels, and what it is made of.

    For label j all heads read row j - 2; head i is judged at label j + i, where there is one.
    `columns` are those of the target's head, which heads without one of their own use.
    """
    own = not head.config.original_lm_head
    kernel = params["head"]["kernel"] if own else columns
    part = kl_divergence if loss.labels == "laws" else cross_entropy
    states = head.states(params, at_rows(final_norm, labels - 2))
    return judge(
        Judge(((part, 1.0),), own or trains_columns, head.multiply),
        states,
        kernel,
        teacher,
        teacher.counts(labels, head.config.num_heads),
        loss.decay ** jnp.arange(head.config.num_heads, dtype=jnp.float32),
    )


def heads_measures(
    verdict: Verdict, labels: Int[Array, "B A"], others: dict[str, Float[Array, ""]]
) -> Measures:
    """Measures of all heads; `others` are parts of the loss beside theirs."""
    heads = verdict.right.shape[0]
    judged = jnp.stack([label_ahead(labels, head) for head in range(heads)])
    each = {f"head_{head}": verdict.losses[head, 0] for head in range(heads)}
    return measure({**others, **each}, verdict.right, judged)


def make_method(target: Model, vocabulary: Vocabulary, config: ConfigDict) -> Method:
    """The method of a config; raises InputError for values that make no sense."""
    options = config.medusa.to_dict()
    vocab_size = target.config.vocab_size
    draft_ids = vocabulary(options.pop("draft_vocab_size"))
    shape = MedusaConfig(
        hidden_size=target.config.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if draft_ids is None else len(draft_ids),
        **options,
    )
    loss = MedusaLoss(**config.loss.to_dict())
    multiply = multiply_dtype(config.dtype)
    if "joint" not in config:
        return medusa_method(target, shape, draft_ids, loss, multiply=multiply)
    from train.medusa2 import JointLoss, medusa2_method

    joint = JointLoss(**config.joint.to_dict(), steps=config.decay_steps or config.steps)
    return medusa2_method(target, shape, draft_ids, loss, joint, multiply=multiply)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run.main(make_method, CONFIG, argv)


if __name__ == "__main__":
    use_compilation_cache()
    raise SystemExit(main())
