"""Every field of every command refuses what it cannot take: one line, its name, exit code 2."""

import collections
import os
import subprocess
import sys
from pathlib import Path

import bad_inputs
import ml_collections
import pytest
from commands import script_module
from conftest import slow

from specjax import bench, decode, export, report
from specjax.cli.decode_config import DecodeFields
from specjax.fields import Kind, fields_of
from train import corpus, distill, eagle, features, generate, import_responses, medusa, mtp
from train.generation import answers
from train.pretraining.tokens import CorpusConfig
from train.run.config import TrainingConfig

CONFIGS = Path("configs").absolute()
# A command's entry point, the kinds of its fields, and its config file.
COMMANDS = {
    "specjax.decode": (decode.main, fields_of(DecodeFields), "decode_smollm2.py"),
    "specjax.bench": (bench.main, fields_of(bench.BenchConfig), "bench_smollm2.py"),
    "train.generate": (generate.main, fields_of(answers.AnswersConfig), "generate_smollm2.py"),
    "train.corpus": (corpus.main, fields_of(CorpusConfig), "corpus.py"),
    "train.medusa": (medusa.main, fields_of(medusa.Config), "train_medusa2.py"),
    "train.eagle": (eagle.main, fields_of(eagle.Config), "train_eagle3.py"),
    "train.distill": (distill.main, fields_of(distill.Config), "train_distill.py"),
    "train.mtp": (mtp.main, fields_of(mtp.Config), "train_mtp_scratch.py:glm"),
}

# A command's entry point, its flags, and those that it needs, all of them good.
FLAGS = {
    "specjax.report": (report.main, report.parser(), {"out": "new"}),
    "specjax.export": (
        export.main,
        export.parser(),
        {"head": "eagle3", "format": "eagle3", "output": "new"},
    ),
    "train.features": (
        features.main,
        features.parser(),
        {"input": "folder", "output": "new"},
    ),
    "train.import_responses": (
        import_responses.main,
        import_responses.parser(),
        {"input": "file", "output": "new"},
    ),
}

# The same of commands that are files.
SCRIPTS = {
    "kill_and_resume": {},
    "reproduce_heads": {},
    "sweep": {},
}
for name, needed in SCRIPTS.items():
    with script_module(name.replace("/", ".")) as script:
        FLAGS[f"scripts/{name}.py"] = (script.main, script.parser(), needed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: a file "file", and a folder "folder"."""
    (tmp_path / "file").write_text("mine\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine\n"


def complaint(main, argv, capsys):
    """What is wrong with how a command ends that was given something bad; None if all is well."""
    try:
        code = main(argv)
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    said = capsys.readouterr().err
    if code != 2:
        return f"exit code {code}"
    if not said.startswith("error: ") or said.count("\n") != 1:
        return f"said {said!r:.300}"
    if len(said) > 1500:
        return f"said {len(said)} characters"
    field = argv[-1].removeprefix("--").removeprefix("config.").partition("=")[0]
    return None if field in said else f"names no field: {said!r:.200}"


@pytest.mark.parametrize(
    ("command", "parts"),
    [*((name, 4) for name in COMMANDS), *slow(*((name, 1) for name in COMMANDS))],
)
def test_every_field(command, parts, folder, capsys, monkeypatch):
    """Of fields with the same bad values the first refuses all of them, each other one a part."""
    main, kinds, config = COMMANDS[command]
    # Refused before any long work.
    for module in ("specjax.decode", "specjax.cli.bench_run", "train.run.setup", "train.generate"):
        monkeypatch.setattr(f"{module}.load_model", None)
    # absl writes the whole config down as a flag's default, which takes most of the time.
    monkeypatch.setattr(ml_collections.ConfigDict, "__str__", lambda self: "a config")
    if command in ("train.eagle", "train.distill", "train.mtp"):
        # What all methods share is tried with one of them.
        shared = {**fields_of(TrainingConfig), "model": None}
        kinds = {name: kind for name, kind in kinds.items() if kind != shared.get(name)}
    if command != "train.mtp":  # its config file alone has the section
        kinds = {name: kind for name, kind in kinds.items() if name != "model"}
    problems, before = [], collections.Counter()
    for name, kind in bad_inputs.flat(kinds):
        assert isinstance(kind, Kind)
        values = bad_inputs.texts(kind)
        number = before[tuple(values)]
        before[tuple(values)] += 1
        for value in values[number % parts :: parts] if number else values:
            argv = [f"--config={CONFIGS / config}", f"--config.{name}={value}"]
            if (problem := complaint(main, argv, capsys)) is not None:
                problems.append(f"{name}={value!r:.60}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag(command, folder, capsys, monkeypatch):
    main, parser, needed = FLAGS[command]
    for module in ("specjax.export", "train.features", "train.import_responses"):
        monkeypatch.setattr(f"{module}.load_model", None)
    problems = []
    for name, kind in parser.fields.items():
        others = [f"--{flag}={value}" for flag, value in needed.items() if flag != name]
        for value in bad_inputs.texts(kind):
            argv = [*others, f"--{name}={value}"]
            if (problem := complaint(main, argv, capsys)) is not None:
                problems.append(f"{name}={value!r:.60}: {problem}")
    for flag in needed:
        argv = [f"--{name}={value}" for name, value in needed.items() if name != flag]
        assert main(argv) == 2
        assert f"{flag} is missing: pass --{flag}=" in capsys.readouterr().err
    assert not problems, "\n".join(problems)


MODULES = [*COMMANDS, *(name for name in FLAGS if "/" not in name)]
PROCESSES = ["specjax.decode", "specjax.report"]
"""One with a config, one with flags."""


@pytest.mark.parametrize(
    "command", [*PROCESSES, *slow(*(name for name in MODULES if name not in PROCESSES))]
)
def test_as_a_process(command, folder):
    """What a person sees: one line, and no traceback."""
    flag = "--config.nosuch=1" if command in COMMANDS else "--nosuch=1"
    config = [f"--config={CONFIGS / COMMANDS[command][2]}"] if command in COMMANDS else []
    root = CONFIGS.parent
    run = subprocess.run(
        [sys.executable, "-m", command, *config, flag],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert "nosuch" in run.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_fields_are_those_of_the_config(command, capsys, tmp_path):
    """A field that a config lacks, or has beside those of the command, is named."""
    main, kinds, config = COMMANDS[command]
    path, colon, size = config.partition(":")
    given = repr(size) if colon else ""
    source = (
        "import runpy\n"
        "def get_config(size=''):\n"
        f"    config = runpy.run_path({str(CONFIGS / path)!r})['get_config']({given})\n"
        "    {}\n"
        "    return config\n"
    )
    file = tmp_path / "config.py"
    field = next(name for name in ("seed", "runs", "limit") if name in kinds)
    section = "mesh" if "mesh" in kinds else "tfds"
    names = ", ".join(list(kinds[section])[:2])
    for change, said in (
        (f"del config.{field}", f"{field} is missing"),
        ("config.sede = 1", "sede=1 is not supported: did you mean seed?"),
        (f"del config.{section}; config.{section} = 5", f"{section}=5: must be a section"),
        (f"config.{section}.depth = 5", f"{section}.depth=5 is not supported: use {names}"),
    ):
        file.write_text(source.format(change))
        assert main([f"--config={file}"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        if "seed" in kinds or "sede" not in change:
            assert said in error
