"""Fit MTP modules to a frozen model: `python -m train.mtp [--config=configs/train_mtp.py:SIZE]`.

SIZE: quick = 11 minutes on two CPU cores; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from train import mtp
from train.run.config import default_workdir, set_size


def get_config(size=""):
    config = config_of(mtp.Config)
    config.workdir = default_workdir("train_mtp", size)
    config.steps = 6600
    config.batch_size = 2
    config.final_fraction = 0.03
    config.checkpoint_every = 600
    config.eval.every = 1100
    config.eval.batches = 48
    config.eval.prompts = 8
    config.row_tokens = 512
    config.row_labels = 320
    config.mtp.labels = "distributions"

    set_size(config, size)
    if size == "quick":
        config.steps = 240
    return config
