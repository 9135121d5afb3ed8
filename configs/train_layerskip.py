"""LayerSkip: `python -m train.layerskip [--config=configs/train_layerskip.py:SIZE]`.

SIZE: quick = 20 minutes on two CPU cores; debug = a few steps, for compiling; scratch = a new model
on the text of `python -m train.corpus` (scratch_debug: on that of configs/corpus.py:debug); none =
the settings below, for a loaded model. Memory: docs/training.md.
"""

from ml_collections import config_dict

from train.run.config import default_workdir, new_model_fields, set_size, training_fields


def get_config(size=""):
    config = training_fields()
    config.workdir = default_workdir("train_layerskip", size)
    config.steps = 2000
    config.batch_size = 2
    config.learning_rate = 1e-4
    config.checkpoint_every = 200
    config.eval.every = 200
    config.eval.at_start = True
    config.eval.batches = 16
    config.eval.prompts = 4
    config.row_tokens = 512
    config.row_labels = 384  # answers are most of these conversations

    config.layerskip = config_dict.ConfigDict()
    config.layerskip.max_dropout = 0.1  # p_max: of the last layer, per row
    config.layerskip.dropout_schedule = "constant"  # | exponential: from 0, for new models
    config.layerskip.e_scale = 0.2  # of the losses of early exits; 0 = none
    config.layerskip.curriculum = "rotational"  # | gradual: last one first | decoded: alone
    config.layerskip.rotation = 8  # steps until every exit was in the loss
    # Compared with: tokens of the data | distributions of the model as it was before the run.
    config.layerskip.labels = "tokens"
    # In its place: ce | kl | reverse_kl | tv | lk | lk_blend, or several as
    # ce:0.1,tv:0.9.
    config.layerskip.label_loss = config_dict.placeholder(str)
    # The exit that is decoded: this many layers; a third unless given.
    config.layerskip.exit_layer = config_dict.placeholder(int)
    config.layerskip.exits = ()  # further ones to measure; () = four among the first 2/3
    config.layerskip.depths = 4  # drafts per round that are simulated

    new = size.startswith("scratch")
    set_size(config, "debug" if size == "scratch_debug" else "" if size == "scratch" else size)
    if size == "quick":
        config.steps = 120
        config.warmup = 20
    elif size == "debug":
        config.layerskip.rotation = 3
    if new:
        config.target = config_dict.placeholder(str)  # a new model
        config.model = new_model_fields()
        config.data = "build/corpus/tokens"
        config.row_labels = config.row_tokens  # every token of a text is a label
        config.optimizer = "muon"
        config.learning_rate = 3e-3
        config.weight_decay = 0.1
        config.steps = 4400
        config.warmup = 100
        config.eval.every = 1100
        config.layerskip.dropout_schedule = "exponential"
        config.layerskip.rotation = 7
        config.layerskip.exit_layer = 4
    if size == "scratch_debug":
        config.data = "build/corpus_debug/tokens"
        config.steps = 6
        config.model.hidden_size = 32
        config.model.intermediate_size = 64
        config.model.head_dim = 8
        config.layerskip.rotation = 4
    return config
