"""Train a DSpark drafter: `python -m train.block --config=configs/train_dspark.py[:SIZE]`.

It is a DFlash drafter with a bias of each token by the one before it, and an estimate of the
probability of acceptance. Sizes as in configs/train_dflash.py.
"""

import runpy
from pathlib import Path

from train.run.config import default_workdir

_DFLASH = Path(__file__).with_name("train_dflash.py")


def get_config(size=""):
    config = runpy.run_path(str(_DFLASH))["get_config"](size)
    config.workdir = default_workdir("train_dspark", size)

    config.block.block_size = 7
    config.block.sample_from_anchor = True
    config.block.markov_rank = 64 if size != "debug" else 8
    config.block.confidence = True
    # The estimate is of acceptance over the whole vocabulary, as in decoding.
    config.block.draft_vocab_size = None
    # 0.1 cross-entropy + 0.9 ||p - q||_1, which is twice the total variation.
    config.loss.label_loss = "ce:0.1,tv:1.8"
    return config
