"""What the page of a server asks for: chats with the server's engine, and their rounds."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import time
from urllib.parse import urlsplit

import pytest
from conftest import slow
from tiny_models import eagle_head

from specjax.apps.serve import playground_api
from specjax.apps.serve.serve_config import ServeConfig
from specjax.apps.serve.server import served
from specjax.drafters import head_drafter, make_drafter, take_turns
from specjax.engine.engine import Engine

MESSAGES = [{"role": "user", "content": "abc ab abc ab"}]
DECODING = dict(num_speculative_tokens=3, batch_size=2, max_length=128, rounds_per_step=4)
OPTIONS = ServeConfig(
    target="toy",
    port=0,
    max_waiting=60,
    max_body_bytes=20_000,
    sampling=dataclasses.replace(ServeConfig().sampling, max_new_tokens=8),
)


@pytest.fixture(scope="module")
def engine(chatty):
    return Engine(chatty, drafter="ngram+suffix", **DECODING)


@pytest.fixture(scope="module")
def url(engine):
    with served(Engine.of(engine.plan), OPTIONS) as url:
        yield url


def ask(url, method, path, body=None, **headers):
    """The status and the text of a response."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    with contextlib.closing(connection):
        body = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read().decode()


def post(url, path, body, **headers):
    status, text = ask(url, "POST", path, body, **headers)
    return status, json.loads(text)


