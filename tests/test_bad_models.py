"""Bad models, in Hugging Face's layout and as GGUF: one line names file, field and remedy."""

import json
import struct

import numpy as np
import pytest
from conftest import slow
from model_files import (
    GGUF_TOKENS,
    WEIGHTS,
    changed,
    edit_json,
    edit_tensors,
    gguf_metadata,
    gguf_tensors,
    open_files,
    refusal,
    without,
    write_gguf,
)

from specjax.errors import InputError
from specjax.loading.load import load_model
from specjax.loading.tokenizers.huggingface_tokenizer import read_tokenizer

LLAMA_CONFIGS = [
    ({"model_type": "mamba"}, "model_type='mamba' is not supported; use a model of the type 'll"),
    ({"model_type": "falcon_h1"}, "it has attention and Mamba-2 side by side in each layer"),
    ({"model_type": ["qwen3"]}, "model_type=['qwen3'] is not supported"),
    ({"surprise": 1}, "surprise=1: is unknown"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"sliding_window": 128}, "sliding_window=128"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "default, linear, llama3, yarn",
    ),
    ({"rope_parameters": {"rope_type": "yarn", "factor": "2"}}, "factor must be a number"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": -2.0}},
        "must be a positive number",
    ),
    ({"rope_parameters": {"rope_type": "yarn", "truncate": 0}}, "truncate must be true or false"),
    ({"rope_parameters": {"rope_type": "yarn", "beta_fast": 0.5}}, "must exceed beta_slow=1.0"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_theta=1.0: must exceed"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "long_factor must be lists of numbers"),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}},
        "rope_scaling.factors: 1 entries",
    ),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number"),
    ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "factor=-1"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of values"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a number"),
    ({"rope_parameters": {"rope_theta": 1e300}}, "rope_theta must be a number"),
    ({"hidden_size": "24"}, "hidden_size='24'"),
    ({"hidden_size": None}, "hidden_size=None"),
    ({"hidden_size": 48}, "mis-shaped"),
    ({"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight"),
    ({"num_hidden_layers": 1}, "unexpected: model.layers.1."),
    ({"num_hidden_layers": 10**4}, "10000 layers"),
    ({"num_hidden_layers": 10**12}, "num_layers=1000000000000: must be"),
    ({"max_position_embeddings": 2**40}, "max_positions=1099511627776: must be"),
    ({"max_position_embeddings": 0}, "max_positions=0: must be"),
    ({"intermediate_size": 2**40}, "intermediate_size=1099511627776: must be"),
    ({"rms_norm_eps": 1e-300}, "rms_norm_eps=1e-300: must be"),
    ({"num_attention_heads": 0}, "num_heads=0"),
    ({"attention_bias": "yes"}, "attention_bias='yes'"),
    ({"tie_word_embeddings": False}, "set tie_word_embeddings to true"),
    ({"vocab_size": 60}, "vocab_size=60, but the tokenizer has 80"),
    ({"head_dim": 7}, "head_dim=7"),
]
FAMILY_CONFIGS = [
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu': is not supported"),
    ("qwen3", {"rope_scaling": {"type": "ntk"}, "rope_parameters": None}, "ntk"),
    ("qwen3", {"rope_parameters": {"surprise": [1]}}, "surprise is unknown"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types="),
    ("qwen2", {"layer_types": ["sliding_attention"]}, "an entry for each of 3 layers"),
    ("qwen2", {"num_hidden_layers": 10**12}, "layer_types="),
    ("qwen2", {"num_hidden_layers": 10**12, "layer_types": None}, "num_layers=1000000000000"),
    ("qwen2", {"sliding_window": 0}, "sliding_window.size=0"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ("mistral", {"sliding_window": "no"}, "sliding_window='no'"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types="),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
    ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar=-4"),
    ("gemma2", {"final_logit_softcapping": -1}, "logit_softcap=-1"),
    ("gemma3_text", {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping=9.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"model_type": "gemma3"}, "text_config=None: a model of model_type='gemma3' m"),
    ("gemma3", {"text_config": [1]}, "text_config=[1]: must be a JSON object"),
    ("gemma3", {"text_config": {"model_type": "qwen3"}}, "model_type='qwen3': is not supported"),
    ("gemma3", {"text_config": {"surprise": 1}}, "text_config: hidden_size=None: must be"),
    ("gemma3", {"audio_config": {"hidden_size": 8}}, "audio_config={'hidden_size': 8}: is unknown"),
    ("gemma3", {"tie_word_embeddings": False}, "set tie_word_embeddings to true"),
    ("mistral3", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("mistral3", {"architectures": ["MistralForCausalLM"]}, "architectures="),
    ("mistral3", {"text_config": {"model_type": "ministral3"}}, "queries scaled by their position"),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 0]}, "must have 1 or 0 for each of 4 layers"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "must have 1 or 0 for each of 4 layers"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "rope_layer_interval=0"),
    ("smollm3", {"use_sliding_window": False}, "layer_types names sliding layers"),
    ("smollm3", {"num_hidden_layers": 10**12}, "no_rope_layers="),
    ("olmo2", {"sliding_window": 7}, "sliding_window=7"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0: is unknown"),
    ("olmo2", {"num_key_value_heads": 4}, "mis-shaped"),
    ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "use full_attention and sliding_attention"),
    ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types="),
    ("granite", {"residual_multiplier": 0}, "residual_scale=0.0: must be a positive number"),
    ("granite", {"logits_scaling": "8"}, "logits_scaling='8': must be a number"),
    ("granite", {"attention_multiplier": -1.0}, "attention.query_scale=-1.0"),
    ("granite", {"num_local_experts": 8}, "num_local_experts=8: is unknown"),
    ("phi3", {"model_type": "phi3small"}, "it has blocksparse attention"),
    ("phi3", {"rope_parameters": {"rope_type": "su"}}, "default, linear, llama3, yarn or longrope"),
    ("phi3", {"attention_bias": True}, "attention_bias=True: is not supported"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2: is not supported; only 1 is"),
    ("phi3", {"num_key_value_heads": 4}, "mis-shaped: model.layers.0.self_attn.qkv_proj.weight"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
    ("gpt2", {"activation_function": ["relu"]}, "activation_function=['relu']"),
    ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.95}}, "rotary_width=11"),
    ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.6}}, "rotary_width=7"),
    ("glm4", {"attention_bias": False}, "unexpected: model.layers."),
    *(
        (name, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, "says something else")
        for name in ("qwen3", "glm4", "gemma3_text")
    ),
    ("glm4_moe", {"num_nextn_predict_layers": 0}, "belongs to an MTP layer"),
    ("gpt_oss", {"swiglu_limit": 0}, "mlp.limit=0.0: must be a positive number"),
    ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha=2.0: is not supported; only 1.702 is"),
    ("gpt_oss", {"initial_context_length": 64}, "initial_context_length=64: is not supported"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8': is not"),
    ("gpt_oss", {"num_local_experts": 5}, "mis-shaped: model.layers."),
    ("deepseek_v3", {"v_head_dim": 20}, "attention.latent.value_dim=20: must be a whole number"),
    ("deepseek_v3", {"qk_nope_head_dim": 0}, "qk_nope_head_dim=0: must be"),
    ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads=1: is not supported; only 4"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax': is not supported"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy': is not supported"),
    ("deepseek_v3", {"rope_interleave": "no"}, "rope_interleave='no': must be true or false"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ("deepseek_v3", {"n_group": 8}, "a group must have at least 2 experts"),
    ("deepseek_v3", {"q_lora_rank": 16}, "mis-shaped: model.layers."),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': is not supported"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True: is not supported"),
    ("qwen3_5_text", {"layer_types": ["linear"] * 5}, "layer_types="),
    ("qwen3_5_text", {"layer_types": ["full_attention"]}, "an entry for each of 5 layers"),
    ("qwen3_5_text", {"num_hidden_layers": 10**12}, "layer_types="),
    ("qwen3_5_text", {"full_attention_interval": 0, "layer_types": None}, "interval=0: must be"),
    ("qwen3_5_text", {"linear_num_key_heads": 3}, "recurrence.key_heads=3: must divide"),
    ("qwen3_5_text", {"linear_key_head_dim": 0}, "recurrence.key_width=0: must be"),
    ("qwen3_5_text", {"linear_value_head_dim": 2**40}, "recurrence.value_width=1099511627776"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 3}, "mis-shaped: model.layers.0.linear_attn."),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False: is not supported"),
    ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "2 MTP modules are announced, and those of"),
    ("qwen3_5_text", {"mtp_num_hidden_layers": 0}, "belongs to an MTP layer"),
    ("qwen3_5_text", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
    ("qwen3_5", {"text_config": {"model_type": "qwen3_5_moe_text"}}, "='qwen3_5_moe_text': is not"),
    ("qwen3_next", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]: is not supported"),
    ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: is not supported"),
    ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_gate: needs a shared_size"),
    ("qwen3_next", {"num_experts": 5}, "mis-shaped: "),
    ("qwen3_next", {"num_experts": 7}, "missing: model.layers.0.mlp.experts.6.down_proj.weight"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False: is not supported"),
    ("lfm2", {"conv_dim": 16}, "conv_dim=16: is not supported; only 32 is"),
    ("lfm2", {"conv_L_cache": 2}, "mis-shaped: model.layers.0.conv.conv.weight"),
    (
        "lfm2",
        {"full_attn_idxs": [1.5], "layer_types": None},
        "full_attn_idxs=[1.5]: must be a list",
    ),
    ("granitemoehybrid", {"mamba_d_head": 16}, "mamba_n_heads=8: times mamba_d_head=16 must be"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    ("granitemoehybrid", {"num_local_experts": 4}, "missing: model.layers.0.block_sparse_moe."),
    ("granitemoehybrid", {"num_local_experts": -1}, "experts.num_experts=-1: must be"),
    ("olmo_hybrid", {"linear_num_value_heads": 3}, "recurrence.key_heads=2: must divide"),
    ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval=2: must be"),
    ("bamba", {"attn_rotary_emb": 12}, "attn_rotary_emb=12: is not supported; only 4 is"),
    ("bamba", {"time_step_limit": [2.0, 0.5]}, "step_limits=(2.0, 0.5): must ascend"),
    ("bamba", {"time_step_limit": [0.0]}, "time_step_limit=[0.0]: must be two numbers"),
    (
        "nemotron_h",
        {"layers_block_type": ["moe"] * 6},
        "moe is not supported; the decoder supports",
    ),
    ("nemotron_h", {"layers_block_type": None}, "must name the kind of each layer"),
    ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers=5: is not supported; only 6 is"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu': is not supported"),
    ("mimo", {"num_nextn_predict_layers": 2}, "missing: model.mtp_layers.1"),
    ("glm4_moe", {"mtp_num_hidden_layers": 3}, "mtp_num_hidden_layers=3: disagrees with num_next"),
]


@pytest.mark.parametrize(
    ("source", "fields", "words"),
    [
        *(("grouped_tied", fields, words) for fields, words in LLAMA_CONFIGS),
        *((f"families/{name}", fields, words) for name, fields, words in FAMILY_CONFIGS),
    ],
)
def test_fields_that_are_not_supported(source, fields, words, tmp_path):
    assert words in refusal(changed(source, tmp_path, **fields))


def extra(name, value=None):
    array = np.ones((2, 2), np.float32) if value is None else value
    return lambda tensors: {**tensors, name: array}


QUERY = "model.layers.0.self_attn.q_proj"
GLM = "families/glm4_moe"
MERGED = "families/qwen3_5_moe"
MERGED_EXPERTS = "model.language_model.layers.0.mlp.experts"


def other_copy(tensors):
    name = "model.layers.3.embed_tokens.weight"
    return {**tensors, name: tensors[name] + 1}


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        ("grouped_tied", extra(f"{QUERY}.lora_A.weight"), "merge the adapter"),
        ("grouped_tied", extra(f"{QUERY}.weight_scale_inv"), "quantised; use the model"),
        ("grouped_tied", extra("vision_tower.weight"), "one of the two is of another kind"),
        ("grouped_tied", without("model.norm"), "download the file again if it is cut off"),
        ("grouped_tied", extra("mtp.fc.weight"), "mtp.fc.weight belongs to an MTP layer"),
        ("grouped_tied", extra("model.layers.2.eh_proj.weight"), "which model_type='llama' does"),
        ("grouped_tied", extra("lm_head.weight", np.ones((83, 24), np.float32)), "set it to false"),
        (
            "grouped_tied",
            extra("model.norm.weight", np.ones(24, np.int8)),
            "model.norm.weight has the type I8",
        ),
        (GLM, without("model.layers.3.eh_proj"), "missing: model.layers.3.eh_proj.weight"),
        (GLM, without("model.layers.3.eh_proj", "model.layers.3.mlp."), "cut off"),
        (GLM, other_copy, "differs from model.embed_tokens.weight"),
        ("families/mimo", without("model.mtp_layers.0.input_proj"), "0.input_proj.weight"),
        ("families/qwen3_5", without("mtp.fc."), "missing: mtp.fc.weight"),
        ("families/qwen3_next", without("mtp.layers.0.mlp.gate."), "mtp.layers.0.mlp.gate.weight"),
        (MERGED, without(f"{MERGED_EXPERTS}.down_proj"), "missing: model.layers.0.mlp.experts.0.d"),
        (
            MERGED,
            extra(f"{MERGED_EXPERTS}.gate_up_proj", np.ones((6, 23, 32), np.float32)),
            "missing: model.layers.0.mlp.experts.0.gate_proj.weight",
        ),
        (
            MERGED,
            extra(f"{MERGED_EXPERTS}.down_proj", np.ones((6, 32, 0), np.float32)),
            "missing: model.layers.0.mlp.experts.0.down_proj.weight",
        ),
        (
            "families/qwen3_5_text",
            extra("model.layers.0.linear_attn.A_log", np.ones((4, 1), np.float32)),
            "mis-shaped: model.layers.0.linear_attn.A_log",
        ),
    ],
)
def test_tensors_that_do_not_fit(source, change, words, tmp_path):
    assert words in refusal(changed(source, tmp_path, change))


