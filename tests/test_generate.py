"""`train.generate`: the target's own answers, whatever the batches, and whenever it was stopped."""

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bad_input import refused_command
from commands import files_limited_to, finish, free_port, joined, start
from rich.console import Console

from specjax.apps.command_line.config_file import read_config
from specjax.apps.command_line.console import Screen
from specjax.distributed import folder_lock
from specjax.engine import generate as decoding
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.loading.load import load_model, save_model
from specjax.sampling import derived_seed
from train import generate
from train.data.examples import Example, target_metadata
from train.data.responses import VALIDATION_EVERY, held_out_groups, open_responses
from train.data.write_responses import write_responses
from train.generation import answers, prompt_corpus, questions
from train.generation.answers import AnswerRow, Job
from train.generation.prompts import Request, read_requests
from train.generation.saved_answers import SavedAnswers

ROOT = Path(__file__).parent.parent
NEW = 6


@pytest.fixture(scope="module")
def model_path(chatty, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    save_model(chatty, path)
    return path


@pytest.fixture(scope="module")
def target(model_path):
    return load_model(str(model_path), dtype="float32")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    notes = {"category": "qa", "source": "own", "licence": "CC0-1.0"}
    rows = [{"prompt": "abc " * (i % 4 + 1), **notes} for i in range(8)]
    rows.append({"turns": ["one", "two"], "question_id": 5})
    said = (("user", "x"), ("assistant", "y"), ("user", "z"))
    rows.append({"messages": [{"role": role, "content": text} for role, text in said]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model_path, prompts, directory, *more):
    return [
        "--config=configs/generate_smollm2.py",
        f"--config.target={model_path}",
        f"--config.prompts={prompts}",
        f"--config.workdir={directory}",
        "--config.dtype=float32",
        "--config.batch_size=3",
        "--config.max_prompt_tokens=448",
        f"--config.max_new_tokens={NEW}",
        *more,
    ]


@pytest.fixture(scope="module")
def done(model_path, prompts, tmp_path_factory):
    """A run that nothing stopped: its directory."""
    directory = tmp_path_factory.mktemp("done") / "run"
    assert generate.main(arguments(model_path, prompts, directory)) == 0
    return directory


def contents(directory):
    responses = open_responses(directory / "responses")
    return [
        (one.id, one.tokens.tolist(), one.loss_mask.tolist(), one.temperature, one.category)
        for one in (responses[index] for index in range(len(responses)))
    ]


def test_answers_are_those_of_generate(done, prompts, target):
    responses = open_responses(done / "responses", target_metadata(target))
    assert len(set(responses.ids.tolist())) == 10
    requests, rows = read_requests(prompts), [responses[index] for index in range(10)]
    starts, samplings = [], []
    for index, (request, one) in enumerate(zip(requests, rows, strict=True)):
        first = int(one.loss_mask.argmax())
        assert one.loss_mask.tolist() == [False] * first + [True] * (len(one.tokens) - first)
        messages = request.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        assert one.tokens[:first].tolist() == target.tokenizer.encode_chat(messages)
        starts.append(first)
        samplings.append(
            SamplingParams(
                temperature=round(one.temperature, 3),
                max_new_tokens=NEW,
                seed=derived_seed(0, "training answer", index),
            )
        )
        notes = (request.category, request.source, request.licence)
        assert (one.category, one.source, one.licence) == notes
    inputs = [one.tokens[:first].tolist() for one, first in zip(rows, starts, strict=True)]
    alone = decoding.generate(target, inputs, sampling=samplings)
    assert [
        one.tokens[first:].tolist() for one, first in zip(rows, starts, strict=True)
    ] == alone.token_ids
    temperatures = collections.Counter(sampling.temperature for sampling in samplings)
    assert sorted(temperatures.values()) == [3, 3, 4]
    assert responses[0].licence == "CC0-1.0"
    assert responses[9].source == "prompts.jsonl"
    assert responses.generation["config"]["max_new_tokens"] == NEW


@pytest.mark.slow
def test_two_processes_answer_what_one_does(model_path, prompts, tmp_path, done):
    address = f"127.0.0.1:{free_port()}"
    command = arguments(model_path, prompts, tmp_path / "run")
    command += ["--config.mesh.data=2", "--config.mesh.model=2"]
    program = ("-m", "train.generate")
    ran = [
        start([*command, *joined(address, number)], program=program, devices=2) for number in (0, 1)
    ]
    (first, out, err), (second, silent, other) = map(finish, ran)
    assert (first, second) == (0, 0), err + other
    assert "10 conversations" in out
    assert "conversations" not in silent
    assert contents(tmp_path / "run") == contents(done)


def test_another_seed_gives_other_answers_where_they_are_drawn(model_path, prompts, tmp_path, done):
    assert generate.main(arguments(model_path, prompts, tmp_path / "run", "--config.seed=1")) == 0
    pairs = list(zip(contents(tmp_path / "run"), contents(done), strict=True))
    drawn = [a[1] != b[1] for a, b in pairs if a[3] == b[3] == 1.0]
    greedy = [a[1] == b[1] for a, b in pairs if a[3] == b[3] == 0.0]
    assert all(greedy)
    assert not drawn or any(drawn)
    assert [a[1] for a, _ in pairs] != [b[1] for _, b in pairs]


KILLED = """
import os, signal, sys
from train import generate
from train.generation.saved_answers import SavedAnswers
add, calls = SavedAnswers.add, []
def dies(self, answers):
    add(self, answers)
    calls.append(answers)
    if len(calls) == 2:
        with self.file.open("a") as file:
            file.write('{"id": 1, "token_i')
        os.kill(os.getpid(), signal.SIGKILL)
SavedAnswers.add = dies
sys.exit(generate.main(sys.argv[1:]))
"""


def saved(directory):
    return SavedAnswers(directory / "answers.jsonl")


def test_a_killed_run_resumes(model_path, prompts, tmp_path, done, capsys):
    """It was killed in the middle of a line."""
    directory = tmp_path / "run"
    command = arguments(model_path, prompts, directory)
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, *command],
        cwd=ROOT,
        capture_output=True,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
    before = saved(directory).file.read_bytes()
    kept = len(saved(directory).read())
    assert 2 <= kept < 10
    assert not (directory / "responses").exists()
    assert generate.main(command) == 0
    assert f"resuming: {kept} of 10 prompts" in capsys.readouterr().out
    assert contents(directory) == contents(done)
    assert saved(directory).file.read_bytes().startswith(before)


def test_minutes_stop_and_damaged_answers_are_made_again(
    model_path, prompts, tmp_path, done, capsys
):
    directory = tmp_path / "run"
    command = arguments(model_path, prompts, directory)
    assert generate.main([*command, "--config.minutes=1e-9"]) == 0
    kept = len(saved(directory).read())
    assert 0 < kept < 10
    said = f"minutes are over: {kept} of 10 prompts are done, {10 - kept} are left"
    assert said in capsys.readouterr().out
    assert not (directory / "responses").exists()
    assert generate.main(command) == 0
    assert contents(directory) == contents(done)
    lines = saved(directory).file.read_text().splitlines()
    wrong = ["5", '{"id": 3}', '{"id": 3, "token_ids": [-1]}', '{"id": 3, "token_ids": [1.5]}']
    saved(directory).file.write_text("\n".join([*wrong, lines[0][:-1], *lines[2:]]))
    (directory / "responses").rename(directory / "earlier")
    left = len(saved(directory).read())
    assert left < 10
    capsys.readouterr()
    assert generate.main(command) == 0
    assert f"resuming: {left} of 10 prompts" in capsys.readouterr().out
    assert contents(directory) == contents(done)
    assert generate.main(command) == 0
    assert "is written already" in capsys.readouterr().out


def test_another_run_in_the_same_folder(model_path, prompts, done, capsys, tmp_path):
    assert "top_k=0 then, 5 now" in refused_command(
        generate.main, arguments(model_path, prompts, done, "--config.top_k=5"), capsys
    )
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text().replace("abc", "xyz"))
    command = [one.replace(str(prompts), str(other)) for one in arguments("m", prompts, done)]
    command[1] = f"--config.target={model_path}"
    error = refused_command(generate.main, command, capsys)
    assert "prompts" in error
    assert "another run" in error
    assert contents(done)


