"""Drafts whose arrays do not agree: JAX would clamp or repeat; each is refused, or left out."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from bad_input import refused
from conftest import row_count
from tiny_models import bigrams

import specjax
from specjax import trees
from specjax.core import turn_taking
from specjax.core.drafter import StepLimits
from specjax.drafters import Drafter, LoadedDrafter, merge_drafters, take_turns
from specjax.methods.ngram import Ngram
from specjax.testing import check_drafter, drafter_check
from specjax.trees import Draft, DynamicTopology, PartialPass, Topology
from specjax.trees.draft import check_draft, usable

B, K, V = 3, 2, 5
FORK = Topology((0, 0))


@pytest.fixture(autouse=True)
def arrays_of_any_shape(monkeypatch):
    """As outside of tests, where shapes in signatures are not checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def target():
    return bigrams(V)


def drawn(**changes):
    """A draft of two siblings, drawn from one distribution, with some arrays changed."""
    tokens = jnp.tile(jnp.arange(K), (B, 1))
    logq = jnp.full((B, 1, V), -jnp.log(V))
    draft = Draft(tokens, tokens >= 0, 0 * tokens, logq, FORK)
    return draft.replace(**changes)


def partial(window, slots=K + 1):
    """A partial pass whose states have K + 1 slots, and its window `slots`."""
    model = specjax.testing.Tabular(V)
    return PartialPass(jnp.zeros((B, window, 4)), model.make_window(B, slots), 1)


WRONG = [
    (
        dict(tokens=jnp.zeros((1, K), int)),
        r"valid of bool\[3, 2\]; use .* with B = 1 row",
    ),
    (dict(tokens=jnp.zeros((B, 3), int)), r"tokens of int32\[3, 3\]; use .* N = 2 nodes"),
    (dict(tokens=jnp.zeros((B, K))), r"tokens of float32\[3, 2\]; .* by jnp.argmax"),
    (dict(valid=jnp.ones((1, K), bool)), r"valid of bool\[1, 2\]; use bool\[B, N\] with B = 3"),
    (dict(valid=jnp.ones((B, K), int)), r"valid of int32\[3, 2\]; use bool"),
    (dict(logq_row=jnp.zeros((B, 1), int)), r"logq_row of int32\[3, 1\]; use int32\[B, N\]"),
    (dict(logq_row=jnp.zeros((B, K))), r"logq_row of float32\[3, 2\]; use int32"),
    (dict(logq_row=jnp.array([[0, 0]] * 2 + [[0, 1]])), r"logq_row\[2, 1\] = 1 for 1 rows of"),
    (dict(logq_row=jnp.array([[0, -2]] * B)), r"logq_row\[0, 1\] = -2"),
    (dict(logq=jnp.zeros((1, 1, V))), r"logq of float32\[1, 1, 5\]; .* with B = 3 rows"),
    (dict(logq=jnp.zeros((B, V))), r"logq of float32\[3, 5\]; use float32\[B, Q, V\]"),
    (dict(logq=jnp.zeros((B, 1, V), int)), r"logq of int32\[3, 1, 5\]; use float32"),
    (dict(logq=jnp.zeros((B, 1, V + 1))), r"logq of float32\[3, 1, 6\]; .* V = 5 tokens"),
    (dict(steps=jnp.zeros(B, int)), r"steps of int32\[3\]; use int32\[\]"),
    (dict(drafted_by=jnp.zeros((B, 1), int)), r"drafted_by of int32\[3, 1\]; use"),
    (dict(partial=partial(K)), r"partial.states of float32\[3, 2, 4\]; .* W = 3 slots"),
    (dict(partial=partial(K + 1, K)), r"partial.window.k of .*; .* W = 3 slots"),
    (
        dict(topology=DynamicTopology(jnp.zeros((2, K), int), 1)),
        r"topology.row_parents of int32\[2, 2\]; .* B = 3 rows",
    ),
    (
        dict(topology=DynamicTopology(jnp.array([[0, 2]] * B), 2)),
        r"topology.row_parents\[0, 1\] = 2; use 0 to 1",
    ),
    (
        dict(topology=DynamicTopology(jnp.array([[0, 1]] * B), 1)),
        r"a topology of depth 1, and the path to node 1 of row 0 has more",
    ),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_arrays_that_do_not_agree_are_named(changes, said):
    """Each of them was accepted, since JAX clamps an index and repeats an axis of length 1."""
    check_draft(drawn(), "x has", rows=B, vocab_size=V)
    rows = None if changes.get("tokens") is not None else B
    said = refused(lambda: check_draft(drawn(**changes), "x has", rows=rows, vocab_size=V), said)
    assert said.startswith("x has ")


@pytest.mark.parametrize(
    ("logq", "said"),
    [
        (
            jnp.zeros((B, K - 1, V)),
            r"logq has shape \(3, 1, 5\) for tokens \(3, 2\): logq is",
        ),
        (jnp.zeros((1, K, V)), r"logq has shape \(1, 2, 5\)"),
        (jnp.zeros((B, K)), r"logq has shape \(3, 2\)"),
        (jnp.zeros((B, K, V), int), r"logq of int32\[3, 2, 5\]; use float32"),
    ],
)
def test_a_chain_has_one_distribution_per_token(logq, said):
    def chain(logq):
        return trees.chain(jnp.zeros((B, K), int), jnp.full(B, K), logq)

    refused(lambda: chain(logq), f"^chain: {said}")
    refused(lambda: jax.jit(chain)(logq), f"^chain: {said}")


def test_a_chain_has_counts():
    refused(lambda: trees.chain(jnp.zeros((B, K), int), jnp.ones(B)), "num_valid is float32: pass")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda: drawn(logq=jnp.zeros((B, 1, V + 1))), r"logq of float32\[3, 1, 6\]"),
        (lambda: drawn(valid=jnp.ones((1, K), bool)), r"valid of bool\[1, 2\]"),
        (lambda: jax.tree.map(lambda array: array[:1], drawn()), r"tokens of int32\[1, 2\]"),
    ],
)
def test_merged_drafts_agree(second, said):
    refused(lambda: trees.merge(drawn(), second()), f"^merge: draft 1 has {said}")
    refused(lambda: trees.merge(), "^merge: there are no drafts; pass one or more")


