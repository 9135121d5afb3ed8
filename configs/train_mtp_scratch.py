"""Train a new model with MTP modules: `python -m train.mtp --config=configs/train_mtp_scratch.py`.

Its text comes from `python -m train.corpus`, as does its tokenizer. With :debug it runs in seconds,
on what that command writes with configs/corpus.py:debug, and learns nothing. With :glm the layers
after the first have experts, as GLM-4.5's, which CPUs compute for every token, so that it is meant
for accelerators; with :glm_debug that takes a minute, on the same data as :debug.
"""

import runpy
from pathlib import Path

from ml_collections.config_dict import placeholder

from specjax.apps.command_line.config_file import config_of
from train.pretraining.new_model import ExpertSizes, ModelSizes
from train.run.config import default_workdir

_MTP = Path(__file__).with_name("train_mtp.py")


def get_config(size=""):
    if size not in ("", "debug", "glm", "glm_debug"):
        raise ValueError(f"size {size!r} is unknown: use debug, glm, glm_debug, or leave it out")
    debug = size.endswith("debug")
    config = runpy.run_path(str(_MTP))["get_config"]("debug" if debug else "")
    config.workdir = default_workdir("train_mtp_scratch", size)
    config.target = placeholder(str)  # a new model
    config.model = config_of(ModelSizes)
    if size.startswith("glm"):
        config.model.experts = config_of(ExpertSizes)

    config.mtp.trains = "all"
    config.mtp.labels = "tokens"
    config.mtp.loss_weight = 0.3
    config.mtp.late_loss_weight = 0.1
    config.mtp.start = "random"

    if debug:
        config.data = "build/corpus_debug/tokens"
        config.row_labels = config.row_tokens
        config.model.hidden_size = 32
        config.model.intermediate_size = 64
        config.model.num_layers = 2
        config.model.head_dim = 8
        if size == "glm_debug":
            config.model.experts.moe_intermediate_size = 16
            config.steps = 200
            config.batch_size = 8
            config.learning_rate = 1e-2
            config.balance_rate = 0.01  # there are few steps
            config.log_every = 20
            config.checkpoint_every = 100
        return config
    config.data = "build/corpus/tokens"
    config.row_labels = config.row_tokens  # every token of a text is a label
    config.weight_decay = 0.1
    config.checkpoint_every = 500
    if size == "glm":
        config.steps = 5000
        config.batch_size = 8
        config.learning_rate = 2e-3
        config.final_fraction = 0.1
        config.warmup = 200
        config.eval.every = 1000
        config.eval.batches = 16
        return config
    config.optimizer = "muon"
    config.learning_rate = 3e-3
    config.steps = 4400  # of 2 x 512 tokens: an hour on two CPU cores
    config.warmup = 100
    config.eval.every = 1100
    config.eval.batches = 32
    return config
