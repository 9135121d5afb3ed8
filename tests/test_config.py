"""The command line's config: defaults that fit the code, overrides, and errors on one line."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from specjax.apps.command_line import command
from specjax.apps.command_line.config_file import packaged_configs, read_config
from specjax.apps.doctor import doctor
from specjax.apps.doctor.doctor import DoctorConfig
from specjax.apps.run import bench, decode
from specjax.apps.run.bench_config import BenchConfig
from specjax.apps.run.decode_config import DecodeConfig, read_decode_config
from specjax.apps.serve import serve
from specjax.apps.serve.serve_config import ServeConfig
from specjax.apps.spec_bench.config import SpecBenchConfig
from specjax.controllers import Fixed
from specjax.drafters import DRAFTERS, drafter_options, option_type
from specjax.engine.options import DecodeOptions
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.fields import Whole, dataclass_in, dotted, fields_of, inline_in, type_hints
from specjax.loading.texts.questions import Question
from specjax.methods.corpus.index_folder import IndexFolder
from specjax.methods.ngram import Ngram
from specjax.sampling import RULES
from train import corpus, distill, eagle, generate, layerskip, medusa, mtp

ROOT = Path(__file__).parent.parent
DEFAULT = "configs/decode_smollm2.py"


def read(*argv):
    return read_config(list(argv), DEFAULT)


def test_config_has_every_sampling_field_and_drafter_option():
    config = read()
    assert set(config.sampling) == {field.name for field in dataclasses.fields(SamplingParams)}
    SamplingParams.of(dict(config.sampling))
    options = {
        name
        for drafter in DRAFTERS
        for name, parameter in drafter_options(drafter).items()
        if option_type(parameter) is not None
    }
    assert set(config.drafter) == options | {"name", "path", "replicated"}


def test_overrides_in_all_spellings():
    config = read(
        f"--config={DEFAULT}",
        "--config.sampling.temperature=1",
        "--config.sampling.stop=('a', 'b')",
        "--config.num_speculative_tokens_per_batch_size=((1, 4, 8), (5, 16, 2))",
        "--config.seed",
        "7",
        "--config.compare",
        "--noconfig.sampling.logprobs",
        "--config.num_speculative_tokens=auto",
        "--config.drafter.exit_layer=3",
    )
    assert config.sampling.temperature == 1.0
    assert config.sampling.stop == ("a", "b")
    assert config.num_speculative_tokens_per_batch_size == ((1, 4, 8), (5, 16, 2))
    assert (config.seed, config.compare, config.sampling.logprobs) == (7, True, False)
    assert (config.num_speculative_tokens, config.drafter.exit_layer) == ("auto", 3)
    assert config.is_locked
    assert read("--config.drafter.exit_layer=auto").drafter.exit_layer == "auto"


def help_of(main, *argv, capsys):
    """The value and the meaning of each field that a command's --help lists."""
    assert main([*argv, "--help"]) == 0
    _, text = capsys.readouterr().out.split("Fields of the config")
    fields = re.findall(r"^  ([a-z_.]+)(?: = (.*?))?(?:  (\[.*))?\n((?:      .*\n)*)", text, re.M)
    return {name: (value, allowed + meaning) for name, value, allowed, meaning in fields}


@pytest.mark.parametrize(
    ("main", "config"),
    [
        (decode.main, DEFAULT),
        (bench.main, "bench_smollm2"),
        (doctor.main, "doctor_smollm2"),
        (serve.main, "serve_smollm2"),
        (corpus.main, "corpus"),
        (distill.main, "train_distill"),
        (eagle.main, "train_eagle3"),
        (generate.main, "generate_smollm2"),
        (layerskip.main, "train_layerskip"),
        (medusa.main, "train_medusa"),
        (mtp.main, "train_mtp"),
    ],
)
def test_help_lists_all_fields_with_values_and_meanings(main, config, capsys):
    listed = help_of(main, capsys=capsys)
    values = dotted(read(f"--config={config}").to_dict())
    assert {name: value for name, (value, _) in listed.items()} == {
        name: "" if value is None else str(value) for name, value in values.items()
    }
    # A meaning is more than the values in brackets, and than who takes an option.
    texts = {name: re.sub(r"\[[^]]*\]|^ +[\w, ]+:", "", text) for name, (_, text) in listed.items()}
    described = {name for name, text in texts.items() if text.strip()}
    mix = {name for name in listed if name.startswith("corpus.mix.")}
    assert set(listed) - described == mix


