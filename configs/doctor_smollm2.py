"""Examine the default model's EAGLE-3 head: `python -m specjax.doctor`.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from specjax.apps.doctor.doctor import DoctorConfig


def get_config(size=""):
    if size:
        raise ValueError(f"size {size!r} is unknown: leave it out")
    config = config_of(DoctorConfig)
    config.target = "smollm2-135m-instruct"
    config.drafter.name = "eagle3"
    return config
