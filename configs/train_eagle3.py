"""Train an EAGLE-3 head: `python -m train.eagle [--config=configs/train_eagle3.py:SIZE]`.

SIZE: quick = 11 minutes on two CPU cores; debug = a minute or two, for compiling; none = the
settings below. Memory: docs/training.md.
"""

from ml_collections import config_dict

from train.run.config import default_workdir, set_size, training_fields


def get_config(size=""):
    config = training_fields()
    config.workdir = default_workdir("train_eagle3", size)
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

    config.eagle = config_dict.ConfigDict()
    config.eagle.version = 3
    config.eagle.draft_vocab_size = 8192  # the commonest tokens of the data; V = all
    config.eagle.taps = ()  # target features; () = the inputs of layers 2, L/2 and L - 3
    # Of attention; as many as the target's by default, at most the query heads.
    config.eagle.num_kv_heads = config_dict.placeholder(int)
    # target: its last layer and its head beside random weights | last_layer: these alone | random
    config.eagle.start = "target"
    config.eagle.fc_bias = False
    config.eagle.own_embedding = False
    config.eagle.own_head = True  # False: logits by the target's output layer, frozen
    config.eagle.norm_before_residual = False
    config.eagle.norm_before_fc = False
    config.eagle.fc_norm = False
    config.eagle.norm_output = False

    config.loss = config_dict.ConfigDict()
    config.loss.steps = 3  # draft steps that are unrolled
    config.loss.weights = "decay"  # of step i: decay = decay ** i | dpace (2605.18810)
    config.loss.decay = 0.8
    config.loss.alpha = 0.5  # of dpace: a probability q counts as (1 - alpha) q + alpha
    config.loss.cross_entropy = 1.0
    # In place of the cross-entropy: ce | kl | reverse_kl | tv | lk | lk_blend, or several as
    # ce:0.1,tv:0.9.
    config.loss.label_loss = config_dict.placeholder(str)
    config.loss.feature = 0.0  # smooth L1 to the target's next feature
    config.loss.noise = 0.0  # half-width of the noise on features

    set_size(config, size)
    if size == "debug":
        config.eagle.draft_vocab_size = 512
        config.loss.steps = 2
    elif size == "quick":
        config.steps = 240
        config.warmup = 20
        config.row_labels = 384  # answers are most of these conversations
    return config