def chat(url, **fields):
    """The tokens of a chat, the values under `specjax`, and the answer's id."""
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 24, **fields}
    status, text = ask(url, "POST", "/playground/chat", body)
    assert status == 200, text
    *chunks, done = [line[6:] for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    own = [chunk["choices"][0]["specjax"] for chunk in chunks]
    tokens = [token for one in own for token in one["token_ids"]]
    return tokens, own, chunks[0]["id"]


def rounds_of(url, id):
    """An answer with its rounds computed again, as the page reads them."""
    status, text = ask(url, "GET", f"/playground/answers/{id}/rounds")
    assert status == 200, text
    return list(map(json.loads, text.splitlines()))


def assert_replayed(url, answered):
    """Check that each round of an answer, computed again, has the tokens that were sent."""
    tokens, own, id = answered
    answer, *rounds = rounds_of(url, id)
    assert answer["tokens"] == tokens
    assert [one["round"]["problems"] for one in rounds] == [[]] * len(rounds)
    assert [token for one in rounds for token in one["round"]["emitted"]] == tokens
    counts = own[-1]["rounds"]
    assert [len(one["round"]["emitted"]) for one in rounds] == counts["emitted"]
    assert [sum(one["round"]["valid"]) for one in rounds] == counts["drafted"]
    assert [len(one["round"]["path"]) for one in rounds] == counts["accepted"]
    texts = {**answer["texts"]}
    for one in rounds:
        texts |= one["texts"]
        assert {str(token) for token in one["round"]["tokens"]} <= set(texts)
    return rounds


def metric(url, name):
    lines = ask(url, "GET", "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def alone(engine, **fields):
    """The output of the same request in an engine of its own."""
    single = Engine.of(engine.plan)
    single.add(MESSAGES, {"temperature": 1.0, "max_new_tokens": 24, **fields})
    (output,) = [delta.output for delta in single if delta.output is not None]
    return output


def test_a_chat_asks_the_servers_engine(url, engine):
    before = metric(url, "generation_tokens_total")
    fields = {"temperature": 0.7, "seed": 5}
    answered = tokens, own, _ = chat(url, **fields)
    expected = alone(engine, **fields)
    assert tokens == expected.token_ids
    assert own[-1]["rounds"]["drafted"] == expected.rounds.drafted.tolist()
    assert "".join(text for one in own for text, _ in one["pieces"]) == expected.text
    assert len(assert_replayed(url, answered)) == len(expected.rounds.emitted) > 3
    times = own[-1]["times"]
    assert 0 < times["first_token_s"] < times["total_s"]
    # It is a request like those to /v1, which gives the same.
    assert metric(url, "generation_tokens_total") == before + len(tokens)
    body = {"messages": MESSAGES, "max_tokens": 24, **fields}
    _, got = post(url, "/v1/chat/completions", body)
    assert got["choices"][0]["message"]["content"] == expected.text


def test_tokens_say_which_drafter_proposed_them(url, engine):
    _, own, _ = chat(url, temperature=0.0, max_tokens=60)
    expected = alone(engine, temperature=0.0, max_new_tokens=60)
    names = ["ngram", "suffix", None]
    by = [name for one in own for name in one["drafter"]]
    assert by == [names[index] for index in expected.drafter_of_tokens()]
    assert {"ngram", None} <= set(by)
    assert [one["drafted"] for one in own] == [
        [name is not None for name in one["drafter"]] for one in own
    ]
    assert "".join(text for one in own for text, _ in one["pieces"]) == expected.text
    assert {name for one in own for _, name in one["pieces"]} <= set(names)


def test_a_request_without_a_seed_gets_one(url):
    """Another one each time, so that its rounds can be computed again."""
    first, second = (chat(url, max_tokens=60) for _ in range(2))
    assert first[0] != second[0]
    for answered in (first, second):
        assert_replayed(url, answered)


PAGES = dict(kv_page_size=64, num_kv_pages=12, enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("drafter", "rule", "options"),
    [
        ("ngram+eagle3", "block", PAGES),
        *slow(
            ("ngram+eagle3", "rejection", PAGES),
            ("ngram+eagle3", "typical", PAGES),
            ("ngram+eagle3", "coupled", PAGES),
            ("ngram+suffix", "rejection", {}),
            ("early_exit", "rejection", {}),
            ("none", "rejection", {}),
        ),
    ],
)
def test_rounds_with_the_servers_options(chatty, drafter, rule, options):
    """Of a row among eight, greedy and sampled, whose caches may be pages with shared prefixes."""
    if drafter == "ngram+eagle3":
        eagle = head_drafter(eagle_head(chatty), chatty)
        drafter = take_turns(make_drafter("ngram", chatty), eagle)
    decoding = DECODING | dict(batch_size=8, max_length=200, verify=rule)
    engine = Engine(chatty, drafter=drafter, **decoding, **options)
    with served(engine, OPTIONS) as url, concurrent.futures.ThreadPoolExecutor(8) as pool:
        # Longer than a page.
        same = {"messages": [{"role": "user", "content": "abc ab " * 20}]}
        asked = [{**same, "temperature": float(number % 2), "seed": number} for number in range(10)]
        answers = list(pool.map(lambda fields: chat(url, **fields), asked))
        for answered in answers[:4]:
            assert_replayed(url, answered)
    if options:
        assert engine.statistics.shared_tokens > 0


def test_rounds_of_drafts_that_are_copied_from_finished_requests(chatty):
    cached = dict(suffix_decoding_max_cached_requests=3)
    drafter = make_drafter("corpus", chatty, num_speculative_tokens=3, **cached)
    with served(Engine(chatty, drafter=drafter, **DECODING), OPTIONS) as url:
        answers = [chat(url, temperature=0.0, max_tokens=40) for _ in range(2)]
        assert [own[-1]["num_draft_tokens"] > 0 for _, own, _ in answers] == [False, True]
        for answered in answers:
            assert_replayed(url, answered)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"drafter": "ngram"}, "drafter", "drafter"),
        ({"rule": "block"}, "rule", "rule"),
        ({"length": 0}, "length", "length"),
        ({"temperature": "hot"}, "temperature", "use 0 for greedy"),
        ({"stream": False}, "stream", "use true"),
        ({"n": 2}, "n", "use 1"),
        ({"n": 90}, "n", "use at most 62"),
        ({"path": "/etc"}, "path", "path"),
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": [{"role": "user", "content": "abc " * 200}]}, "messages", "leaves no room"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(url, fields, param, message):
    body = {"messages": MESSAGES, "stream": True, **fields}
    status, got = post(url, "/playground/chat", body)
    assert status == 400
    assert message in got["error"]["message"]
    assert "\n" not in got["error"]["message"]
    assert got["error"]["param"] == param


