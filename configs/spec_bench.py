"""Spec-Bench with the default model: `python -m specjax.spec_bench --config.prompts=FILE`.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from specjax.apps.spec_bench.config import SpecBenchConfig


def get_config(size=""):
    if size:
        raise ValueError(f"size {size!r} is unknown: leave it out")
    config = config_of(SpecBenchConfig)
    config.target = "smollm2-135m-instruct"
    return config
