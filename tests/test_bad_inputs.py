"""What command lines refuse: one line that names the field, the value and the remedy, exit code 2.

Every field of every command with values that it cannot take; lines that are wrong in another way;
config files that are none. What a model or a prompt refuses is tested where these are.
"""

import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_collections
import pytest
from bad_input import refused_command
from commands import script_module
from conftest import slow

from specjax import fields
from specjax.apps import corpus_index, export
from specjax.apps.command_line.flags import Listed, Positional
from specjax.apps.doctor import doctor
from specjax.apps.report import report
from specjax.apps.run import bench, decode
from specjax.apps.run.decode_config import DecodeConfig
from specjax.apps.serve import serve
from specjax.apps.serve.serve_config import ServeConfig
from specjax.apps.spec_bench import command as spec_bench
from specjax.apps.spec_bench.config import SpecBenchConfig
from specjax.engine import options, requests
from specjax.fields import Kind, fields_of
from specjax.loading.texts import documents
from specjax.methods.corpus import index_folder
from train import (
    block,
    corpus,
    distill,
    eagle,
    features,
    generate,
    import_responses,
    layerskip,
    medusa,
    mtp,
    peagle,
)
from train.generation import answers
from train.methods import losses
from train.pretraining.tokens import CorpusConfig
from train.run import config as train_config
from train.run import optimizer
from train.run.config import TrainingConfig

CONFIGS = Path("configs").absolute()
# A command's entry point, the kinds of its fields, and its config file.
COMMANDS = {
    "specjax.decode": (decode.main, fields_of(DecodeConfig), "decode_smollm2.py"),
    "specjax.doctor": (doctor.main, fields_of(doctor.DoctorConfig), "doctor_smollm2.py"),
    "specjax.serve": (serve.main, fields_of(ServeConfig), "serve_smollm2.py"),
    "specjax.bench": (bench.main, fields_of(bench.BenchConfig), "bench_smollm2.py"),
    "specjax.spec_bench": (spec_bench.main, fields_of(SpecBenchConfig), "spec_bench.py"),
    "train.generate": (generate.main, fields_of(answers.AnswersConfig), "generate_smollm2.py"),
    "train.corpus": (corpus.main, fields_of(CorpusConfig), "corpus.py"),
    "train.medusa": (medusa.main, fields_of(medusa.Config), "train_medusa2.py"),
    "train.eagle": (eagle.main, fields_of(eagle.Config), "train_eagle3.py"),
    "train.peagle": (peagle.main, fields_of(peagle.Config), "train_peagle.py"),
    "train.block": (block.main, fields_of(block.Config), "train_dflash.py"),
    "train.distill": (distill.main, fields_of(distill.Config), "train_distill.py"),
    "train.layerskip": (layerskip.main, fields_of(layerskip.Config), "train_layerskip.py"),
    "train.mtp": (mtp.main, fields_of(mtp.Config), "train_mtp_scratch.py:glm"),
}

# A command's entry point, its flags, and those that it needs, all of them good.
FLAGS = {
    "specjax.report": (report.main, fields_of(report.Flags), {"out": "new"}),
    "specjax.export": (
        export.main,
        fields_of(export.Flags),
        {"head": "eagle3", "format": "eagle3", "output": "new"},
    ),
    "specjax.corpus_index": (
        corpus_index.main,
        fields_of(corpus_index.Flags),
        {"input": "file", "tokenizer": "nosuch", "output": "new"},
    ),
    "train.features": (
        features.main,
        fields_of(features.Flags),
        {"input": "folder", "output": "new"},
    ),
    "train.import_responses": (
        import_responses.main,
        fields_of(import_responses.Flags),
        {"input": "file", "output": "new"},
    ),
}

# The same of commands that are files.
SCRIPTS = {
    "kill_and_resume": {},
    "reproduce_heads": {},
    "train_accelerator": {"out": "new"},
    "weights_cost": {},
}
for name, needed in SCRIPTS.items():
    with script_module(name.replace("/", ".")) as script:
        FLAGS[f"scripts/{name}.py"] = (script.main, fields_of(script.Flags), needed)


