"""Every method in the engine: rows that come and go, dense and in pages, give what they give alone.

Requests wait for slots, are added while others decode, are aborted and, in pages, put back and
resumed; their tokens are those of plain decoding, and their counts those of the row alone.
"""

import collections
import dataclasses
import functools

import conftest
import jax
import numpy as np
import pytest
from conformance.cells import WARPS, remembers_drafts
from conformance.methods import (
    LENGTH,
    METHODS,
    RECURRENT,
    TOPOLOGIES,
    VOCAB,
    drafter,
    per_target,
    takes,
    target,
    target_with,
)
from conftest import slow
from decoding import make_call
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import own_results
from test_paged_engine import assert_nothing_is_held, paged, results

from specjax.distributed.sharding import make_mesh
from specjax.engine.engine import Engine
from specjax.engine.requests import Request, SamplingParams
from specjax.loading.load import place_model

PAGE, NUM_PAGES = 4, 12
"""Tokens of a page, and so few pages that three rows do not fit at their ends."""
BEGINNING = np.random.default_rng(3).integers(VOCAB, size=14).tolist()
PROMPTS = [
    *([7 % VOCAB], BEGINNING[:9], [*BEGINNING, 1, 2], [*BEGINNING, 1, 2], BEGINNING[:PAGE]),
    *([*BEGINNING[:PAGE], 3, 3], [1, 2, 1, 2, 1], [*BEGINNING[: 2 * PAGE], 5], [4, 4], BEGINNING),
]
"""Some are equal, some end or part at the end of a page."""
NEW = [12, 14, 14, 9, 1, 16, 11, 7, 13, 14]
ABORTED = (2, 5)


def call_of(loaded, rule="coupled", model=None):
    names = "temperature", "top_k", "top_p", "min_p"
    sampling = [
        SamplingParams(**dict(zip(names, warp, strict=True)), max_new_tokens=new, ignore_eos=True)
        for warp, new in zip((WARPS * 2)[: len(PROMPTS)], NEW, strict=True)
    ]
    options = {} if loaded is None else dict(drafter=loaded, num_speculative_tokens=LENGTH)
    return make_call(
        target() if model is None else model,
        PROMPTS,
        sampling=sampling,
        verify=rule,
        batch_size=3,
        **options,
    ).with_options(rounds_per_step=2, max_prefill_tokens=5)


def alone(call):
    """Return what each request gives without others."""
    engine, found = Engine.of(call.plan), {}
    for request in call.requests:
        engine.submit([request])
        found |= {one.id: own_results(one.output) for one in engine if one.output is not None}
    return found


@per_target
def plain():
    """Return the tokens of each request by plain decoding."""
    return {number: result[0] for number, result in alone(call_of(None)).items()}


CASES = [(name, topology) for topology in TOPOLOGIES for name in METHODS if takes(name, topology)]
KINDS = (
    *("suffix", "draft_model", "early_exit", "sparse_kv", "medusa"),
    *("peagle", "mtp", "dflash", "token_recycling", "lookahead"),
)
"""What a drafter keeps of a row, each kind once: texts, keys, copied keys, features, tables.

Nothing is kept of `ngram`, in `test_requests_that_come_and_go_at_random`.
"""
USUAL = [(name, "chain") for name in KINDS]


@pytest.mark.parametrize(
    ("method", "topology", "rule"),
    [
        *((*case, "coupled") for case in USUAL),
        # Under other rules what is drawn depends on a row's rounds, too.
        ("eagle3", "chain", "rejection"),
        *slow(*((*case, "coupled") for case in CASES if case not in USUAL)),
        *slow(("draft_model", "chain", "rejection")),
        *slow(*((*case, "block") for case in CASES if case[0] != "none")),
    ],
)
def test_rows_in_company_give_what_they_give_alone(method, topology, rule):
    loaded = None if method == "none" else drafter(method, topology)
    assert_same_in_company(loaded, call_of(loaded, rule), rule)


@pytest.mark.parametrize(
    ("layers", "method", "topology"),
    [
        *(("delta", name, "chain") for name in ("none", "early_exit")),
        *slow(*((kind, *case) for kind in RECURRENT for case in CASES)),
    ],
)
def test_states_of_recurrent_layers_in_company(layers, method, topology):
    """Prefixes are shared where the states after them were kept, at the ends of pages."""
    with target_with(layers):
        loaded = None if method == "none" else drafter(method, topology)
        call = call_of(loaded).with_loop(chunks=(PAGE,)).with_options(max_prefill_tokens=4 * PAGE)
        assert_same_in_company(loaded, call, "coupled")


