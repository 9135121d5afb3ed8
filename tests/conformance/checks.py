"""What is checked of each cell: tokens, distribution, caches, company, ends, resumption."""

import functools
from typing import ClassVar

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cells import (
    CAPACITY,
    ROWS,
    Cell,
    expected,
    is_greedy,
    joint_test,
    outputs_of,
    plain,
    remembers_drafts,
    restarted,
    taken,
)
from conformance.methods import LENGTH, target_with
from conformance.passes import assert_remembered

from specjax.core.state import FULL, STOPPED
from specjax.sampling import RULES

COUNTS = ("drafted", "accepted", "emitted")
FEW, MANY = 4_000, 24_000
SOME_ROUNDS = 4
ALWAYS_RIGHT = "itself", "early_exit_all_layers"


def assert_outputs(state, counts, rule):
    """All rows of `coupled`, and greedy ones of any rule, have the tokens of plain decoding."""
    arguments, wanted = expected()
    found, stops = outputs_of(state), np.asarray(arguments[1].stop_ids)[:, 0]
    status, most = np.asarray(state.status), np.asarray(arguments[1].max_length)
    for row in range(ROWS):
        if rule == "coupled" or is_greedy(row):
            assert found[row] == wanted[row], row
        # Nothing comes after a stop token, and nothing beyond the last position.
        assert stops[row] not in found[row][:-1]
        ended = found[row][-1] == stops[row]
        assert status[row] == (STOPPED if ended else FULL)
        assert ended or int(state.length[row]) == most[row]
    ran = counts.emitted >= 0
    assert (counts.accepted <= counts.drafted)[ran].all()
    assert (counts.emitted <= counts.accepted + 1)[ran].all()
    assert np.maximum(counts.emitted, 0).sum(axis=1).tolist() == list(map(len, found.values()))


@jax.jit
def cache_distance(cache, wanted):
    """Return the largest difference of two caches in the tokens that the first one holds."""
    held = (jnp.arange(cache.capacity)[None, :] < cache.length[:, None])[None, :, None, :, None]
    pairs = (cache.k, wanted.k), (cache.v, wanted.v)
    found = [jnp.where(held, jnp.abs(one - other), 0).max() for one, other in pairs]
    # Rows whose cache is empty have read nothing.
    some = (cache.length > 0)[None, :]
    for one, other in zip(*map(jax.tree.leaves, (cache.recurrent, wanted.recurrent)), strict=True):
        read = some.reshape(*some.shape, *(1 for _ in one.shape[2:]))
        found.append(jnp.where(read, jnp.abs(one - other), 0).max())
    return jnp.stack(found).max()


def assert_cache(state):
    """The cache holds all committed tokens but the last, as a fresh prefill has them."""
    wanted = restarted(plain(), state.replace(drafter=plain().start(expected()[0]).drafter)).cache
    np.testing.assert_array_equal(state.cache.length, state.length - 1)
    assert float(cache_distance(state.cache, wanted)) < 2e-5


@functools.lru_cache(maxsize=1)
def decoded(cell):
    """Return a cell's rows before the first round and at their end, and all counts."""
    first = cell.program.start(expected()[0])
    return first, *cell.program.run(first)


class Conformance:
    """The checks of the cells in a subclass's `cells`."""

    cells: tuple[Cell, ...] = ()

    @pytest.fixture(autouse=True)
    def _target(self, cell):
        with target_with(cell.layers):
            yield

    only: ClassVar = {"test_distribution": ("rejection", "block")}
    """The rules of a check that does not run under all: here those that draw anew each round."""

    def test_tokens_and_ends(self, cell):
        _, state, counts = decoded(cell)
        assert_outputs(state, counts, cell.rule)
        ran = counts.emitted > 0
        last = ran.sum(axis=1) - 1
        if cell.method in ALWAYS_RIGHT and RULES[cell.rule].exact:
            # A row's last draft may be longer than what it has room for.
            before = ran & (np.arange(ran.shape[1])[None, :] < last[:, None])
            assert (counts.accepted == counts.drafted)[before].all()
            assert counts.accepted[before].max() == LENGTH
            return
        assert {0, 1} <= set(counts.accepted[ran].tolist())
        # Some rows stop at the first token of a round, some after an accepted one.
        stopped = np.asarray(state.status) == STOPPED
        assert {1, 2} <= set(counts.emitted[np.arange(ROWS), last][stopped].tolist())

    def test_caches_and_resumption(self, cell):
        """After each of some rounds; rows that are put back there end as if they had stayed."""
        state, last, counts = decoded(cell)
        for _ in range(SOME_ROUNDS):
            before = state
            state, _ = cell.program.run(before, 1)
            assert_cache(state)
            if remembers_drafts(cell.drafter):
                assert_remembered(cell.program, before, state)
        again, later = cell.program.run(restarted(cell.program, state))
        if not remembers_drafts(cell.drafter):
            assert outputs_of(again) == outputs_of(last)
            for name in COUNTS:
                wanted = getattr(counts, name)[:, SOME_ROUNDS:]
                np.testing.assert_array_equal(
                    getattr(later, name)[:, : CAPACITY - SOME_ROUNDS], wanted
                )
        else:
            rows = [row for row in range(ROWS) if cell.rule == "coupled" or is_greedy(row)]
            assert outputs_of(again, rows) == outputs_of(last, rows)

    def test_company(self, cell):
        """Rows in another order, half of them without their neighbours, do as before."""
        _, last, counts = decoded(cell)
        order = np.random.default_rng(1).permutation(ROWS)
        present = np.arange(ROWS) % 2 == 0
        state = cell.program.start(taken(expected()[0], order, jnp.asarray(present)))
        state, other = cell.program.run(state)
        found, wanted = outputs_of(state), outputs_of(last)
        for slot, row in enumerate(order.tolist()):
            if present[slot]:
                assert found[slot] == wanted[row]
        for name in COUNTS:
            mine, theirs = getattr(other, name)[present], getattr(counts, name)[order][present]
            np.testing.assert_array_equal(mine, theirs)

    def test_distribution(self, cell):
        """Three tokens together, over several rounds; `coupled` has plain decoding's tokens."""
        found, length = joint_test(cell.program, MANY if conftest.full else FEW)
        assert found.statistic < found.threshold, found
        assert length > 1.05
