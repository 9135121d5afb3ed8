"""Let the default model answer prompts: `python -m train.generate --config=FILE[:debug]`."""

from ml_collections import config_dict

from specjax.apps.command_line.mesh_config import distributed_fields, mesh_fields
from train.generation.prompt_corpus import DEFAULT_MIX


def get_config(size=""):
    config = config_dict.ConfigDict()
    config.target = "smollm2-135m-instruct"
    config.dtype = "auto"  # auto | float32 | bfloat16 | float16
    config.workdir = "build/generate_smollm2"  # finished answers; the same command resumes it
    config.output = config_dict.placeholder(str)  # the dataset; none = WORKDIR/responses

    # A JSONL file ({"prompt"}, {"messages"} or {"turns"} a line), a directory with a TFDS dataset,
    # or the name of one; target_questions = the target asks itself, by the section `questions`;
    # none = specjax_corpus, by the section `corpus`.
    config.prompts = config_dict.placeholder(str)
    config.tfds = config_dict.ConfigDict()
    config.tfds.data_dir = config_dict.placeholder(str)
    config.tfds.split = "train"
    config.tfds.prompt_field = "prompt"
    config.limit = config_dict.placeholder(int)  # the first prompts only
    config.chat = "auto"  # auto | true | false: put plain texts through the chat template
    config.max_prompt_tokens = 1152  # longer prompts are left out

    config.corpus = config_dict.ConfigDict()
    config.corpus.num_prompts = 16_000
    config.corpus.seed = 0
    config.corpus.wikipedia = "auto"  # auto | true | false: texts beside Python's own
    config.corpus.long = 0.35  # share of long texts, where texts are given
    config.corpus.mix = config_dict.ConfigDict(DEFAULT_MIX)  # a share for each category

    config.questions = config_dict.ConfigDict()
    config.questions.num_asked = 16_000
    config.questions.temperature = 1.0
    config.questions.min_tokens = 5  # shorter ones are left out
    config.questions.max_tokens = 128  # those that have not ended by then are left out

    config.temperatures = (0.0, 0.7, 1.0)  # each for as many prompts
    config.top_k = 0
    config.top_p = 1.0
    config.min_p = 0.0
    config.max_new_tokens = 160
    config.seed = 0

    config.batch_size = 32
    config.drafter = config_dict.ConfigDict()
    config.drafter.name = "none"  # in large batches drafts gain nothing
    config.drafter.path = config_dict.placeholder(str)
    config.num_speculative_tokens = config_dict.placeholder(int)
    config.verify = "rejection"  # rejection | block | coupled
    config.minutes = config_dict.placeholder(float)  # stop after so long, to be resumed

    config.mesh = mesh_fields()
    config.distributed = distributed_fields()

    if size == "debug":
        config.workdir = "build/generate_smollm2_debug"
        config.corpus.num_prompts = 10
        config.questions.num_asked = 10
        config.questions.max_tokens = 64
        config.max_prompt_tokens = 200
        config.max_new_tokens = 8
        config.batch_size = 4
    elif size:
        raise ValueError(f"size {size!r} is unknown: use debug, or leave it out")
    return config
