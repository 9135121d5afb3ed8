"""Train Medusa-1 heads: `python -m train.medusa [--config=configs/train_medusa.py:SIZE]`.

SIZE: quick = 8 minutes on two CPU cores; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from train import medusa
from train.run.config import default_workdir, set_size


def get_config(size=""):
    config = config_of(medusa.Config)
    config.workdir = default_workdir("train_medusa", size)
    config.steps = 3200
    config.batch_size = 4
    config.optimizer = "muon"
    config.learning_rate = 1.5e-3
    config.final_fraction = 0.03
    config.checkpoint_every = 800
    config.eval.every = 800
    config.eval.batches = 24
    config.eval.prompts = 8
    config.row_tokens = 512
    config.row_labels = 288
    config.medusa.draft_vocab_size = 8192

    set_size(config, size)
    if size == "debug":
        config.medusa.num_heads = 2
        config.medusa.draft_vocab_size = 512
    elif size == "quick":
        config.steps = 200
        config.batch_size = 2
        config.learning_rate = 2e-3
    return config
