"""How much to draft in a round: as long as one more token is worth the time it is expected to cost.

The batch pays for its widest row, so one length is chosen for all rows of a drafter. A round that
commits E tokens in C seconds is worth E - pace * C, where `pace` is the tokens per second that the
batch makes: the length with the highest value is the one that makes the whole run fastest. Where
nobody waits for a slot, that is when the last row ends, so tokens of late rows count for more. A
drafter that draws one token after another decides again before each, from its confidence in it.

What a decision depends on was there before the token in question was drawn: earlier rounds, tokens
that stand before it in any row, and the distributions that those at its own depth will be drawn
from. So the output keeps the target's distribution.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.draft_length import survival
from specjax.draft_length.survival import RowHistory, Survival
from specjax.trees import AnyTopology

LOOK_AGAIN_ROUNDS = 16
"""A drafter that does not pay is tried again after so many rounds at the earliest,"""
LOOK_AGAIN_SHARE = 0.01
"""and no sooner than what that costs is this share of the time since."""
_PACE_MEMORY = 0.98
_PACE_WEIGHT = 8.0
"""Of the belief that nothing is gained, in rounds."""
_RATE_WEIGHT = 4.0
"""Of the batch's tokens per round in what a row is taken to make, in rounds."""
_LATE_POWER = 4.0
"""The mean of the rows' times that is to be short: the higher, the more the last row counts."""
_LAST_FACTOR = 0.5
"""What the last of many rows is taken to accept, beside rows on average."""
_FREE = 0.02
"""A drafter that takes less than this share of a plain round is run even where it may not pay."""
NOT_FORCED = -1


@struct.dataclass
class Costs:
    """Seconds of the parts of a round of one batch.

    `passes` are rounds at each compiled width, drafting apart; `first` is to observe what a round
    committed and to draft a token, `further` to draft one more, and `catch_up` one pass over what
    was missed while it slept, by drafter.
    """

    passes: Float[Array | np.ndarray, "widths"]
    first: Float[Array | np.ndarray, "drafters"]
    further: Float[Array | np.ndarray, "drafters"]
    catch_up: Float[Array | np.ndarray, "drafters"]

    def of_share(self, widths: tuple[int, ...], share: float) -> Costs:
        """Those of rounds whose passes, at the compiled `widths`, are over a share of the rows.

        A pass takes as long as one over all rows with as many tokens in all: between the widths,
        and below the first one, on straight lines. It is no dearer than over all rows, and no
        cheaper than its share of that. Drafters run over all rows.
        """
        if len(widths) == 1:
            return self
        whole = np.asarray(widths, np.float32)
        below = np.clip(np.searchsorted(whole, share * whole) - 1, 0, len(widths) - 2)
        slope = (self.passes[below + 1] - self.passes[below]) / (whole[below + 1] - whole[below])
        passes = self.passes[below] + slope * (share * whole - whole[below])
        return self.replace(passes=jnp.clip(passes, share * self.passes, self.passes))


@struct.dataclass
class Work:
    """How often each part ran, in rounds and between them; the first fields are those of `Costs`.

    `partial` are the rounds whose pass was over fewer rows than the batch has, so that they say
    nothing of what one over all costs.
    """

    passes: Int[Array | np.ndarray, "widths"]
    first: Int[Array | np.ndarray, "drafters"]
    further: Int[Array | np.ndarray, "drafters"]
    catch_up: Int[Array | np.ndarray, "drafters"]
    partial: Int[Array | np.ndarray, ""]

    def counts(self) -> Float[np.ndarray, "parts"]:
        """How often each part with a cost ran, on the host, in the order of `CostFilter`."""
        parts = [self.passes, self.first, self.further, self.catch_up]
        return np.concatenate(parts).astype(float)


