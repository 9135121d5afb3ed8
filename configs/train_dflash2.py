"""Train a DFlash2 drafter: `python -m train.block --config=configs/train_dflash2.py[:SIZE]`.

It is a DFlash drafter with convolutions along the block, and a choice among each slot's likeliest
tokens by the token before. Sizes as in configs/train_dflash.py.
"""

import runpy
from pathlib import Path

from train.run.config import default_workdir

_DFLASH = Path(__file__).with_name("train_dflash.py")


def get_config(size=""):
    config = runpy.run_path(str(_DFLASH))["get_config"](size)
    config.workdir = default_workdir("train_dflash2", size)

    config.block.conv_kernel_size = 2
    config.block.selector_rank = 64 if size != "debug" else 8
    return config
