"""Train Medusa-1 heads: `python -m train.medusa [--config=configs/train_medusa.py:SIZE]`.

SIZE: quick = 8 minutes on two CPU cores; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.
"""

from ml_collections import config_dict

from train.run.config import default_workdir, set_size, training_fields


def get_config(size=""):
    config = training_fields()
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

    config.medusa = config_dict.ConfigDict()
    config.medusa.num_heads = 4
    config.medusa.num_layers = 1  # residual blocks per head
    config.medusa.original_lm_head = True  # the target's own head; else one for each, trained
    config.medusa.projection = True  # a matrix of each head's own before the target's head
    config.medusa.draft_vocab_size = 8192  # the commonest tokens of the data; V = all

    config.loss = config_dict.ConfigDict()
    config.loss.labels = (
        "distributions"  # distributions of the target | tokens of the data, as published
    )
    # In its place: ce | kl | reverse_kl | tv | lk | lk_blend, or several as ce:0.1,tv:0.9.
    config.loss.label_loss = config_dict.placeholder(str)
    config.loss.weights = "decay"  # of head i: decay = decay ** i | dpace (2605.18810)
    config.loss.decay = 0.8
    config.loss.alpha = 0.5  # of dpace: a probability q counts as (1 - alpha) q + alpha

    set_size(config, size)
    if size == "debug":
        config.medusa.num_heads = 2
        config.medusa.draft_vocab_size = 512
    elif size == "quick":
        config.steps = 200
        config.batch_size = 2
        config.learning_rate = 2e-3
        config.warmup = 20
        config.row_labels = 384  # answers are most of these conversations
    return config