def test_indices_known_only_on_the_device():
    """Nodes that name what is not there are invalid; they never use another node's entry."""
    on_device = jax.jit(usable)
    row = jnp.array([[0, 1], [0, -1], [0, -2]])
    assert usable(drawn(logq_row=row)).valid.tolist() == [
        [True, False],
        [True, True],
        [True, False],
    ]
    parents = DynamicTopology(jnp.array([[0, 1], [0, 0], [2, 0]]), 1)
    draft = on_device(drawn(topology=parents))
    assert draft.valid.tolist() == [[True, False], [True, True], [False, True]]
    # Without distributions every node is deterministic, also after drafts that have some.
    merged = trees.side_by_side(drawn(logq=None), drawn())
    assert merged.logq_row[0].tolist() == [-1, -1, 0, 0]
    merged = jax.jit(trees.side_by_side)(drawn(logq_row=row), drawn())
    assert merged.valid[0].tolist() == [True, False, True, True]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws(Drafter):
    """Draws a chain from another bigram table; `fault` is what is wrong with its draft."""

    name = "draws"
    num_speculative_tokens: int = 2
    fault: str = ""
    variant: int = 0
    sampled = True

    def propose(self, params, state, context, noise):
        token, drawn = context.token_at(context.length - 1), []
        for depth in range(self.num_speculative_tokens):
            token, logq = context.draw(params[token], noise, depth)
            drawn.append((token, logq))
        tokens, logq = (jnp.stack(part, axis=1) for part in zip(*drawn, strict=True))
        draft = trees.chain(tokens, context.limit, logq)
        if self.fault == "rows":
            return draft.replace(logq=logq[:, :-1]), state
        if self.fault == "vocabulary":
            return draft.replace(logq=jnp.pad(logq, ((0, 0), (0, 0), (0, 1)))), state
        if self.fault == "one row":
            return draft.replace(tokens=tokens[:1]), state
        if self.fault == "logits":
            return draft.replace(logq=logq + 1), state
        return draft, state


def draws(target, fault="", **options):
    near = target[1] + 0.9 * jax.random.normal(jax.random.key(1), (V, V))
    return LoadedDrafter(Draws(fault=fault, **options), near)


@pytest.mark.parametrize("join", [lambda drafter: drafter, take_turns, merge_drafters])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("vocabulary", r"propose returned logq of float32\[\d+, 2, 6\]; use .* V = 5 tokens"),
        ("one row", r"propose returned tokens of int32\[1, 2\]; use .* rows, N = 2 nodes"),
        ("rows", r"propose returned logq_row\[2, 1\] = 1 for 1 rows of logq; use 0 to 0"),
        ("logits", r"propose returned logq\[1, 0\] whose probabilities sum to 2.718; return log-"),
    ],
)
def test_the_part_is_named(fault, said, join, target):
    drafter = draws(target, fault)
    joined = drafter if join not in (take_turns, merge_drafters) else join(Ngram(), drafter)
    refused(lambda: check_drafter(joined, target, 100), f"^drafter 'draws': {said}")


@pytest.mark.parametrize("join", [take_turns, merge_drafters])
def test_the_part_with_another_state_is_named(join, target):
    class Rowless(Ngram):
        name = "rowless"

        def init(self, params, batch, capacity):
            return jnp.zeros(())

    class Forgets(Ngram):
        name = "forgets"
        pass_features = ("top_tokens:1",)

        def init(self, params, batch, capacity):
            return jnp.zeros(batch)

        def observe_pass(self, params, state, target_pass):
            return state[:1]

    said = "'rowless': its state holds an array"
    refused(lambda: check_drafter(join(Ngram(), Rowless()), target, 100), f"^drafter {said}")
    said = r"'forgets': observe_pass returned the state .*\[1\]\) where init made .*\[\d+\]\)"
    refused(lambda: check_drafter(join(Ngram(), Forgets()), target, 100), f"^drafter {said}")


def test_limits_have_one_number_per_drafter(target):
    drafter, limits = take_turns(Ngram(), draws(target)), StepLimits(np.array([1]), np.array([0.0]))
    said = r"^limits.longest has shape \(1,\) for 2 drafters: use one number per drafter"
    refused(lambda: check_drafter(drafter, target, row_count(8_000), limits=limits), said)


@pytest.mark.parametrize("broken", [False, True])
def test_a_row_of_q_that_is_not_there_is_never_another(broken, target, monkeypatch):
    """The second token is left out; the broken variant verifies it against the first one's q."""
    monkeypatch.setattr(drafter_check, "check_contract", lambda *arguments: None)
    if broken:
        monkeypatch.setattr(turn_taking, "usable", lambda draft: draft)
    # Another value, since programs are kept by the drafter.
    check = check_drafter(draws(target, "rows", variant=broken), target, row_count(8_000))
    assert check.passed != broken, check
