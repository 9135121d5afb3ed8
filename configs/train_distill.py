"""Distil a draft model: `python -m train.distill [--config=configs/train_distill.py:SIZE]`.

SIZE: quick = 5 minutes on two CPU cores; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from train import distill
from train.run.config import default_workdir, set_size


def get_config(size=""):
    config = config_of(distill.Config)
    config.workdir = default_workdir("train_distill", size)
    config.steps = 6600
    config.batch_size = 2
    config.learning_rate = 1.5e-3
    config.final_fraction = 0.03
    config.checkpoint_every = 600
    config.eval.every = 1100
    config.eval.batches = 48
    config.eval.prompts = 8
    config.row_tokens = 512
    config.row_labels = 288
    config.distill.layers = (0, 1, 29)
    config.distill.draft_vocab_size = 8192

    set_size(config, size)
    if size == "debug":
        config.distill.draft_vocab_size = 512
        config.distill.layers = (0, 29)
    elif size == "quick":
        config.steps = 240
    return config