def test_prompts_that_are_too_long_are_left_out_and_said(model_path, prompts, tmp_path, capsys):
    more = ("--config.max_prompt_tokens=8", "--config.limit=9")
    assert generate.main(arguments(model_path, prompts, tmp_path / "run", *more)) == 0
    responses = open_responses(tmp_path / "run" / "responses")
    assert 0 < len(responses) < 9
    message = f"{9 - len(responses)} of 9 prompts are left out: longer than 8 tokens"
    assert message in capsys.readouterr().out
    prompt_lengths = responses.lengths - responses.num_labels
    assert prompt_lengths.max() <= 8


def test_prompts_that_fail_are_left_out_and_said(chatty, prompts, tmp_path, done, capsys):
    """Where all fail nothing is kept; where some do, the others are what they were."""
    *others, last = (one.prompt for one in read_requests(prompts))
    others = [[{"role": "user", "content": one}] for one in others if isinstance(one, str)]
    known = {token for one in others for token in chatty.tokenizer.encode_chat(one)}
    token = next(one for one in chatty.tokenizer.encode_chat(last) if one not in known)
    bad = {path: tmp_path / path for path in ("some", "all")}
    params = chatty.params["embed"]["embedding"]
    for path, table in (("some", params.at[token].set(np.nan)), ("all", params * np.nan)):
        whole = {**chatty.params, "embed": {"embedding": table}}
        save_model(dataclasses.replace(chatty, params=whole), bad[path])
    directory = tmp_path / "run"
    assert generate.main(arguments(bad["some"], prompts, directory, "--config.minutes=1e-9")) == 0
    assert generate.main(arguments(bad["some"], prompts, directory)) == 0
    out = capsys.readouterr().out
    assert f"without an answer: target={bad['some']}: its logits are not numbers" in out
    ours, all_ids = contents(directory), {one[0] for one in contents(done)}
    assert 0 < len(ours) < len(all_ids)
    assert f"{10 - len(ours)} of 10 prompts are left out: they have no answer" in out
    assert 9 not in {one[0] for one in ours}
    before = {one[0]: one for one in contents(done)}
    assert ours == [before[one[0]] for one in ours]
    assert "its logits are not numbers" in refused_command(
        generate.main, arguments(bad["all"], prompts, tmp_path / "none"), capsys
    )
    assert not saved(tmp_path / "none").read()


