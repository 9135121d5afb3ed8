"""The chance that a draft token is accepted, learned while decoding.

A drafter's own confidence in a token (the largest probability that its logits give to one, before
any warp, known before the token is drawn) is calibrated for each depth by what became of earlier
tokens with about the same confidence. What a row accepts beyond or below that is a factor of its
own. Of trees it is also counted how often each node, by its number, is on the accepted path.
"""

from __future__ import annotations

import jax
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
_FIRST_NODE = 0.6
"""How often node n is taken to be accepted before anything was seen: this, divided by n."""
_ROW_MEMORY = 0.9
_MOST = 0.98
"""The highest chance: none is certain."""


@struct.dataclass
class Survival:
    """Decayed counts of draft tokens by drafter, depth and class of confidence; and by node.

    A token is tested where its parent was accepted. `declined` are rows in which a drafter ran and
    nothing was drafted. `proposed` and `accepted` count nodes by their number in the draft.
    """

    tested: Float[Array, "drafters K classes"]
    passed: Float[Array, "drafters K classes"]
    declined: Float[Array, "drafters"]
    proposed: Float[Array, "drafters N"]
    accepted: Float[Array, "drafters N"]


@struct.dataclass
class RowHistory:
    """Decayed sums over a row's tested draft tokens, by drafter: chances, and what passed."""

    expected: Float[Array, "B drafters"]
    passed: Float[Array, "B drafters"]


def no_survival(drafters: int, longest: int, nodes: int) -> Survival:
    """Nothing seen of drafters whose drafts have `nodes` nodes, and paths of `longest` tokens."""
    empty, each = jnp.zeros((drafters, longest, len(_PRIOR))), jnp.zeros((drafters, nodes))
    return Survival(empty, empty, jnp.zeros(drafters), each, each)


def no_history(batch: int, drafters: int) -> RowHistory:
    """Nothing seen of any row."""
    return RowHistory(jnp.zeros((batch, drafters)), jnp.zeros((batch, drafters)))


def confidence_class(confidence: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The class of each confidence."""
    return jnp.searchsorted(np.asarray(EDGES, np.float32), confidence, side="right")


def chances(survival: Survival) -> Float[Array, "drafters K classes"]:
    """The chance that a token passes whose ancestors did, by drafter, depth and class.

    What was seen at one depth is complemented by all depths, and that by a belief of no evidence.
    """
    prior = _PRIOR_WEIGHT * np.asarray(_PRIOR, np.float32)[None, :]
    passed, tested = survival.passed.sum(axis=1), survival.tested.sum(axis=1)
    anywhere = (passed + prior) / (tested + _PRIOR_WEIGHT)
    passed = survival.passed + _PRIOR_WEIGHT * anywhere[:, None, :]
    return passed / (survival.tested + _PRIOR_WEIGHT)


def expected_chances(survival: Survival) -> Float[Array, "drafters K"]:
    """The same of tokens whose confidence is not known yet."""
    passed, tested = survival.passed.sum(axis=2), survival.tested.sum(axis=2)
    everywhere = (passed.sum(axis=1) + _EXPECTED_WEIGHT * UNKNOWN) / (
        tested.sum(axis=1) + _EXPECTED_WEIGHT
    )
    return (passed + _EXPECTED_WEIGHT * everywhere[:, None]) / (tested + _EXPECTED_WEIGHT)


def node_chances(survival: Survival) -> Float[Array, "drafters N"]:
    """The chance that a node is on the accepted path, by drafter and number."""
    number = jnp.arange(1, survival.proposed.shape[1] + 1)
    before = _EXPECTED_WEIGHT * _FIRST_NODE / number
    return (survival.accepted + before[None, :]) / (survival.proposed + _EXPECTED_WEIGHT)


def draft_rate(survival: Survival) -> Float[Array, "drafters"]:
    """How often a drafter that runs drafts: it may find nothing, or be too unsure."""
    drafted = survival.tested[:, 0].sum(axis=1) + 1.0
    return drafted / (drafted + survival.declined)


def row_factor(
    history: RowHistory, before: Float[Array, ""] | float = 1.0
) -> Float[Array, "B drafters"]:
    """How much more or less than expected each row accepts of each drafter.

    `before` is what is believed of rows that nothing is known of.
    """
    return (history.passed + _PRIOR_WEIGHT * before) / (history.expected + _PRIOR_WEIGHT)


def chance(
    table: Float[Array, "*#shape"], factor: Float[Array, "*#shape"]
) -> Float[Array, "*shape"]:
    """A chance in a row of that factor."""
    return jnp.minimum(table * factor, _MOST)


def decline(
    survival: Survival, declined: Int[Array, "drafters"], rounds: Int[Array, ""] | int
) -> Survival:
    """What is known after so many rounds in which each drafter found nothing in `declined` rows."""
    keep = jnp.where(declined > 0, _MEMORY**rounds, 1.0)

    def kept(table: Array) -> Array:
        return table * keep.reshape(-1, *[1] * (table.ndim - 1))

    survival = jax.tree.map(kept, survival)
    return survival.replace(
        declined=survival.declined + declined * (1 - _MEMORY**rounds) / (1 - _MEMORY)
    )


def observe(
    survival: Survival,
    history: RowHistory,
    drafter: Int[Array, "B"],
    confidence: Float[Array, "B N"],
    depth: Int[Array | np.ndarray, "#B N"],
    valid: Bool[Array, "B N"],
    tested: Bool[Array, "B N"],
    passed: Bool[Array, "B N"],
    declined: Int[Array, "drafters"],
) -> tuple[Survival, RowHistory]:
    """Both after a round in which `drafter` (-1: none) drafted the `valid` nodes of each row.

    `depth` is each node's, 0 for children of the root. Nodes on the accepted path passed; those
    and their siblings, and the children of the last, were tested. `declined` counts the rows in
    which each drafter ran and nothing was drafted.
    """
    shape = confidence.shape
    drew = (drafter >= 0)[:, None]
    tested, passed = tested & drew, passed & tested & drew
    row = jnp.broadcast_to(jnp.maximum(drafter, 0)[:, None], shape)
    which = (row, jnp.broadcast_to(depth, shape), confidence_class(confidence))
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
    keep = jnp.where(drafted.any(axis=0) | (declined > 0), _MEMORY, 1.0)
    node = (row, jnp.broadcast_to(jnp.arange(shape[1])[None, :], shape))

    def add(table: Array, where: tuple[Array, ...], counted: Bool[Array, "B N"]) -> Array:
        kept = table * keep.reshape(-1, *[1] * (table.ndim - 1))
        return kept.at[where].add(counted.astype(table.dtype))

    seen = Survival(
        add(survival.tested, which, tested),
        add(survival.passed, which, passed),
        survival.declined * keep + declined,
        add(survival.proposed, node, valid & drew),
        add(survival.accepted, node, passed),
    )
    return seen, history
