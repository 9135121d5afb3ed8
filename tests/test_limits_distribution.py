"""Rows under limits that are fixed before a step have the target's distribution, jointly.

What two rows emit is tested as one outcome, since a choice that looks at the wrong tokens may leave
each row's distribution right and tie them. Groups are pairs of rows; a group's number says which
variant it is: as it should be, or deliberately broken. So one program serves all of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import slow
from decoding import draft_model, tampered

from specjax.core import initial_state
from specjax.core.drafter import StepLimits
from specjax.core.round import one_round
from specjax.drafters import TreeOptions, merge_drafters, take_turns
from specjax.engine.requests import SamplingParams
from specjax.methods.ngram import Ngram
from specjax.sampling import RULES
from specjax.testing import Tabular
from specjax.testing.drafter_check import chi_square, first_rows, make_plan, output_distribution

VOCAB, LENGTH, ROWS = 4, 3, 2
GROUPS = 15_000
PROMPT = (1, 2, 3, 1)
AS_IS = SamplingParams(temperature=1.0)
BUSHY = TreeOptions(kind="static", choices=((0,), (1,), (0, 0), (1, 0)))


@pytest.fixture(scope="module")
def tables():
    """The target's table, and the one that drafters draw from."""
    table = 1.2 * jax.random.normal(jax.random.key(2), (VOCAB, VOCAB))
    return table, table + 0.9 * jax.random.normal(jax.random.key(3), (VOCAB, VOCAB))


