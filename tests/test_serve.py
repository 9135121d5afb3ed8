"""`specjax.serve`: OpenAI's API over one engine, with real sockets, and clients of every kind."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import signal
import socket
import struct
import time
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
from bad_input import refused_command
from browser import CHROMIUM, browser
from commands import finish, start
from conftest import slow
from decoding import Call
from test_paged_engine import assert_nothing_is_held, paged
from test_playground_server import chat, rounds_of

from specjax.apps.serve import serve
from specjax.apps.serve import server as server_module
from specjax.apps.serve.engine_thread import warm_up
from specjax.apps.serve.serve_config import ServeConfig
from specjax.apps.serve.server import served
from specjax.engine.engine import Engine
from specjax.loading.load import save_model

PROMPT = "abc ab abc ab"
MESSAGES = [{"role": "user", "content": PROMPT}]
LENGTH = 128


OPTIONS = ServeConfig(
    target="toy",
    port=0,
    max_waiting=60,
    max_body_bytes=20_000,
    shutdown_s=20.0,
    sampling=dataclasses.replace(ServeConfig().sampling, max_new_tokens=8, logprobs=True),
)


@pytest.fixture(scope="module")
def engine(chatty):
    """An engine whose programs are compiled; each server has one of its own with them."""
    options = dict(num_speculative_tokens=3, batch_size=2, max_length=LENGTH, rounds_per_step=4)
    engine = Engine(chatty, drafter="ngram", **options)
    warm_up(engine, OPTIONS.sampling)
    return engine


@pytest.fixture(scope="module")
def url(engine):
    with served(Engine.of(engine.plan), OPTIONS) as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(engine, prompt, n=1, **sampling):
    """The outputs of the samples of a prompt in an engine of their own."""
    single = Engine.of(engine.plan)
    single.add(prompt, {"temperature": 1.0, "logprobs": True, **sampling}, n=n)
    outputs = [delta.output for delta in single if delta.output is not None]
    return sorted(outputs, key=lambda output: output.sample)


def post(url, path, body, **headers):
    """The status and the JSON of a response to some bytes, or to a value as JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(connect(url)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def connect(url):
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)


