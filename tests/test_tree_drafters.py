"""Drafters with a model as trees: the trees that they ought to be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import (
    PROMPTS,
    Deciding,
    decode,
    draft_model,
    first_state,
    greedy,
    make_call,
    observed,
    rounds,
)
from test_drafters import context_of, silence
from tiny_models import medusa_head

import specjax
from specjax import sampling
from specjax.apps.command_line.config_file import read_config
from specjax.apps.run.decode_config import read_decode_config
from specjax.core.drafter import Sampling
from specjax.core.growth import dynamic_tree, static_tree
from specjax.core.growth.tree_options import USUAL_DEPTH, USUAL_NODES
from specjax.drafters import TokenRecycling, TreeOptions, head_drafter
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.methods.early_exit import EarlyExit
from specjax.trees import DynamicTree, RankedTree, tree_of_choices

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
TREES = {
    "static": TreeOptions(kind="static", choices=CHOICES),
    "dynamic": TreeOptions(kind="dynamic", topk=3, depth=3, num_nodes=9),
}


def call_of(target, drafter, requests):
    options = dict(verify="coupled", max_length=48, every_width=True)
    return make_call(target, PROMPTS, drafter=drafter, sampling=requests, **options)


@pytest.mark.parametrize("kind", ["dynamic", *slow("static")])
def test_a_draft_model_reads_no_token_again_that_it_was_fed(kind, tiny):
    """Its keys are there, without asking a model that has no numbers any more."""
    everything = SamplingParams(temperature=0.8, top_k=9, top_p=0.8, min_p=0.05)
    requests = [*[greedy()] * 7, everything]
    call = call_of(tiny, draft_model(tiny, tree=TREES[kind]), requests)
    state = next(rounds(call, first_state(call), counts := []))
    assert counts[0].accepted.max() == 3
    unknown = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), call.plan.drafter.params)
    drafter = call.plan.drafter._replace(params=unknown)
    without = call._replace(plan=dataclasses.replace(call.plan, drafter=drafter))
    cache = observed(without, state)[0].cache
    assert cache.length.tolist() == (state.length - 2).tolist()
    assert jnp.isfinite(cache.k).all()


SIZE, CODE = 23, 97


@dataclasses.dataclass(frozen=True)
class Growing:
    """A drafter's step whose logits depend on the whole path, and the reference for it.

    A token's path is a number: of its parent's and its own, and again the sum over what it sees.
    What is carried says whether these are the same.
    """

    slots: int
    seed: int = 0

    @functools.cached_property
    def table(self):
        rng = np.random.default_rng(self.seed)
        return 2 * rng.standard_normal((CODE, SIZE)).astype(np.float32)

    def root(self, token):
        return (token + 1) % CODE

    def after(self, code, token, depth):
        return (code + (token + 1) * 5**depth) % CODE

    def program(self, grow, context):
        """A function of the table: what `grow(logits, step, carry)` drafts, and if it is right."""

        @jax.jit
        def draft(table):
            def step(level, carry):
                codes, window, same = carry
                above = jnp.take_along_axis(codes, jnp.asarray(level.parents), axis=1)
                codes = self.after(above, level.tokens, level.depth)
                own = slice(level.start, level.start + codes.shape[1])
                window = window.at[:, own].set((level.tokens + 1) * 5**level.depth)
                seen = jnp.where(level.visible, window[:, None, :], 0).sum(axis=2) % CODE
                return table[codes], (codes, window, same & (seen == codes).all())

            codes = self.root(context.token_at(context.length - 1))[:, None]
            window = jnp.zeros((len(codes), self.slots), jnp.int32).at[:, :1].set(codes)
            grown, (*_, same) = grow(table[codes], step, (codes, window, jnp.bool_(True)))
            return grown, same

        return draft

    def drafted(self, draft):
        grown, same = draft(self.table)
        assert same
        return grown


ROWS = [[1, 2], [3, 4, 5], [6], [7, 8]]
LIMITS = [4, 2, 0, 1]


def by_hand(growing, token, limit, topk, depth):
    """EAGLE-2's candidates in the order of their value: [(value, path)], from the root."""
    every, level = [], [(0.0, (), growing.root(token))]
    for step in range(1, depth + 1):
        found = []
        for value, path, code in level:
            logits = growing.table[code].astype(np.float64)
            logp = logits - np.log(np.exp(logits).sum())
            for best in np.argsort(-logp, kind="stable")[:topk]:
                after = growing.after(code, int(best), step)
                found.append((value + logp[best], (*path, int(best)), after))
        if step <= limit:
            every += [(value, path) for value, path, _ in found]
        found.sort(key=lambda one: -one[0])
        level = found[:topk]
    return sorted(every, key=lambda one: -one[0])