def test_ctrl_c_keeps_what_has_ended(model_path, prompts, tmp_path, done, monkeypatch):
    directory, answer = tmp_path / "run", answers.answer

    def interrupted(*arguments):
        count = 0
        for ended in answer(*arguments):
            count += len(ended)
            yield ended
            if count >= 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(answers, "answer", interrupted)
        assert generate.main(arguments(model_path, prompts, directory)) == 130
    assert 4 <= len(saved(directory).read()) < 10
    assert generate.main(arguments(model_path, prompts, directory)) == 0
    assert contents(directory) == contents(done)


def test_the_dataset_may_go_elsewhere_when_a_run_resumes(model_path, prompts, tmp_path, done):
    """And there may be fewer slots: what errors of full disks and memories advise."""
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert generate.main(arguments(model_path, prompts, directory, "--config.minutes=1e-9")) == 0
    more = (f"--config.output={elsewhere}", "--config.batch_size=2")
    assert generate.main(arguments(model_path, prompts, directory, *more)) == 0
    elsewhere.rename(directory / "responses")
    assert contents(directory) == contents(done)


@pytest.mark.parametrize("named", [False, True])
def test_the_corpus_at_debug_size(named, model_path, tmp_path, capsys):
    command = [
        "--config=configs/generate_smollm2.py:debug",
        *["--config.prompts=specjax_corpus"] * named,
        f"--config.target={model_path}",
        f"--config.workdir={tmp_path / 'run'}",
        "--config.max_prompt_tokens=500",
        "--config.corpus.wikipedia=false",
        "--config.drafter.name=ngram",
        "--config.verify=coupled",
    ]
    assert generate.main(command) == 0
    responses = open_responses(tmp_path / "run" / "responses")
    assert 2 < len(responses) <= 10
    for index in range(len(responses)):
        assert responses[index].licence in ("PSF-2.0", "Apache-2.0")
        assert responses[index].category
        assert 1 <= responses.num_labels[index] <= 8
    assert "conversations" in capsys.readouterr().out