def metric(url, name):
    with contextlib.closing(connect(url)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def eventually(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_openai_package_completes(client, engine):
    got = client.completions.create(
        model="toy", prompt=PROMPT, max_tokens=9, n=2, seed=5, logprobs=0, extra_body={"top_k": 20}
    )
    outputs = alone(engine, PROMPT, n=2, seed=5, max_new_tokens=9, top_k=20)
    assert [choice.text for choice in got.choices] == [output.text for output in outputs]
    assert [choice.specjax["token_ids"] for choice in got.choices] == [
        output.token_ids for output in outputs
    ]
    assert got.choices[1].logprobs.token_logprobs == pytest.approx(outputs[1].logprobs)
    assert got.choices[0].finish_reason == outputs[0].finish_reason
    assert got.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert [choice.index for choice in got.choices] == [0, 1]


def test_several_prompts_and_token_ids(client, engine):
    got = client.completions.create(
        model="toy", prompt=[[5, 6, 7], [8, 9]], n=2, temperature=0, max_tokens=4
    )
    ids = [choice.specjax["token_ids"] for choice in got.choices]
    expected = [alone(engine, prompt, temperature=0.0, max_new_tokens=4)[0].token_ids
                for prompt in ([5, 6, 7], [8, 9])]  # fmt: skip
    assert ids == [expected[0], expected[0], expected[1], expected[1]]
    assert got.usage.prompt_tokens == 5


def test_the_openai_package_streams_a_chat(client, engine):
    chunks = list(
        client.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=30,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    (output,) = alone(engine, MESSAGES, temperature=0.0, max_new_tokens=30)
    *parts, last = chunks
    choices = [chunk.choices[0] for chunk in parts]
    assert len(choices) > 1
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content for choice in choices) == output.text
    assert [choice.finish_reason for choice in choices] == [
        *[None] * (len(choices) - 1),
        output.finish_reason,
    ]
    own = [choice.specjax for choice in choices]
    assert [token for one in own for token in one["token_ids"]] == output.token_ids
    assert [drafted for one in own for drafted in one["drafted"]] == output.was_drafted()
    assert "".join(text for one in own for text, _ in one["pieces"]) == output.text
    scores = [entry.logprob for choice in choices for entry in choice.logprobs.content]
    assert scores == pytest.approx(output.logprobs)
    assert own[-1]["rounds"]["accepted"] == output.rounds.accepted.tolist()
    assert own[-1]["num_accepted_tokens"] == output.rounds.accepted.sum()
    assert [chunk.usage for chunk in parts] == [None] * len(parts)
    assert last.usage.completion_tokens == len(output.token_ids)
    assert last.choices == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_for_lack_of_room_says_so(stream, client):
    """In its own fields: the reason is "length", as if `max_tokens` had been reached."""
    prompts, room = [[5, 6, 7], [8, 9]], LENGTH - 3
    options = dict(prompt=prompts, temperature=0, stream=stream, extra_body={"ignore_eos": True})
    for most, enough in ((room, True), (room + 1, False)):
        got = client.completions.create(model="toy", max_tokens=most, **options)
        chunks = [got] if not stream else list(got)
        last = {}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            if choice.finish_reason:
                last[choice.index] = choice
        assert [last[index].finish_reason for index in (0, 1)] == ["length"] * 2
        said, other = (last[index].specjax["warning"] for index in (0, 1))
        assert other is None
        assert (said is None) == enough
    assert f"max_tokens={room + 1}: the prompt has 3 tokens, which leaves room for {room}" in said
    assert f"max_length={LENGTH}" in said


def test_a_whole_chat_and_a_stop_string(client, engine):
    (output,) = alone(engine, MESSAGES, temperature=0.0, max_new_tokens=30)
    stop = output.text[5:8]
    got = client.chat.completions.create(
        model="toy", messages=MESSAGES, temperature=0, max_tokens=30, stop=stop, user="me"
    )
    assert got.choices[0].message.content == output.text[: output.text.index(stop)]
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].logprobs is None


def test_models_health_and_errors_of_the_openai_package(client, url):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").max_model_len == LENGTH
    with pytest.raises(openai.NotFoundError, match="'toy'"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="is not served here: use 'toy'"):
        client.completions.create(model="gpt", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt=PROMPT, best_of=2)
    assert caught.value.param == "best_of"
    with contextlib.closing(connect(url)) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


def test_penalties_and_constraints_of_the_openai_package(client, engine):
    """Names of OpenAI and, in `extra_body`, of vLLM; the program for them is made meanwhile."""
    (output,) = alone(
        engine,
        [5, 6, 7],
        temperature=0.0,
        max_new_tokens=9,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias={9: 2.5},
        allowed_token_ids=[9, 10, 11, 12],
    )
    got = client.completions.create(
        model="toy",
        prompt=[5, 6, 7],
        temperature=0,
        max_tokens=9,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias={"9": 2.5},
        extra_body={"allowed_token_ids": [9, 10, 11, 12], "min_tokens": 2},
    )
    assert got.choices[0].specjax["token_ids"] == output.token_ids
    assert {*output.token_ids} <= {9, 10, 11, 12}


def test_metrics_have_vllms_names_and_add_up(client, url):
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    )
    before = {name: metric(url, name) for name in names}
    got = client.completions.create(model="toy", prompt=PROMPT, max_tokens=40, temperature=0)
    added = {name: metric(url, name) - before[name] for name in names}
    own = got.choices[0].specjax
    assert own["num_accepted_tokens"] > 0
    assert added == {
        "prompt_tokens_total": got.usage.prompt_tokens,
        "generation_tokens_total": got.usage.completion_tokens,
        "request_success_total": 1,
        "spec_decode_num_drafts_total": own["num_drafts"],
        "spec_decode_num_draft_tokens_total": own["num_draft_tokens"],
        "spec_decode_num_accepted_tokens_total": own["num_accepted_tokens"],
    }
    assert metric(url, "spec_decode_num_accepted_tokens_per_pos_total") == metric(
        url, "spec_decode_num_accepted_tokens_total"
    )
    assert metric(url, "num_requests_running") == metric(url, "num_requests_waiting") == 0