def paths_of(draft, row):
    """The path of each valid node."""
    slots = {0: ()}
    for node in range(draft.topology.num_nodes):
        if draft.valid[row, node]:
            parents = draft.topology.row_parents
            parent = int(parents[row if len(parents) > 1 else 0, node])
            slots[node + 1] = (*slots[parent], int(draft.tokens[row, node]))
    return [slots[slot] for slot in sorted(slots) if slot]


@functools.cache
def dynamic_program(tree, slots):
    context = context_of(ROWS, LIMITS, SIZE)

    def grow(logits, step, carry):
        return dynamic_tree.draft_dynamic_tree(tree, logits, step, carry, context)

    return Growing(slots).program(grow, context)


@pytest.mark.parametrize("seed", range(4))
def test_a_dynamic_tree_is_the_best_of_all_candidates(seed):
    tree = DynamicTree(topk=3, depth=4, num_nodes=12)
    growing = Growing(sum(dynamic_tree.level_sizes(tree)), seed)
    draft = growing.drafted(dynamic_program(tree, growing.slots))
    counts = []
    for row, ids in enumerate(ROWS):
        wanted = by_hand(growing, ids[-1], LIMITS[row], 3, 4)[:12]
        assert paths_of(draft, row) == [path for _, path in wanted]
        counts.append(len(wanted))
    # Where a path may be short, what could be deeper makes room.
    assert counts == [12, 12, 0, 3]
    assert draft.logq is None
    for count in (1, 5):
        smaller = dataclasses.replace(tree, num_nodes=count)
        first_nodes = growing.drafted(dynamic_program(smaller, growing.slots))
        for row in range(4):
            assert paths_of(first_nodes, row) == paths_of(draft, row)[:count]


def test_of_equal_candidates_the_shallower_is_taken():
    """Tokens that are certain: each child is worth as much as its parent."""
    tree = DynamicTree(topk=2, depth=3, num_nodes=3)
    certain = jnp.where(jnp.arange(SIZE) == 7, 0.0, -1e9)

    def step(level, carry):
        return jnp.broadcast_to(certain, (*level.tokens.shape, SIZE)), carry

    context = context_of([[1, 2]], [3], SIZE)

    @jax.jit
    def propose():
        return dynamic_tree.draft_dynamic_tree(tree, certain[None, None], step, (), context)[0]

    draft = propose()
    assert draft.tokens.tolist() == [[7, 7, 7]]
    assert draft.topology.row_parents.tolist() == [[0, 1, 2]]


def test_a_static_tree_has_the_candidates_of_its_ranks():
    tree = tree_of_choices(CHOICES)
    growing = Growing(sum(static_tree.level_sizes(tree)))
    assert growing.slots == 1 + 6
    context = context_of(ROWS, LIMITS, SIZE)

    def grow(*growth):
        return static_tree.draft_static_tree(tree, *growth, context, silence, sampled=False)

    draft = growing.drafted(growing.program(grow, context))
    for row, ids in enumerate(ROWS):
        wanted = []
        for choice in tree.choices:
            code, path = growing.root(ids[-1]), ()
            for depth, rank in enumerate(choice, start=1):
                token = int(np.argsort(-growing.table[code], kind="stable")[rank])
                code, path = growing.after(code, token, depth), (*path, token)
            if len(path) <= LIMITS[row]:
                wanted.append(path)
        assert paths_of(draft, row) == wanted