@struct.dataclass
class LengthDecision:
    """What decides how long one drafter's draft of this round is; prices are in tokens.

    The length of a tree is how many of its first nodes are kept: a node is accepted or not whatever
    comes after it. `rate` is how often the drafter drafts where it runs, `price[n]` the price of a
    pass with n draft tokens, `planned` the best length before anything is drawn, and `at_least` the
    length that is drafted whatever it costs. A `free` draft costs so little that it need not pay. A
    draft of `forced` tokens, unless -1, is made without any decision. `weight` is what a token of
    each row is worth.
    """

    chances: Float[Array, "K classes"]
    expected: Float[Array, "K"]
    nodes: Float[Array, "N"]
    rate: Float[Array, ""]
    factor: Float[Array, "B"]
    weight: Float[Array, "B"]
    price: Float[Array, "N+1"]
    first: Float[Array, ""]
    further: Float[Array, ""]
    limit: Int[Array, "B"]
    planned: Int[Array, ""]
    at_least: Int[Array, ""]
    free: Bool[Array, ""]
    forced: Int[Array, ""]

    @property
    def worth_running(self) -> Bool[Array, ""]:
        """Whether to run a drafter that decides after it has a draft."""
        return (self.planned > 0) | (self.free & (self.forced == NOT_FORCED))

    def chance(
        self, depth: Int[Array, ""] | int, confidence: Float[Array, "B"]
    ) -> Float[Array, "B"]:
        """The chance that each row's token at a depth passes if those before it do."""
        table = self.chances[depth, survival.confidence_class(confidence)]
        return survival.chance(table, self.factor)

    def best_length(
        self, depth: Int[Array, ""] | int, survived: Float[Array, "B"], rows: Bool[Array, "B"]
    ) -> Int[Array, ""]:
        """The length to draft as it looks before the token at `depth` is drawn in `rows`.

        `survived` is the chance that it and all before it are accepted. The result is `depth` where
        it is best to stop.
        """
        best = _best_length(self, depth, survived, rows)
        best = jnp.where(best > depth, best, jnp.maximum(depth, self.at_least))
        return jnp.where(self.forced == NOT_FORCED, best, self.forced)

    def best_of_draft(
        self,
        confidence: Float[Array, "B N"] | None,
        valid: Bool[Array, "B N"],
        topology: AnyTopology,
    ) -> Int[Array, ""]:
        """How much to keep of a draft that no token was drawn for.

        Where there is no `confidence`, by how often each node was on the accepted path.
        """
        count = valid.shape[1]
        if confidence is None:
            each = survival.chance(self.nodes[None, :count], self.factor[:, None])
            accepted = jnp.where(valid, each, 0.0)
        else:
            depth = jnp.broadcast_to(topology.row_depths[:, 1:] - 1, confidence.shape)
            table = self.chances[depth, survival.confidence_class(confidence)]
            each = jnp.where(valid, survival.chance(table, self.factor[:, None]), 0.0)
            accepted = topology.along_paths(each)
        # The draft is there: only the pass costs anything more.
        value = _gains(self, accepted) - self.price[: count + 1]
        best = jnp.maximum(jnp.argmax(value).astype(jnp.int32), self.at_least)
        return jnp.where(self.forced == NOT_FORCED, best, self.forced)


def _values(decision: LengthDecision, survived: Float[Array, "B K"]) -> Float[Array, "K+1"]:
    """What a draft of 0..K tokens is worth, given each token's chance to be accepted."""
    length = jnp.arange(survived.shape[1] + 1)
    drafting = jnp.where(length > 0, decision.first + decision.further * (length - 1), 0.0)
    return _gains(decision, survived) - decision.price[: len(length)] - drafting


def _gains(decision: LengthDecision, survived: Float[Array, "B K"]) -> Float[Array, "K+1"]:
    """What the accepted tokens of a draft of 0..K tokens are worth, in all rows together."""
    return jnp.pad(jnp.cumsum((decision.weight[:, None] * survived).sum(axis=0)), (1, 0))


def _best_length(
    decision: LengthDecision,
    depth: Int[Array, ""] | int,
    survived: Float[Array, "B"],
    rows: Bool[Array, "B"],
) -> Int[Array, ""]:
    step = jnp.arange(decision.expected.shape[0])[None, :]
    each = survival.chance(decision.expected[None, :], decision.factor[:, None])
    each = jnp.where(step > depth, each, jnp.where(step == depth, survived[:, None], 1.0))
    counted = (step >= depth) & (step < decision.limit[:, None]) & rows[:, None]
    value = _values(decision, jnp.where(counted, jnp.cumprod(each, axis=1), 0.0))
    # The logits at `depth` are there: only what is drafted after it costs anything more.
    length = jnp.arange(value.shape[0])
    value += jnp.where(length > depth, decision.first + decision.further * depth, 0.0)
    value = value.at[depth].set(-decision.price[depth])
    return jnp.argmax(jnp.where(length < depth, -jnp.inf, value)).astype(jnp.int32)