def by_the_past(plan, params, state, group):
    """Any limits and confidence, by the tokens of both rows so far."""
    committed = jnp.arange(state.tokens.shape[1])[None, :] < state.length[:, None]
    past = jnp.where(committed, state.tokens + 1, 0).sum() + group // 7
    number = jnp.arange(len(plan.drafter.parts))
    most = plan.drafter.full_limits().longest
    longest = (past * (2 * number + 1) + number) % (most + 1)
    return StepLimits(longest, jnp.array([0.0, 0.45, 0.6])[(past // 2 + number) % 3])


def full(plan, params, state, group):
    return plan.drafter.full_limits()


def unsure(plan, params, state, group):
    return plan.drafter.full_limits().replace(confidence=jnp.full(1, 0.45))


def own_probabilities(draft):
    rows = jnp.maximum(draft.logq_row, 0)[:, :, None]
    own = jnp.take_along_axis(jnp.exp(draft.logq), rows, axis=1)
    return jnp.take_along_axis(own, draft.tokens[:, :, None], axis=2)[..., 0]


def by_the_drafts(draft, context):
    """Broken: nothing is drafted where what row 0 has drawn first looks bad."""
    return draft.valid & (own_probabilities(draft)[0, 0] > 0.3)


def by_acceptance(draft, context):
    """Broken: a chain ends before the first token that might be refused."""
    root = context.token_at(context.length - 1)[:, None]
    before = jnp.concatenate([root, draft.tokens[:, :-1]], axis=1)
    p = jax.nn.softmax(context.params)[before, draft.tokens]
    return draft.valid & jnp.cumprod(p >= own_probabilities(draft), axis=1).astype(bool)


def after_the_draw(draft, context):
    """Broken: a threshold for the token that was drawn, by its own probability."""
    return draft.valid & ((own_probabilities(draft) > 0.3) | (draft.logq_row < 0))


def down_to_a_width(draft, context):
    """Broken: a drawn chain that ended at two tokens is cut to one, which a width holds."""
    count = draft.valid.sum(axis=1, keepdims=True)
    return draft.valid & ((count != 2) | (jnp.arange(draft.valid.shape[1])[None, :] < 1))


def best_of_finished(draft, context):
    """Broken: the length that looks best for the tokens that were drawn."""
    survived = jnp.cumprod(jnp.where(draft.valid, own_probabilities(draft), 0.0), axis=1)
    step = jnp.arange(draft.valid.shape[1])[None, :]
    value = jnp.cumsum(survived, axis=1) - 0.3 * (step + 1)
    best = jnp.argmax(jnp.pad(value, ((0, 0), (1, 0))), axis=1)
    return draft.valid & (step < best[:, None])


def by_the_neighbour(draft, context):
    """Broken: a row drafts as far as the other row's tokens of the same depth are even."""
    return draft.valid & jnp.cumprod(draft.tokens[::-1] % 2 == 0, axis=1).astype(bool)


VARIANTS = {
    # name: (limits of a step, what is changed of a draft)
    "exact": (by_the_past, None),
    "by_the_drafts": (full, by_the_drafts),
    "by_acceptance": (full, by_acceptance),
    "after_the_draw": (full, after_the_draw),
    "down_to_a_width": (unsure, down_to_a_width),
    "best_of_finished": (full, best_of_finished),
    "by_the_neighbour": (full, by_the_neighbour),
}
# The last one's rows draw from the target's own table: what ties them is all that is wrong.
CHAIN, TREE = tuple(VARIANTS), ("exact", "by_the_drafts", "after_the_draw")


def merged(draft):
    return merge_drafters(draft, Ngram(prompt_lookup_min=1, num_matches=2))


DRAFTERS = {
    # name: (drafter of a drawing model, K, variants, widths)
    "chain": (lambda draft: draft, 3, CHAIN, (4,)),
    "tree": (lambda draft: draft, 2, TREE, (5,)),
    "turns": (lambda draft: take_turns(Ngram(prompt_lookup_min=1), draft), 2, TREE[:1], (1, 2, 3)),
    "merged": (merged, 2, TREE[:1], None),
    "joined": (
        lambda draft: take_turns(Ngram(prompt_lookup_min=1), merged(draft)),
        2,
        TREE[:1],
        None,
    ),
}


@pytest.fixture(scope="module")
def rows_of(tables):
    """The tokens [groups, 2, LENGTH] and the nodes drafted of each variant of a drafter."""

    @functools.cache
    def of(name, rule):
        make, length, variants, widths = DRAFTERS[name]
        # Without distributions nothing that is drafted ties a row to anything.
        variants = variants if RULES[rule].needs_logq else variants[:1]

        def change(draft, context):
            number = context.index[:, None] // ROWS % len(variants)
            valid = draft.valid
            for here, variant in enumerate(variants):
                changes = VARIANTS[variant][1]
                if changes is not None:
                    valid = jnp.where(number == here, changes(draft, context), valid)
            return draft.replace(valid=valid)

        draft = draft_model((Tabular(VOCAB), tables[1]), tree=BUSHY if name == "tree" else None)
        if len(variants) > 2:
            draft = tampered(draft, change)
        turns, params = take_turns(make(draft))
        room = len(PROMPT) + LENGTH + length + 1
        options = dict(verify=RULES[rule], request=AS_IS, capacity=room)
        plan = make_plan(Tabular(VOCAB), turns, length, **options)
        plan = dataclasses.replace(plan, widths=widths or plan.widths)
        numbers = jnp.arange(GROUPS * len(variants))
        tokens, drafted = groups_of(plan, variants, (tables[0], params), numbers)
        tokens, drafted = (
            np.asarray(part).reshape(GROUPS, len(variants), ROWS, LENGTH).swapaxes(0, 1)
            for part in (tokens, drafted)
        )
        return dict(zip(variants, zip(tokens, drafted, strict=True), strict=True))

    return of


@functools.partial(jax.jit, static_argnums=(0, 1))
def groups_of(plan, variants, params, groups):
    choices = {VARIANTS[variant][0]: None for variant in variants}
    which = jnp.array([list(choices).index(VARIANTS[variant][0]) for variant in variants])

    def one(group):
        number = group % len(variants)
        tied = variants[-1] == "by_the_neighbour"
        own = (
            params[0],
            jax.tree.map(
                lambda part: jnp.where(tied & (number == len(variants) - 1), params[0], part),
                params[1],
            ),
        )
        index = ROWS * group + jnp.arange(ROWS)
        state = initial_state.start(plan, own, *first_rows(plan, PROMPT, AS_IS, index, 0))

        def step(state, _):
            each = [choose(plan, own, state, group // len(variants)) for choose in choices]
            limits = jax.tree.map(lambda *parts: jnp.stack(parts)[which[number]], *each)
            state, rounds, _ = one_round(plan, own, state, limits)
            return state, rounds.drafted

        state, drafted = jax.lax.scan(step, state, length=LENGTH)
        return state.tokens[:, len(PROMPT) : len(PROMPT) + LENGTH], drafted.T

    return jax.vmap(one)(groups)


def joint(tables, tokens, rows=(0, 1), length=2):
    """The chi-square of the tokens of some rows together."""
    outputs = tokens[:, list(rows), LENGTH - length :].reshape(len(tokens), -1)
    cells = (VOCAB,) * outputs.shape[1]
    counted = np.bincount(np.ravel_multi_index(tuple(outputs.T), cells), minlength=np.prod(cells))
    one = output_distribution(Tabular(VOCAB), tables[0], PROMPT, AS_IS, LENGTH)
    one = one.reshape(-1, VOCAB**length).sum(axis=0)
    return chi_square(counted, functools.reduce(np.multiply.outer, [one] * len(rows)).ravel())


def shown(found):
    return f"{found}: p = {scipy.stats.chi2.sf(found.statistic, found.degrees):.2g}"


CASES = [
    ("chain", "rejection"),
    ("tree", "rejection"),
    ("joined", "rejection"),
    *slow(("chain", "block"), ("turns", "block"), ("turns", "rejection"), ("merged", "rejection")),
    *slow(*((name, "coupled") for name in ("chain", "tree", "turns", "merged"))),
]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_pairs_of_rows_are_exact_and_independent(name, rule, tables, rows_of):
    """Limits and confidence change from step to step, by all that both rows have emitted."""
    tokens, drafted = rows_of(name, rule)["exact"]
    most = int(drafted.max())
    assert most == {"chain": 3, "tree": 4, "turns": 2}.get(name, most)
    assert set(range(most + 1)) <= set(np.unique(drafted).tolist())
    found = joint(tables, tokens)
    assert found.statistic < found.threshold, shown(found)


@pytest.mark.parametrize(
    ("name", "rule", "variant"),
    [
        *(("chain", "rejection", variant) for variant in CHAIN[1:-1]),
        *(("tree", "rejection", variant) for variant in TREE[1:]),
        *slow(*(("chain", "block", variant) for variant in CHAIN[1:-1])),
    ],
)
def test_choices_that_look_at_the_drafts_are_found(name, rule, variant, tables, rows_of):
    found = joint(tables, rows_of(name, rule)[variant][0])
    assert found.statistic > 1.5 * found.threshold, shown(found)


@pytest.mark.parametrize("rule", ["rejection", *slow("block")])
def test_only_both_rows_together_show_what_ties_them(rule, tables, rows_of):
    """Each row for itself has the right distribution, though its neighbour's tokens limit it."""
    tokens, _ = rows_of("chain", rule)["by_the_neighbour"]
    for row in range(ROWS):
        alone = joint(tables, tokens, rows=(row,))
        assert alone.statistic < alone.threshold, shown(alone)
    found = joint(tables, tokens)
    assert found.statistic > found.threshold, shown(found)
