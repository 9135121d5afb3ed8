"""The record of P-EAGLE."""

from __future__ import annotations

from specjax.methods.eagle.method import EAGLE3
from specjax.methods.heads.own_cache import check_window
from specjax.methods.method import Method, Needs, Training, VllmMethod
from specjax.methods.peagle.drafter import PEagleDrafter
from specjax.methods.peagle.head import KIND, PEagleConfig

PEAGLE = Method(
    name=KIND,
    paper="2602.01469",
    drafter=PEagleDrafter,
    needs=Needs.HEAD,
    head=PEagleConfig,
    check=check_window,
    vllm=VllmMethod(parallel_of=EAGLE3.name),
    training=(Training(KIND, "train.peagle", "configs/train_peagle.py"),),
)