SETTINGS = "tokenizer_config.json"
SHARD = "model-00002-of-00004.safetensors"


def put(name, content):
    """A change of a directory: a file, or, of None, no file."""

    def change(path):
        if content is None:
            (path / name).unlink()
        else:
            data = content if isinstance(content, bytes) else content.encode()
            (path / name).write_bytes(data)

    return change


def several(*changes):
    def change(path):
        for each in changes:
            each(path)

    return change


def truncated(path):
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-10])


def lacking_a_tensor(path):
    edit_tensors(path / SHARD, lambda tensors: dict(sorted(tensors.items())[1:]))


def outside(path):
    index = path / "model.safetensors.index.json"
    edit_json(index, weight_map={"a": "../../secret.safetensors"})


def infinite_number(path):
    config = path / "config.json"
    config.write_text(config.read_text().replace("{", '{"rope_theta": 1e999, ', 1))


def model_of_tokenizer(**fields):
    def change(path):
        content = json.loads((path / "tokenizer.json").read_text())
        content["model"] |= fields
        (path / "tokenizer.json").write_text(json.dumps(content))

    return change


def far_token(path):
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 2**32 - 1
    (path / "tokenizer.json").write_text(json.dumps(content))


def ends(value):
    return lambda path: edit_json(path / "generation_config.json", eos_token_id=value)