def test_a_tfds_directory_as_prompts(model_path, tmp_path, tiny, capsys):
    # A dataset of responses has texts too: its categories serve as prompts here.
    one = Example(np.arange(5, dtype=np.int32), np.ones(5, bool), category="why?", licence="MIT")
    examples = [dataclasses.replace(one, id=number) for number in range(4)]
    write_responses(tmp_path / "data", examples, target_metadata(tiny))
    more = ("--config.tfds.split=conversations", "--config.tfds.prompt_field=category")
    command = arguments(model_path, tmp_path / "data", tmp_path / "run", *more)
    assert generate.main(command) == 0
    responses = open_responses(tmp_path / "run" / "responses")
    assert (len(responses), responses[0].licence) == (4, "MIT")
    capsys.readouterr()
    for wrong, said in (
        ("--config.tfds.split=train", "no file, and TFDS says"),
        ("--config.tfds.prompt_field=text", "no such field; use one of category"),
        ("--config.tfds.prompt_field=tokens", "holds no text"),
    ):
        assert said in refused_command(generate.main, [*command, wrong], capsys)
    (records,) = (tmp_path / "data").glob("*.array_record*")
    records.write_bytes(b"")
    assert "its records cannot be read" in refused_command(generate.main, command, capsys)


def test_the_target_asks_itself(model_path, target, tmp_path, capsys):
    """Stopped while it asks, and while it answers; what is left out is counted."""
    directory = tmp_path / "run"
    more = ("num_asked=30", "min_tokens=2", "max_tokens=200")
    command = [
        *arguments(model_path, questions.NAME, directory, "--config.chat=true"),
        *(f"--config.questions.{one}" for one in more),
    ]
    assert generate.main([*command, "--config.minutes=1e-9"]) == 0
    assert "of 30 questions are done" in capsys.readouterr().out
    assert generate.main(command) == 0
    assert "resuming: " in capsys.readouterr().out
    responses = open_responses(directory / "responses")
    counts = responses.generation["questions"]
    assert counts["asked"] == 30 == counts["kept"] + sum(counts["left_out"].values())
    answered = responses.generation["answers"]
    assert answered["kept"] == len(responses) > 2
    assert counts["kept"] == answered["kept"] + sum(answered["left_out"].values())
    assert 0 < responses.validation.sum() < len(responses)
    frame = questions.frame_of(target, "auto")
    asked = SavedAnswers(directory / questions.NAME / "answers.jsonl").read().values()
    texts = {target.tokenizer.decode(tokens).strip() for tokens in asked}
    for index in range(len(responses)):
        prompt = responses[index].tokens[~responses[index].loss_mask].tolist()
        text = target.tokenizer.decode(prompt).strip()
        assert text in texts
        assert prompt == target.tokenizer.encode_chat([{"role": "user", "content": text}])
        assert tuple(prompt[: len(frame.before)]) == frame.before
    again = tmp_path / "again"
    assert generate.main([one.replace(str(directory), str(again)) for one in command]) == 0
    assert contents(again) == contents(directory)


def plain_ids(target):
    """A function that encodes a text without tokens around it."""
    return lambda text: target.tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_questions_that_are_left_out(target):
    section = questions.QuestionsSection(20, 1.0, 3, 40)
    frame = questions.frame_of(target, "auto")
    assert frame == questions.Frame((0,), (2,), (1, 2))
    encode = plain_ids(target)
    text, end = "the quick fox jumps over", [2]
    good = encode(text)
    wrong = {
        "failed": [],
        "not ended": good,
        "empty": [*encode(" . , ;"), *end],
        "too short": [*encode("the"), *end],
        "too long": [*encode("abcdefghijklmnopqrstuvwxyz" * 2), *end],
        "special tokens": [*good, 0, *end],
        "repeats itself": [*encode("ab " * 12), *end],
        "duplicate": [*encode(text + ","), *end],
    }
    others = [f"{text} {letter}" for letter in "abcdefgh"]
    written = [[*good, *end], *wrong.values(), *([*encode(one), 1] for one in others)]
    requests, left_out = questions.requests_of(written, target, frame, section, 30)
    assert left_out == dict.fromkeys(wrong, 1)
    assert [one.prompt for one in requests] == [text, *others]
    # Whatever their order.
    held_out = {one.prompt for one in requests if one.id % 50 == 0}
    assert 0 < len(held_out) < len(requests)
    others = questions.requests_of(written[:0:-1] + written[:1], target, frame, section, 30)[0]
    assert {one.prompt.rstrip(",") for one in others if one.id % 50 == 0} == held_out
    with pytest.raises(InputError, match="asked nothing of use .1 failed, 1 not ended.; raise"):
        questions.requests_of([[], good], target, frame, section, 30)


