"""Decode with the default model: `python -m specjax.decode --config=configs/decode_smollm2.py`."""

from ml_collections import config_dict

from specjax.cli.mesh_config import distributed_fields, mesh_fields
from specjax.drafters import DRAFTERS, drafter_options, option_type


def get_config():
    config = config_dict.ConfigDict()
    # A built-in name, a .gguf file, a Hugging Face directory, or org/name on the hub.
    config.target = "smollm2-135m-instruct"
    config.dtype = "auto"  # auto | float32 | bfloat16 | float16

    # One text, or a JSONL file in Spec-Bench's schema; neither = a few built-in prompts.
    config.prompt = config_dict.placeholder(str)
    config.prompts = config_dict.placeholder(str)
    config.turns = "first"  # first | all: with all, answers become the history of the next turn
    config.limit = config_dict.placeholder(int)
    config.per_task = config_dict.placeholder(int)
    config.chat = "auto"  # auto | true | false: put prompts through the chat template

    config.drafter = config_dict.ConfigDict()
    # Several, as ngram,eagle3,ngram+eagle3, are each compared with plain decoding; an option goes
    # to those that take it.
    config.drafter.name = "ngram"
    config.drafter.path = config_dict.placeholder(str)
    for name in DRAFTERS:
        for option, parameter in drafter_options(name).items():
            if (kind := option_type(parameter)) is not None:
                config.drafter[option] = config_dict.placeholder(kind)

    config.drafter.replicated = False  # each device holds a draft model whole

    # Of drafters with a model: several tokens after each, static where they are the same ranks in
    # each round, dynamic where they are chosen anew; auto is the static one that is fastest here.
    config.tree = config_dict.ConfigDict()
    # By default as the drafter has it: token_recycling a static tree, the others a chain.
    config.tree.kind = config_dict.placeholder(str)  # chain | static | dynamic | auto
    config.tree.topk = config_dict.placeholder(int)  # the most tokens after a token
    config.tree.depth = config_dict.placeholder(int)  # the longest path, in tokens
    config.tree.num_nodes = config_dict.placeholder(int)
    # static: paths of ranks, as ((0,), (1,), (0, 0)), instead of the three numbers.
    config.tree.choices = config_dict.placeholder(tuple)

    # auto: as many as make decoding faster | fixed: as each drafter has it | a number
    config.num_speculative_tokens = "auto"
    # ((low, high, k), ...): with low..high unfinished rows at most k draft tokens.
    config.num_speculative_tokens_per_batch_size = ()
    config.verify = "rejection"  # rejection | block | coupled, and typical, which is lossy
    config.typical = config_dict.ConfigDict()  # accepts p(x) > min(epsilon, delta exp(-H(p)))
    config.typical.epsilon = config_dict.placeholder(float)  # 0.09
    config.typical.delta = config_dict.placeholder(float)  # 0.3

    config.sampling = config_dict.ConfigDict()
    config.sampling.temperature = 0.0
    config.sampling.top_k = 0
    config.sampling.top_p = 1.0
    config.sampling.min_p = 0.0
    config.sampling.max_new_tokens = 96
    config.sampling.stop = ()
    config.sampling.stop_token_ids = ()
    config.sampling.seed = config_dict.placeholder(int)
    config.sampling.logprobs = False
    config.sampling.ignore_eos = False

    config.batch_size = 1
    config.max_length = config_dict.placeholder(int)
    config.seed = 0
    config.compare = False  # also decode plainly, and check that the output is the same
    config.report = config_dict.placeholder(str)  # a JSON path

    # data x model devices: rows are spread over data, weights and heads split over model.
    config.mesh = mesh_fields()
    # Several processes: coordinator_address, num_processes, process_id; or cluster=true, which asks
    # the scheduler (Slurm, Kubernetes, TPU pods).
    config.distributed = distributed_fields()
    return config
