"""The records of block drafters: DFlash, whose heads may be DFlash2's, and DSpark."""

from __future__ import annotations

from specjax.methods.block.drafter import BlockDrafter
from specjax.methods.block.head import PARALLEL, SEQUENTIAL, BlockConfig
from specjax.methods.heads.own_cache import check_window
from specjax.methods.method import Method, Needs, Training, VllmMethod

_LENGTH = "as many draft tokens as a block has"
DFLASH = Method(
    name=PARALLEL,
    paper="2602.06036",
    drafter=BlockDrafter,
    needs=Needs.HEAD,
    length=_LENGTH,
    head=BlockConfig,
    check=check_window,
    vllm=VllmMethod(),
    training=(
        Training(PARALLEL, "train.block", "configs/train_dflash.py", reads_stored=False),
        Training("dflash2", "train.block", "configs/train_dflash2.py", reads_stored=False),
    ),
)
DSPARK = Method(
    name=SEQUENTIAL,
    paper="DeepSpec",
    drafter=BlockDrafter,
    needs=Needs.HEAD,
    length=_LENGTH,
    head=BlockConfig,
    check=check_window,
    vllm=VllmMethod(),
    training=(Training(SEQUENTIAL, "train.block", "configs/train_dspark.py", reads_stored=False),),
)
