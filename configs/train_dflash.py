"""Train a DFlash drafter: `python -m train.block [--config=configs/train_dflash.py:SIZE]`.

SIZE: quick = as many tokens as train_eagle3's, too few to draft well; debug = a minute or two, for
compiling; none = the settings below. Memory: docs/training.md.

`--help` says what each field does.
"""

from specjax.apps.command_line.config_file import config_of
from train import block
from train.run.config import default_workdir, set_size


def get_config(size=""):
    config = config_of(block.Config)
    config.workdir = default_workdir("train_dflash", size)
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
    config.block.draft_vocab_size = 8192
    config.loss.label_loss = "ce"

    set_size(config, size)
    if size == "debug":
        config.block.draft_vocab_size = 512
        config.block.num_layers = 1
        config.block.block_size = 4
        config.loss.anchors = 4
    elif size == "quick":
        config.steps = 240
    return config