def test_help_is_of_the_config_that_is_named(capsys):
    listed = help_of(bench.main, "--config=bench_smollm2:debug", capsys=capsys)
    assert listed["runs"][0] == "2"
    assert decode.main(["--config=missing.py", "--help"]) == 2
    assert "missing.py" in capsys.readouterr().err


MADE = """
import ml_collections
from ml_collections import config_dict
def get_config():
    config = ml_collections.ConfigDict({{"a": 1, "section": {{"b": 2}}}})
    {}
    return config
"""


def test_a_frozen_config_may_be_overridden(tmp_path):
    path = tmp_path / "made.py"
    path.write_text(MADE.format("config = ml_collections.FrozenConfigDict(config)"))
    assert read(f"--config={path}", "--config.section.b=5").section.b == 5


def test_values_that_are_computed_from_overrides(tmp_path):
    path = tmp_path / "made.py"
    path.write_text(MADE.format("config.c = 6 // config.get_ref('a')"))
    assert read(f"--config={path}", "--config.a=2").c == 3
    with pytest.raises(InputError, match=r"made.py': c fails \(ZeroDivisionError.* overrides its"):
        read(f"--config={path}", "--config.a=0")


@pytest.mark.parametrize("given", ["", "decode_smollm2", "decode_smollm2.py", DEFAULT])
def test_the_configs_that_come_with_specjax_are_found_from_anywhere(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read(*([f"--config={given}"] if given else [])).drafter.name == "ngram"


@pytest.mark.parametrize("name", packaged_configs())
def test_a_size_that_is_unknown_is_named(name):
    with pytest.raises(InputError, match="size 'fast' is unknown: .*leave it out"):
        read(f"--config={name}:fast")


def test_only_a_config_that_is_named_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    """Config files are programs."""
    (tmp_path / "configs").mkdir()
    for name in ("decode_smollm2", "decode_smollm2.py", DEFAULT):
        (tmp_path / name).write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    assert read().drafter.name == "ngram"
    with pytest.raises(InputError, match="calls sys.exit"):
        read(f"--config={DEFAULT}")


def test_one_line_and_exit_code(capsys):
    def fails(config) -> int:
        raise InputError("a\nb")

    options = dict(default=DEFAULT, read=read_decode_config, source=decode.DecodeConfig)
    assert command.run_config(fails, [], **options) == 2
    assert capsys.readouterr().err == "error: a b\n"

    def interrupted(config) -> int:
        raise KeyboardInterrupt

    assert command.run_config(interrupted, [], **options) == 130


def test_defaults_are_those_of_python_but_for_those_that_help_explains():
    config = read_decode_config(read().to_dict())
    assert config.sampling == SamplingParams()
    differing = {"batch_size": 1, "rounds_per_step": 4, "verify": RULES["rejection"]}
    assert config.options == dataclasses.replace(DecodeOptions(), **differing)
    benched = read("--config=bench_smollm2")
    assert (benched.target, benched.dtype) == (config.target, config.dtype)


def test_fixed_lengths_are_the_default_of_every_command():
    """Of a length that depends on the clock, tau would differ between equal runs."""
    for given, length in ((None, "fixed"), ("auto", "auto"), ("3", 3)):
        changes = [] if given is None else [f"--config.num_speculative_tokens={given}"]
        config = read(*changes).to_dict()
        assert read_decode_config(config).options.num_speculative_tokens == length
    lengths = {
        **dict.fromkeys(("decode_smollm2", "serve_smollm2", "doctor_smollm2"), "fixed"),
        **dict.fromkeys(("bench_smollm2", "spec_bench"), ("fixed",)),
        "generate_smollm2": None,
        **{name: None for name in packaged_configs() if name.startswith("train_")},
    }
    for name, length in lengths.items():
        config = read(f"--config={name}")
        config = config.eval if name.startswith("train_") else config
        assert config.num_speculative_tokens == length
    with_lengths = {
        name for name in packaged_configs() if "num_speculative_tokens" in read(f"--config={name}")
    }
    assert with_lengths <= lengths.keys()
    assert isinstance(DecodeOptions().length_controller, Fixed)


def test_options_go_to_the_drafters_that_take_them():
    config = read(
        "--config.drafter.name=ngram, early_exit,ngram+eagle3",
        "--config.drafter.exit_layer=4",
        "--config.drafter.prompt_lookup_min=1",
        "--config.drafter.path=head",
    )
    found = read_decode_config(config.to_dict())
    assert found.compare
    assert [(one.name, one.path, one.options) for one in found.drafters] == [
        ("ngram", None, {"prompt_lookup_min": 1}),
        ("early_exit", None, {"exit_layer": 4}),
        ("ngram+eagle3", "head", {"prompt_lookup_min": 1}),
    ]
    for one in found.drafters:
        alone = read_decode_config(found.written_for(one))
        assert alone.drafters == (one,)
        assert alone.compare


def own(target, path=None, *, start: Annotated[int, Whole(1, 9)] = 1, window: float = 0.5, k=2):
    """A drafter of one's own; lookahead has a window of another type, and k has no type at all."""
    return Ngram(prompt_lookup_min=start)


OWN = "test_config:own"


@pytest.mark.parametrize("source", [decode.DecodeConfig, doctor.DoctorConfig, ServeConfig])
def test_the_options_of_an_own_drafter_are_fields(source, tmp_path):
    given = [f"--config.drafter.name={OWN}", "--config.drafter.start=2"]
    given += ["--config.drafter.window=0.25", "--config.drafter.k=(1, 2)"]
    section = read_config(given, DEFAULT, source).drafter
    assert (section.start, section.window, section.k) == (2, 0.25, (1, 2))
    config = {**read().to_dict(), "drafter": section.to_dict()}
    (found,) = read_decode_config(config).drafters
    assert found.options == {"start": 2, "window": 0.25, "k": (1, 2)}
    # In a config file, too, where the command line may change it.
    path = tmp_path / "own.py"
    path.write_text(
        "from specjax.apps.command_line.config_file import config_of\n"
        "from specjax.apps.run.decode_config import DecodeConfig\n"
        "def get_config():\n"
        "    config = config_of(DecodeConfig)\n"
        f"    config.drafter.name = {OWN!r}\n"
        "    config.drafter.start = 3\n"
        "    return config\n"
    )
    for argv, start in (([], 3), (["--config.drafter.start=4"], 4)):
        config = read_config([f"--config={path}", *argv], DEFAULT, source).to_dict()
        assert read_decode_config(config).drafters[0].options == {"start": start}


def decode_drafters(name, *options):
    """The drafters of a command line, as (name, options)."""
    argv = [f"--config.drafter.name={name}", *(f"--config.drafter.{each}" for each in options)]
    config = read_config(argv, DEFAULT, decode.DecodeConfig).to_dict()
    return [(each.name, each.options) for each in read_decode_config(config).drafters]


def test_an_own_drafter_beside_others_and_joined_with_them():
    """Each option goes to those that take it; those that nobody takes are named."""
    found = decode_drafters(f"ngram,{OWN}+early_exit", "start=2", "exit_layer=3")
    assert found == [("ngram", {}), (f"{OWN}+early_exit", {"start": 2, "exit_layer": 3})]
    for name, options, said in (
        (OWN, ["start=10"], "drafter.start=10: use a whole number from 1 to 9"),
        (OWN, ["starts=2"], "drafter.starts='2': there is no such field; did you mean drafter.st"),
        (OWN, ["exit_layer=2"], f"drafter.exit_layer=2: {OWN} does not take it; it takes start, w"),
        ("ngram", ["start=2"], "drafter.start='2': there is no such field"),
        (f"{OWN}|ngram+suffix", [], "join all of them by"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            decode_drafters(name, *options)


@pytest.mark.parametrize(
    ("name", "longest", "most"),
    [("ngram", 20, 64), ("ngram,suffix", 20, 64), ("corpus", 20, 16), ("ngram,corpus", 20, 16)],
)
def test_each_drafter_s_own_range_counts(name, longest, most, tmp_path, monkeypatch):
    """Of several drafters that take an option each must accept it."""
    monkeypatch.setattr(IndexFolder, "check", lambda self, name, value: value)
    options = [f"prompt_lookup_max={longest}", *(["corpus=x"] if "corpus" in name else [])]
    if longest <= most:
        assert decode_drafters(name, *options)[0][1]["prompt_lookup_max"] == longest
        return
    said = f"drafter.prompt_lookup_max={longest}: use a whole number from 1 to {most}"
    with pytest.raises(InputError, match=said):
        decode_drafters(name, *options)


def test_a_window_of_a_drafter_s_own_cache():
    """Of an option that may be None, too, a number is a value of a command line."""
    ((_, options),) = decode_drafters("eagle3", "sliding_window=256", "sinks=4")
    assert options == {"sliding_window": 256, "sinks": 4}
    ((_, options),) = decode_drafters("layer_skip", "skipped=(1, 2)")
    assert options == {"skipped": (1, 2)}


def test_help_lists_the_options_of_a_drafter_that_is_named(capsys):
    listed = help_of(decode.main, f"--config.drafter.name={OWN}", capsys=capsys)
    assert "By default 1. [a whole number from 1 to 9]" in listed["drafter.start"][1]
    assert listed["drafter.name"][0] == OWN
    assert "drafter.start" not in help_of(decode.main, capsys=capsys)


def job(**changes):
    config = read()
    with config.unlocked():
        config.update(changes)
    return dataclasses.replace(
        read_decode_config(config.to_dict()),
        questions=(Question(1, "", ("a", "b")), Question(2, "", ("c",))),
    )


def test_turn_taking_need_a_chat_template(chatty, tiny):
    with pytest.raises(InputError, match="turns='all' needs a chat template"):
        job(turns="all").first_prompts(tiny)
    with pytest.raises(InputError, match="chat=auto"):
        job(turns="all", chat="false").first_prompts(chatty)
    assert job(chat="false").first_prompts(chatty) == ["a", "c"]
    assert job().first_prompts(tiny) == ["a", "c"]


@pytest.mark.parametrize("verify", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_when_outputs_are_compared(verify, temperature):
    one = job(verify=verify, sampling={"temperature": temperature})
    assert one.comparable == (verify == "coupled" or temperature == 0)


CONFIGS = {
    config: fields_of(config)
    for config in (DecodeConfig, ServeConfig, SpecBenchConfig, DoctorConfig, BenchConfig)
}
# What a benchmark varies is a list of values, and where it reads a file again it takes no pipe.
VARIED = {"num_speculative_tokens", "temperatures", "drafters", "max_new_tokens"}
VARIED |= {"prompts", "turns", "report"}


def test_an_option_is_declared_once():
    """In one dataclass, whichever commands have it."""
    homes = {}
    for config in CONFIGS:
        for base in filter(dataclasses.is_dataclass, config.__mro__):
            for name in vars(base).get("__annotations__", {}):
                hint = type_hints(base)[name]
                if inline_in(hint) is not None:
                    for inside in fields_of(dataclass_in(hint)):
                        homes.setdefault(inside, set()).add(dataclass_in(hint))
                elif name in fields_of(base):
                    homes.setdefault(name, set()).add(base)
    several = {name for name, classes in homes.items() if len(classes) > 1}
    settable = {name for kinds in CONFIGS.values() for name in kinds}
    assert several & settable <= VARIED | {"sampling"}  # a section with other defaults


ONE_LINE_MORE = """
import importlib.util, sys
from specjax.engine import options
spec = importlib.util.find_spec("specjax.engine.options")
line = "    seed: Annotated[int, SEED] = 0"
source = spec.loader.get_source(spec.name)
assert source.count(line) == 1
source = source.replace(line, "    patience: Annotated[int, Whole(1)] = 7\\n" + line)
exec(compile(source, spec.origin, "exec"), vars(options))
import specjax.engine.generate
from specjax.apps.run import decode
from specjax.apps.command_line.config_file import config_of, read_config
from specjax.apps.run.decode_config import DecodeConfig, read_decode_config
from specjax.apps.serve.serve_config import ServeConfig, read_serve_config
from specjax.apps.spec_bench.config import SpecBenchConfig, read_spec_bench_config

for source, read in (
    (DecodeConfig, read_decode_config),
    (ServeConfig, read_serve_config),
    (SpecBenchConfig, read_spec_bench_config),
):
    name = {DecodeConfig: "decode_smollm2", ServeConfig: "serve_smollm2"}.get(source, "spec_bench")
    config = read(read_config(["--config.patience=9"], name, source).to_dict())
    assert config.options.patience == 9, config
    if source is SpecBenchConfig:
        assert {cell.config.options.patience for cell in config.cells} == {9}
assert options.DecodeOptions(patience=3).patience == 3
assert "patience" in str(__import__("inspect").signature(specjax.engine.generate.generate))
decode.main(["--help"])
"""


def test_a_new_option_takes_one_line():
    """It is settable from Python, decode, serve and spec_bench, and checked and in the help."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_LINE_MORE], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "  patience = 7\n" in done.stdout
    assert "[a whole number of at least 1]" in done.stdout