def test_metrics_count_rows_that_are_put_back(engine):
    own = Engine.of(engine.plan)
    own.statistics.put_back = 3
    with served(own, OPTIONS) as url:
        assert metric(url, "num_preemptions_total") == 3


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "temperature='hot': use 0 for greedy"),
        ({"temperature": float("1e40")}, "temperature", "use 0 for greedy"),
        ({"top_p": 0}, "top_p", "use 1 for off"),
        ({"top_k": -1}, "top_k", "use 0 for off"),
        ({"seed": -1}, "seed", "use a whole number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "use a whole number"),
        ({"n": 63}, "n", "use at most 62"),
        ({"stream": "yes"}, "stream", "use true or false"),
        ({"stop": ["a"] * 17}, "stop", "use at most 16 strings"),
        ({"stop": ""}, "stop", "strings that are not empty"),
        ({"stop_token_ids": list(range(9))}, None, "use at most 8"),
        ({"logprobs": 5}, "logprobs", "use 0: only that of the token itself"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "with stream=true only"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x=1"),
        ({"tools": [{"type": "function"}]}, "tools", "is not supported: leave it out"),
        ({"frequency_penalty": 3}, "frequency_penalty", "a number from -2 to 2"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "use a dict of token ids and biases"),
        ({"response_format": {"type": "xml"}}, "response_format", 'use {"type": "text"}'),
        ({"echo": True}, "echo", "is not supported: leave it out"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": []}, "prompt", "use a text, token ids, or a list"),
        ({"prompt": 3}, "prompt", "use a text, token ids, or a list"),
        ({"prompt": {"a": 1}}, "prompt", "use a text, token ids, or a list"),
        ({"prompt": MESSAGES}, "prompt", "use a text, token ids, or a list"),
        ({"prompt": [MESSAGES]}, "prompt", "use a text, token ids, or a list"),
        ({"prompt": [1, "a"]}, "prompt", "use a text, token ids, or a list"),
        ({"prompt": [True]}, "prompt", "use text, token ids"),
        ({"prompt": [10**6]}, "prompt", "outside the vocabulary"),
        ({"prompt": ["a"] * 63}, "prompt", "63 prompts are too many"),
        ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
        ({"prompt": [5] * LENGTH}, "prompt", f"{LENGTH} tokens, which leaves no room"),
        ({"messages": MESSAGES}, "messages", "messages="),
    ],
)  # fmt: skip
def test_bad_fields_are_named(url, fields, param, message):
    body = {"prompt": PROMPT, **fields}
    status, got = post(url, "/v1/completions", body)
    assert status == 400
    assert message in got["error"]["message"]
    assert "\n" not in got["error"]["message"]
    assert got["error"]["type"] == "invalid_request_error"
    if param is not None:
        assert got["error"]["param"] == param


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "use a list of objects"),
        ([], "messages is empty"),
        (["hello"], "use a list of objects"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": 1, "content": "a"}], "must be a dict with string 'role'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be a text part"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_bad_messages_are_named(url, messages, message):
    status, got = post(url, "/v1/chat/completions", {"messages": messages})
    assert (status, got["error"]["param"]) == (400, "messages")
    assert message in got["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body is not JSON"),
        (b"{", 400, "the body is not JSON"),
        (b"\xff\xfe{}", 400, "the body is not JSON"),
        (b'{"prompt": "\xff"}', 400, "the body is not JSON"),
        (b'{"temperature": NaN}', 400, "no number of JSON"),
        (b'{"n": 1, "n": 2}', 400, "twice"),
        (b"[" * 9000, 400, "the body is not JSON"),
        (b"[1]", 400, "send a JSON object"),
        (b'{"prompt": "' + b"a" * 20_000 + b'"}', 413, "more than 20000 bytes"),
        (b"x" * 400_000, 413, "more than 20000 bytes"),
        (b'{"prompt": "' + b"ab " * 6000 + b'"}', 400, "which leaves no room"),
    ],
)
def test_bad_bodies_are_refused(url, body, status, message):
    got_status, got = post(url, "/v1/completions", body)
    assert got_status == status
    assert message in got["error"]["message"]