MANY_DIGITS = "9" * 5000
_PATHS = ["", " ", "a" * 300, "~nosuchuser/x", "file/x", "a\0b"]
_NUMBERS = ["", "x", "-1", "nan", "inf", "1e400", MANY_DIGITS]

TEXTS = {
    Positional: [],
    fields.Whole: ["", "x", "1.5", "-1", str(2**63), str(2**64), MANY_DIGITS, "nan", "()"],
    fields.Number: _NUMBERS,
    fields.Flag: ["maybe", "2", "-"],
    fields.Choice: ["", "nosuch", "AUTO", "\udcff"],
    fields.Text: ["\udcff"],
    fields.PathOrName: _PATHS,
    fields.InputFile: [*_PATHS, "nosuch", "folder", "/dev/null"],
    fields.InputFolder: [*_PATHS, "nosuch", "file", "/dev/null"],
    fields.OutputFile: [*_PATHS, "folder", "/dev/full", "/dev/stdout", "/proc/x"],
    fields.OutputFolder: [*_PATHS, "file", "file/x/y", "/dev/full"],
    options.RuleField: ["", "nosuch", "AUTO"],
    options.Ladder: [
        *["5", "x", "(1,", "(1, 2)", "((1, 2),)", "((None,),)", "((4, 2, 1),)", "((0, 2, 1),)"],
        *["((1, 4, 1025),)", "((1, 4, -1),)", "((1, 4, 2), (3, 9, 1))", "(('a', 2, 3),)"],
    ],
    requests.Expression: ["", " ", "(a", "a**", "\udcff"],
    requests.JsonSchema: ["5", "x", "{", "[]", "{'a': 1}", '{"a": NaN}'],
    requests.TokenBiases: ["5", "x", "(1,", "{'a': 1}", "{1: 'a'}", "{1: 101}", "{-1: 1}"],
    options.DraftLengthField: ["", "x", "-1", "1.5", "1025", str(10**6), MANY_DIGITS],
    train_config.TargetName: _PATHS,
    train_config.RunFolder: [*_PATHS, "file", "file/x/y", "/dev/full", "."],
    train_config.HeadFolder: [*_PATHS, "nosuch", "file", "EAGLE3"],
    train_config.DataFolders: [*_PATHS, "nosuch", "file", "folder,", "folder,nosuch"],
    corpus_index.CorpusInput: [*_PATHS, "nosuch", "folder,", "folder,nosuch", "tfds:", "tfds:a\0b"],
    index_folder.IndexFolder: [*_PATHS, "nosuch", "folder", "file"],
    documents.DocumentFiles: [*_PATHS, "nosuch", "folder,", "folder,nosuch"],
    losses.LossNames: ["", "kls", "ce:", "ce:0", "ce:-1", "ce:nan", "ce,ce", "ce,", "KL"],
    optimizer.Scales: ["x", "a:", ":1", "a:-1", "a:nan", "a:1,a:2"],
}
"""Values that fields of a kind refuse where there is a file "file" and a folder "folder"."""


def texts(kind):
    """Bad values of a kind, as texts for a command line."""
    if isinstance(kind, fields.Shared):
        return texts((kind.checks or [use.kind for use in kind.uses])[0])
    if isinstance(kind, fields.Either):
        # What one of the kinds refuses another might take.
        first, *others = map(texts, kind.kinds)
        return [value for value in first if all(value in other for other in others)]
    if isinstance(kind, Listed):
        wrong = [one for one in texts(kind.kind) if one or not kind.empty]
        return [*wrong, *(f"{one}," for one in wrong)]
    if isinstance(kind, fields.Items):
        wrong = ["(None,)", "((),)"]
        if isinstance(kind.kind, fields.Text):
            return [*wrong, "5", "(5,)", "('',)"]
        return [*wrong, "(1,", "('a',)", "(-1,)", "(1e400,)", *(["()"] if kind.least else [])]
    if isinstance(kind, fields.Text):
        return TEXTS[fields.Text] + ([] if kind.empty else ["", " "])
    if isinstance(kind, fields.Number) and kind.least <= -1:
        return [value for value in _NUMBERS if value != "-1"]
    return TEXTS[type(kind)]