def test_answers_that_are_left_out(target):
    encode = plain_ids(target)
    good, loop = encode("the quick fox jumps over"), encode("ab " * 12)
    answers = {0: [*good, 1], 1: [], 2: [1], 3: [*loop, 1], 4: loop, 5: good}
    wanted = {1: "failed", 2: "empty", 3: "repeats itself", 4: "repeats itself"}
    assert questions.degenerate_answers(answers, target.ends) == wanted


def test_prompts_about_one_text_are_held_out_together(tmp_path):
    """By the names of groups alone, and equal prompts always; whatever their numbers are."""
    requests = [Request(number, f"prompt {number % 120}") for number in range(360)]
    requests += [
        Request(360 + number, f"{number}", group=f"{number % 90}") for number in range(270)
    ]
    rows = tuple(AnswerRow(request, (5,), SamplingParams()) for request in requests)
    saved = SavedAnswers(tmp_path / "answers.jsonl")
    saved.add({request.id: [7] for request in requests})
    job = Job(rows, (), "")
    written = list(answers.examples(job, saved, left_out={0}))
    assert len({one.id for one in written}) == len(written) == len(rows) - 1
    held_out: dict[str, set] = {}
    for request, one in zip(requests[1:], written, strict=True):
        group = request.group or request.prompt
        held_out.setdefault(group, set()).add(one.id % VALIDATION_EVERY == 0)
    assert all(len(sides) == 1 for sides in held_out.values())
    chosen = {group for group, sides in held_out.items() if True in sides}
    assert 1 < len(chosen) < 0.1 * len(held_out)
    # Another dataset with some of these groups holds out the same ones.
    assert held_out_groups([*sorted(held_out)[::2], *chosen]) == chosen
    assert held_out_groups(["a", "b"]) < {"a", "b"}
    assert not held_out_groups(["a", "a"])


def test_corpus_prompts_are_grouped_by_what_they_are_about():
    texts = prompt_corpus.Texts(wikipedia=False)
    made = prompt_corpus.make_corpus(300, 0, prompt_corpus.DEFAULT_MIX, texts)
    own = [one for one in made if not one.group]
    assert {one.source for one in own} == {"specjax templates"}
    assert all(one.group.startswith(one.source) for one in made if one.group)
    assert len({one.group for one in made}) < len(made) - len(own)


def test_questions_that_begin_alike_are_held_out_together(target, monkeypatch):
    monkeypatch.setattr(questions, "_OPENING", 3)
    frame, section = questions.frame_of(target, "auto"), questions.QuestionsSection(9, 1.0, 1, 40)
    encode = plain_ids(target)
    texts = [f"{opening} {letter}" for opening in ("the", "fox", "jumps") for letter in "abcdef"]
    written = [[*encode(text), 2] for text in texts]
    requests, left_out = questions.requests_of(written, target, frame, section, 30)
    assert not left_out
    held_out = [one.prompt for one in requests if one.id % 50 == 0]
    assert len({text[:3] for text in held_out}) == 1
    assert len(held_out) == 6


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template; use other prompts"),
        ("{{ messages[0].content | upper }}", "'A question of the user' is in its output 0 times"),
        ("{{ messages[0].content * 2 }}", "in its output 2 times"),
        ("{{ messages[0].content }}<|im_end|>", "nothing precedes the user's text"),
    ],
)
def test_no_place_for_a_question(template, said, target):
    tokenizer = dataclasses.replace(target.tokenizer, chat_template=template)
    model = dataclasses.replace(target, tokenizer=tokenizer)
    with pytest.raises(InputError, match=said):
        questions.frame_of(model, "auto")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--config.prompts=target_questions", "--config.chat=false"],
            "chat=false: target_questions are asked by the chat template",
        ),
        (
            ["--config.prompts=target_questions", "--config.questions.max_tokens=600"],
            "questions.max_tokens=600: ",
        ),
        (["--config.questions.min_tokens=300"], "questions.min_tokens=300: no such question ends"),
        (["--config.workdir="], "workdir='' is empty"),
        (["--config.temperatures=()"], "temperatures=(): use a list of at least 1"),
        (["--config.verify=typical"], "verify='typical'"),
        (["--config.corpus.mix.cooking=1"], "no such field"),
        (["--config.max_prompt_tokens=599"], "has room for 594"),
        (["--config.max_prompt_tokens=3"], "all 10 prompts are longer"),
        (["--config.prompts=no_such_dataset_at_all"], "no_such_dataset_at_all"),
        (["--config.chat=false"], "a conversation, and chat=false"),
        (["--config.drafter.name=telepathy"], "telepathy"),
        (["--config.prompts=~nosuchuser/x"], "prompts='~nosuchuser/x': Could not determine home"),
        (["--config.prompts=/dev/null"], "prompts='/dev/null' is a device: name a file"),
    ],
)
def test_bad_input_before_anything_is_decoded(model_path, prompts, tmp_path, capsys, more, said):
    error = refused_command(
        generate.main, arguments(model_path, prompts, tmp_path / "run", *more), capsys
    )
    assert said in error
    assert not saved(tmp_path / "run").file.exists()


