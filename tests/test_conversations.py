"""Questions of several turns as requests, decoded in turn with one program."""

import pytest

from specjax.apps.run.conversations import Conversations
from specjax.apps.run.runner import Program, Way, in_turn
from specjax.drafters import make_drafter
from specjax.engine.generate import decode_requests, generate
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import NoRoomError
from specjax.engine.requests import Request, SamplingParams
from specjax.loading.texts.questions import Question

QUESTIONS = [Question(1, "", ("a", "b")), Question(2, "", ("c",)), Question(3, "", ("a", "b"))]


def conversations(model, questions=QUESTIONS, **changes):
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    return Conversations(model, questions, sampling, chat=True, **changes)


def test_answers_become_history(chatty):
    some = conversations(chatty, seeds=[5, 6, 7, 8, 9])
    first = some.turn(0, {0: [], 1: [], 2: []})
    # Question 3 ended without an answer.
    second = some.turn(1, {0: ["x"], 1: ["y"], 2: []})
    assert (first.questions, second.questions) == ([0, 1, 2], [0])
    assert [one.number for one in (*first.requests, *second.requests)] == [0, 1, 2, 3]
    assert [one.sampling.seed for one in (*first.requests, *second.requests)] == [5, 7, 8, 6]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "b"},
    ]
    assert second.requests[0].prompt == tuple(chatty.tokenizer.encode_chat(messages))
    assert some.turn(2, {0: ["x", "y"], 1: ["y"]}) is None
    assert some.name(2, 0) == "question 2, turn 1"
    only = conversations(chatty, num_turns=1)
    assert only.turn(1, {0: ["x"]}) is None
    assert only.name(2, 0) == "question 2"


def test_what_leaves_no_room_is_refused(chatty):
    """Before any work if no answers would help, and later for the conversation alone."""
    with pytest.raises(NoRoomError, match="question 3, turn 2 has"):
        conversations(chatty, [Question(3, "", ("a", "b " * 60))], max_length=60)
    some = conversations(chatty, max_length=60)
    turn = some.turn(1, {0: ["x " * 60], 2: ["y"]})
    assert turn.questions == [2]
    (error,) = some.refused
    assert "question 1, turn 2 has" in str(error)


@pytest.mark.usefixtures("one_width")
def test_all_ways_answer_the_first_one_s_conversation(chatty):
    some = conversations(chatty)
    ways = [
        Way(name, Program(some.plan(drafter, DecodeOptions(batch_size=2))))
        for name, drafter in (("plain", None), ("ngram", make_drafter("ngram", chatty)))
    ]
    found = dict(in_turn(some, [0, 2], ways, Way.decode))
    plain, drafted = (found[way] for way in ways)
    assert [one.turn for one in plain] == [one.turn for one in drafted]
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.differences(ways[1].plan, theirs.result) == [None, None]
    again = dict(in_turn(some, [0, 2], ways[1:], Way.decode, [one.turn for one in plain]))
    assert [one.result.token_ids for one in again[ways[1]]] == [
        one.result.token_ids for one in plain
    ]


@pytest.mark.usefixtures("one_width")
def test_no_row_outgrows_its_caches(chatty):
    """Answers may be encoded in more tokens than were decoded."""
    plan = conversations(chatty).plan(None, DecodeOptions())
    room = plan.loop.capacity
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    request = Request(0, tuple(5 + at % 70 for at in range(room - 10)), sampling)
    result = decode_requests(plan, [request])
    assert result.finish_reasons == ["length"]
    whole = generate(chatty, [list(request.prompt)], sampling=sampling)
    assert len(result.token_ids[0]) == 10
    assert result.token_ids[0] == whole.token_ids[0][:10]
