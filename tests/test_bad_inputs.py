"""Every field of every command refuses what it cannot take: one line, its name, exit code 2."""

from pathlib import Path

import bad_inputs
import pytest

from specjax import bench, decode
from specjax.fields import Kind
from specjax.job import decode_fields
from train import answers, distill, eagle, generate, medusa

CONFIGS = Path("configs").absolute()
# A command's entry point, the kinds of its fields, and its config file.
COMMANDS = {
    "specjax.decode": (decode.main, decode_fields(), "decode_smollm2.py"),
    "specjax.bench": (bench.main, bench.FIELDS, "bench_smollm2.py"),
    "train.generate": (generate.main, answers.FIELDS, "generate_smollm2.py"),
    "train.medusa": (medusa.main, medusa.FIELDS, "train_medusa.py"),
    "train.eagle": (eagle.main, eagle.FIELDS, "train_eagle3.py"),
    "train.distill": (distill.main, distill.FIELDS, "train_distill.py"),
}


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
    return None if argv[-1][9:].partition("=")[0] in said else f"names no field: {said!r:.200}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field(command, folder, capsys, monkeypatch):
    main, kinds, config = COMMANDS[command]
    # Refused before any long work.
    for module in ("specjax.decode", "specjax.bench", "train.setup", "train.generate"):
        monkeypatch.setattr(f"{module}.load_model", None)
    problems = []
    for name, kind in bad_inputs.flat(kinds):
        assert isinstance(kind, Kind)
        for value in bad_inputs.texts(kind):
            argv = [f"--config={CONFIGS / config}", f"--config.{name}={value}"]
            if (problem := complaint(main, argv, capsys)) is not None:
                problems.append(f"{name}={value!r:.60}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("command", COMMANDS)
def test_fields_are_those_of_the_config(command, capsys, tmp_path):
    """A field that a config lacks, or has beside those of the command, is named."""
    main, kinds, config = COMMANDS[command]
    source = (
        "import runpy\n"
        "def get_config(size=''):\n"
        f"    config = runpy.run_path({str(CONFIGS / config)!r})['get_config']()\n"
        "    {}\n"
        "    return config\n"
    )
    file = tmp_path / "config.py"
    for change, said in (
        ("del config.seed" if "seed" in kinds else "del config.runs", "is missing"),
        ("config.sede = 1", "sede=1 is not supported: did you mean seed?"),
        ("del config.mesh; config.mesh = 5", "mesh=5: must be a section"),
        ("config.mesh.depth = 5", "mesh.depth=5 is not supported: use data, model"),
    ):
        file.write_text(source.format(change))
        assert main([f"--config={file}"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        if "seed" in kinds or "sede" not in change:
            assert said in error