@pytest.mark.parametrize("inside", ["batches", "batches/x", "responses/x", "config.json"])
def test_an_output_in_the_work_folder_is_refused_first(
    inside, model_path, prompts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(generate, "load_model", None)
    more = f"--config.output={tmp_path / 'run' / inside}"
    error = refused_command(
        generate.main, arguments(model_path, prompts, tmp_path / "run", more), capsys
    )
    assert f"/run/{inside}': in the work folder only 'responses' is free for it" in error
    assert not (tmp_path / "run").exists()


def test_the_home_folder_of_prompts(prompts, monkeypatch):
    monkeypatch.setenv("HOME", str(prompts.parent))
    arguments = [f"--config.prompts=~/{prompts.name}"]
    config = answers.read_answers_config(read_config(arguments, generate.CONFIG).to_dict())
    assert answers.find_requests(config, Screen(Console(quiet=True))) == read_requests(prompts)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "line 2 is [1]; put one JSON object in a line"),
        ('{"text": "x"}', "one of prompt, messages, turns"),
        ('{"prompt": "x", "turns": ["x"]}', "one of"),
        ('{"prompt": ""}', "of no use"),
        ('{"prompt": 5}', "of no use"),
        ('{"prompt": [null]}', "of no use"),
        ('{"prompt": ["x"]}', "of no use"),
        ('{"turns": []}', "of no use"),
        ('{"turns": ["x", 1]}', "of no use"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages[0].content is missing"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "must be a text part"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "of no use"),
        ('{"prompt": "x", "licence": 3}', "licence=3"),
        ('{"prompt": "x\\ud800"}', "line 2: prompt: character 1 is"),
        ('{"turns": ["\\ud800"]}', "line 2: turns: character 0 is"),
        ('{"messages": [{"role": "\\udfff", "content": "x"}]}', "messages: character 0 is"),
        ('{"prompt": "x", "category": "\\ud800"}', "category: character 0 is"),
        ('{"prompt": "x", "n": ' + "1" * 5000 + "}", "line 2 is not JSON"),
        ('{"messages": [{"role": "user\\n", "content": "x"}]}', "line 2: chat template"),
    ],
)
def test_lines_of_no_use(model_path, tmp_path, capsys, line, said):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    error = refused_command(generate.main, arguments(model_path, path, tmp_path / "run"), capsys)
    assert "line 2" in error
    assert said in error


def test_a_second_run_is_refused(model_path, prompts, tmp_path, capsys):
    with folder_lock.hold(tmp_path / "run", "answers", "workdir"):
        assert generate.main(arguments(model_path, prompts, tmp_path / "run")) == 2
    assert f"run': another run is at work there (pid {os.getpid()} on " in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_full_disk_keeps_what_was_done(model_path, prompts, tmp_path, done, capsys):
    directory = tmp_path / "run"
    command = arguments(model_path, prompts, directory)
    assert generate.main([*command, "--config.minutes=1e-9"]) == 0
    kept, limit = saved(directory).read(), saved(directory).file.stat().st_size + 20
    with saved(directory).file.open("a") as file:
        file.write("\n" * 5000)
    with (
        files_limited_to(limit + 4980),
        pytest.raises(InputError, match="cannot be written .*free"),
    ):
        saved(directory).add({7: list(range(1000))})
    assert saved(directory).read() == kept
    assert generate.main(command) == 0
    assert contents(directory) == contents(done)
