"""The session is strict, programs are traced once, and a round copies neither cache nor weights."""

import functools
import re

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
import shape_checks
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    changed,
    draft_model,
    greedy,
    loop_arguments,
    make_call,
    mixed,
)
from jaxtyping import Array, Float
from tiny_models import with_modules

import specjax
from specjax import sampling
from specjax.core import cache as cache_module
from specjax.core import loop
from specjax.core import round as round_module
from specjax.core.cache import KVCache, make_cache
from specjax.drafters import make_drafter
from specjax.engine.programs import compile_plan
from specjax.engine.requests import SamplingParams
from specjax.loading.load import random_model
from specjax.methods.early_exit import EarlyExit
from specjax.methods.ngram import Ngram
from specjax.models.cpu import library


def test_the_session_is_strict():
    assert jax.device_count() == 8
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)
    with pytest.raises(jaxtyping.TypeCheckError):
        sampling.residual(jnp.ones(3), jnp.ones(4))
    with pytest.raises(jaxtyping.TypeCheckError):
        make_cache(1, 1, 1, 1, 1, jnp.dtype("float32")).__class__(0, 0, 0)


def test_local_functions_share_their_checks():
    def scaled_by(factor):
        @shape_checks.jaxtyped(typechecker=beartype.beartype)
        def scaled(x: Float[Array, "N"]) -> Float[Array, "N"]:
            return factor * x if factor else x[None]

        return scaled

    @shape_checks.jaxtyped(typechecker=beartype.beartype)
    def first(x: Float[Array, "N"], of: int) -> jax.Array:
        return jnp.float32(of) + 0 * x.sum()

    with pytest.raises(jaxtyping.TypeCheckError):
        first(jnp.ones((1, 3)), 1)
    with pytest.raises(jaxtyping.TypeCheckError):
        first(jnp.ones(3), "1")
    assert [float(scaled_by(factor)(jnp.ones(3)).sum()) for factor in (2, 3)] == [6, 9]
    for wrong, x in ((2, jnp.ones((1, 3))), (0, jnp.ones(3))):
        with pytest.raises(jaxtyping.TypeCheckError):
            scaled_by(wrong)(x)


def counting(drafter, traces):
    def propose(real, *arguments):
        traces.append("propose")
        return real(*arguments)

    return changed(drafter, propose=propose)


def test_nothing_is_traced_again(tiny):
    """Other rounds, prompts of other lengths, other batches, other seeds and other numbers."""
    traces = []
    drafter = counting(Ngram(prompt_lookup_min=1), traces)
    options = dict(drafter=drafter, num_speculative_tokens=3, batch_size=4)
    short = [[5], [1, 2, 1, 2], [7] * 20, [6]] * 2
    specjax.generate(tiny, short, sampling=mixed(max_new_tokens=9), **options)
    traced = len(traces)
    assert traced > 0
    other = [[1] * 30, [3, 4], [9], [8, 9], [4]]
    every = [greedy(max_new_tokens=9), SamplingParams(0.3, 3, 0.5, 0.1, max_new_tokens=50)]
    specjax.generate(tiny, other, sampling=[every[0], *every * 2], seed=1, **options)
    for _ in specjax.stream(tiny, other[::-1], sampling=[*every * 2, every[1]], **options):
        pass
    assert len(traces) == traced


CASES = {
    "ngram": lambda model, draft: Ngram(prompt_lookup_min=1),
    "early_exit": lambda model, draft: EarlyExit(3),
    "draft_model": lambda model, draft: draft_model(draft),
    "mtp": lambda model, draft: make_drafter("mtp", with_modules(model)),
}


def lowered(call, donate=True):
    """The loop of a call, lowered for its first batch."""
    params, state, max_rounds = loop_arguments(call)
    program = jax.jit(loop.run, static_argnums=0, donate_argnums=2 if donate else ())
    return state, program.lower(call.plan.loop, params, state, max_rounds)


def copied_shapes(text):
    """The shapes of what a compiled program copies."""
    found = re.findall(r"= \w+\[([\d,]*)\][^=\n]*? copy(?:-start)?\(", text)
    return {tuple(map(int, shape.split(","))) for shape in found if shape}


