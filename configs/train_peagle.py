"""Train a P-EAGLE head: `python -m train.peagle [--config=configs/train_peagle.py:SIZE]`.

SIZE: quick = as many tokens as train_eagle3's; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from train import peagle
from train.run.config import default_workdir, set_size


def get_config(size=""):
    config = config_of(peagle.Config)
    config.workdir = default_workdir("train_peagle", size)
    config.steps = 6600
    config.batch_size = 2
    config.learning_rate = 2e-3
    config.final_fraction = 0.03
    config.checkpoint_every = 600
    config.eval.every = 1100
    config.eval.batches = 48
    config.eval.prompts = 8
    config.row_tokens = 512
    config.row_labels = 320
    config.eagle.draft_vocab_size = 8192
    config.loss.steps = 4

    set_size(config, size)
    if size == "debug":
        config.eagle.draft_vocab_size = 512
        config.loss.steps = 2
    elif size == "quick":
        config.steps = 240
    return config