def test_other_requests_are_refused(url):
    assert post(url, "/v1/completions", {}, **{"Content-Type": "text/plain"})[0] == 415
    assert post(url, "/v1/nothing", {})[0] == 404
    assert post(url, "/v1/models", {})[0] == 405
    with contextlib.closing(connect(url)) as connection:
        connection.request("GET", "/v1/models", headers={"Host": "another.example"})
        assert connection.getresponse().status == 400


def test_200_clients_at_once(url):
    """Those beyond slots and queue are refused, all others get what they would get alone."""

    def one(number):
        body = {"prompt": [number % 50], "temperature": 0, "max_tokens": 6}
        status, got = post(url, "/v1/completions", body)
        return status, got["choices"][0]["specjax"]["token_ids"] if status == 200 else got["error"]

    with concurrent.futures.ThreadPoolExecutor(200) as clients:
        results = list(clients.map(one, range(200)))
    statuses = [status for status, _ in results]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 62
    by_prompt = {}
    for number, (status, got) in enumerate(results):
        if status == 200:
            assert by_prompt.setdefault(number % 50, got) == got
        else:
            assert got["type"] == "rate_limit_error"
    assert len(set(map(tuple, by_prompt.values()))) > 10


def stream_from(url, **fields):
    """A socket on which a stream has begun."""
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": 100, "stream": True, "ignore_eos": True, **fields}
    )
    connection = connect(url)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(url, stream):
    aborted = metric(url, "request_success_total")
    tokens = metric(url, "generation_tokens_total")
    connections = [stream_from(url, stream=stream, n=4) for _ in range(4)]
    if stream:
        assert connections[0].getresponse().readline().startswith(b"data: ")
    else:
        eventually(lambda: metric(url, "num_requests_running") == 2)
    for connection in connections:
        # A reset, as of a process that was killed.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    eventually(lambda: metric(url, "request_success_total") == aborted + 16)
    assert metric(url, "generation_tokens_total") - tokens < 16 * 100
    assert metric(url, "num_requests_running") == metric(url, "num_requests_waiting") == 0


def test_clients_that_never_read_hold_no_slot(engine, monkeypatch):
    """Their connections end after a while, and nobody waits for them."""
    monkeypatch.setattr(server_module, "_UNREAD_S", 2)
    bind = server_module.bind

    def with_small_buffers(host, port):
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(server_module, "bind", with_small_buffers)
    with served(Engine.of(engine.plan), OPTIONS) as url:
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = urlsplit(url).netloc.split(":")
        silent.connect((host, int(port)))
        body = b'{"prompt": "abc", "n": 30, "max_tokens": 100, "stream": true, "ignore_eos": true}'
        silent.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        eventually(lambda: metric(url, "num_requests_running") == 2)
        assert post(url, "/v1/completions", {"prompt": PROMPT})[0] == 200
        eventually(lambda: metric(url, "request_success_total") == 31)
        time.sleep(3)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := silent.recv(65536):
                got += piece
        assert b"[DONE]" not in got
        silent.close()


