"""Distil a draft model: `python -m train.distill [--config=configs/train_distill.py:SIZE]`.

SIZE: quick = 5 minutes on two CPU cores; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.
"""

from ml_collections import config_dict

from train.run.config import default_workdir, set_size, training_fields


def get_config(size=""):
    config = training_fields()
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

    config.distill = config_dict.ConfigDict()
    config.distill.layers = (0, 1, 29)  # of the target: what the draft model starts as
    config.distill.draft_vocab_size = 8192  # the commonest tokens of the data; V = all

    config.loss = config_dict.ConfigDict()
    config.loss.kl = 1.0  # of KL(target || draft)
    config.loss.tv = 0.0  # of the total variation
    # In place of both: ce | kl | reverse_kl | tv | lk | lk_blend, or several as ce:0.1,tv:0.9.
    config.loss.label_loss = config_dict.placeholder(str)
    config.loss.depths = 4  # drafts per round that are measured

    set_size(config, size)
    if size == "debug":
        config.distill.draft_vocab_size = 512
        config.distill.layers = (0, 29)
    elif size == "quick":
        config.steps = 240
        config.warmup = 20
        config.row_labels = 384  # answers are most of these conversations
    return config
