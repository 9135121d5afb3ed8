"""The records of EAGLE and EAGLE-3."""

from __future__ import annotations

from specjax.methods.eagle.drafter import EagleDrafter
from specjax.methods.eagle.head import EagleConfig
from specjax.methods.heads.own_cache import check_window
from specjax.methods.method import Method, Needs, Training, VllmMethod

EAGLE = Method(
    name="eagle",
    paper="2401.15077",
    drafter=EagleDrafter,
    needs=Needs.HEAD,
    head=EagleConfig,
    check=check_window,
    vllm=VllmMethod(),
    training=(Training("eagle", "train.eagle", "configs/train_eagle1.py"),),
)
EAGLE3 = Method(
    name="eagle3",
    paper="2503.01840",
    drafter=EagleDrafter,
    needs=Needs.HEAD,
    head=EagleConfig,
    check=check_window,
    joined_in_all=True,
    vllm=VllmMethod(),
    training=(Training("eagle3", "train.eagle", "configs/train_eagle3.py"),),
)