def flat(kinds, prefix=""):
    """The kinds of all fields by their dotted names."""
    for name, kind in kinds.items():
        if isinstance(kind, fields.OptionalSection):
            kind = kind.fields
        if isinstance(kind, fields.DependentFields):
            kind = kind.of("ngram")
        if isinstance(kind, dict):
            yield from flat(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


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
    [*((name, 8) for name in COMMANDS), *slow(*((name, 1) for name in COMMANDS))],
)
def test_every_field(command, parts, folder, capsys, monkeypatch):
    """Of fields with the same bad values the first refuses all of them, each other one a part."""
    main, kinds, config = COMMANDS[command]
    # Refused before any long work.
    for module in (
        "specjax.apps.run.decode_config",
        "train.run.setup",
        "train.generate",
    ):
        monkeypatch.setattr(f"{module}.load_model", None)
    # absl writes the whole config down as a flag's default, which takes most of the time.
    monkeypatch.setattr(ml_collections.ConfigDict, "__str__", lambda self: "a config")
    trained = "block", "eagle", "peagle", "distill", "layerskip", "mtp"
    if command in [f"train.{name}" for name in trained]:
        # What all methods share is tried with one of them.
        shared = {**fields_of(TrainingConfig), "model": None}
        kinds = {name: kind for name, kind in kinds.items() if kind != shared.get(name)}
    if command in ("specjax.doctor", "specjax.serve", "specjax.bench", "specjax.spec_bench"):
        # So is what they share with decoding.
        shared = fields_of(DecodeConfig)
        kinds = {name: kind for name, kind in kinds.items() if kind != shared.get(name)}
    if command != "train.mtp":  # its config file alone has the section
        kinds = {name: kind for name, kind in kinds.items() if name != "model"}
    problems, before = [], collections.Counter()
    for name, kind in flat(kinds):
        assert isinstance(kind, Kind)
        values = texts(kind)
        number = before[tuple(values)]
        before[tuple(values)] += 1
        for value in values[number % parts :: parts] if number else values:
            argv = [f"--config={CONFIGS / config}", f"--config.{name}={value}"]
            if (problem := complaint(main, argv, capsys)) is not None:
                problems.append(f"{name}={value!r:.60}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag(command, folder, capsys, monkeypatch):
    main, kinds, needed = FLAGS[command]
    for module in ("specjax.apps.export", "train.features", "train.import_responses"):
        monkeypatch.setattr(f"{module}.load_model", None)
    monkeypatch.setattr("specjax.apps.corpus_index.open_tokenizer", None)
    problems = []
    for name, kind in kinds.items():
        others = [f"--{flag}={value}" for flag, value in needed.items() if flag != name]
        for value in texts(kind):
            argv = [*others, f"--{name}={value}"]
            if (problem := complaint(main, argv, capsys)) is not None:
                problems.append(f"{name}={value!r:.60}: {problem}")
    assert not problems, "\n".join(problems)
    good = {name: f"--{name}={value}" for name, value in needed.items()}
    for flag in needed:
        argv = [given for name, given in good.items() if name != flag]
        assert f"{flag} is missing: pass --{flag}=" in refused_command(main, argv, capsys)
    error = refused_command(main, [*good.values(), "--nosuch=1"], capsys)
    assert "--nosuch=1" in error
    assert "--help" in error
    if "/" not in command:
        assert main(["--help"]) == 0
        assert "--output" in capsys.readouterr().out or "output" not in kinds


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
    section = next(name for name in ("mesh", "tfds", "sampling", "tree") if name in kinds)
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


LINES = [
    # a command's entry point, its arguments, what is said
    (decode.main, "--config.temperture=1", "did you mean sampling.temperature?"),
    (decode.main, "--config.tempature=0.8", "did you mean sampling.temperature?"),
    (decode.main, "--config.sampling.topp=1", "did you mean sampling.top_p?"),
    (decode.main, "--config.batchsize=1", "did you mean batch_size?"),
    (decode.main, "--config.xyzzy=1", "use activations, batch_size, chat"),
    (decode.main, "--config.seed.x=1", "there is no such field"),
    (
        decode.main,
        "--config.drafter=ngram",
        "a section; did you mean config.drafter.name. set one of",
    ),
    (decode.main, "--config.seed=x", "config.seed='x': use a whole number"),
    *(
        (decode.main, f"--config.drafter.name=corpus --config.drafter.{given}", said)
        for given, said in (
            ("corpus=nosuch", "drafter.corpus='nosuch': no such folder"),
            ("corpus=file", "drafter.corpus='file' is a file: name a folder"),
            ("corpus=folder", "drafter.corpus='folder': holds no index of a corpus; make one by"),
            (
                "prompt_lookup_max=17",
                "drafter.prompt_lookup_max=17: use a whole number from 1 to 16",
            ),
            ("match=latest", "drafter.match='latest': corpus does not take it"),
        )
    ),
    (decode.main, "--config.limit=1.5", "config.limit='1.5': use a whole number"),
    (decode.main, "--config.sampling.top_p=high", "use a number"),
    (decode.main, "--config.compare=maybe", "use true or false"),
    (decode.main, "--quiet", "'--quiet' is not understood: use --config=FILE"),
    (decode.main, "--prompt=$a", "did you mean --config.prompt='.a'?"),
    (decode.main, "--drafter=eagle3", "did you mean --config.drafter.name=eagle3?"),
    (decode.main, "--temperature", "did you mean --config.sampling.temperature=VALUE?"),
    (decode.main, "--batch-size=2", "did you mean --config.batch_size=2?"),
    (decode.main, "stray", "'stray' is not understood: did you mean --config.prompt=stray?"),
    *(
        (decode.main, f"--config={given}", f"config='{given}': no such file.*decode_smollm2, doc")
        for given in ("missing.py", "nosuch", "configs/nosuch.py", "other/decode_smollm2.py")
    ),
    *(
        (decode.main, f"--config={given}", "config=")
        for given in (".", "/dev/null", "~nosuchuser/config.py")
    ),
    *(
        (block.main, f"--config=train_dflash{arguments}", said)
        for arguments, said in (
            (" --config.loss.label_loss=kls", "loss.label_loss='kls': use ce, kl, reverse_kl, tv"),
            (" --config.loss.label_loss=ce:0", r"loss.label_loss.ce=0\.0: use a number above 0"),
            (" --config.block.block_size=0", "block.block_size=0: use a whole number from 1"),
            (" --config.block.start=last", "block.start='last' is unknown: use target, random"),
            (" --config.loss.weights=linear", "loss.weights='linear' is unknown: use decay, dpace"),
            (" --config.loss.alpha=0", r"loss.alpha=0\.0: use a number above 0 to 1"),
        )
    ),
    *(
        (layerskip.main, f"--config=train_layerskip{arguments}", said)
        for arguments, said in (
            (" --config.layerskip.max_dropout=1.0", r"max_dropout=1.0: use a number in \[0, 1\)"),
            (" --config.layerskip.max_dropout=-0.1", r"max_dropout=-0.1: use a number in \[0, 1\)"),
            (" --config.layerskip.e_scale=-1", "layerskip.e_scale=-1.0: use a number"),
            (" --config.layerskip.exits=(0,)", "layerskip.exits.*0.*: use"),
            (" --config.steps=6", "layerskip.rotation=8: the run has steps=6"),
            (" --config.start_from=eagle3", "start_from='eagle3': no head is trained"),
            (":scratch --config.layerskip.labels=distributions", "a new model has nothing to say"),
            (
                " --config.layerskip.labels=tokens --config.layerskip.label_loss=tv",
                "layerskip.label_loss='tv': reads .*; use layerskip.labels=distributions",
            ),
        )
    ),
    *(
        (mtp.main, f"--config={config} {arguments}", said)
        for config, arguments, said in (
            ("train_mtp", "--config.mtp.loss_weight=0.3", "=0.3: weighs the MTP loss beside"),
            ("train_mtp", "--config.mtp.late_loss_weight=0.0", "=0.0: weighs the MTP loss"),
            (
                "train_mtp",
                "--config.mtp.trains=all --config.mtp.loss_weight=-0.3",
                "mtp.loss_weight=-0.3: use a number",
            ),
            (
                "train_mtp",
                "--config.mtp.num_modules=0",
                "a frozen target learns nothing; use mtp.trains=all",
            ),
            (
                "train_mtp",
                "--config.mtp.num_modules=2 --config.mtp.steps=1",
                "mtp.steps=1: mtp.num_modules=2",
            ),
            (
                "train_mtp",
                "--config.mtp.trains=all --config.mtp.export=head",
                "mtp.export='head': modules trained",
            ),
            (
                "train_mtp_scratch",
                "--config.mtp.num_modules=0",
                "no module to decode eval.prompts=8 with",
            ),
            (
                "train_mtp_scratch",
                "--config.mtp.trains=modules",
                "mtp.trains='modules': a new model has",
            ),
            (
                "train_mtp_scratch",
                "--config.mtp.labels=distributions",
                "mtp.labels='distributions': a new",
            ),
            (
                "train_mtp_scratch",
                "--config.start_from=folder",
                "start_from='folder': what was trained for a model is of no use",
            ),
        )
    ),
]


@pytest.mark.parametrize(("main", "arguments", "said"), LINES)
def test_lines_that_do_not_fit(main, arguments, said, folder, capsys):
    assert re.search(said, refused_command(main, arguments.split(), capsys))


def test_all_that_is_wrong_is_listed_at_once(folder, capsys):
    wrong = "steps=0 batch_size=3 accumulate=2 data=nowhere,elsewhere workdir=file"
    wrong += " start_from=nosuch loss.kl=0.0"
    argv = ["--config=train_distill", *(f"--config.{given}" for given in wrong.split())]
    said = refused_command(distill.main, argv, capsys)
    for problem in (
        "steps=0: use a whole number of at least 1",
        "accumulate=2: batch_size=3 rows cannot be split",
        "data='nowhere': no such folder",
        "data='elsewhere': no such folder",
        "workdir='file' is a file",
        "start_from='nosuch': no such folder",
        "loss.kl=0, loss.tv=0: one of them must be positive",
    ):
        assert problem in said


def test_a_size_that_a_config_lacks_is_named(capsys):
    said = refused_command(medusa.main, ["--config=train_medusa:fast"], capsys)
    assert "get_config('fast') fails (ValueError: size 'fast' is unknown: use debug" in said
    assert "correct what is after the colon" in said


MADE = """
import ml_collections
from ml_collections import config_dict
def get_config():
    config = ml_collections.ConfigDict({{"a": 1, "section": {{"b": 2}}}})
    {}
    return config
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import sys\nsys.exit()", "calls sys.exit(None)"),
        ("def get_config():\n    raise SystemExit('over')", "calls sys.exit('over')"),
        ("import nothing_of_the_kind", "fails (ModuleNotFoundError: No module named"),
        ("def get_config(:", "fails (SyntaxError: invalid syntax"),
        ("x = '\0'", "fails ("),
        ("x = 1", "has no function get_config()"),
        ("get_config = 3", "has no function get_config()"),
        ("def get_config():\n    return {'a': 1}", "get_config() returns {'a': 1}, not a"),
        ("def get_config():\n    return get_config()", "get_config() fails (RecursionError: "),
        ("def get_config(size):\n    pass", "get_config() fails (TypeError: "),
        ("def get_config():\n    return 1 / 0", "get_config() fails (ZeroDivisionError: "),
        (
            MADE.format("config.section = ml_collections.ConfigDict({5: 3})"),
            "cannot be used (Type",
        ),
        (MADE.format("config.me = config"), "cannot be used (RecursionError"),
        (
            MADE.format("config.section.c = config_dict.required_placeholder(int)"),
            "section.c fails (Required",
        ),
        (
            MADE.format("config.c = 1 // config.get_ref('a'); config.a = 0"),
            "c fails (ZeroDivisionError",
        ),
    ],
)
def test_config_files_that_fail_say_so(body, says, tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text(body)
    error = refused_command(decode.main, [f"--config={path}"], capsys)
    assert error.startswith(f"error: config={str(path)!r}")
    assert says in error
    assert "repair the config file" in error