def template(value):
    def change(path):
        (path / "chat_template.jinja").unlink()
        edit_json(path / SETTINGS, chat_template=value)

    return change


BAD_TEMPLATES = [5, True, {}, "\ud800", "x" * 2**21, [5], [{"name": "default"}]]
BAD_TEMPLATES.append([{"name": "default", "template": 5}])
FILES = {
    "a config that is cut off": (put("config.json", "{"), "is not JSON"),
    "a config that is a list": (put("config.json", "[]"), "must hold a JSON object"),
    "a config too deep": (put("config.json", "[" * 100_000), "is not JSON"),
    "no config": (put("config.json", None), "config.json: missing"),
    "a number of many digits": (put("config.json", f'{{"a": {"1" * 5000}}}'), "is not JSON"),
    "a number no float holds": (infinite_number, "too large"),
    "no tokenizer in its file": (put("tokenizer.json", "{}"), "not a tokenizer"),
    "only SentencePiece's file": (
        several(put("tokenizer.json", None), put("tokenizer.model", "")),
        "no tokenizer.json",
    ),
    "settings that are no JSON": (put(SETTINGS, "nope"), "is not JSON"),
    "an end that is no token": (put(SETTINGS, '{"eos_token": "<none>"}'), "eos_token='<none>'"),
    "an end that is a text": (ends("x"), "eos_token_id='x'"),
    "an end that is a number with a point": (ends(2.0), "eos_token_id=2.0"),
    "an enormous token id": (far_token, "have ids up to 4294967295"),
    "a tokenizer that panics": (
        model_of_tokenizer(continuing_subword_prefix="\0" * 10),
        "not a tokenizer",
    ),
    "garbage for weights": (put(WEIGHTS, "garbage"), "not a safetensors file"),
    "weights that are cut off": (truncated, "not a safetensors file"),
    "no weights": (put(WEIGHTS, None), "no weights"),
    "an adapter alone": (
        several(put("config.json", None), put("adapter_config.json", "{}")),
        "an adapter without its model; merge it",
    ),
    "a template that is no text": (put("chat_template.jinja", b"\xff"), "cannot be read"),
    "a template file too long": (put("chat_template.jinja", "x" * 2**21), "characters"),
    **{
        f"the chat template {value!r:.30}": (template(value), f"{SETTINGS}: chat_template")
        for value in BAD_TEMPLATES
    },
    **{
        f"a pickle, {suffix}": (
            lambda path, suffix=suffix: (path / WEIGHTS).rename(path / f"pytorch_model{suffix}"),
            "save_pretrained",
        )
        for suffix in (".bin", ".pt", ".pth")
    },
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_damaged(name, tmp_path, capfd):
    change, words = FILES[name]
    path = changed("grouped_tied", tmp_path)
    change(path)
    assert words in refusal(path)
    capfd.readouterr()  # Rust prints what it likes of a panic


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(SHARD, None), f"missing shard {SHARD}"),
        (lacking_a_tensor, f"{SHARD}: lacks model."),
        (outside, "not a plain file name"),
    ],
)
def test_shards_that_do_not_fit_their_index(change, words, tmp_path):
    path = changed("biased_untied", tmp_path)
    change(path)
    assert words in refusal(path)


