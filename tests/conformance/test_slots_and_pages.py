"""Every method in the engine: rows that come and go, dense and in pages, give what they give alone.

Requests wait for slots, are added while others decode, are aborted and, in pages, put back and
resumed; their tokens are those of plain decoding, and their counts those of the row alone.
"""

import numpy as np
import pytest
from conformance.cells import WARPS, remembers_drafts
from conformance.methods import LENGTH, METHODS, TOPOLOGIES, VOCAB, drafter, takes, target
from conftest import slow
from decoding import make_call
from test_engine import own_results
from test_paged_engine import assert_nothing_is_held, paged, results

from specjax.engine.engine import Engine
from specjax.engine.requests import SamplingParams

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


def call_of(loaded, rule="coupled"):
    sampling = [
        SamplingParams(**dict(zip(("temperature", "top_k", "top_p", "min_p"), warp, strict=True)))
        for warp in (WARPS * 2)[: len(PROMPTS)]
    ]
    sampling = [
        SamplingParams(
            temperature=one.temperature,
            top_k=one.top_k,
            top_p=one.top_p,
            min_p=one.min_p,
            max_new_tokens=new,
            ignore_eos=True,
        )
        for one, new in zip(sampling, NEW, strict=True)
    ]
    options = {} if loaded is None else dict(drafter=loaded, num_speculative_tokens=LENGTH)
    return make_call(
        target(), PROMPTS, sampling=sampling, verify=rule, batch_size=3, **options
    ).with_options(rounds_per_step=2, max_prefill_tokens=5)


def alone(call):
    """Return what each request gives without others."""
    engine, found = Engine.of(call.plan), {}
    for request in call.requests:
        engine.submit([request])
        found |= {one.id: own_results(one.output) for one in engine if one.output is not None}
    return found


@pytest.fixture(scope="module")
def plain():
    return {number: result[0] for number, result in alone(call_of(None)).items()}


CASES = [(name, topology) for topology in TOPOLOGIES for name in METHODS if takes(name, topology)]
USUAL = [case for case in CASES if case[1] == "chain"]


@pytest.mark.parametrize(
    ("method", "topology", "rule"),
    [
        *((*case, "coupled") for case in USUAL),
        # Under other rules what is drawn depends on a row's rounds, too.
        *((name, "chain", "rejection") for name in ("draft_model", "eagle3")),
        *slow(*((*case, "coupled") for case in CASES if case not in USUAL)),
        *slow(*((*case, "block") for case in CASES if case[0] != "none")),
    ],
)
def test_rows_in_company_give_what_they_give_alone(method, topology, rule, plain):
    loaded = None if method == "none" else drafter(method, topology)
    call = call_of(loaded, rule)
    wanted = alone(call)
    if rule == "coupled":
        assert {number: result[0] for number, result in wanted.items()} == plain
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