@pytest.mark.parametrize(("count", "has_pages"), [(60, True), *slow((500, True), (500, False))])
def test_many_clients_of_whom_some_vanish(engine, count, has_pages):
    """None of the answers is lost or mixed up, and each has the tokens of its request alone.

    Also with too few pages for all rows, of which some are shared.
    """
    rng = np.random.default_rng(0)
    bodies = [
        {
            "prompt": rng.integers(3, 20, rng.integers(1, 40)).tolist(),
            "max_tokens": int(rng.integers(4, 40)),
            "temperature": float(number % 2),
            "seed": number,
            "stream": True,
        }
        for number in range(count)
    ]
    for body in bodies[1::3]:
        body["prompt"] = [7] * 24 + body["prompt"]
    leaves = rng.random(count) < 0.1

    def ask(number):
        """The tokens that came, and whether the answer was whole."""
        with contextlib.closing(connect(url)) as connection:
            body = json.dumps(bodies[number])
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response, tokens = connection.getresponse(), []
            assert response.status == 200
            for line in iter(response.readline, b""):
                if line == b"data: [DONE]\n":
                    return tokens, True
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += choice["specjax"]["token_ids"]
                    if leaves[number]:
                        return tokens, False
            return tokens, False

    call = Call(engine.plan, [])
    serving = Engine.of((paged(call, 14, True) if has_pages else call).plan)
    with served(serving, OPTIONS) as url:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(ask, range(count)))
        eventually(lambda: metric(url, "num_requests_running") == 0)
        assert metric(url, "num_requests_waiting") == 0
        assert metric(url, "request_success_total") == count
    if has_pages:
        assert_nothing_is_held(serving)
        assert serving.statistics.shared_tokens > 0
    for body, (tokens, whole), left in zip(bodies, answers, leaves, strict=True):
        fields = {name: body[name] for name in ("temperature", "seed")}
        (output,) = alone(engine, body["prompt"], max_new_tokens=body["max_tokens"], **fields)
        assert tokens == (output.token_ids[: len(tokens)] if left else output.token_ids)
        assert tokens
        assert whole or left


def test_slow_bodies_and_connections_that_say_nothing(url, monkeypatch):
    monkeypatch.setattr("specjax.apps.serve.connections._BODY_S", 0.2)
    with contextlib.closing(connect(url)) as quiet, contextlib.closing(connect(url)) as slow:
        quiet.connect()
        slow.putrequest("POST", "/v1/completions")
        slow.putheader("Content-Type", "application/json")
        slow.putheader("Content-Length", "100")
        slow.endheaders(b"{")
        assert slow.getresponse().status == 408


def test_an_api_key(engine):
    server = served(Engine.of(engine.plan), OPTIONS, api_key="secret")
    with server as url:
        assert post(url, "/v1/completions", {"prompt": PROMPT})[0] == 401
        wrong = {"Authorization": "Bearer secre"}
        status, got = post(url, "/v1/completions", {"prompt": PROMPT}, **wrong)
        assert (status, got["error"]["code"]) == (401, "invalid_api_key")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            assert client.completions.create(model="toy", prompt=PROMPT).choices
        assert metric(url, "num_requests_waiting") == 0


def test_without_log_probabilities_they_are_refused(engine):
    sampling = dataclasses.replace(OPTIONS.sampling, logprobs=False)
    options = dataclasses.replace(OPTIONS, sampling=sampling)
    with served(Engine.of(engine.plan), options) as url:
        status, got = post(url, "/v1/completions", {"prompt": PROMPT, "logprobs": 0})
    assert (status, got["error"]["param"]) == (400, "logprobs")
    assert "--config.sampling.logprobs=true" in got["error"]["message"]


def test_a_failure_of_the_engine_ends_the_server(engine, monkeypatch):
    broken = Engine.of(engine.plan)

    def fail():
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(broken, "step", fail)
    results = []

    def ask():
        with served(broken, OPTIONS) as url:
            results.append(post(url, "/v1/completions", {"prompt": PROMPT}))

    with pytest.raises(RuntimeError, match="the device is lost"):
        ask()
    ((status, got),) = results
    assert (status, got["error"]["message"]) == (500, "the engine has failed")


def test_one_request_that_fails_leaves_the_others(engine, monkeypatch):
    """As with tokens that have no text."""
    other = Engine.of(engine.plan)
    add = other.add

    def refuse(prompt, *arguments, **options):
        if prompt == [7]:
            raise server_module.InputError("no memory for it")
        return add(prompt, *arguments, **options)

    monkeypatch.setattr(other, "add", refuse)
    with served(other, OPTIONS) as url:
        assert post(url, "/v1/completions", {"prompt": [7]})[0] == 400
        assert post(url, "/v1/completions", {"prompt": [8]})[0] == 200


