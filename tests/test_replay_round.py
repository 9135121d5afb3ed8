"""Rounds computed again: every round of a run has the tokens that the run emitted."""

import dataclasses

import jax.numpy as jnp
import pytest
from conftest import slow
from decoding import PROMPTS, drafters, make_call
from tiny_models import eagle_head

from specjax.apps.playground import draft_tests, page
from specjax.apps.playground import replay_round as replay_module
from specjax.apps.playground.replay_round import RecordedRow, replay_round, replay_rounds
from specjax.drafters import TokenRecycling, TreeOptions, head_drafter
from specjax.engine.generate import decode_requests
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError

DRAWN = SamplingParams(temperature=0.9, seed=7, max_new_tokens=16)
ROW = 1


def recorded_run(target, drafter, sampling=DRAWN, **options):
    call = make_call(
        target, PROMPTS[:3], drafter=drafter, sampling=sampling, batch_size=4, **options
    )
    return call, RecordedRow.of(decode_requests(*call), ROW)


def traces(call, recorded):
    return list(replay_rounds(call.plan, call.requests[ROW], recorded))


STATIC = TreeOptions(kind="static", choices=((0,), (1,), (0, 0), (1, 0)))
DYNAMIC = TreeOptions(kind="dynamic", topk=2, depth=2, num_nodes=5)


def drafter_of(name, tiny, similar):
    if name == "eagle tree":
        return head_drafter(eagle_head(tiny), tiny, tree=STATIC)
    if name == "eagle dynamic tree":
        return head_drafter(eagle_head(tiny), tiny, tree=DYNAMIC)
    if name == "token_recycling":
        return TokenRecycling(61, tree=TreeOptions(kind="static", num_nodes=6, depth=3))
    return drafters(tiny, tiny, similar)[name]


@pytest.mark.parametrize(
    ("name", "verify", "temperature"),
    [
        ("similar", "rejection", 0.9),
        ("eagle tree", "block", 0.9),
        *slow(
            ("eagle tree", "rejection", 0.9),
            ("similar", "block", 0.9),
            ("eagle dynamic tree", "rejection", 0.9),
            ("token_recycling", "rejection", 0.9),
            ("turns_model", "rejection", 0.9),
            ("similar", "coupled", 0.9),
            ("similar", "typical", 0.9),
            ("eagle tree", "rejection", 0.0),
            ("similar", "rejection", 0.0),
        ),
    ],
)
def test_every_round_has_the_recorded_tokens(tiny, similar, name, verify, temperature):
    drafter = drafter_of(name, tiny, similar)
    sampling = dataclasses.replace(DRAWN, temperature=temperature)
    call, recorded = recorded_run(tiny, drafter, sampling, verify=verify)
    found = traces(call, recorded)
    assert [trace.problems for trace in found] == [()] * len(recorded.emitted)
    assert sum((trace.emitted for trace in found), ()) == recorded.token_ids
    for trace in found:
        assert {test.slot for test in trace.tests if test.accepted} == set(trace.path)
        assert sum(trace.valid) == recorded.drafted[trace.number]
        assert trace.next_source == "target" or any(not test.accepted for test in trace.tests)
    tests = [test for trace in found for test in trace.tests]
    assert tests
    if name == "similar":
        assert {test.accepted for test in tests} == {True, False}
    if name == "eagle tree" and temperature:
        # Siblings are tested one after another, with a number each and what the target has left.
        assert any(
            test.uniform is not None and trace.parents[test.slot - 1] == 0 and test.slot > 1
            for trace in found
            for test in trace.tests
        )


def test_other_draws_are_found(tiny, similar, monkeypatch):
    """With another key, another round's key, or a rule that verifies otherwise."""
    call, recorded = recorded_run(tiny, drafter_of("similar", tiny, similar))
    good = traces(call, recorded)
    other_key = call.requests[ROW]
    other_key = dataclasses.replace(other_key, sampling=dataclasses.replace(DRAWN, seed=8))
    *_, last = replay_rounds(call.plan, other_key, recorded)
    assert last.problems
    assert last.number < len(good) - 1

    prefilled = replay_module._prefilled

    def later(*arguments):
        state = prefilled(*arguments)
        return state.replace(round=state.round + 1)

    with monkeypatch.context() as patch:
        patch.setattr(replay_module, "_prefilled", later)
        assert traces(call, recorded)[-1].problems

    changed = dataclasses.replace(recorded, token_ids=(*recorded.token_ids[:-1], 0))
    assert "emitted tokens" in traces(call, changed)[-1].problems[0]

    # The draws are looked at on their own: tests that say otherwise are found.
    with monkeypatch.context() as patch:
        patch.setattr(draft_tests.sampling, "uniforms", lambda keys, count: jnp.ones((1, count)))
        assert "the draws say otherwise" in " ".join(traces(call, recorded)[-1].problems)


def test_one_round(tiny, similar):
    call, recorded = recorded_run(tiny, drafter_of("similar", tiny, similar))
    row = call.requests[ROW]
    last = len(recorded.emitted) - 1
    assert replay_round(call.plan, row, recorded, last).emitted == recorded.tokens_of(last)
    shown = page.answer_data(call.plan, row, recorded, "one")
    assert len(shown["rounds"]) == last + 1
    assert set(recorded.token_ids) <= shown["texts"].keys()
    assert "one" in page.page({"runs": [shown]})
    with pytest.raises(InputError, match=f"round={last + 1}: the row has {last + 1} rounds"):
        replay_round(call.plan, row, recorded, last + 1)
    moved = dataclasses.replace(recorded, token_ids=(0, *recorded.token_ids[1:]))
    with pytest.raises(InputError, match="an earlier round differs"):
        replay_round(call.plan, row, moved, last)
