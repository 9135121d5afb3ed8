"""Train Medusa-2: `python -m train.medusa --config=configs/train_medusa2.py[:SIZE]`.

SIZE: quick = ten minutes or more on two CPU cores; debug = several minutes; none = the full
settings. It takes 6 GiB: docs/training.md.
The target learns too: W/export/target and W/export/head belong together.
"""

import runpy
from pathlib import Path

from specjax.apps.command_line.config_file import config_of
from train.methods.medusa2 import JointOptions
from train.run.config import default_workdir

_MEDUSA = Path(__file__).with_name("train_medusa.py")


def get_config(size=""):
    config = runpy.run_path(str(_MEDUSA))["get_config"](size)
    config.workdir = default_workdir("train_medusa2", size)
    config.learning_rate_scales = "target:0.02"  # of the heads' learning rate

    config.joint = config_of(JointOptions)
    config.joint.warm_steps = 200
    if size == "debug":
        config.joint.warm_steps = 2
    elif size == "quick":
        config.steps = 110  # the last 30 train the target, each as long as several others
        config.joint.warm_steps = 80
    return config
