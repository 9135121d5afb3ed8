"""The training command and the config file of each kind of drafter."""

from __future__ import annotations

from typing import NamedTuple


class Trainer(NamedTuple):
    """A training command: its module, its config file, and overrides of the file's fields.

    `reads_stored` says whether it reads the features that `train.features` stores by default.
    """

    module: str
    config: str
    options: tuple[str, ...] = ()
    reads_stored: bool = True

    def command(self, size: str = "") -> list[str]:
        """Return the arguments after `python -m`, with `size` (":debug", or "") in the config."""
        return [self.module, f"--config={self.config}{size}", *self.options]


TRAINERS = {
    "eagle3": Trainer("train.eagle", "configs/train_eagle3.py"),
    "draft_model": Trainer("train.distill", "configs/train_distill.py"),
    "medusa": Trainer("train.medusa", "configs/train_medusa.py"),
    "eagle": Trainer("train.eagle", "configs/train_eagle1.py"),
    "mtp": Trainer("train.mtp", "configs/train_mtp.py", ("--config.mtp.export=head",)),
    "dflash": Trainer("train.block", "configs/train_dflash.py", reads_stored=False),
    "dflash2": Trainer("train.block", "configs/train_dflash2.py", reads_stored=False),
    "dspark": Trainer("train.block", "configs/train_dspark.py", reads_stored=False),
}
"""The heads that `reproduce_heads.py` trains; `dflash2` is a head of the kind `dflash`."""

METHODS = {
    **TRAINERS,
    "medusa2": Trainer("train.medusa", "configs/train_medusa2.py"),
    "layerskip": Trainer("train.layerskip", "configs/train_layerskip.py"),
}
"""All training methods, by the names that checkpoints record."""