def test_children_are_drawn_without_replacement_as_far_as_there_are_any():
    tree = tree_of_choices(((0,), (1,), (2,), (0, 0), (2, 0)))
    growing = Growing(sum(static_tree.level_sizes(tree)))
    warp = Sampling(
        temperature=jnp.array([0.0, 1.0, 1.0, 1.0]),
        top_k=jnp.array([0, 0, 2, 1]),
        top_p=jnp.ones(4),
        min_p=jnp.zeros(4),
    )
    flags = sampling.WarpFlags(top_p=False, min_p=False)
    context = context_of(ROWS, [2] * 4, SIZE)
    context = context.replace(sampling=warp, flags=flags, needs_logq=True)

    def grow(logits, step, carry):
        noise = sampling.draft_noise(jax.vmap(jax.random.key)(jnp.arange(4)), SIZE)
        return static_tree.draft_static_tree(tree, logits, step, carry, context, noise)

    draft = growing.drafted(growing.program(grow, context))
    assert draft.valid[:2].all()
    assert draft.valid[2].tolist() == [True, True, False, True, False]
    assert draft.valid[3].tolist() == [True, False, False, True, False]
    assert draft.logq_row.tolist() == [[-1] * 5] + [[0, 0, 0, 1, 2]] * 3
    logits = growing.table[[growing.root(ids[-1]) for ids in ROWS]]
    likeliest = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    assert draft.tokens[0, :3].tolist() == likeliest[0].tolist()
    assert len(set(draft.tokens[1, :3].tolist())) == 3
    assert set(draft.tokens[2, :2].tolist()) == set(likeliest[2, :2].tolist())
    np.testing.assert_allclose(np.exp(draft.logq).sum(axis=2), 1.0, atol=1e-5)


def test_an_unsure_token_has_no_children():
    """`draft_p_min` also ends the branches of trees."""
    tree = DynamicTree(topk=2, depth=2, num_nodes=4)
    sure = jnp.where(jnp.arange(SIZE) == 7, 5.0, 0.0)

    def step(level, carry):
        return jnp.where((level.tokens == 7)[..., None], sure, jnp.zeros(SIZE)), carry

    options = dict(p_min=0.5)
    context = context_of([[1, 2]], [2], SIZE)
    ranked = tree_of_choices(((0,), (1,), (0, 0), (1, 0)))

    @jax.jit
    def propose():
        given = sure[None, None], step, (), context
        return (
            dynamic_tree.draft_dynamic_tree(tree, *given, **options)[0],
            static_tree.draft_static_tree(ranked, *given, silence, sampled=False, **options)[0],
        )

    dynamic, static = propose()
    assert dynamic.valid.sum() == 4
    assert {path[0] for path in paths_of(dynamic, 0) if len(path) == 2} == {7}
    assert static.valid.tolist() == [[True, True, True, False]]


def test_options_name_a_tree(tiny):
    drafter = specjax.make_drafter("early_exit", tiny, tree={"kind": "dynamic", "topk": 2})
    assert drafter.drafter.shape == DynamicTree(2, USUAL_DEPTH, 2 + 4 * (USUAL_DEPTH - 1))
    assert not drafter.drafter.sampled
    assert drafter.drafter.num_speculative_tokens == USUAL_DEPTH
    usual = EarlyExit(3, tree=TreeOptions(kind="static"), num_speculative_tokens=2)
    assert isinstance(usual.shape, RankedTree)
    assert (usual.shape.num_nodes, usual.shape.depth) == (USUAL_NODES, 2)
    assert usual.sampled
    assert EarlyExit(3, tree=TreeOptions()) == EarlyExit(3)
    deep = EarlyExit(3, tree=TREES["static"])
    shorter = dataclasses.replace(deep, num_speculative_tokens=2)
    assert shorter.shape.choices == tuple(path for path in CHOICES if len(path) <= 2)
    assert dataclasses.replace(shorter, num_speculative_tokens=3) == deep
    # There are three heads.
    heads = head_drafter(medusa_head(tiny), tiny, tree=TreeOptions(kind="static")).drafter
    assert heads.num_speculative_tokens == heads.shape.depth == 3


