"""What a wheel holds, and what decoding from it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from specjax.loading.load import save_model
from specjax.methods.find_head import shipped_heads

ROOT = Path(__file__).resolve().parents[1]
LIST_FILES = """
from distutils.core import run_setup
build = run_setup("setup.py", stop_after="commandline").get_command_obj("build_py")
build.ensure_finalized()
build.build_lib = "LIB"
print("\\n".join(build.get_outputs(include_bytecode=False)))
"""


def wheel_files():
    """The files that setuptools puts into a wheel of the repository; nothing is written."""
    program = f"import setuptools\n{LIST_FILES}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("LIB/")]
    return {line.removeprefix("LIB/") for line in lines}


def test_a_wheel_holds_modules_configs_and_heads():
    files = wheel_files()
    wanted = {
        file.relative_to(ROOT).as_posix()
        for package in ("specjax", "train")
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    wanted |= {f"specjax/configs/{file.name}" for file in (ROOT / "configs").glob("*.py")}
    assert files == wanted
    for target, kinds in shipped_heads().items():
        for kind in kinds:
            folder = f"specjax/shipped_heads/{target}/{kind}"
            assert {f"{folder}/specjax_folder.json", f"{folder}/model.safetensors"} <= files


# What the extra `train` brings; flax needs optax, too.
FOR_TRAINING = ("tensorflow_datasets", "array_record", "importlib_resources", "tensorboardX")
BLOCKED = "import sys\nsys.modules.update(dict.fromkeys({names!r}))\n"


def run_without(names, program, folder):
    """Run a program to which packages seem not to be installed."""
    program = BLOCKED.format(names=names) + program
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )


def test_decoding_needs_neither_datasets_nor_training_nor_pictures(chatty, tmp_path):
    """In a working directory without a config file, as from an installed wheel."""
    save_model(chatty, tmp_path / "model")
    program = (
        "from specjax import decode\n"
        "code = decode.main(['--config.target=model', '--config.prompt=ab',\n"
        "    '--config.sampling.max_new_tokens=2', '--config.report=report.json',\n"
        "    '--config.num_speculative_tokens=1'])\n"
        "raise SystemExit(code)\n"
    )
    blocked = (*FOR_TRAINING, "tensorflow", "train", "matplotlib", "huggingface_hub", "starlette")
    done = run_without(blocked, program, tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert (tmp_path / "report.json").is_file()


def test_all_commands_are_listed_without_the_packages_of_training(tmp_path):
    listing = "import specjax.__main__\nraise SystemExit(specjax.__main__.main(['--help']))\n"
    done = run_without((*FOR_TRAINING, "optax"), listing, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.medusa" in done.stdout


@pytest.mark.parametrize("missing", [*FOR_TRAINING, "optax"])
@pytest.mark.parametrize("command", ["train.medusa", "train.import_responses"])
@pytest.mark.parametrize("through", ["python -m", "specjax"])
def test_training_without_its_packages_ends_in_one_line(missing, command, through, tmp_path):
    start = {
        "python -m": "import runpy\nsys.argv = ['-m']\n"
        f"runpy.run_module('{command}', run_name='__main__', alter_sys=True)\n",
        "specjax": f"import specjax.__main__\nspecjax.__main__.main(['{command}'])\n",
    }
    done = run_without((missing,), start[through], tmp_path)
    line = f"error: train: {missing} is not installed; pip install 'specjax[train]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