def test_wrong_requests_are_refused(url):
    assert ask(url, "GET", "/playground/answers/none/rounds")[0] == 404
    assert post(url, "/playground/engine", {})[0] == 404
    # What another site's page can send.
    status, _ = ask(url, "POST", "/playground/chat", {}, **{"Content-Type": "text/plain"})
    assert status == 415
    assert post(url, "/playground/chat", b"{")[0] == 400
    status, got = post(url, "/playground/chat", b"x" * 20_001)
    assert status == 413
    assert "more than 20000 bytes" in got["error"]["message"]


LONG = {"messages": MESSAGES, "stream": True, "max_tokens": 100, "ignore_eos": True}


def test_the_servers_queue_is_the_pages_too(engine):
    options = dataclasses.replace(OPTIONS, max_waiting=0)
    clients = concurrent.futures.ThreadPoolExecutor(12)
    with served(Engine.of(engine.plan), options) as url, clients:
        asked = clients.map(lambda _: ask(url, "POST", "/playground/chat", LONG), range(12))
        answers = list(asked)
    assert {status for status, _ in answers} == {200, 429}
    refused = json.loads(next(text for status, text in answers if status == 429))
    assert refused["error"]["code"] == "rate_limit_exceeded"


def test_a_page_that_is_left_aborts_its_request(engine):
    with served(Engine.of(engine.plan), OPTIONS) as url:
        for _ in range(4):
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
            with contextlib.closing(connection):
                kind = {"Content-Type": "application/json"}
                connection.request("POST", "/playground/chat", json.dumps(LONG), kind)
                assert connection.getresponse().readline().startswith(b"data: ")
        end = time.monotonic() + 60
        while metric(url, "request_success_total") < 4:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert metric(url, "num_requests_running") == metric(url, "num_requests_waiting") == 0
        assert metric(url, "generation_tokens_total") < 4 * 100


def test_the_page_says_what_serves(url):
    page = ask(url, "GET", "/")[1]
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["served"] == {
        "model": "toy",
        "drafter": "ngram+suffix",
        "drafters": ["ngram", "suffix"],
        "longest": 3,
        "rule": "rejection",
        "exact": True,
    }
    assert data["runs"] == []


def test_answers_are_bounded(engine, monkeypatch):
    monkeypatch.setattr(playground_api, "MOST_ANSWERS", 2)
    with served(Engine.of(engine.plan), OPTIONS) as url:
        ids = [chat(url)[2] for _ in range(3)]
        statuses = [ask(url, "GET", f"/playground/answers/{id}/rounds")[0] for id in ids]
        assert statuses == [404, 200, 200]


def test_chats_while_v1_runs(url):
    """Requests of users get what they get alone, at the same time as rounds are computed again."""
    body = {"messages": MESSAGES, "max_tokens": 16, "seed": 1}
    _, expected = post(url, "/v1/chat/completions", body)
    content = expected["choices"][0]["message"]["content"]

    def user(_):
        return post(url, "/v1/chat/completions", body)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        users = pool.map(user, range(24))
        for _ in range(3):
            assert_replayed(url, chat(url, seed=3))
        for status, got in users:
            assert (status, got["choices"][0]["message"]["content"]) == (200, content)


def test_a_key_is_needed_for_the_playground_too(engine):
    with served(Engine.of(engine.plan), OPTIONS, api_key="secret") as url:
        assert ask(url, "GET", "/")[0] == 200
        body = {"messages": MESSAGES, "stream": True}
        assert post(url, "/playground/chat", body)[0] == 401
        assert ask(url, "GET", "/playground/answers/none/rounds")[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert ask(url, "POST", "/playground/chat", body, **key)[0] == 200
        assert ask(url, "GET", "/playground/answers/none/rounds", **key)[0] == 404