@pytest.mark.parametrize(("shutdown_s", "ends"), [(60, True), (0, False)])
def test_sigterm_with_requests_running(chatty, tmp_path, shutdown_s, ends):
    save_model(chatty, tmp_path / "model")
    process = start(
        [
            f"--config.target={tmp_path / 'model'}",
            "--config.served_model_name=toy",
            "--config.port=0",
            "--config.batch_size=1",
            "--config.max_length=512",
            "--config.num_speculative_tokens=0",
            "--config.drafter.name=none",
            "--config.rounds_per_step=1",
            f"--config.shutdown_s={shutdown_s}",
        ],
        program=("-m", "specjax.serve"),
    )
    line = ""
    while "ready: " not in line:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
    url = line.split()[1].removesuffix("/v1")
    connection = stream_from(url, max_tokens=480)
    response = connection.getresponse()
    first = response.readline()
    process.send_signal(signal.SIGTERM)
    events = [first, *response]
    connection.close()
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert out.endswith("stopped\n")
    assert events[-2] == b"data: [DONE]\n"
    last = json.loads(events[-4].removeprefix(b"data: "))
    if ends:
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert "shutting down" in last["error"]["message"]
    with pytest.raises(ConnectionRefusedError):
        connect(url).connect()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.drafter.name=ngram,eagle3"], "a server has one drafter"),
        (["--config.drafter.name=simulated"], "use another"),
        (["--config.port=70000"], "port=70000: use a whole number from 0 to 65535"),
        (["--config.host=no.such.host.invalid"], "cannot listen there"),
        (["--config.api_key_file=missing"], "api_key_file"),
        (["--config.prompt=x"], "there is no such field"),
    ],
)
def test_bad_configs_are_one_line(arguments, message, capsys):
    assert message in refused_command(serve.main, arguments, capsys)


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused_command(serve.main, [f"--config.port={port}"], capsys)
    assert f"port={port}: cannot listen there" in error


def test_a_file_with_a_key(tmp_path, capsys):
    for content in (b"", b"two\nlines", b"\xff", b"a" * 5000):
        (tmp_path / "key").write_bytes(content)
        arguments = [f"--config.api_key_file={tmp_path / 'key'}"]
        assert "api_key_file" in refused_command(serve.main, arguments, capsys)


def test_without_the_extra_what_to_install_is_said(monkeypatch, capsys):
    monkeypatch.setattr(serve, "missing", "uvicorn")
    assert "pip install 'specjax[serve]'" in refused_command(serve.main, [], capsys)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_the_playground_streams_an_answer(url, tmp_path):
    # What computes rounds again is compiled here, for which the browser would not wait.
    rounds_of(url, chat(url, temperature=0.0)[2])
    with browser(tmp_path) as view:
        view.open(f"{url}/")
        for said in ("toy", "ngram", "up to 3 tokens", "rejection"):
            assert said in view.text("#chat-about")
        # At temperature 1 a random model sometimes ends an answer with its first token.
        view.slide("#temperature", 0)
        view.slide("#most", 16)
        view.run(f"$('chat-input').value = {PROMPT!r}")
        view.click("#send")
        assert "tokens per pass" in view.until("$('chat-figures').innerText")
        view.until("!$('send').disabled")
        rounds = view.run("document.querySelectorAll('.rounds > div').length")
        assert 0 < rounds <= 16
        assert view.text("#answer")
        assert view.text("#chat-state") == ""
        view.until("!$('round-body').hidden && answer.rounds.length === answer.emitted.length")
        assert view.run("answer.rounds.length") == rounds
        assert "drafter ngram, rule rejection, temperature 0" in view.text("#round-about")
        assert "gives the tokens that the run emitted" in view.text("#trace")
        view.run("$('chat-input').value = 'a '.repeat(400)")
        view.click("#send")
        view.until("$('chat-state').innerText.startsWith('No answer: ')")
        # The refusal itself is logged by the browser, and nothing else.
        assert all("400" in error for error in view.errors)
