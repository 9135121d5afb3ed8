"""Train a new model with MTP modules: `python -m train.mtp --config=configs/train_mtp_scratch.py`.

Its text comes from `python -m train.corpus`, as does its tokenizer. With :debug it runs in seconds,
on what that command writes with configs/corpus.py:debug, and learns nothing.
"""

import runpy
from pathlib import Path

from ml_collections import config_dict

from train.run.config import default_workdir

_MTP = Path(__file__).with_name("train_mtp.py")


def get_config(size=""):
    if size == "quick":
        raise ValueError("size 'quick' is unknown: use debug, or leave it out")
    config = runpy.run_path(str(_MTP))["get_config"](size)
    config.workdir = default_workdir("train_mtp_scratch", size)
    config.target = config_dict.placeholder(str)  # a new model, of these sizes
    config.model = config_dict.ConfigDict()
    config.model.hidden_size = 256
    config.model.intermediate_size = 768
    config.model.num_layers = 8
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 64
    config.model.max_positions = 2048
    config.model.rope_theta = 10000.0
    config.model.tie_word_embeddings = True

    config.mtp.trains = "all"
    config.mtp.labels = "tokens"
    config.mtp.loss_weight = 0.3
    config.mtp.late_loss_weight = 0.1
    config.mtp.start = "random"

    if size == "debug":
        config.data = "build/corpus_debug/tokens"
        config.row_labels = config.row_tokens
        config.model.hidden_size = 32
        config.model.intermediate_size = 64
        config.model.num_layers = 2
        config.model.head_dim = 8
        return config
    config.data = "build/corpus/tokens"
    config.steps = 5000
    config.batch_size = 8
    config.row_labels = config.row_tokens  # every token of a text is a label
    config.learning_rate = 2e-3
    config.final_fraction = 0.1
    config.warmup = 200
    config.weight_decay = 0.1
    config.checkpoint_every = 500
    config.eval.every = 1000
    config.eval.batches = 16
    return config
