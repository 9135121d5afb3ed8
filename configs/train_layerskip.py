"""LayerSkip: `python -m train.layerskip [--config=configs/train_layerskip.py:SIZE]`.

SIZE: quick = 20 minutes on two CPU cores; debug = a few steps, for compiling; scratch = a new model
on the text of `python -m train.corpus` (scratch_debug: on that of configs/corpus.py:debug); none =
the settings below, for a loaded model. Memory: docs/training.md.

`--help` says what each field does.
"""

from ml_collections.config_dict import placeholder

from specjax.apps.command_line.config_file import config_of
from train import layerskip
from train.pretraining.new_model import ModelSizes
from train.run.config import default_workdir, set_size


def get_config(size=""):
    config = config_of(layerskip.Config)
    config.workdir = default_workdir("train_layerskip", size)
    config.steps = 2000
    config.batch_size = 2
    config.learning_rate = 1e-4
    config.checkpoint_every = 200
    config.eval.every = 200
    config.eval.at_start = True
    config.row_tokens = 512
    config.row_labels = 384  # answers are most of the shipped conversations

    new = size.startswith("scratch")
    set_size(config, "debug" if size == "scratch_debug" else "" if size == "scratch" else size)
    if size == "quick":
        config.steps = 120
    elif size == "debug":
        config.layerskip.rotation = 3
    if new:
        config.target = placeholder(str)  # a new model
        config.model = config_of(ModelSizes)
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
