"""Decode with the default model: `python -m specjax.decode --config=configs/decode_smollm2.py`.

`--help` says what each field does, and `--list` prints the drafters, their options, and the rules.
"""

from specjax.apps.command_line.config_file import config_of
from specjax.apps.run.decode_config import DecodeConfig


def get_config(size=""):
    if size:
        raise ValueError(f"size {size!r} is unknown: leave it out")
    config = config_of(DecodeConfig)
    config.target = "smollm2-135m-instruct"
    config.drafter.name = "ngram"
    return config
