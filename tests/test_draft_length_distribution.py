"""Rows whose draft lengths are decided together have the target's distribution, jointly.

Pairs of rows share each round's decision. What two rows emit is tested as one outcome, since a
decision that looks at the wrong tokens may leave each row's distribution right and tie them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import changed, draft_model, tampered
from specjax.draft_length.cost_measurement import RoundKind
from specjax.draft_length.limits import DraftLength
from specjax.draft_length.policy import NOT_FORCED, Costs

from specjax.decoding import loop
from specjax.decoding.sampling_params import SamplingParams
from specjax.drafters import TreeOptions, take_turns, turns
from specjax.drafters.lookup.ngram import Ngram
from specjax.sampling import RULES, Rejection
from specjax.testing import Tabular
from specjax.testing.drafters import chi_square, first_rows, make_plan, output_distribution

VOCAB, LENGTH, ROWS = 4, 3, 2
GROUPS = 15_000
PROMPT = (1, 2, 3, 1)
AS_IS = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def tables():
    table = 1.2 * jax.random.normal(jax.random.key(2), (VOCAB, VOCAB))
    other = table + 0.9 * jax.random.normal(jax.random.key(3), (VOCAB, VOCAB))
    return (Tabular(VOCAB), table), (Tabular(VOCAB), other)


def some_pay(plan):
    """Costs at which some rounds draft nothing, some one token, and some all."""
    drafters = len(plan.drafter.parts)
    return Costs(
        passes=jnp.linspace(1.0, 1.1, len(plan.widths)),
        first=jnp.full(drafters, 0.03),
        further=jnp.full(drafters, 0.12),
        catch_up=jnp.zeros(drafters),
    )


def pairs(
    target,
    drafter,
    length,
    groups=GROUPS,
    costs=None,
    kinds=None,
    widths=None,
    auto=True,
    rule="rejection",
):
    """The first `LENGTH` tokens of both rows of each pair, and the lengths drafted.

    Without `costs` drafting costs nothing, so that as much as possible is drafted, as it is without
    `auto`. With `kinds` there is a round of each of these.
    """
    model, params = target
    turns, drafter_params = take_turns(drafter)
    capacity = len(PROMPT) + LENGTH + length + 1
    draft_length = DraftLength(length, auto=auto)
    verify = RULES[rule]
    plan = make_plan(model, turns, draft_length, verify=verify, request=AS_IS, capacity=capacity)
    if widths is not None:
        plan = dataclasses.replace(plan, widths=widths)
    costs = costs and costs(plan)
    if auto:
        kinds = kinds or [RoundKind(0, (NOT_FORCED,) * len(turns.parts))] * LENGTH
        kinds = tuple(map(jnp.asarray, zip(*kinds, strict=True)))
    tokens, drafted = rounds_of_pairs(
        plan, (params, drafter_params), costs, kinds, jnp.arange(groups)
    )
    return np.asarray(tokens), np.asarray(drafted)


@functools.partial(jax.jit, static_argnums=0)
def rounds_of_pairs(plan, params, costs, kinds, groups):
    """Costs and kinds are arguments, so that plans that are equal have one program."""

    def one_round(state, kind):
        if kind is not None:
            narrowest, lengths = kind
            policy = state.policy.replace(forced=lengths, narrowest=narrowest)
            state = state.replace(policy=policy)
        state, counts = loop.run(plan, params, state, jnp.int32(1))
        return state, counts.drafted[:, 0]

    def one(group):
        index = ROWS * group + jnp.arange(ROWS)
        state = loop.start(plan, params, *first_rows(plan, PROMPT, AS_IS, index, 0))
        if costs is not None:
            state = state.replace(policy=state.policy.replace(costs=costs))
        state, drafted = jax.lax.scan(one_round, state, kinds, LENGTH)
        return state.tokens[:, len(PROMPT) : len(PROMPT) + LENGTH], drafted.T

    return jax.vmap(one)(groups)


def pairs_by_steps(target, drafter, length):
    """The same tokens, and who ran each round: 1 the plain program, 0 the one that can draft."""
    model, params = target
    turns, drafter_params = take_turns(drafter)
    params = params, drafter_params
    capacity = len(PROMPT) + LENGTH + length + 1
    auto = DraftLength(length, auto=True)
    plan = make_plan(model, turns, auto, verify=Rejection(), request=AS_IS, capacity=capacity)
    plan = dataclasses.replace(plan, widths=(1, length + 1))
    options = np.zeros(ROWS, bool), jnp.int32(1), jnp.int32(ROWS + 1)

    @jax.jit
    def one(group):
        index = ROWS * group + jnp.arange(ROWS)
        state = loop.start(plan, params, *first_rows(plan, PROMPT, AS_IS, index, 0))
        state = state.replace(policy=state.policy.replace(costs=some_pay(plan)))

        def one_round(carried, _):
            state, plain = carried
            programs = (functools.partial(run, plan) for run in (loop.plain_step, loop.step))
            state, seen = jax.lax.cond(plain, *programs, params, state, *options)
            unknown = jnp.where(plain, seen.rounds.emitted, -1)
            policy, intention = loop.look_ahead(plan, params, state, unknown, options[-1])
            next_plain = ~intention.drafts & (intention.room > 0)
            return (state.replace(policy=policy), next_plain), plain

        (state, _), ran = jax.lax.scan(one_round, (state, jnp.bool_(False)), length=LENGTH)
        return state.tokens[:, len(PROMPT) : len(PROMPT) + LENGTH], ran

    tokens, ran = jax.vmap(one)(jnp.arange(2 * GROUPS))
    return np.asarray(tokens), np.asarray(ran)


def joint(target, tokens, rows=(0, 1), length=2):
    """The chi-square of the tokens of some rows together."""
    outputs = tokens[:, list(rows), LENGTH - length :].reshape(len(tokens), -1)
    cells = (VOCAB,) * outputs.shape[1]
    counted = np.bincount(np.ravel_multi_index(tuple(outputs.T), cells), minlength=np.prod(cells))
    one = output_distribution(*target, PROMPT, AS_IS, LENGTH)
    one = one.reshape(-1, VOCAB**length).sum(axis=0)
    return chi_square(counted, functools.reduce(np.multiply.outer, [one] * len(rows)).ravel())


DRAFTERS = {
    "drawn": (lambda draft: draft_model(draft), 3),
    "turns": (lambda draft: take_turns(Ngram(prompt_lookup_min=1), draft_model(draft)), 2),
    "greedy": (lambda draft: draft_model(draft, draft_sample_method="greedy"), 2),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("turns", "rejection"),
        # `block` is exact for each number of valid tokens (test_chain_enumeration), and how many
        # there are is decided alike.
        *slow(("turns", "block"), ("drawn", "rejection"), ("greedy", "rejection")),
        *slow(("drawn", "block")),
    ],
)
def test_pairs_of_rows_are_exact_and_independent(name, rule, tables):
    target, draft = tables
    make, length = DRAFTERS[name]
    tokens, drafted = pairs(target, make(draft), length, costs=some_pay, rule=rule)
    assert set(range(length + 1)) <= set(np.unique(drafted[..., :LENGTH]).tolist())
    found = joint(target, tokens)
    assert found.statistic < found.threshold, found


def test_rounds_that_measure_costs_are_exact(tables):
    """Of one drafter after the other, and none, in passes as wide as they need or wider."""
    target, draft = tables
    make, length = DRAFTERS["turns"]
    kinds = [RoundKind(0, (0, 2)), RoundKind(1, (0, 0)), RoundKind(0, (2, 0))]
    tokens, drafted = pairs(target, make(draft), length, costs=some_pay, kinds=kinds)
    # The first round drafts for all rows, the second for none.
    assert (drafted[..., 0] == 2).all()
    assert set(np.unique(drafted[..., 1]).tolist()) <= {-1, 0}
    found = joint(target, tokens)
    assert found.statistic < found.threshold, found


BUSHY = TreeOptions(kind="static", choices=((0,), (1,), (0, 0), (1, 0)))


def some_nodes_pay(plan):
    """Costs at which some rounds verify a few nodes, and some all."""
    drafters = len(plan.drafter.parts)
    passes = jnp.asarray([1.0, 1.3, 1.45])
    nothing = jnp.zeros(drafters)
    return Costs(passes, first=jnp.full(drafters, 0.05), further=nothing, catch_up=nothing)


def half_broken(context):
    """The pairs 0, 2, 4, ... are broken, beside others as they are."""
    return context.index // ROWS % 2 == 0


@pytest.fixture(scope="module")
def sized(tables):
    """Pairs that share the size of their trees; of half of them trees are cut by own tokens."""
    target, draft = tables
    decided_after = turns._decided_after

    def by_own_tokens(part, context, draft):
        decided, planned = decided_after(part, context, draft)
        own = jnp.take_along_axis(draft.logq, draft.logq_row[:, :, None], axis=1)
        own = jnp.take_along_axis(own, draft.tokens[:, :, None], axis=2)[..., 0]
        here = half_broken(context)[:, None]
        valid = jnp.where(here, draft.valid & (jnp.exp(own) > 0.3), decided.valid)
        return decided.replace(valid=valid), planned

    drafter = changed(draft_model(draft, tree=BUSHY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "_decided_after", by_own_tokens)
        return pairs(target, drafter, 2, 2 * GROUPS, costs=some_nodes_pay, widths=(1, 3, 5))


def test_pairs_of_rows_that_share_the_size_of_their_trees(tables, sized):
    """How many nodes are verified is decided before any of them is drawn."""
    tokens, drafted = (part[1::2] for part in sized)
    assert len(set(np.unique(drafted[..., :LENGTH]).tolist()) - {-1, 0}) > 1
    found = joint(tables[0], tokens)
    assert found.statistic < found.threshold, found


def test_a_drawn_tree_is_not_cut_by_its_own_tokens(tables, sized):
    found = joint(tables[0], sized[0][::2])
    assert found.statistic > 1.5 * found.threshold


def test_pairs_of_rows_whose_drafters_sleep(tables, monkeypatch):
    """Which program runs a round is chosen before anything of it is drawn."""
    target, draft = tables
    intend = turns.Turns.intend

    def by_what_would_be_drawn(self, params, state, context, noise):
        intention = intend(self, params, state, context, noise)
        draft = self.propose(params, state, context, noise).draft
        drafts = jnp.any(draft.valid[:, 0] & (draft.tokens[:, 0] == 1))
        drafts = jnp.where(half_broken(context).any(), drafts, intention.drafts)
        return intention._replace(drafts=drafts)

    monkeypatch.setattr(turns.Turns, "intend", by_what_would_be_drawn)
    drafter = draft_model(draft, num_speculative_tokens=2)
    tokens, ran = pairs_by_steps(target, drafter, 2)
    # The first round may draft in any case.
    assert 0.05 < ran[1::2, 1:].mean() < 0.95
    found = joint(target, tokens[1::2])
    assert found.statistic < found.threshold, found
    broken = joint(target, tokens[::2])
    assert broken.statistic > 1.5 * broken.threshold


def rounds_down(draft, context):
    """Cuts a finished draft of two tokens to one, which a compiled width holds."""
    count = draft.valid.sum(axis=1, keepdims=True)
    step = jnp.arange(draft.valid.shape[1])[None, :]
    return draft.replace(valid=draft.valid & ((count != 2) | (step < 1)))


def best_of_finished(draft, context):
    """Keeps the length that looks best for the tokens that were drawn."""
    own = jnp.take_along_axis(jnp.exp(draft.logq), draft.tokens[:, :, None], axis=2)[..., 0]
    survived = jnp.cumprod(jnp.where(draft.valid, own, 0.0), axis=1)
    step = jnp.arange(own.shape[1])
    value = jnp.cumsum(survived, axis=1) - 0.3 * (step + 1)[None, :]
    best = jnp.argmax(jnp.pad(value, ((0, 0), (1, 0))), axis=1)
    return draft.replace(valid=draft.valid & (step[None, :] < best[:, None]))


def admitted_by_the_neighbour(draft, context):
    """Verifies a row's token where the other row's token of the same depth is even."""
    other = draft.tokens[::-1]
    keep = jnp.cumprod(other % 2 == 0, axis=1).astype(bool)
    return draft.replace(valid=draft.valid & keep)


BROKEN = {
    # Drafts stop at a token that the head is not sure of, which the token before it decides.
    "rounded_down_to_a_width": rounds_down,
    "the_best_of_a_finished_draft": best_of_finished,
}


@pytest.fixture(scope="module")
def broken_pairs(tables):
    """Pairs of rows of a rule: those of each broken variant in turn, and then one as it is."""
    target, draft = tables

    def change(draft, context):
        which = context.index[:, None] // ROWS % (len(BROKEN) + 1)
        valid = draft.valid
        for number, variant in enumerate(BROKEN.values()):
            valid = jnp.where(which == number, variant(draft, context).valid, valid)
        return draft.replace(valid=valid)

    @functools.cache
    def of(rule):
        drafter = tampered(changed(draft_model(draft, draft_p_min=0.45)), change)
        groups = (len(BROKEN) + 1) * GROUPS
        tokens, _ = pairs(target, drafter, 3, groups, widths=(4,), auto=False, rule=rule)
        return tokens.reshape(GROUPS, -1, *tokens.shape[1:])

    return of


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "rejection") for name in BROKEN), *slow(("the_best_of_a_finished_draft", "block"))],
)
def test_broken_variants_fail(name, rule, tables, broken_pairs):
    tokens = broken_pairs(rule)
    broken = joint(tables[0], tokens[:, list(BROKEN).index(name)])
    untouched = joint(tables[0], tokens[:, -1])
    assert untouched.statistic < untouched.threshold
    assert broken.statistic > 1.5 * broken.threshold


def test_only_both_rows_together_show_what_ties_them(tables):
    """Each row for itself has the right distribution, though its neighbour's tokens admit it."""
    target, _ = tables
    drafter = tampered(changed(draft_model(target)), admitted_by_the_neighbour)
    tokens, _ = pairs(target, drafter, 2, 2 * GROUPS, widths=(3,), auto=False)
    for row in range(ROWS):
        alone = joint(target, tokens, rows=(row,))
        assert alone.statistic < alone.threshold
    found = joint(target, tokens)
    assert found.statistic > found.threshold
