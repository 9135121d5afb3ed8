"""The record of Medusa."""

from __future__ import annotations

from specjax.methods.medusa.drafter import MedusaDrafter
from specjax.methods.medusa.head import KIND, MedusaConfig
from specjax.methods.method import Method, Needs, Training, VllmMethod

MEDUSA = Method(
    name=KIND,
    paper="2401.10774",
    drafter=MedusaDrafter,
    needs=Needs.HEAD,
    length="one draft token per head",
    head=MedusaConfig,
    vllm=VllmMethod(),
    training=(
        Training(KIND, "train.medusa", "configs/train_medusa.py"),
        Training("medusa2", "train.medusa", "configs/train_medusa2.py", alone=False),
    ),
)