def assert_same_in_company(loaded, call, rule):
    wanted = alone(call)
    if rule == "coupled":
        assert {number: result[0] for number, result in wanted.items()} == plain()
    dense = Engine.of(call.plan)
    pages = Engine.of(paged(call, NUM_PAGES, shares=True, size=PAGE).plan)
    for engine in (dense, pages):
        # What a drafter has learned of refused drafts is lost with a row that is put back.
        kept = 1 if engine is pages and loaded is not None and remembers_drafts(loaded) else 3
        for aborted in ((), ABORTED):
            found = results(engine, call, aborted)
            assert found.keys() == wanted.keys()
            for number, result in found.items():
                if number in aborted and result[1] == "abort":
                    assert result[0] == wanted[number][0][: len(result[0])]
                else:
                    assert result[:kept] == wanted[number][:kept]
    assert_nothing_is_held(pages)
    summary = pages.statistics.summary()
    assert summary.put_back > 0
    shares = loaded is None or loaded.drafter.following_tokens is not None
    assert (summary.shared_tokens > 2 * PAGE) == shares


MOST = max(NEW)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, MOST)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0)),
    ),
    min_size=12,
    max_size=60,
)
"""A request of a prompt with a limit, some steps, the end of one of those that are there."""


@functools.cache
def seeded():
    """Return the sampling of each prompt, with a seed of its own, and its longest output."""
    call = call_of(None)
    requests = [
        dataclasses.replace(
            one, sampling=dataclasses.replace(one.sampling, seed=number, max_new_tokens=MOST)
        )
        for number, one in enumerate(call.requests)
    ]
    found = alone(call._replace(requests=requests))
    return [(one.sampling, found[one.number][0]) for one in requests]


@functools.cache
def plan_on(data):
    """Return a plan with pages for rows of `ngram`, split over some devices."""
    model = target()
    if data > 1:
        model = place_model(model, make_mesh(data, devices=jax.devices()[:data]))
    call = call_of(drafter("ngram", "chain"), model=model)
    # A device has two rows, for which so few pages are not enough, either.
    num_pages = NUM_PAGES if data == 1 else 9 * data
    return paged(call, num_pages, shares=True, size=PAGE).plan


happened = collections.Counter()


def come_and_go(plan, actions):
    """After each step pages are unused or held by unfinished requests; all tokens are right."""
    engine, known = Engine.of(plan), seeded()
    asked, alive, aborted, ended = [], set(), set(), {}

    def step():
        for delta in engine.step():
            if delta.output is not None:
                assert delta.id not in ended
                ended[delta.id] = delta.output
                alive.discard(delta.id)
        for pool in engine._scheduler.pages.pools:
            held = {page for pages in pool._held.values() for page in pages.pages}
            assert len(held) + pool.num_unused == pool.num_pages
        assert {request.id for request in engine._scheduler.pages._pool_of} <= alive

    for name, number, *new in actions:
        if name == "add":
            own = dataclasses.replace(known[number][0], max_new_tokens=new[0])
            engine.submit([Request(len(asked), tuple(PROMPTS[number]), own)])
            alive.add(len(asked))
            asked.append((number, new[0]))
        elif name == "abort" and alive - aborted:
            left = sorted(alive - aborted)
            engine.abort(left[number % len(left)])
            aborted.add(left[number % len(left)])
        elif name == "step":
            for _ in range(number):
                step()
    while engine.num_unfinished:
        step()
    assert_nothing_is_held(engine)
    assert ended.keys() == set(range(len(asked)))
    for request, output in ended.items():
        number, new = asked[request]
        assert output.token_ids == known[number][1][: len(output.token_ids)]
        assert output.finish_reason == "abort" or len(output.token_ids) == new
    summary = engine.statistics.summary()
    for name in ("put_back", "shared_tokens", "aborted"):
        happened[name] += getattr(summary, name)


@pytest.mark.parametrize("data", [1, *slow(2)])
def test_requests_that_come_and_go_at_random(data):
    """Also with pages on two devices."""
    happened.clear()

    @given(actions=ACTIONS)
    @settings(max_examples=300 if conftest.full else 40, deadline=None, derandomize=True)
    def holds(actions):
        come_and_go(plan_on(data), actions)

    holds()
    assert all(happened[name] > 5 for name in ("put_back", "shared_tokens", "aborted")), happened
