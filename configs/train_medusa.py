"""Train Medusa-1 heads: `python -m train.medusa --config=configs/train_medusa.py[:debug]`."""

from ml_collections import config_dict

from train.run.config import training_fields


def get_config(size=""):
    config = training_fields()
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
    config.medusa.num_layers = 1  # residual blocks a head
    config.medusa.original_lm_head = True  # the target's own head; else one for each, trained
    config.medusa.projection = True  # a matrix of each head's own before the target's head
    config.medusa.draft_vocab_size = 8192  # the commonest tokens of the data; V = all

    config.loss = config_dict.ConfigDict()
    config.loss.labels = (
        "distributions"  # distributions of the target | tokens of the data, as published
    )
    config.loss.decay = 0.8  # the weight of head i is decay ** i

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
        config.medusa.num_heads = 2
        config.medusa.draft_vocab_size = 512
    elif size:
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    return config
