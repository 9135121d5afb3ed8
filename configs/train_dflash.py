"""Train a DFlash drafter: `python -m train.block [--config=configs/train_dflash.py:SIZE]`.

SIZE: quick = as many tokens as train_eagle3's, too few to draft well; debug = a minute or two, for
compiling; none = the settings below. Memory: docs/training.md.
"""

from ml_collections import config_dict

from train.run.config import default_workdir, set_size, training_fields


def get_config(size=""):
    config = training_fields()
    config.workdir = default_workdir("train_dflash", size)
    config.steps = 6600
    config.batch_size = 2
    config.learning_rate = 2e-3
    config.final_fraction = 0.03
    config.checkpoint_every = 600
    config.eval.every = 1100
    config.eval.batches = 48
    config.eval.prompts = 8
    config.row_tokens = 512
    config.row_labels = 320

    config.block = config_dict.ConfigDict()
    config.block.num_layers = 2
    config.block.block_size = 8  # slots, the anchor included
    config.block.draft_vocab_size = 8192  # the commonest tokens of the data; V = all
    config.block.taps = ()  # target features; () = outputs of five layers, evenly spaced
    # Its embedding stands for tokens to be drafted; by default one without text, or the last.
    config.block.mask_token_id = config_dict.placeholder(int)
    config.block.start = "target"  # target: its last layers | random
    config.block.causal = False  # attend to earlier slots of the block only (JetSpec)
    config.block.sample_from_anchor = False  # each slot predicts the next token
    config.block.markov_rank = 0  # of the bias by the token before (DSpark); 0 = none
    config.block.confidence = False  # estimate the probability of acceptance (DSpark)
    config.block.conv_kernel_size = 0  # taps of convolutions along the block (DFlash2); 0 = none
    config.block.conv_group_size = 16  # channels
    config.block.selector_rank = 0  # of the choice by the token before (DFlash2); 0 = none
    config.block.selector_top_k = 16  # tokens per slot to choose from

    config.loss = config_dict.ConfigDict()
    config.loss.anchors = 64  # blocks per row, at random labels
    config.loss.weights = "decay"  # of position k: decay = exp(-k / gamma) | dpace (2605.18810)
    config.loss.gamma = 4.0
    config.loss.alpha = 0.5  # of dpace: a probability q counts as (1 - alpha) q + alpha
    # ce | kl | reverse_kl | tv | lk | lk_blend, or several with weights, as ce:0.1,tv:0.9.
    config.loss.label_loss = "ce"
    config.loss.confidence = 1.0  # of the confidence head's cross-entropy
    config.loss.selector = 1.0  # of the selector's cross-entropy

    set_size(config, size)
    if size == "debug":
        config.block.draft_vocab_size = 512
        config.block.num_layers = 1
        config.block.block_size = 4
        config.loss.anchors = 4
    elif size == "quick":
        config.steps = 240
        config.warmup = 20
        config.row_labels = 384  # answers are most of these conversations
    return config