def _planned(decision: LengthDecision, *, tree: bool) -> Int[Array, ""]:
    """The best length before anything is computed; 0 where it is not worth running the drafter."""
    if tree:
        each = survival.chance(decision.nodes[None, :], decision.factor[:, None])
        value = _values(decision, jnp.where(decision.limit[:, None] > 0, each, 0.0))
    else:
        each = survival.chance(decision.expected[None, :], decision.factor[:, None])
        within = jnp.arange(each.shape[1])[None, :] < decision.limit[:, None]
        value = _values(decision, jnp.where(within, jnp.cumprod(each, axis=1), 0.0))
    # What it gains, where it drafts at all, against what running it costs in any case.
    gain = value + jnp.where(jnp.arange(value.shape[0]) > 0, decision.first, 0.0) - value[0]
    best = jnp.argmax(gain).astype(jnp.int32)
    best = jnp.where(decision.rate * gain[best] > decision.first, best, 0)
    best = jnp.maximum(best, decision.at_least)
    return jnp.where(decision.forced == NOT_FORCED, best, decision.forced)


def row_weights(
    active: Bool[Array, "B"],
    left: Int[Array, "B"],
    new: Int[Array, "B"],
    rounds: Int[Array, "B"],
) -> Float[Array, "B"]:
    """What a token of each row is worth where the batch is done when its last row is; 1 on average.

    A row that has made `new` tokens in so many `rounds`, and may make `left` more, is taken to need
    a time t. The weights are by how much one more token per round in each row would shorten the
    mean of the times of order p, (sum t^p)^(1/p). Rows that are not `active` have none.
    """
    mean = jnp.maximum((new * active).sum() / jnp.maximum((rounds * active).sum(), 1), 1.0)
    rate = jnp.where(active, (new + _RATE_WEIGHT * mean) / (rounds + _RATE_WEIGHT), 1.0)
    time = jnp.where(active, left / rate, 0.0)
    late = (time / jnp.maximum(time.max(), 1.0)) ** _LATE_POWER / rate
    return late * active.sum() / jnp.maximum(late.sum(), jnp.finfo(late.dtype).tiny)


@struct.dataclass
class Policy:
    """What is known of costs and acceptance, for all rows of a batch.

    `earned` and `spent` are decayed sums of tokens per unfinished row, by what they are worth, and
    of plain rounds' time; `idle_rounds` are those since each drafter drafted, or ran in vain at
    some cost. `forced` and `narrowest` override decisions: the length of each drafter's draft, or
    -1, and the least compiled width's index. `all_rows` says that the batch is done when its last
    row is, and nobody waits for the slots of those that end before.
    """

    costs: Costs
    work: Work
    survival: Survival
    earned: Float[Array, ""]
    spent: Float[Array, ""]
    idle_rounds: Int[Array, "drafters"]
    forced: Int[Array, "drafters"]
    narrowest: Int[Array, ""]
    all_rows: Bool[Array, ""]

    def admit(self, slots: Int[Array, "A"], new: Policy) -> Policy:
        """Itself: what was learned is not of a row."""
        del slots, new
        return self

    @property
    def measures(self) -> Bool[Array, ""]:
        """Whether rounds are of a kind that is being timed."""
        return (self.forced != NOT_FORCED).any() | (self.narrowest > 0)

    @property
    def free(self) -> Bool[Array, "drafters"]:
        """The drafters that cost so little that it need not pay to run them."""
        return self.costs.first < _FREE * self.costs.passes[0]

    def pace(self, active: Bool[Array, "B"]) -> Float[Array, ""]:
        """Tokens per second that the batch makes; at least what it makes without drafts."""
        gain = jnp.maximum(self.earned / self.spent, 1.0)
        return gain * active.sum() / self.costs.passes[0]

    def look_again(self, number: int, catch_up: Int[Array, ""]) -> Int[Array, ""]:
        """1 where a drafter has not drafted for so long that its chances may have changed.

        `catch_up` are the passes over what it missed, which come before a draft: where these alone
        take too large a share of the time, it is not tried again.
        """
        extra = self.costs.first[number] + self.costs.passes[min(1, len(self.costs.passes) - 1)]
        extra += self.costs.catch_up[number] * catch_up
        extra = (extra - self.costs.passes[0]) / self.costs.passes[0]
        rounds = jnp.maximum(LOOK_AGAIN_ROUNDS, extra / LOOK_AGAIN_SHARE)
        return (self.idle_rounds[number] >= rounds).astype(jnp.int32)

    def after_round(
        self,
        weight: Float[Array, "B"],
        emitted: Int[Array, "B"],
        width: Int[Array, ""],
        drafted: Bool[Array, "drafters"],
        first: Int[Array, "drafters"],
        further: Int[Array, "drafters"],
        catch_up: Int[Array, "drafters"],
        learned: Survival,
        costs: Costs,
        partial: Bool[Array, ""],
    ) -> Policy:
        """What is known after a round at compiled width `width` (its index).

        `weight` is what a token of each row was worth, and `drafted` says who drafted in any row;
        `first`, `further` and `catch_up` count what ran, as `Work` does. `costs` are those of such
        a round, and `partial` says whether its pass was over fewer rows than there are.
        """
        rows = jnp.maximum(weight.sum(), 1.0)
        drafting = costs.first * first + costs.further * further + costs.catch_up * catch_up
        seconds = costs.passes[width] + drafting.sum()
        return self.replace(
            work=Work(
                self.work.passes.at[width].add(1),
                self.work.first + first,
                self.work.further + further,
                self.work.catch_up + catch_up,
                self.work.partial + partial,
            ),
            survival=learned,
            earned=self.earned * _PACE_MEMORY + (weight * emitted).sum() / rows,
            spent=self.spent * _PACE_MEMORY + seconds / costs.passes[0],
            idle_rounds=jnp.where(drafted | ((first > 0) & ~self.free), 0, self.idle_rounds + 1),
        )


