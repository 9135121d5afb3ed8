"""Equal calls compile once, and no compile cache keeps an array alive."""

import gc
import os
import subprocess
import sys
import weakref

import jax
import pytest
from conftest import slow, tiny_config
from decoding import PROMPTS, changed, greedy, make_call, random_distribution
from tiny_models import eagle_head, medusa_head, with_modules

import specjax
from specjax import sampling
from specjax.drafters import (
    LoadedDrafter,
    head_drafter,
    make_drafter,
)
from specjax.engine import programs
from specjax.loading.load import random_model
from specjax.methods.ngram import Ngram
from specjax.trees import Topology, chain, chain_topology


def makers():
    """Each kind of drafter, made anew for a target."""
    return {
        "none": lambda target: None,
        "ngram": lambda target: make_drafter("ngram", target),
        "early_exit": lambda target: make_drafter("early_exit", target, exit_layer=2),
        "draft_model": lambda target: make_drafter("draft_model", target, target),
        "eagle3": lambda target: head_drafter(eagle_head(target), target),
        "mtp": lambda target: make_drafter("mtp", with_modules(target)),
        "medusa": lambda target: head_drafter(medusa_head(target), target),
        "simulated": lambda target: make_drafter("simulated", target, continuations=[[1, 2]]),
        "ngram+early_exit": lambda target: make_drafter("ngram+early_exit", target),
    }


@pytest.mark.parametrize("name", list(makers()))
def test_equal_calls_share_their_programs(name, tiny):
    """What programs are kept by: equal for drafters made anew, other prompts, tokens and seeds."""
    make = makers()[name]

    def key(prompts=((5,), (3, 4)), length=1, new_tokens=12, **options):
        options |= dict(num_speculative_tokens=length, sampling=greedy(max_new_tokens=new_tokens))
        return programs._key(make_call(tiny, prompts, drafter=make(tiny), **options).plan)

    first = key()
    for other in (key(), key(seed=3, new_tokens=11), key(prompts=((4,) * 9, (5,)))):
        assert other == first
        assert hash(other) == hash(first)
    assert key(length=2) != first or name != "ngram"


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
