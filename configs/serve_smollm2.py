"""Serve the default model: `python -m specjax.serve --config=configs/serve_smollm2.py`.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from specjax.apps.serve.serve_config import ServeConfig


def get_config(size=""):
    if size:
        raise ValueError(f"size {size!r} is unknown: leave it out")
    config = config_of(ServeConfig)
    config.target = "smollm2-135m-instruct"
    config.drafter.name = "ngram"
    return config