@struct.dataclass
class Decisions:
    """A policy in one round; `active` are the rows that still decode, `weight` what they count."""

    policy: Policy
    history: RowHistory
    active: Bool[Array, "B"]
    weight: Float[Array, "B"]
    widths: tuple[int, ...] = struct.field(pytree_node=False)

    def decide_length(
        self,
        number: int,
        limit: Int[Array, "B"],
        drafted: Int[Array, ""],
        catch_up: Int[Array, ""],
        *,
        tree_nodes: int | None = None,
    ) -> LengthDecision:
        """How long drafter `number` drafts, of whose paths each row may have `limit` tokens.

        `drafted` is the longest draft that was decided on for other rows: a pass is as wide anyway.
        `catch_up` are the passes that the drafter has to make over what it missed. A drafter of
        trees has at most `tree_nodes` nodes; for one of chains it is None.
        """
        policy = self.policy
        pace = policy.pace(self.active)
        length = jnp.maximum(jnp.arange(policy.survival.proposed.shape[1] + 1), drafted)
        # No compiled width holds more than the longest draft: `limit` sees to it.
        index = jnp.searchsorted(np.asarray(self.widths), 1 + length)
        index = jnp.minimum(jnp.maximum(index, policy.narrowest), len(self.widths) - 1)
        # Where the last of n rows counts: the more there are, the less will it accept.
        last = _LAST_FACTOR + (1 - _LAST_FACTOR) / jnp.maximum(self.active.sum(), 1)
        before = jnp.where(policy.all_rows, last, 1.0)
        decision = LengthDecision(
            chances=survival.chances(policy.survival)[number],
            expected=survival.expected_chances(policy.survival)[number],
            nodes=_first(survival.node_chances(policy.survival)[number], tree_nodes),
            rate=survival.draft_rate(policy.survival)[number],
            factor=survival.row_factor(self.history, before)[:, number],
            weight=self.weight,
            price=pace * policy.costs.passes[index],
            first=pace * policy.costs.first[number],
            further=pace * policy.costs.further[number],
            limit=limit,
            planned=jnp.int32(0),
            at_least=policy.look_again(number, catch_up),
            free=policy.free[number],
            forced=policy.forced[number],
        )
        return decision.replace(planned=_planned(decision, tree=tree_nodes is not None))


def _first(chances: Float[Array, "N"], count: int | None) -> Float[Array, "N"]:
    """The chances of the first `count` nodes; others, which do not exist, have none."""
    return chances if count is None else jnp.where(jnp.arange(len(chances)) < count, chances, 0.0)


def new_policy(drafters: int, longest: int, nodes: int, num_widths: int) -> Policy:
    """A policy that knows nothing: a pass costs 1 at any width, and drafting nothing.

    Drafts have `nodes` nodes at most, and paths of `longest` tokens.
    """
    return Policy(
        costs=Costs(jnp.ones(num_widths), *[jnp.zeros(drafters) for _ in range(3)]),
        work=Work(
            jnp.zeros(num_widths, jnp.int32),
            *[jnp.zeros(drafters, jnp.int32) for _ in range(3)],
            jnp.int32(0),
        ),
        survival=survival.no_survival(drafters, longest, nodes),
        earned=jnp.float32(_PACE_WEIGHT),
        spent=jnp.float32(_PACE_WEIGHT),
        idle_rounds=jnp.zeros(drafters, jnp.int32),
        forced=jnp.full(drafters, NOT_FORCED, jnp.int32),
        narrowest=jnp.int32(0),
        all_rows=jnp.bool_(False),
    )
