"""Equal calls compile once, and no compile cache keeps an array alive."""

import dataclasses
import gc
import os
import subprocess
import sys
import weakref

import jax
import jaxtyping
import pytest
from conftest import slow, tiny_config
from decoding import PROMPTS, changed, greedy, random_distribution
from tiny_models import eagle_head, medusa_head, with_modules

import specjax
from specjax import sampling
from specjax.decoding import programs
from specjax.drafters import (
    Drafter,
    LoadedDrafter,
    TokenRecycling,
    Turns,
    head_drafter,
    make_drafter,
)
from specjax.drafters.lookup.ngram import Ngram
from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.testing import Tabular, check_drafter
from specjax.trees import DynamicTopology, Topology, chain, chain_topology


def makers():
    """Each kind of drafter, made anew for a target."""
    return {
        "none": lambda target: None,
        "ngram": lambda target: "ngram",
        "early_exit": lambda target: make_drafter("early_exit", target, exit_layer=2),
        "draft_model": lambda target: make_drafter("draft_model", target, target),
        "eagle3": lambda target: head_drafter(eagle_head(target), target),
        "mtp": lambda target: make_drafter("mtp", with_modules(target)),
        "medusa": lambda target: head_drafter(medusa_head(target), target),
        "simulated": lambda target: make_drafter("simulated", target, continuations=[[1, 2]]),
        "ngram+early_exit": lambda target: "ngram+early_exit",
    }


@pytest.mark.parametrize(
    "name",
    [
        "eagle3",
        *slow(
            "none", "ngram", "draft_model", "early_exit", "medusa", "simulated", "ngram+early_exit"
        ),
    ],
)
def test_equal_calls_never_compile_again(name, tiny):
    make = makers()[name]

    def call(**changes):
        options = dict(sampling=greedy(max_new_tokens=12), batch_size=2, num_speculative_tokens=1)
        options |= changes
        specjax.generate(tiny, PROMPTS[:2], drafter=make(tiny), **options)
        return programs._compile.cache_info().misses

    first = call()
    assert call() == first
    assert call(seed=3, sampling=greedy(max_new_tokens=11)) == first
    if name == "ngram":
        assert call(num_speculative_tokens=2) > first


@pytest.mark.parametrize(
    "name",
    # The others have no arrays of their own.
    [
        "draft_model",
        *slow("eagle3", "none", "ngram", "early_exit", "ngram+early_exit"),
        *slow("medusa", "mtp", "simulated"),
    ],
)
def test_nothing_keeps_the_arrays_of_a_model(name):
    """After the model is gone, none of its arrays is alive, nor its drafter's."""
    target = random_model(tiny_config(hidden_size=28, head_dim=8), 5, dtype="float32")
    result = specjax.generate(
        target,
        PROMPTS[:1],
        drafter=makers()[name](target),
        sampling=greedy(max_new_tokens=3),
        num_speculative_tokens=1,
    )
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(target.params)]
    before = len(jax.live_arrays())
    assert result.new_tokens == 3
    del target
    gc.collect()
    assert not any(array() is not None for array in arrays)
    assert len(jax.live_arrays()) <= before - len(arrays)


class Holder:
    """Hashable by identity, with an array in it: what a closure would be."""

    def __init__(self, array):
        self.array = array


def test_a_drafter_that_holds_an_array_keeps_it_alive(tiny):
    """The broken variant: the compile cache keeps the drafter, and the drafter its table."""
    loaded = random_distribution(tiny.config.vocab_size)
    table = weakref.ref(loaded.params)
    holder = Holder(loaded.params)

    def propose(real, params, state, context, noise, holder=holder):
        return real(holder.array, state, context, noise)

    broken = changed(LoadedDrafter(loaded.drafter, ()), propose=propose)
    specjax.generate(
        tiny, [[1]], drafter=broken, sampling={"max_new_tokens": 6}, num_speculative_tokens=1
    )
    del loaded, holder, propose, broken
    gc.collect()
    assert table() is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithATable(Ngram):
    table: object = dataclasses.field(kw_only=False)


class Forgetful(Drafter):
    """Without `propose`."""