@pytest.fixture(scope="module")
def models():
    """Of unlike sizes, so that no small buffer has the shape of a cache or weight."""
    shape = dict(hidden_size=26, intermediate_size=42, vocab_size=67)
    return (
        random_model(tiny_config(**shape), 0, dtype="float32"),
        random_model(tiny_config(**shape, num_layers=2), 1, dtype="float32"),
    )


def call_of(name, models, **fields):
    target, draft = models
    options = dict(sampling=mixed(**fields)[:3], num_speculative_tokens=2, every_width=True)
    return make_call(target, PROMPTS[:3], drafter=CASES[name](target, draft), **options)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", ["mtp", *slow("ngram", "early_exit", "draft_model")])
def test_a_round_works_in_place(name, models):
    call = call_of(name, models, top_k=0)
    state, program = lowered(call)
    compiled = program.compile()
    caches = [state.cache.k, state.cache.v]
    leaves = jax.tree.leaves(state.drafter, is_leaf=lambda node: isinstance(node, KVCache))
    for cache in leaves:
        if isinstance(cache, KVCache):
            caches += [cache.k, cache.v]
    assert len(caches) == {"draft_model": 4, "mtp": 4}.get(name, 2)
    cache_bytes = sum(cache.size * cache.dtype.itemsize for cache in caches)
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    kept = {cache.shape for cache in caches}
    kept |= {leaf.shape for leaf in jax.tree.leaves(call.plan.params) if leaf.ndim > 1}
    text = compiled.as_text()
    assert not copied_shapes(text) & kept, copied_shapes(text) & kept
    assert "callback" not in text


def padded_windows(call):
    """The numbers of slots to which a compiled loop pads windows of keys or values."""
    program = jax.jit(functools.partial(loop.run, call.plan.loop))  # traced anew each time
    text = program.lower(*loop_arguments(call)).compile().as_text()
    layers, rows, heads, _, size = call.plan.loop.target.make_window(call.plan.num_rows, 1).k.shape
    window = rf"\[{layers},{rows},{heads},(\d+),{size}\]"
    return {int(slots) for slots in re.findall(rf"= \w+{window}[^=\n]*? pad\(", text)}


@pytest.mark.usefixtures("as_shipped")
def test_each_width_appends_its_own_slots(models, monkeypatch):
    """A round without a draft does not pay for the slots of the widest one."""
    call = call_of("ngram", models, top_k=0)
    assert call.plan.loop.widths == (1, 2, 3)
    assert not padded_windows(call)
    padded_to_widest = lambda cache, window, slots, count: cache_module.commit(  # noqa: E731
        cache, window.padded(3 - window.k.shape[3]), slots, count
    )
    monkeypatch.setattr(round_module, "commit", padded_to_widest)
    assert padded_windows(call) == {3}


@pytest.mark.usefixtures("as_shipped")
def test_a_prompt_is_read_into_its_slot(models):
    """No program holds a row twice or copies one, neither to read nor to admit it."""
    programs = compile_plan(call_of("mtp", models, top_k=0).plan)
    shapes = [leaf for leaf in jax.tree.leaves(programs.read.out_info) if leaf.ndim == 5]
    assert len(shapes) == 4
    for program in (programs.new, programs.read, programs.admit):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
        # Admission copies from slot to slot in blocks, each of which is a whole row here.
        counts = (4,) if program is programs.admit else (1, 4)
        rows = {(leaf.shape[0], count, *leaf.shape[2:]) for leaf in shapes for count in counts}
        assert not copied_shapes(program.as_text()) & rows


@pytest.mark.usefixtures("as_shipped")
def test_the_search_for_copies_finds_them(models):
    """Without donation the caches are copied, and the search says so."""
    call = make_call(models[0], PROMPTS[:3], sampling=greedy())
    state, program = lowered(call, donate=False)
    compiled = program.compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert state.cache.k.shape in copied_shapes(compiled.as_text())


@pytest.mark.parametrize("name", ["mtp", *slow("ngram", "early_exit", "draft_model")])
def test_the_loop_exports_for_every_platform(name, models, monkeypatch):
    # The kernels in C++ are for this machine's processor.
    monkeypatch.setattr(library, "available", lambda: False)
    call = call_of(name, models)
    program = jax.jit(functools.partial(loop.run, call.plan.loop))
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(program, platforms=platforms)(*loop_arguments(call))
    assert exported.platforms == platforms
    assert len(exported.mlir_module_serialized) > 0
