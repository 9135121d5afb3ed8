"""Fit MTP modules to a frozen model: `python -m train.mtp [--config=configs/train_mtp.py:SIZE]`.

SIZE: quick = 11 minutes on two CPU cores; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.
"""

from ml_collections import config_dict

from train.run.config import default_workdir, set_size, training_fields


def get_config(size=""):
    config = training_fields()
    config.workdir = default_workdir("train_mtp", size)
    config.steps = 6600
    config.batch_size = 2
    config.learning_rate = 1e-3
    config.final_fraction = 0.03
    config.checkpoint_every = 600
    config.eval.every = 1100
    config.eval.batches = 48
    config.eval.prompts = 8
    config.row_tokens = 512
    config.row_labels = 320

    config.mtp = config_dict.ConfigDict()
    config.mtp.trains = "modules"  # of a frozen target | all: the target along with them
    config.mtp.num_modules = 1  # D; 0 = the target alone, with trains=all
    # Draft steps, D unless given: those beyond D run the last module on its own outputs.
    config.mtp.steps = config_dict.placeholder(int)
    config.mtp.weights = "decay"  # of step i: decay = decay ** i, over their sum | dpace
    config.mtp.decay = 1.0
    config.mtp.alpha = 0.5  # of dpace: a probability q counts as (1 - alpha) q + alpha
    # Compared with: tokens of the data | distributions of the target as it was before the run.
    config.mtp.labels = "distributions"
    # In its place: ce | kl | reverse_kl | tv | lk | lk_blend, or several as ce:0.1,tv:0.9.
    config.mtp.label_loss = config_dict.placeholder(str)
    # lambda, beside the target's own loss: 0.3 unless given; a frozen target has none.
    config.mtp.loss_weight = config_dict.placeholder(float)
    config.mtp.late_loss_weight = config_dict.placeholder(float)  # lambda later in the run
    config.mtp.late_from = 0.7  # where later begins: a share of the schedule's steps
    config.mtp.draft_vocab_size = config_dict.placeholder(int)  # the commonest tokens; None = all
    config.mtp.start = (
        "target"  # its own modules, or new ones that pass its feature through | random
    )
    config.mtp.export = "model"  # the target with the modules inside | head: the modules alone
    # Conventions in which checkpoints differ.
    config.mtp.concat = "embedding_first"  # | hidden_first
    config.mtp.hidden = "final_norm"  # the target's feature that is read | pre_norm
    config.mtp.recursion = "normed"  # outputs are read after a module's final norm | raw: before
    config.mtp.zero_first_embedding = False  # of the pair at position 0

    set_size(config, size)
    if size == "quick":
        config.steps = 240
        config.warmup = 20
        config.row_labels = 384  # answers are most of these conversations
    return config
