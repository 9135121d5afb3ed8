"""`scripts/compare_peers.py` beside a fake llama-server, which remembers prompts."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver
from commands import script_module
from conftest import tiny_config

from specjax.loading.load import random_model, save_model

SERVER = """#!{python}
import http.server, json, os, sys

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seen = []

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, new = request["prompt"], request["n_predict"]
        shared = max((len(os.path.commonprefix([ids, one])) for one in seen), default=0)
        seen.append(ids)
        with open({log!r}, "a") as log:
            log.write(json.dumps({{"argv": sys.argv[1:], "request": request}}) + chr(10))
        speed = 2.0 if "--spec-draft-model" in options else 1.0
        self.answer({{
            "tokens": list(range(new)),
            "timings": {{
                "prompt_ms": max(1.0, 1000.0 * (len(ids) - shared) / len(ids)),
                "predicted_ms": 100.0 * (new - 1) / speed,
            }},
        }})

arguments = list(sys.argv)
port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""A llama-server that reads a prompt in a second, but not what it shares with an earlier prompt."""


@pytest.fixture
def compare(chatty, tmp_path, monkeypatch):
    """The script, as a function of its flags, on a tiny model and its draft model.

    It returns what the fake server was called with, one entry per request.
    """
    save_model(chatty, tmp_path / "model")
    shape = tiny_config(vocab_size=chatty.config.vocab_size, num_layers=1)
    save_model(random_model(shape, 1, chatty.tokenizer, dtype="float32"), tmp_path / "draft")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    log = tmp_path / "log"
    server = programs / "llama-server"
    server.write_text(SERVER.format(python=sys.executable, log=str(log)))
    server.chmod(0o755)
    with script_module("compare_peers") as script:

        def run(**values):
            flags.FLAGS.mark_as_parsed()
            values = {
                "peers": ["llama_cpp"],
                "model": str(tmp_path / "model"),
                "draft": str(tmp_path / "draft"),
                "weights": "float",
                "peer_python": str(programs / "python"),
                "prompts": str(prompts(tmp_path)),
                "max_new_tokens": 6,
                "prefill_tokens": 40,
                "runs": 2,
                **values,
            }
            with flagsaver.flagsaver(**values):
                script.main([])
            return [json.loads(line) for line in log.read_text().splitlines()]

        run.script = script
        yield run


def prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    lines = [{"question_id": n, "category": "qa", "turns": ["abc ab " * (1 + n)]} for n in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.usefixtures("one_width")
def test_all_ways_are_decoded_in_turn_and_compared(compare, capsys):
    requests = compare()
    said = capsys.readouterr().out
    ways = ["specjax plain", "specjax lookup", "specjax suffix auto", "specjax draft"]
    ways += ["specjax draft auto", "llama_cpp plain", "llama_cpp lookup", "llama_cpp draft"]
    order = re.findall(r"^run (\d): (.*): .* tokens/s$", said, re.MULTILINE)
    assert sorted(order) == sorted((str(run), way) for run in (1, 2) for way in ways)
    assert [way for run, way in order if run == "1"] == ways[::-1]
    assert [way for run, way in order if run == "2"] != ways[::-1]
    # 10 tokens per second plainly, and the draft model doubles that.
    other = "tokens as specjax plain: 0/2"
    assert re.search(rf"llama_cpp plain +10\.0 \(10\.0\.\.10\.0\) +{other}", said)
    twice = r"2\.00 \(2\.00\.\.2\.00\) x its plain"
    same = "tokens as llama_cpp plain: 2/2"
    assert re.search(rf"llama_cpp draft +20\.0 \(.*\) +{twice}; {same}; {other}", said)
    for way in ("lookup", "suffix auto", "draft", "draft auto"):
        assert re.search(rf"specjax {way} .* x its plain; tokens as specjax plain: 2/2", said)
    for ours, theirs in (("draft", "draft"), ("draft auto", "plain"), ("suffix auto", "plain")):
        assert f"specjax {ours} / llama_cpp {theirs} = " in said
    # Each way has a server of its own, with the models and lengths of the command.
    servers = {tuple(one["argv"]) for one in requests}
    drafting = [argv for argv in servers if "draft-simple" in argv]
    assert (len(servers), len(drafting)) == (3, 1)
    given = dict(itertools.pairwise(drafting[0]))
    assert given["--spec-draft-n-max"] == "4"
    assert (Path(given["--model"]).name, Path(given["--spec-draft-model"]).name) == (
        "model",
        "draft",
    )
    (lookup,) = (argv for argv in servers if "ngram-simple" in argv)
    assert "8" in lookup


def first_token_s(said: str) -> float:
    (seconds,) = re.findall(r"first token of 40 tokens, .*, llama_cpp ([\d.]+) s,", said)
    return float(seconds)


def test_the_first_token_is_of_prompts_that_no_cache_has(compare, capsys, monkeypatch):
    """The server would skip what it has read: with one prompt for all runs, as it once was, 0 s."""
    requests = compare(draft=None)
    assert first_token_s(capsys.readouterr().out) == 1.0
    timed = [one["request"]["prompt"] for one in requests if one["request"]["n_predict"] == 1]
    assert [len(ids) for ids in timed] == [40] * 3
    assert len({ids[0] for ids in timed}) == 3
    assert not any(one["request"]["cache_prompt"] for one in requests)
    fresh = compare.script.fresh_prompts
    repeated = lambda *args: [fresh(*args)[0]] * args[-1]  # noqa: E731
    monkeypatch.setattr(compare.script, "fresh_prompts", repeated)
    compare(draft=None)
    assert first_token_s(capsys.readouterr().out) == 0.0


def test_fresh_prompts_begin_differently_and_have_no_special_tokens():
    with script_module("compare_peers") as script:
        prompts = script.fresh_prompts(1000, 50, 30)
    assert len({ids[0] for ids in prompts}) == 30
    assert {len(ids) for ids in prompts} == {50}
    assert min(map(min, prompts)) >= 100
    assert max(map(max, prompts)) < 800


def test_heads_of_the_model_draft_where_there_are_some():
    with script_module("compare_peers") as script, flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        without = set(script.ways_of([], False))
        assert without == {"plain", "lookup", "suffix auto"}
        assert set(script.ways_of(["eagle3"], False)) - without == {"ngram+eagle3 auto"}
        assert set(script.ways_of(["eagle3"], True)) - without == {"draft", "ngram+eagle3 auto"}


def test_bad_input_and_a_server_that_does_not_start_end_in_one_line(compare, tmp_path, capfd):
    with pytest.raises(SystemExit, match="^error: .*nothing"):
        compare(model=str(tmp_path / "nothing.gguf"))
    (tmp_path / "bin" / "llama-server").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match="peer process ended with code 1"):
        compare(draft=None)
    assert "llama-server did not start; see why: " in capfd.readouterr().err
