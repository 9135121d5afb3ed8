"""The fields that every training config has: what is refused, what is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import toy_training
from toy_training import config_of, get_config, read

from specjax.apps.command_line.config_file import read_config
from specjax.errors import InputError
from specjax.fields import Number, Whole
from train import block, distill, eagle, layerskip, medusa, mtp, peagle
from train.run import run
from train.run.config import read_training_config

TOY = toy_training.__file__


@dataclass(frozen=True)
class Extras:
    """A section that no other command has."""

    share: Annotated[float, Number(0.0, 1.0)] = 0.25
    """A share in that section."""


@dataclass(frozen=True, kw_only=True)
class Extended(toy_training.ToyConfig):
    """The config of a command that has more fields than others."""

    window: Annotated[int, Whole(1)] = 7
    """A window that no other command has."""
    extras: Extras


def test_a_field_is_declared_once(tmp_path, capsys):
    """The command line sets and checks it, `--help` lists it, and a run records it."""
    file = tmp_path / "extended.py"
    file.write_text(
        "from specjax.apps.command_line.config_file import config_of\n"
        f"from {__name__} import Extended\n"
        "def get_config():\n"
        "    return config_of(Extended)\n"
    )

    def read_options(*options):
        argv = [f"--config={file}", "--config.workdir=build/toy", *options]
        return read_training_config(Extended, read_config(argv, "", Extended).to_dict())

    config = read_options("--config.window=3")
    assert (config.window, config.extras.share, config.seed) == (3, 0.25, 0)
    assert config.record["window"] == 3
    with pytest.raises(InputError, match=r"window=0: use .*; extras.share=2.0: use a number from"):
        read_options("--config.window=0", "--config.extras.share=2")
    assert run.main(toy_training.toy_method, Extended, [f"--config={file}", "--help"]) == 0
    said = capsys.readouterr().out
    assert "  window = 7\n      A window that no other command has. [" in said
    assert "  extras: A section that no other command has.\n  extras.share = 0.25\n" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(batch_size=3, accumulate=2), "accumulate=2: batch_size=3 rows cannot be split"),
        ({"mesh.data": 3}, "mesh.data=3: 4 rows .* cannot be spread"),
        (dict(schedule="cosin"), "schedule='cosin' is unknown: use cosine, linear, constant"),
        (dict(learning_rate_scales="a:-0.5"), r"learning_rate_scales\.a=-0\.5: use a number of at"),
        (dict(learning_rate_scales="a:1,b.0:nan"), r"learning_rate_scales\.b\.0=nan: use a number"),
        (dict(learning_rate_scales="a:x"), r"learning_rate_scales\.a='x': use a number"),
        (dict(learning_rate_scales="a=2"), "learning_rate_scales='a=2': use NAME:FACTOR"),
        (dict(learning_rate_scales="a:2,a:3"), "learning_rate_scales='a:2,a:3': use NAME:FACTOR"),
    ],
)
def test_senseless_fields_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        config_of(**changes)


def test_a_cross_check_waits_for_good_values():
    """It would fail on what is no number."""
    config = get_config().unlock()
    values = {**config.to_dict(), "workdir": "build/toy", "batch_size": 3, "accumulate": "two"}
    with pytest.raises(InputError, match=r"^accumulate='two': use a whole number[^;]*$"):
        read_training_config(toy_training.ToyConfig, values)


def test_folders_that_are_not_named(tmp_path):
    config = get_config()
    config.data, config.workdir = None, None
    with pytest.raises(InputError, match="data is missing: .*; workdir is missing: "):
        read(config)


@pytest.mark.parametrize("size", ["", "debug", "quick"])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("train_dflash", block),
        ("train_distill", distill),
        ("train_dspark", block),
        ("train_dflash2", block),
        ("train_eagle1", eagle),
        ("train_eagle3", eagle),
        ("train_layerskip", layerskip),
        ("train_medusa", medusa),
        ("train_medusa2", medusa),
        ("train_mtp", mtp),
        ("train_peagle", peagle),
    ],
)
def test_every_size_is_complete_without_flags(name, module, size, tmp_path, monkeypatch):
    file = Path(toy_training.__file__).parents[1] / "configs" / f"{name}.py"
    config = read_config([f"--config={file}:{size}" if size else f"--config={file}"], "")
    monkeypatch.chdir(tmp_path)
    config = read_training_config(module.Config, config.to_dict())
    assert config.workdir == f"build/{name}{'_' if size else ''}{size}"
    assert config.data == "shipped"


def test_factors_from_the_command_line():
    options = ["--config.learning_rate_scales=head:0.5, layers.0:0", "--config.workdir=build/toy"]
    config = read(read_config([f"--config={TOY}", *options], ""))
    assert config.optimization.learning_rate_scales == {"head": 0.5, "layers.0": 0.0}
    assert config.record["learning_rate_scales"] == {"head": 0.5, "layers.0": 0.0}
    assert config_of().optimization.learning_rate_scales == {}


def of_file(name, module, **changes):
    """The checked value of a config file, with some fields changed."""
    config = read_config([f"--config=configs/{name}.py"], "")
    config.update_from_flattened_dict(changes)
    return read_training_config(module.Config, config.to_dict())


@pytest.mark.parametrize(
    ("name", "module", "changes", "recorded"),
    [
        ("train_medusa", medusa, {"schedule": "cosine"}, 12),
        ("train_medusa", medusa, {}, None),
        # More steps must not move Medusa-2's ramp, or where lambda becomes another.
        ("train_medusa2", medusa, {}, 12),
        ("train_mtp", mtp, {}, None),
        ("train_layerskip", layerskip, {}, None),
        ("train_layerskip", layerskip, {"layerskip.curriculum": "gradual"}, 12),
        ("train_mtp", mtp, {"mtp.trains": "all", "mtp.late_loss_weight": 0.1}, 12),
    ],
)
def test_what_ends_with_the_schedule_is_recorded(name, module, changes, recorded):
    config = of_file(name, module, **{"steps": 12, "schedule": "constant", **changes})
    assert config.record["decay_steps"] == recorded
    assert config.optimization.decay_steps == 12


def test_the_record_is_what_was_written():
    """As a config file has it, in sections: a run resumes what an earlier one began."""
    written = read_config(["--config=configs/train_medusa2.py"], "").to_dict()
    config = read_training_config(medusa.Config, written)
    filled = {"learning_rate_scales": {"target": 0.02}, "decay_steps": written["steps"]}
    assert config.record == {**written, **filled}
    assert config.joint.warm_steps == written["joint"]["warm_steps"]
    assert of_file("train_medusa", medusa).joint is None