def test_a_static_tree_has_no_more_nodes_than_rates_are_known_of():
    rates = np.full((2, 10), 0.09)
    options = TreeOptions(kind="static", topk=64, depth=1, acceptance=rates)
    assert options.shape().num_nodes == 10
    assert options == dataclasses.replace(options, acceptance=rates.tolist())
    assert hash(options) is not None
    deeper = dataclasses.replace(options, depth=3, num_nodes=40)
    assert deeper.shape().num_nodes == 40
    says = (
        "num_nodes=40: with rates of 10 candidates and depth=1 there are at most 10; lower it, or r"
    )
    with pytest.raises(InputError, match=says):
        dataclasses.replace(options, num_nodes=40).shape()
    with pytest.raises(InputError, match=r"tree.acceptance is empty"):
        TreeOptions(kind="static", acceptance=())
    recycling = TokenRecycling(64, tree=TreeOptions(kind="static", num_nodes=9, acceptance=rates))
    assert recycling.shape.num_nodes == 9


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((-2, 3, 4), "topk=-2 must be at least 1"),
        ((0, 3, 0), "topk=0 must be at least 1"),
        ((2, -1, 0), "depth=-1 must be at least 0"),
        ((2, 3, -1), "num_nodes=-1 must be at least 0"),
        ((2, 3, 11), "num_nodes=11: with topk=2 and depth=3 there are 10 candidates"),
    ],
)
def test_a_dynamic_tree_has_numbers_that_can_be(numbers, says):
    with pytest.raises(InputError, match=says):
        DynamicTree(*numbers)


def test_trees_that_do_not_fit(tiny):
    dynamic, static = TREES["dynamic"], TREES["static"]
    make = specjax.make_drafter

    def refused(says, call, *arguments, **options):
        with pytest.raises(InputError) as caught:
            call(*arguments, **options)
        assert says in str(caught.value)

    refused("tree.kind=dynamic: ngram does not take it", make, "ngram", tiny, tree=dynamic)
    for tree, field in ((dynamic, "depth"), (static, "choices")):
        says = f"num_speculative_tokens=2: tree.{field} has 3 levels"
        refused(says, make, "early_exit", tiny, tree=tree, num_speculative_tokens=2)
    says = "drafter.draft_sample_method='probabilistic': the nodes of a dynamic tree are chosen"
    options = dict(tree=dynamic, draft_sample_method="probabilistic")
    refused(says, make, "early_exit", tiny, **options)
    says = "tree.depth=3: medusa drafts at most 2 tokens in a row; lower it"
    refused(says, head_drafter, medusa_head(tiny, heads=2), tiny, tree=static)
    drafter = EarlyExit(3, tree=dynamic)
    says = "verify=own: early_exit drafts trees, and own verifies chains; use rejection, block or"
    refused(says, decode, tiny, [[1]], drafter=drafter, verify=Deciding(sampling.block))
    says = "num_speculative_tokens=8: the tree has 3 levels"
    refused(says, decode, tiny, [[1]], drafter=drafter, num_speculative_tokens=8)


def test_the_command_line_names_trees():
    flags = ["--config.drafter.name=ngram,early_exit", "--config.tree.kind=static"]
    flags += ["--config.tree.choices=((0,), (1,), (0, 0))"]
    config = read_config(flags, "configs/decode_smollm2.py")
    found = read_decode_config(config.to_dict())
    tree = TreeOptions(kind="static", choices=((0,), (1,), (0, 0)))
    assert [one.options.get("tree") for one in found.drafters] == [None, tree]
    for one in found.drafters:
        alone = read_decode_config(found.written_for(one))
        assert alone.drafters == (one,)
    with config.unlocked():
        config.tree.kind = "chain"
    with pytest.raises(InputError, match="tree.choices=.*a chain has no such option"):
        read_decode_config(config.to_dict())


def test_a_chain_is_drafted_where_it_is_asked_for(tiny):
    """token_recycling drafts a tree by default; other drafters need no option for a chain."""
    recycling = ["--config.drafter.name=token_recycling,ngram"]
    shapes = []
    for said in ([], ["--config.tree.kind=chain"]):
        config = read_config([*recycling, *said], "configs/decode_smollm2.py")
        first, second = read_decode_config(config.to_dict()).drafters
        shapes.append(specjax.make_drafter(first.name, tiny, **first.options).drafter.tree)
        assert not second.options
    assert shapes[0] is not None
    assert shapes[1] is None
    for names in ("ngram", "ngram,none"):
        said = [f"--config.drafter.name={names}", "--config.tree.kind=chain"]
        config = read_config(said, "configs/decode_smollm2.py")
        assert all(not one.options for one in read_decode_config(config.to_dict()).drafters)
