"""Distil a draft model: `python -m train.distill --config=configs/train_distill.py[:debug]`."""

from ml_collections import config_dict

from train.run.config import training_fields


def get_config(size=""):
    config = training_fields()
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

    config.distill = config_dict.ConfigDict()
    config.distill.layers = (0, 1, 29)  # of the target: what the draft model starts as
    config.distill.draft_vocab_size = 8192  # the commonest tokens of the data; V = all

    config.loss = config_dict.ConfigDict()
    config.loss.kl = 1.0  # of KL(target || draft)
    config.loss.tv = 0.0  # of the total variation
    config.loss.depths = 4  # drafts a round that are measured

    if size == "debug":
        config.steps = 6
        config.batch_size = 2
        config.row_tokens = 64
        config.row_labels = 32
        config.log_every = 1
        config.checkpoint_every = 3
        config.eval.every = 0
        config.eval.prompts = 1
        config.eval.new_tokens = 8
        config.distill.draft_vocab_size = 512
        config.distill.layers = (0, 29)
    elif size:
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    return config
