"""The chance that a draft token is accepted, learned while decoding.

A drafter's own confidence in a token (the largest probability of the distribution that the token is
drawn from, known before it is drawn) is calibrated for each depth by what became of earlier tokens
with about the same confidence. What a row accepts beyond or below that is a factor of its own.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.93)
"""Between the classes of confidence (C of them)."""
_PRIOR = (0.1, 0.2, 0.3, 0.45, 0.55, 0.7, 0.8, 0.9)
"""What a class is taken to accept before anything was seen."""
UNKNOWN = 0.7
"""The confidence of drafters that report none."""
_PRIOR_WEIGHT = 4.0
"""Of what is believed before anything was seen, in tested tokens; likewise of all depths for one"""
_EXPECTED_WEIGHT = 12.0
"""The same without regard to confidence: a few refusals put no drafter to sleep."""
_MEMORY = 0.98
"""How much of its weight an observation keeps from one round with tests to the next."""
_ROW_MEMORY = 0.9
_MOST = 0.98
"""The highest chance: none is certain."""


@struct.dataclass
class Survival:
    """Decayed counts of draft tokens by drafter, depth and class of confidence.

    `declined` are rows in which a drafter ran and nothing was drafted.
    """

    tested: Float[Array, "D K C"]
    passed: Float[Array, "D K C"]
    declined: Float[Array, "D"]


@struct.dataclass
class RowHistory:
    """Decayed sums over a row's tested draft tokens, by drafter: chances, and what passed."""

    expected: Float[Array, "B D"]
    passed: Float[Array, "B D"]


def no_survival(drafters: int, longest: int) -> Survival:
    """Nothing seen of drafters whose longest draft has `longest` tokens."""
    empty = jnp.zeros((drafters, longest, len(_PRIOR)))
    return Survival(empty, empty, jnp.zeros(drafters))


def no_history(batch: int, drafters: int) -> RowHistory:
    """Nothing seen of any row."""
    return RowHistory(jnp.zeros((batch, drafters)), jnp.zeros((batch, drafters)))


def confidence_class(confidence: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The class of each confidence."""
    return jnp.searchsorted(np.asarray(EDGES, np.float32), confidence, side="right")


def chances(survival: Survival) -> Float[Array, "D K C"]:
    """The chance that a token passes whose ancestors did, by drafter, depth and class.

    What was seen at one depth is complemented by all depths, and that by a belief of no evidence.
    """
    prior = _PRIOR_WEIGHT * np.asarray(_PRIOR, np.float32)[None, :]
    passed, tested = survival.passed.sum(axis=1), survival.tested.sum(axis=1)
    anywhere = (passed + prior) / (tested + _PRIOR_WEIGHT)
    passed = survival.passed + _PRIOR_WEIGHT * anywhere[:, None, :]
    return passed / (survival.tested + _PRIOR_WEIGHT)


def expected_chances(survival: Survival) -> Float[Array, "D K"]:
    """The same of tokens whose confidence is not known yet."""
    passed, tested = survival.passed.sum(axis=2), survival.tested.sum(axis=2)
    everywhere = (passed.sum(axis=1) + _EXPECTED_WEIGHT * UNKNOWN) / (
        tested.sum(axis=1) + _EXPECTED_WEIGHT
    )
    return (passed + _EXPECTED_WEIGHT * everywhere[:, None]) / (tested + _EXPECTED_WEIGHT)


def draft_rate(survival: Survival) -> Float[Array, "D"]:
    """How often a drafter that runs drafts: it may find nothing, or be too unsure."""
    drafted = survival.tested[:, 0].sum(axis=1) + 1.0
    return drafted / (drafted + survival.declined)


def row_factor(history: RowHistory) -> Float[Array, "B D"]:
    """How much more or less than expected each row accepts of each drafter."""
    return (history.passed + _PRIOR_WEIGHT) / (history.expected + _PRIOR_WEIGHT)


def chance(
    table: Float[Array, "*#shape"], factor: Float[Array, "*#shape"]
) -> Float[Array, "*shape"]:
    """A chance in a row of that factor."""
    return jnp.minimum(table * factor, _MOST)


def observe(
    survival: Survival,
    history: RowHistory,
    drafter: Int[Array, "B"],
    confidence: Float[Array, "B K"],
    depth: Int[Array, "B"],
    accepted: Int[Array, "B"],
    declined: Int[Array, "D"],
) -> tuple[Survival, RowHistory]:
    """Both after a round in which `drafter` (-1: none) drafted `depth` tokens in each row.

    `declined` counts the rows in which each drafter ran and nothing was drafted. Of those drafted
    the accepted ones passed and one more, if there was one, was tested.
    """
    longest = confidence.shape[1]
    step = jnp.arange(longest)[None, :]
    tested = (step < jnp.minimum(accepted + 1, depth)[:, None]) & (drafter >= 0)[:, None]
    passed = tested & (step < accepted[:, None])
    shape = confidence.shape
    which = (
        jnp.broadcast_to(jnp.maximum(drafter, 0)[:, None], shape),
        jnp.broadcast_to(step, shape),
        confidence_class(confidence),
    )
    expected = jnp.where(tested, chances(survival)[which], 0.0).sum(axis=1, keepdims=True)
    drafters = jnp.arange(survival.tested.shape[0])
    drafted = (drafter[:, None] == drafters[None, :]) & tested.any(axis=1, keepdims=True)
    history = RowHistory(
        jnp.where(drafted, history.expected * _ROW_MEMORY + expected, history.expected),
        jnp.where(
            drafted,
            history.passed * _ROW_MEMORY + passed.sum(axis=1, keepdims=True),
            history.passed,
        ),
    )

    def add(table: Float[Array, "D K C"], counted: Bool[Array, "B K"]) -> Float[Array, "D K C"]:
        return table.at[which].add(counted.astype(table.dtype))

    keep = jnp.where(drafted.any(axis=0) | (declined > 0), _MEMORY, 1.0)
    kept = keep[:, None, None]
    seen = Survival(
        add(survival.tested * kept, tested),
        add(survival.passed * kept, passed),
        survival.declined * keep + declined,
    )
    return seen, history