class Undeclared(Ngram):
    """With distributions, though it does not say that it draws."""

    def propose(self, params, state, context, noise):
        draft, state = super().propose(params, state, context, noise)
        return draft.replace(logq=jax.numpy.zeros((*draft.tokens.shape, 61))), state


def proposing(change):
    """A lookup whose draft and state are changed by a function, before they are returned."""
    return changed(Ngram(), propose=lambda real, *rest: change(*real(*rest)))


def with_tokens(draft, dtype):
    return draft.replace(tokens=draft.tokens.astype(dtype))


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (lambda: WithATable(jax.numpy.ones(3)), "unhashable.*params of LoadedDrafter"),
        (lambda: Forgetful(), "no Forgetful.propose; subclass"),
        (lambda: changed(Ngram(), propose=lambda real, *rest: 1 / 0), "ZeroDivisionError"),
        (lambda: proposing(lambda draft, state: draft), r"returned Draft; return \(Draft, state\)"),
        (lambda: proposing(lambda draft, state: (state, draft)), r"returned \(tuple, Draft\)"),
        (
            lambda: proposing(lambda draft, state: (draft, jax.numpy.ones(2))),
            r"propose returned the state .*float32\[2\]\) where init made \(\)",
        ),
        (
            lambda: proposing(lambda draft, state: (with_tokens(draft, "float32"), state)),
            r"returned tokens of float32\[1, 8\]; return int32\[B, N\], by jnp.argmax",
        ),
        (
            lambda: proposing(lambda draft, state: (draft.replace(valid=draft.tokens), state)),
            r"returned valid of int32\[1, 8\]; return bool",
        ),
        (lambda: Undeclared(), "returned logq.*but its `sampled` is False; override"),
        (
            lambda: changed(TokenRecycling(61), observe=lambda real, *rest: None),
            "observe returned the state None where init made .*return one of the same arrays",
        ),
        (lambda: LoadedDrafter(Turns((Ngram(), Ngram())), ()), "has 2 drafters and 0 params"),
    ],
)
def test_a_drafter_of_ones_own_that_is_none(drafter, said, tiny, monkeypatch):
    # As for users: without a type checker in front of specjax's own messages.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=f"^drafter.*{said}") as caught:
        specjax.generate(tiny, [[1, 2]], drafter=drafter(), sampling={"max_new_tokens": 4})
    assert "\n" not in str(caught.value)


