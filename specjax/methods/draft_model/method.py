"""The record of draft models: whole models, or heads that were distilled for one target."""

from __future__ import annotations

from specjax.methods.draft_model.drafter import DraftModel
from specjax.methods.draft_model.head import KIND, DraftModelConfig
from specjax.methods.heads.own_cache import check_window
from specjax.methods.method import Method, Needs, Training, VllmMethod

DRAFT_MODEL = Method(
    name=KIND,
    paper="2211.17192, 2302.01318",
    drafter=DraftModel,
    needs=Needs.MODEL,
    head=DraftModelConfig,
    of_model=DraftModel.of_model,
    check=check_window,
    vllm=VllmMethod(),
    training=(Training(KIND, "train.distill", "configs/train_distill.py"),),
)
