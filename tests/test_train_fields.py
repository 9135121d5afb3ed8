"""The fields that every training config has: what is refused, what is read."""

import pytest
import toy_training
from toy_training import get_config, settings_of

from specjax.cli.config_file import read_config
from specjax.errors import InputError
from train.run.config import read_settings, record_of

TOY = toy_training.__file__


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(steps=0), "steps=0: use a whole number of at least 1"),
        (dict(batch_size=3, accumulate=2), "accumulate=2: batch_size=3 rows cannot be split"),
        (dict(learning_rate=0.0), "learning_rate=0.0: use a number above 0"),
        (dict(learning_rate=float("nan")), "learning_rate=nan"),
        (dict(clip=-1.0), "clip=-1.0: use a number of at least 0"),
        (dict(minutes=-1.0), "minutes=-1.0"),
        (dict(schedule="cosin"), "schedule='cosin' is unknown: use cosine, linear, constant"),
        (dict(features="some"), "features='some' is unknown: use auto, stored, online"),
        (dict(learning_rate_scales="a:-0.5"), r"learning_rate_scales\.a=-0\.5: use a number of at"),
        (dict(learning_rate_scales="a:1,b.0:nan"), r"learning_rate_scales\.b\.0=nan: use a number"),
        (dict(learning_rate_scales="a:x"), r"learning_rate_scales\.a=x: use a number"),
        (dict(learning_rate_scales="a=2"), "learning_rate_scales='a=2': use NAME:FACTOR"),
        (dict(learning_rate_scales="a:2,a:3"), "learning_rate_scales='a:2,a:3': use NAME:FACTOR"),
    ],
)
def test_senseless_fields_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        settings_of(**changes)


def test_rows_must_divide_over_devices():
    config = get_config()
    with pytest.raises(InputError, match="mesh.data=3: 4 rows .* cannot be spread"):
        read_settings(config, data_devices=3)


def test_factors_from_the_command_line():
    config = read_config(["--config.learning_rate_scales=head:0.5, layers.0:0"], TOY)
    assert read_settings(config).optimization.scales == {"head": 0.5, "layers.0": 0.0}
    assert record_of(config)["learning_rate_scales"] == {"head": 0.5, "layers.0": 0.0}
    assert read_settings(get_config()).optimization.scales == {}


def test_what_ends_with_the_schedule_is_recorded():
    """Without a schedule only Medusa-2's ramp does, which more steps must not move."""
    config = get_config()
    assert record_of(config)["decay_steps"] == config.steps
    config.schedule = "constant"
    assert record_of(config)["decay_steps"] is None
    config.joint = {"ramp": True}
    assert record_of(config)["decay_steps"] == config.steps
