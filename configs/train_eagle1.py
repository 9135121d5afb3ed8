"""Train an EAGLE-1 head: `python -m train.eagle --config=configs/train_eagle1.py[:SIZE]`.

SIZE: quick = at most 11 minutes on two CPU cores; debug = a minute or two, for compiling; none =
the full settings. Memory: docs/training.md.
"""

import runpy
from pathlib import Path

from train.run.config import default_workdir

_EAGLE3 = Path(__file__).with_name("train_eagle3.py")


def get_config(size=""):
    config = runpy.run_path(str(_EAGLE3))["get_config"](size)
    config.workdir = default_workdir("train_eagle1", size)
    config.eagle.version = 1
    config.eagle.fc_bias = True
    config.loss.steps = 1
    config.loss.cross_entropy = 0.1
    config.loss.feature = 1.0
    config.loss.noise = 0.1
    return config
