"""How each kind of drafter is trained: the command, and its config file."""

from __future__ import annotations

from typing import NamedTuple


class Trainer(NamedTuple):
    """A training command: a module, its config file, and the fields that differ from that file."""

    module: str
    config: str
    options: tuple[str, ...] = ()

    def command(self, size: str = "") -> list[str]:
        """The arguments after `python -m`; `size` is appended to the config (":debug", or "")."""
        return [self.module, f"--config={self.config}{size}", *self.options]


TRAINERS = {
    "eagle3": Trainer("train.eagle", "configs/train_eagle3.py"),
    "draft_model": Trainer("train.distill", "configs/train_distill.py"),
    "medusa": Trainer("train.medusa", "configs/train_medusa.py"),
    "eagle": Trainer("train.eagle", "configs/train_eagle1.py"),
    "mtp": Trainer("train.mtp", "configs/train_mtp.py", ("--config.mtp.export=head",)),
}
"""The kinds that `reproduce_heads.py` trains; each exports a head."""

METHODS = {**TRAINERS, "medusa2": Trainer("train.medusa", "configs/train_medusa2.py")}
"""All training methods, by the names that checkpoints record."""