def test_several_chat_templates(tmp_path):
    path = changed("grouped_tied", tmp_path)
    (path / "chat_template.jinja").unlink()
    entries = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    for value, chosen in ((entries, "b"), (entries[:1], None), ([], None), (None, None)):
        edit_json(path / SETTINGS, chat_template=value)
        assert read_tokenizer(path).chat_template == chosen


def test_an_unknown_token_that_is_none(tmp_path):
    path = changed("grouped_tied", tmp_path)
    model_of_tokenizer(unk_token="no such token")(path)
    with pytest.raises(InputError, match="text: the tokenizer cannot encode it"):
        read_tokenizer(path).encode("\u4e16")


def test_a_pickle_alone_is_refused(tmp_path):
    path = changed("grouped_tied", tmp_path) / WEIGHTS
    assert "save_pretrained" in refusal(path.rename(path.with_suffix(".bin")))


def test_a_model_whose_announced_modules_are_none(tmp_path):
    load_model(changed("grouped_tied", tmp_path, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.expert_count": np.uint32(8)}, "expert_used_count=None: must be a whole number"),
        ({"llama.attention.sliding_window": np.uint32(64)}, "sliding_window=64"),
        ({"llama.rope.dimension_count": np.uint32(8)}, "rope.dimension_count=8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.surprise": np.uint32(1)}, "llama.surprise"),
        ({"llama.block_count": np.uint32(3_000)}, "3000 layers"),
        *slow(({"llama.block_count": np.uint32(60_000)}, "60000 layers")),
        ({"llama.block_count": np.uint32(2**32 - 1)}, "num_layers=4294967295: must be"),
        ({"llama.context_length": np.uint32(2**32 - 1)}, "max_positions=4294967295: must be"),
        ({"llama.rope.freq_base": np.float32(1e30)}, "rope.freq_base=1e+30: must be"),
        ({"tokenizer.chat_template": np.uint32(5)}, "tokenizer.chat_template=5: use a text"),
        ({"tokenizer.chat_template": True}, "tokenizer.chat_template=True: use a text"),
        ({"tokenizer.chat_template": ["x"]}, "tokenizer.chat_template=['x']: use a text"),
        ({"llama.block_count": np.uint32(3)}, "missing: blk.2.attn_norm.weight"),
        ({"llama.block_count": np.uint32(1)}, "unexpected: blk.1."),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.embedding_length": np.uint32(0)}, "hidden_size=0"),
        ({"llama.embedding_length": np.uint32(128)}, "mis-shaped"),
        ({"llama.attention.head_count": np.uint32(3)}, "num_heads=3"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama.attention.layer_norm_rms_epsilon": np.float32("nan")}, "epsilon=nan: must be"),
        ({"llama.context_length": None}, "llama.context_length=None: must be a whole number"),
        ({"general.alignment": np.uint32(0)}, "general.alignment=0"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre='klingon'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens=None: must be"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.merges": ["x y"]}, "inconsistent"),
        ({"tokenizer.ggml.merges": ["in"]}, "not two tokens"),
        ({"tokenizer.ggml.bos_token_id": np.uint32(10**6)}, "bos_token_id=1000000"),
        ({"tokenizer.ggml.tokens": ["a", *GGUF_TOKENS[1:]]}, "'a' appears twice"),
    ],
)
def test_unsupported_and_contradictory_metadata_are_refused_by_name(tmp_path, change, words):
    keys = gguf_metadata() | change
    keys = {key: value for key, value in keys.items() if value is not None}
    path = write_gguf(tmp_path / "a.gguf", keys, gguf_tensors())
    assert words in refusal(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf",
        gguf_metadata(),
        gguf_tensors(),
        architecture="mamba",
    )
    message = refusal(path)
    assert "'mamba'" in message
    assert "'llama'" in message