def test_a_token_out_of_range_spoils_nothing(tiny):
    """Neither a proposed one, nor one in a node that is not valid."""

    def propose(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        every = jax.numpy.arange(len(PROMPTS))[:, None] % 2 == 0
        unknown = jax.numpy.where(every | ~draft.valid, draft.tokens + 61, draft.tokens)
        return draft.replace(tokens=unknown), state

    plain = specjax.generate(tiny, PROMPTS, sampling=greedy(max_new_tokens=8), batch_size=8)
    drafter = changed(Ngram(prompt_lookup_min=1, num_speculative_tokens=3), propose=propose)
    got = specjax.generate(
        tiny, PROMPTS, drafter=drafter, sampling=greedy(max_new_tokens=8), batch_size=8
    )
    assert got.token_ids == plain.token_ids
    assert got.drafted[1::2].max() > 0 >= got.drafted[::2].max()


def test_values_are_equal_by_their_fields():
    assert Ngram() == Ngram() != Ngram(num_speculative_tokens=2)
    assert hash(sampling.Rejection()) == hash(sampling.Rejection())
    assert sampling.Rejection() != sampling.Block()
    assert chain_topology(2) == Topology((0, 1)) != Topology((0, 0))
    tree = Topology((0, 0, 1, 2, 2))
    assert (tree.num_nodes, tree.width, tree.depth, tree.is_chain) == (5, 6, 2, False)
    with pytest.raises(ValueError, match=r"parents\[1\]=3: a parent is the slot of an earlier"):
        Topology((0, 3))


def test_valid_nodes_are_closed_under_ancestors():
    tree = Topology((0, 0, 1, 2, 2))
    valid = jax.numpy.array([[True, False, True, True, True], [False, True, True, True, False]])
    assert tree.close(valid).tolist() == [
        [True, False, True, False, False],
        [False, True, False, True, False],
    ]
    line = chain_topology(3).close(jax.numpy.array([[True, False, True]]))
    assert line.tolist() == [[True, False, False]]


def test_two_chains_of_one_shape_can_be_chosen_between():
    tokens, count = jax.numpy.zeros((1, 2), int), jax.numpy.ones(1, int)
    chosen = jax.lax.cond(True, lambda: chain(tokens, count), lambda: chain(tokens + 1, count))
    assert chosen.topology.is_chain


@pytest.mark.slow
def test_programs_are_kept_for_calls_from_python(tmp_path):
    """A process that only calls the Python API finds the programs of the one before."""
    code = (
        "import specjax\n"
        "from specjax.loading.load import random_model\n"
        "from specjax.models.config import DecoderConfig\n"
        "shape = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=2)\n"
        "heads = dict(num_heads=2, num_kv_heads=1, head_dim=12, max_positions=100)\n"
        "model = random_model(DecoderConfig(**shape, **heads), 0, dtype='float32')\n"
        "specjax.generate(model, [[1, 2]], drafter='ngram', sampling={'max_new_tokens': 4})\n"
    )
    kept = []
    for _ in range(2):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        kept.append(sorted(path.name for path in tmp_path.rglob("*-cache")))
    assert kept[0]
    assert kept[0] == kept[1]


def test_the_old_form_of_a_drafter_and_of_a_rule(tiny, monkeypatch):
    """Closures are refused with the form of today."""
    with pytest.raises(InputError, match=r"^Drafter\('mine', .*subclass specjax.Drafter as a froz"):
        specjax.Drafter("mine", None, None, None, num_speculative_tokens=3)
    old = type("Drafter", (), {"init": None, "propose": None, "observe": None})()
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=r"^drafter=.*subclass specjax.Drafter as a frozen datacl"):
        specjax.generate(tiny, [[1]], drafter=old)
    with pytest.raises(InputError, match=r"^verify=.*subclass specjax.sampling.UniformRule"):
        specjax.generate(tiny, [[1]], verify=lambda *arguments: None)


def test_checks_name_what_a_drafter_does_wrong():
    small = Tabular(8), jax.numpy.zeros((8, 8))

    def too_many(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        return draft.replace(valid=jax.numpy.ones_like(draft.valid)), state

    def with_a_hole(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        step = jax.numpy.arange(draft.valid.shape[1])[None, :]
        hole = (step > 0) & (step < context.limit[:, None])
        return draft.replace(valid=hole), state

    def too_large(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        tokens = jax.numpy.pad(draft.tokens, ((0, 0), (0, 3)))
        return chain(tokens, draft.valid.sum(axis=1)), state

    def child_first(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        parents = jax.numpy.zeros_like(draft.tokens).at[:, 0].set(2)
        valid = jax.numpy.broadcast_to(context.limit[:, None] > 1, draft.valid.shape)
        return draft.replace(valid=valid, topology=DynamicTopology(parents, 2)), state

    class Rowless(Ngram):
        def init(self, params, batch, capacity):
            return jax.numpy.zeros(())

    for drafter, said in (
        (changed(Ngram(), propose=too_many), "proposes more than its limit"),
        (changed(Ngram(), propose=with_a_hole), "not closed under ancestors"),
        (Rowless(), "rows as its first axis"),
        (changed(Ngram(), propose=too_large), "a tree of 5 nodes where its num_nodes is 2"),
        (
            changed(Ngram(), propose=child_first),
            "node 0 of row 2 has the parent slot 2; use 0 to 0",
        ),
    ):
        with pytest.raises(InputError, match=said):
            check_drafter(drafter, small, rows=100)


def test_a_draft_of_another_size_than_its_drafter_says_is_refused(tiny):
    """Else nodes that the pass has no slots for would be dropped unseen."""

    def resized(length):
        def propose(real, params, state, context, noise):
            tokens = jax.numpy.ones((len(context.length), length), jax.numpy.int32)
            return chain(tokens, context.limit), state

        return changed(Ngram(num_speculative_tokens=2), propose=propose)

    for length in (1, 4):
        says = f"^drafter 'changed': proposes a tree of {length} nodes where its num_nodes is 2; p"
        with pytest.raises(InputError, match=says):
            specjax.generate(tiny, [[1, 2]], drafter=resized(length))
