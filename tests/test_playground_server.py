"""What the page of a server asks for: chats with settings, and their rounds."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import threading
from urllib.parse import urlsplit

import pytest

from specjax.apps.serve import playground_api, playground_engines
from specjax.apps.serve.serve_config import ServeConfig
from specjax.apps.serve.server import served
from specjax.controllers import Fixed
from specjax.engine.engine import Engine

MESSAGES = [{"role": "user", "content": "abc ab abc ab"}]
OPTIONS = ServeConfig(
    target="toy",
    port=0,
    sampling=dataclasses.replace(ServeConfig().sampling, max_new_tokens=8),
)


@pytest.fixture(scope="module")
def engine(chatty):
    options = dict(num_speculative_tokens=3, batch_size=2, max_length=128, rounds_per_step=4)
    return Engine(chatty, drafter="ngram+suffix", **options)


@pytest.fixture(scope="module")
def url(engine):
    with served(engine, OPTIONS) as url:
        yield url


def ask(url, method, path, body=None, **headers):
    """The status and the text of a response."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    with contextlib.closing(connection):
        body = None if body is None else json.dumps(body)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read().decode()


def post(url, path, body):
    status, text = ask(url, "POST", path, body)
    return status, json.loads(text)


def chat(url, **fields):
    """The tokens of a chat, the last value under `specjax`, and the answer's id."""
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 24, **fields}
    status, text = ask(url, "POST", "/playground/chat", body)
    assert status == 200, text
    *chunks, done = [line[6:] for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    own = [chunk["choices"][0]["specjax"] for chunk in chunks]
    tokens = [token for one in own for token in one["token_ids"]]
    return tokens, own, chunks[0]["id"]


def metrics(url):
    lines = ask(url, "GET", "/metrics")[1].splitlines()
    return [line for line in lines if not line.startswith("#")]


def alone(chatty, drafter, **fields):
    """The output of a request of the same kind in an engine of its own."""
    options = dict(max_length=128, num_speculative_tokens=3, verify=fields.pop("rule"))
    options |= dict(batch_size=1, controller=Fixed(fields.pop("length")))
    single = Engine(chatty, drafter=drafter, **options)
    single.add(MESSAGES, {"max_new_tokens": 24, **fields})
    (output,) = [delta.output for delta in single if delta.output is not None]
    return output


@pytest.mark.parametrize(
    ("drafter", "rule", "length"),
    [("ngram+suffix", "rejection", 3), ("suffix", "block", 2), ("early_exit", "rejection", 2)],
)
def test_a_chat_with_a_setting_and_its_rounds(url, chatty, drafter, rule, length):
    before = metrics(url)
    status, made = post(url, "/playground/engine", {"drafter": drafter, "rule": rule})
    assert (status, made["longest"]) == (200, 3)
    assert made["compile_s"] > 0
    setting = {"drafter": drafter, "rule": rule, "length": length}
    fields = {"temperature": 0.7, "seed": 5}
    tokens, own, id = chat(url, **setting, **fields)
    expected = alone(chatty, drafter, rule=rule, length=length, **fields)
    assert tokens == expected.token_ids
    assert own[-1]["rounds"]["drafted"] == expected.rounds.drafted.tolist()
    status, text = ask(url, "GET", f"/playground/answers/{id}/rounds")
    assert status == 200
    answer, *rounds = map(json.loads, text.splitlines())
    assert answer["tokens"] == tokens
    assert len(rounds) == len(expected.rounds.emitted) > 3
    assert [one["round"]["problems"] for one in rounds] == [[]] * len(rounds)
    emitted = [token for one in rounds for token in one["round"]["emitted"]]
    assert emitted == tokens
    texts = {**answer["texts"]}
    for one in rounds:
        texts |= one["texts"]
        assert {str(token) for token in one["round"]["tokens"]} <= set(texts)
    times = own[-1]["times"]
    assert 0 < times["first_token_s"] < times["total_s"]
    # These are no requests of users.
    assert metrics(url) == before


def test_tokens_say_which_drafter_proposed_them(url, chatty):
    fields = {"temperature": 0.0, "max_tokens": 60}
    _, own, _ = chat(url, length=3, **fields)
    expected = alone(chatty, "ngram+suffix", rule="rejection", length=3, temperature=0.0,
                     max_new_tokens=60)  # fmt: skip
    names = ["ngram", "suffix", None]
    by = [name for one in own for name in one["drafter"]]
    assert by == [names[index] for index in expected.drafter_of_tokens()]
    assert {"ngram", None} <= set(by)
    assert [one["drafted"] for one in own] == [
        [name is not None for name in one["drafter"]] for one in own
    ]
    assert "".join(text for one in own for text, _ in one["pieces"]) == expected.text
    assert {name for one in own for _, name in one["pieces"]} <= set(names)


def test_length_0_is_plain_decoding(url, chatty):
    tokens, own, id = chat(url, length=0, temperature=0)
    assert own[-1]["num_draft_tokens"] == 0
    assert tokens == chat(url, length=3, temperature=0)[0]
    _, *rounds = ask(url, "GET", f"/playground/answers/{id}/rounds")[1].splitlines()
    assert len(rounds) == len(tokens)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"drafter": "/etc/passwd"}, "drafter", "is unknown: use ngram+suffix, ngram"),
        ({"drafter": "os:system"}, "drafter", "is unknown"),
        ({"drafter": ["ngram"]}, "drafter", "is unknown"),
        ({"drafter": "eagle3"}, "drafter", "no eagle3 head comes with specjax"),
        ({"drafter": "quantized"}, "drafter", "start the server with it"),
        ({"drafter": "simulated"}, "drafter", "continuations"),
        ({"rule": "none"}, "rule", "use rejection, block"),
        ({"length": -1}, "length", "use auto or a whole number"),
        ({"length": "long"}, "length", "use auto or a whole number"),
        ({"length": 4}, "length", "drafts at most 3 tokens"),
        ({"temperature": "hot"}, "temperature", "use 0 for greedy"),
        ({"stream": False}, "stream", "use true"),
        ({"n": 2}, "n", "use at most 1"),
        ({"path": "/etc"}, "path", "path"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(url, fields, param, message):
    body = {"messages": MESSAGES, "stream": True, **fields}
    status, got = post(url, "/playground/chat", body)
    assert status == 400
    assert message in got["error"]["message"]
    assert got["error"]["param"] == param


def test_wrong_requests_are_refused(url):
    assert post(url, "/playground/engine", {"path": "x"})[0] == 400
    assert ask(url, "GET", "/playground/answers/none/rounds")[0] == 404
    # What another site's page can send.
    status, _ = ask(url, "POST", "/playground/engine", {}, **{"Content-Type": "text/plain"})
    assert status == 415


def test_what_is_offered_says_why_the_rest_is_not(url):
    page = ask(url, "GET", "/")[1]
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["served"]
    assert data["default"] == {"drafter": "ngram+suffix", "rule": "rejection", "length": 3}
    offers = data["drafters"]
    assert {"ngram", "suffix", "ngram+suffix", "token_recycling", "early_exit"} <= {
        name for name, offer in offers.items() if offer["reason"] is None
    }
    unoffered = ("eagle3", "corpus", "none", "layer_skip", "sparse_kv")
    assert all(offers[name]["reason"] for name in unoffered)
    assert offers["token_recycling"]["rules"]["coupled"] is None


def test_engines_for_one_row_have_no_pages(engine):
    """They would have as many as the server's rows, and offer fewer drafters."""
    pages = dict(kv_page_size=64, num_kv_pages=30, enable_prefix_caching=True)
    pooled, dense = (
        playground_engines.PlaygroundEngines(plan, OPTIONS.sampling)
        for plan in (engine.plan.with_options(**pages), engine.plan)
    )
    assert pooled.offers() == dense.offers()
    chosen = engine.plan.drafter, "block", playground_engines.ChosenLength()
    assert pooled._planned(*chosen).loop == dense._planned(*chosen).loop


def test_engines_and_answers_are_bounded(engine, monkeypatch):
    monkeypatch.setattr(playground_engines, "MOST_ENGINES", 1)
    monkeypatch.setattr(playground_api, "MOST_ANSWERS", 2)
    started = {thread.ident for thread in threading.enumerate()}
    with served(Engine.of(engine.plan), OPTIONS) as url:
        ids = [chat(url, drafter=name)[2] for name in ("ngram", "suffix", "ngram")]
        statuses = [ask(url, "GET", f"/playground/answers/{id}/rounds")[0] for id in ids]
        assert statuses == [404, 200, 200]
        running = [one for one in threading.enumerate() if one.name == "engine"]
        assert sum(one.ident not in started for one in running) == 2


def test_an_engine_in_use_is_kept(engine, monkeypatch):
    monkeypatch.setattr(playground_engines, "MOST_ENGINES", 1)
    with served(Engine.of(engine.plan), OPTIONS) as url:
        assert post(url, "/playground/engine", {"drafter": "ngram"})[0] == 200
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 100, "drafter": "ngram"}
        body |= {"length": 0, "ignore_eos": True}
        with contextlib.closing(connection):
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/playground/chat", json.dumps(body), kind)
            assert connection.getresponse().readline().startswith(b"data: ")
            statuses = [
                post(url, "/playground/engine", {"drafter": name})[0]
                for name in ("suffix", "ngram")
            ]
        assert statuses[1] == 200


def test_chats_while_v1_runs(url):
    """Requests of users get what they get alone, at the same time as settings compile."""
    body = {"messages": MESSAGES, "max_tokens": 16, "seed": 1}
    _, expected = post(url, "/v1/chat/completions", body)
    settings = [{"drafter": name, "rule": "coupled"} for name in ("ngram", "suffix", "lookup")]

    def user(_):
        return post(url, "/v1/chat/completions", body)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        users = pool.map(user, range(24))
        answers = list(pool.map(lambda one: chat(url, **one, seed=3)[0], settings))
        for status, got in users:
            assert status == 200
            content = got["choices"][0]["message"]["content"]
            assert content == expected["choices"][0]["message"]["content"]
    # The output of `coupled` depends on the seed and the prompt only.
    assert answers[0] == answers[1] == answers[2]


def test_a_key_is_needed_for_the_playground_too(engine):
    with served(Engine.of(engine.plan), OPTIONS, api_key="secret") as url:
        assert ask(url, "GET", "/")[0] == 200
        assert post(url, "/playground/engine", {})[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert ask(url, "POST", "/playground/engine", {}, **key)[0] == 200