def test_tensors_that_do_not_fit_are_listed_together(tmp_path):
    arrays = gguf_tensors()
    del arrays["blk.0.attn_q.weight"]
    arrays["blk.0.surprise.weight"] = np.zeros(32, np.float32)
    arrays["blk.1.ffn_norm.weight"] = np.zeros(63, np.float32)
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays))
    assert "missing: blk.0.attn_q.weight" in message
    assert "unexpected: blk.0.surprise.weight" in message
    assert "mis-shaped: blk.1.ffn_norm.weight [63], not [64]" in message


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path):
    arrays = gguf_tensors()
    arrays["output_norm.weight"] = np.zeros(64, np.int32)
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays))
    assert "output_norm.weight has the ggml type I32" in message


def gguf_header(version=3, tensors=0, keys=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def gguf_text(value):
    return struct.pack("<Q", len(value)) + value


def gguf_array(kind, count):
    return gguf_text(b"key") + struct.pack("<IIQ", 9, kind, count)


def gguf_tensor(shape, kind=0, offset=0):
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return gguf_text(b"t") + axes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"GG", "no GGUF magic"),
        (b"PK\x03\x04 a zip file", "no GGUF magic"),
        (b"GGUF\x03\x00", "truncated"),
        (gguf_header(version=1), "version 1"),
        (gguf_header(version=99), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (gguf_header(tensors=2**63), "claims 9223372036854775808 tensors"),
        (gguf_header(keys=2**40), "claims 1099511627776 keys"),
        (gguf_header(keys=1, rest=struct.pack("<Q", 2**62) + b"x" * 20), "truncated"),
        (gguf_header(keys=1, rest=gguf_array(4, 2**61)), "truncated"),
        (gguf_header(keys=1, rest=gguf_array(8, 2**61)), "claims 2305843009213693952 strings"),
        (
            gguf_header(keys=1, rest=gguf_array(8, 1) + struct.pack("<Q", 99)),
            "truncated: a string of the key",
        ),
        (gguf_header(keys=1, rest=gguf_array(9, 1) + b"x" * 40), "unknown value type 9"),
        (
            gguf_header(keys=1, rest=gguf_text(b"key") + struct.pack("<I", 77)),
            "unknown value type 77",
        ),
        (gguf_header(keys=1, rest=gguf_text(b"\xff\xfe") + b"x" * 8), "not UTF-8"),
        (
            gguf_header(keys=2, rest=(gguf_text(b"k") + struct.pack("<IB", 0, 1)) * 2),
            "appears twice",
        ),
        (gguf_header(tensors=1, rest=gguf_tensor((2**40, 2**40))), "truncated"),
        (gguf_header(tensors=1, rest=gguf_tensor((2**63, 2**63, 2**63, 2**63))), "truncated"),
        (gguf_header(tensors=1, rest=gguf_tensor((1,) * 5)), "has 5 axes"),
        (gguf_header(tensors=1, rest=gguf_tensor((32,), kind=999)), "unknown ggml type 999"),
        (gguf_header(tensors=1, rest=gguf_tensor((33,), kind=2)), "rows of 33 values"),
        (gguf_header(tensors=1, rest=gguf_tensor((8,), offset=2**62)), "truncated"),
        (gguf_header(tensors=1, rest=gguf_tensor((8,), offset=3) + b"x" * 99), "truncated"),
        (gguf_header(tensors=2, rest=gguf_tensor((0,)) * 2 + b"x" * 99), "appears twice"),
    ],
)
def test_a_damaged_header_is_an_error(tmp_path, content, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert words in refusal(path)


def test_a_file_truncated_in_its_weights_says_where_it_ends(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors())
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    message = refusal(path)
    assert "truncated" in message
    assert str(len(whole) - 100) in message


def write_parts(folder, arrays=None, size=8):
    """The paths of the parts of a small model, `size` tensors in each; three by default."""
    folder.mkdir()
    arrays = arrays or gguf_tensors()
    write_gguf(folder / "a.gguf", gguf_metadata(), arrays, split_max_tensors=size)
    return sorted(folder.iterdir())


def remove(parts, folder):
    parts[1].unlink()


def swap(index, other_index, **options):
    """A part in the place of one of another split of the model, or of the model in one file."""

    def damage(parts, folder):
        others = write_parts(folder / "other", **options)
        parts[index].write_bytes(others[other_index].read_bytes())

    return damage


def put_a_whole_file(parts, folder):
    write_gguf(parts[1], gguf_metadata(), gguf_tensors())


def truncate(parts, folder):
    parts[2].write_bytes(parts[2].read_bytes()[:-100])


ARRAYS = gguf_tensors()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "its part a-00002-of-00003.gguf is missing"),
        (swap(1, 2), "a-00002-of-00003.gguf has split.no=2 and split.count=3, not 1 and 3"),
        (swap(1, 1, size=4), "a-00002-of-00003.gguf has split.no=1 and split.count=5, not 1 and 3"),
        (
            swap(2, 2, arrays=dict(reversed(ARRAYS.items()))),
            "is in a-00003-of-00003.gguf and in a part before it",
        ),
        (
            swap(2, 2, arrays=dict(list(ARRAYS.items())[:-1])),
            "hold 19 tensors, not split.tensors.count=20",
        ),
        (put_a_whole_file, "a-00002-of-00003.gguf: split.no=None: must be a whole number"),
        (truncate, "a-00003-of-00003.gguf: GGUF truncated"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, damage, words):
    parts = write_parts(tmp_path / "model")
    damage(parts, tmp_path)
    assert words in refusal(parts[0])
    assert not open_files(tmp_path)


def test_another_part_than_the_first_names_the_first(tmp_path):
    parts = write_parts(tmp_path / "model")
    assert "split.no=1, so it is not the first part; load a-00001-of-" in refusal(parts[1])


def test_a_part_of_another_name_is_refused(tmp_path):
    renamed = write_parts(tmp_path / "model")[0].rename(tmp_path / "a.gguf")
    assert "its name does not end in -00001-of-00003.gguf" in refusal(renamed)


def test_messages_are_printable_and_bounded():
    for text in ("a\nb\r\t\x1b[2J\0\ud800\u2028", "x" * 10**6):
        message = str(InputError(text))
        assert message.isprintable()
        assert len(message) < 2100
    assert str(InputError("a\nb\x1b[2J\ud800")) == r"a b\x1b[2J\ud800"
    assert str(InputError("Ġ é ▁ 世")) == "Ġ é ▁ 世"
