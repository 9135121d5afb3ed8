"""Families of models against transformers: goldens of scripts/data/make_family_goldens.py."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reports
from conftest import slow
from decoding import draft_model, greedy
from model_files import GOLDENS as ROOT
from model_files import changed
from tiny_models import mtp_head

from specjax import SamplingParams, generate, make_drafter, save_checkpoint
from specjax.apps.rows import compare_outputs
from specjax.apps.run import decode
from specjax.core.cache import commit
from specjax.core.prefill import prefill
from specjax.distributed import sharding
from specjax.drafters import head_drafter
from specjax.engine.plan import plan_requests
from specjax.errors import InputError
from specjax.loading.formats.families import registry, schema
from specjax.loading.formats.huggingface_config import read_config
from specjax.loading.load import load_model, place_model, random_model, save_model
from specjax.methods.eagle.head import EagleConfig
from specjax.models.config import Attention, DecoderConfig, SlidingWindow
from specjax.models.form import Form
from specjax.models.mtp import MtpConfig
from train.run import setup

GOLDENS = ROOT / "families"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
VARIANTS = sorted(f"../variants/{path.name}" for path in (GOLDENS.parent / "variants").iterdir())
"""Families with other routers."""
TOLERANCE = 1e-4
HALF, TOKENS = 20, 40


@functools.cache
def model_of(name, **form):
    return load_model(GOLDENS / name, dtype="float32", form=Form(**form) if form else None)


@functools.cache
def golden(name):
    return dict(np.load(GOLDENS / name / "golden.npz"))


@functools.partial(jax.jit, static_argnums=0)
def extend(decoder, params, tokens, positions, cache, window, start, visible):
    return decoder.extend(params, tokens, positions, cache, window, start, visible)


def causal(length):
    return jnp.tril(jnp.ones((1, length, length), bool))


def at_once(model, tokens, first=0, cache=None):
    """A pass over the tokens at positions `first` and after, and the cache that holds them too."""
    decoder = model.architecture
    batch, length = tokens.shape
    positions = jnp.broadcast_to(first + jnp.arange(length), tokens.shape)
    cache = decoder.make_cache(batch, 256) if cache is None else cache
    window = decoder.make_window(batch, length)
    out = extend(
        decoder,
        model.params,
        jnp.asarray(tokens),
        positions,
        cache,
        window,
        jnp.int32(0),
        causal(length),
    )
    slots = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    return out, commit(cache, out.window, slots, jnp.full(batch, length, jnp.int32))


def assert_near(logits, name, where=slice(None)):
    expected = golden(name)["logits"][:, where]
    assert np.abs(np.asarray(logits) - expected).max() <= TOLERANCE


def test_there_is_a_golden_for_each_family():
    assert {*NAMES, "llama"} == {*registry.FAMILIES, *registry.TEXT_PARTS}


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_logits_equal_those_of_transformers(name):
    """In two passes, the second after the cache; then that half one by one in the window."""
    model, tokens = model_of(name), golden(name)["tokens"]
    first, cache = at_once(model, tokens[:, :HALF])
    assert_near(first.logits, name, slice(HALF))
    second, _ = at_once(model, tokens[:, HALF:], HALF, cache)
    assert_near(second.logits, name, slice(HALF, None))
    window = model.architecture.make_window(len(tokens), HALF)
    for slot in range(HALF):
        position = HALF + slot
        out = extend(
            model.architecture,
            model.params,
            jnp.asarray(tokens[:, position : position + 1]),
            jnp.full((len(tokens), 1), position),
            cache,
            window,
            jnp.int32(slot),
            causal(HALF)[:, slot : slot + 1],
        )
        window = out.window
        assert_near(out.logits, name, slice(position, position + 1))


fill = jax.jit(prefill, static_argnums=(0, 5))


@pytest.mark.parametrize("name", ["gpt_oss", *slow(*(name for name in NAMES if name != "gpt_oss"))])
def test_chunks_of_a_prompt_do_not_matter(name):
    """One token at a time, seven, and more than a chunk of the prompt."""
    model, tokens = model_of(name), golden(name)["tokens"]
    decoder, lengths = model.architecture, jnp.full(len(tokens), HALF, jnp.int32)
    for chunk in (1, 7, 64):
        cache = decoder.make_cache(len(tokens), 256)
        prompt = jnp.asarray(tokens[:, :HALF])
        cache, _ = fill(decoder, model.params, prompt, lengths, cache, (chunk,))
        after, _ = at_once(model, tokens[:, HALF:], HALF, cache)
        assert_near(after.logits, name, slice(HALF, None))


@functools.partial(jax.jit, static_argnums=0)
def trained_logits(decoder, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)
    parts = (tokens, positions, None, None, jnp.int32(0), causal(TOKENS))
    return decoder.extend(params, *parts).logits


UNUSUAL = ("gpt_oss", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [*UNUSUAL, *slow(*(name for name in NAMES if name not in UNUSUAL))]
)
def test_training_computes_the_same(name):
    model, tokens = model_of(name), jnp.asarray(golden(name)["tokens"])
    assert_near(trained_logits(model.architecture, model.params, tokens), name)


def decoded(model, prompts, drafter=None, tokens=24, **options):
    """Tokens of each prompt."""
    if drafter is not None:
        drafter = make_drafter(drafter, model)
    options = {"sampling": greedy(max_new_tokens=tokens, ignore_eos=True)} | options
    return generate(model, prompts, drafter=drafter, **options).token_ids


def mixed_rows(model, name, drafter=None, batch=4):
    """Tokens of greedy rows, and of sampled ones under `coupled`."""
    tokens = golden(name)["tokens"]
    prompts = [tokens[0].tolist(), tokens[1, :3].tolist(), tokens[1, 5:25].tolist(), [7, 8, 7, 8]]
    drawn = SamplingParams(temperature=0.8, max_new_tokens=16, ignore_eos=True, seed=5)
    requests = [greedy(max_new_tokens=16, ignore_eos=True), drawn] * 2
    options = {"sampling": requests, "verify": "coupled", "batch_size": batch}
    return decoded(model, prompts, drafter, **options)


OTHERS = slow(*sorted({*NAMES} - {"gemma3_text"}))


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("gemma3_text", "early_exit"), *slow(*((name, "ngram") for name in NAMES))],
)
def test_greedy_tokens_equal_those_of_transformers(name, drafter):
    expected, prompts = golden(name)["greedy"].tolist(), golden(name)["tokens"].tolist()
    assert decoded(model_of(name), prompts, drafter) == expected


# Its greedy tokens are compared above; any rows of any drafter in test_loop_output_comparison.
@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("drafter", ["early_exit", "ngram"])
@pytest.mark.parametrize("name", ["gemma3_text", *OTHERS])
def test_drafting_changes_no_token(name, drafter, batch):
    """Rows alone and beside each other."""
    plain = mixed_rows(model_of(name), name, batch=batch)
    assert mixed_rows(model_of(name), name, drafter, batch) == plain


@pytest.mark.parametrize("name", slow(*NAMES))
def test_drafting_changes_no_token_on_a_mesh(name):
    """Nor do the devices: the tokens are those of one."""
    plain = mixed_rows(model_of(name), name)
    placed = place_model(model_of(name), sharding.make_mesh(2, 2, jax.devices()[:4]))
    for drafter in ("ngram", "early_exit"):
        assert mixed_rows(placed, name, drafter) == plain


@pytest.mark.usefixtures("one_width")
@pytest.mark.parametrize("name", ["gemma3_text", *slow("gemma2", "qwen2", "glm4_moe")])
def test_a_model_that_drafts_for_itself_is_always_right(name):
    """Its windows hold drafted tokens and those observed, at positions of their own."""
    model, tokens = model_of(name), golden(name)["tokens"].tolist()
    drafted = generate(
        model,
        tokens,
        drafter=draft_model(model),
        num_speculative_tokens=4,
        sampling=greedy(max_new_tokens=21, ignore_eos=True),
    )
    assert drafted.token_ids == golden(name)["greedy"][:, :21].tolist()
    assert drafted.summary().acceptance_rate == 1.0


@pytest.mark.parametrize("name", slow(*NAMES))
def test_the_command_line_decodes_each_family(name, tmp_path):
    """With the tokenizer of another tiny model, whose 80 tokens the vocabulary has."""
    copy = changed(f"families/{name}", tmp_path)
    for path in (GOLDENS.parent / "grouped_tied").glob("tokenizer*"):
        shutil.copy(path, copy)
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"question_id": 1, "category": "qa", "turns": ["the quick brown fox the quick"]})
    )
    report = tmp_path / "report.json"
    arguments = {
        "target": copy,
        "prompts": tmp_path / "prompts.jsonl",
        "report": report,
        "drafter.name": "ngram",
        "num_speculative_tokens": "fixed",
        "sampling.max_new_tokens": 16,
        "sampling.ignore_eos": "true",
        "compare": "true",
    }
    code = decode.main([f"--config.{field}={value}" for field, value in arguments.items()])
    assert code == 0
    assert all(row["identical"] for row in reports.read_one(report)["rows"])


@pytest.mark.usefixtures("one_width")
@pytest.mark.parametrize(
    "name", ["qwen3_moe", *slow(*(name for name in NAMES if name != "qwen3_moe"))]
)
def test_each_family_in_bfloat16(name):
    """Near the logits of float32, but where other experts are chosen; drafts decide near-ties."""
    model, tokens = load_model(GOLDENS / name, dtype="bfloat16"), golden(name)["tokens"]
    assert model.params["head"]["kernel"].dtype == jnp.bfloat16
    expected = golden(name)["logits"]
    differences = np.abs(np.asarray(at_once(model, tokens)[0].logits) - expected).max(axis=-1)
    assert np.median(differences) <= 3 * 2**-7 * np.abs(expected).max()
    prompts = tokens.tolist()
    options = {"sampling": greedy(max_new_tokens=16, ignore_eos=True)}
    plain, drafted = (decoded(model, prompts, drafter, **options) for drafter in (None, "ngram"))
    plan, requests = plan_requests(model, prompts, sampling=options["sampling"])
    for row, pair in enumerate(zip(drafted, plain, strict=True)):
        found = compare_outputs.compare_row(plan, requests[row], *pair)
        assert found is None or found.excused


OTHER_FORMS = slow("gemma2", "gpt2", "glm4", "qwen2", "smollm3", "olmo3", "granite")


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "deepseek_v3", *OTHER_FORMS])
def test_other_forms_compute_the_same(name):
    """However layers lie, all rows at once, and the kernel, which some layers lack."""
    tokens = golden(name)["tokens"]
    for form in (
        {"layers": "apart"},
        {"layers": "unrolled"},
        {"layers": "unrolled", "cache_attention": "kernel"},
        {"cache_attention": "blocks"},
    ):
        if form.get("layers") == "apart" and model_of(name).config.experts is not None:
            continue
        model = model_of(name, **form)
        _, cache = at_once(model, tokens[:, :HALF])
        out, _ = at_once(model, tokens[:, HALF:], HALF, cache)
        assert_near(out.logits, name, slice(HALF, None))


@pytest.mark.usefixtures("one_width")
@pytest.mark.parametrize(
    "name",
    # Experts on a mesh are in test_experts.
    ["gemma3_text", *OTHERS],
)
def test_each_family_on_a_mesh(name):
    """Rows over `data`, heads and experts over `model`: the tokens of transformers."""
    model, tokens = model_of(name), golden(name)
    mesh = sharding.make_mesh(2, 2, jax.devices()[:4])
    placed = place_model(model, mesh)
    prompts = tokens["tokens"].tolist()
    assert decoded(placed, prompts, "ngram", 8) == tokens["greedy"][:, :8].tolist()


def test_blocks_that_are_too_old_are_not_needed():
    """A window that begins after the first block of the cache, beside a layer that sees it all."""
    window = SlidingWindow(20, (True, False), rope_theta=100.0)
    config = DecoderConfig(40, 16, 24, 2, 2, 1, 8, 1024, sliding_window=window)
    tokens = np.random.default_rng(0).integers(40, size=(2, 600)).astype(np.int32)
    model = random_model(config, 0, dtype="float32")
    decoder = model.architecture
    positions = jnp.broadcast_to(jnp.arange(600), tokens.shape)
    whole = extend(decoder, model.params, tokens, positions, None, None, jnp.int32(0), causal(600))
    lengths = jnp.array([590, 300], jnp.int32)
    cache = decoder.make_cache(2, 768)
    cache, _ = fill(decoder, model.params, jnp.asarray(tokens), lengths, cache, (64,))
    rows = np.asarray(lengths)[:, None] + np.arange(5)
    out = extend(
        decoder,
        model.params,
        jnp.asarray(np.take_along_axis(tokens, rows, axis=1)),
        jnp.asarray(rows),
        cache,
        decoder.make_window(2, 5),
        jnp.int32(0),
        causal(5),
    )
    expected = np.take_along_axis(np.asarray(whole.logits), rows[:, :, None], axis=1)
    np.testing.assert_allclose(out.logits, expected, atol=3e-5, rtol=1e-4)
    # Nothing that only the windowed layer could have seen: what is in the old block does not count.
    poisoned = dataclasses.replace(cache, k=cache.k.at[0, :, :, :256].set(jnp.nan))
    again = extend(
        decoder,
        model.params,
        jnp.asarray(np.take_along_axis(tokens, rows, axis=1)),
        jnp.asarray(rows),
        poisoned,
        decoder.make_window(2, 5),
        jnp.int32(0),
        causal(5),
    )
    np.testing.assert_array_equal(again.logits, out.logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mixtral", 1e-5),
        ("glm4", 1.5625e-7),
        ("glm4_moe", 1e-5),
        ("qwen3", 1e-6),
        ("smollm3", 1e-6),
        ("olmo2", 1e-5),
        ("olmo3", 1e-5),
        ("phi3", 1e-5),
        ("granite", 1e-6),
        ("gpt_oss", 1e-5),
        ("deepseek_v2", 1e-6),
        ("deepseek_v3", 1e-6),
    ],
)
def test_an_epsilon_that_is_not_stated_is_transformers_own(name, value, tmp_path):
    copy = changed(f"families/{name}", tmp_path, rms_norm_eps=None)
    assert read_config(copy, None)[0].rms_norm_eps == value


def test_layers_that_are_not_stated(tmp_path):
    change = {"no_rope_layers": None, "layer_types": None, "num_hidden_layers": 8}
    config, _ = read_config(changed("families/smollm3", tmp_path / "a", **change), None)
    assert config.attention.unrotated == (False, False, False, True)
    assert config.windowed == config.unrotated
    config, _ = read_config(changed("families/olmo3", tmp_path / "b", layer_types=None), None)
    assert config.windowed == (True, True, True, False)


def test_windows_of_qwen_that_are_not_stated(tmp_path):
    change = {"sliding_window": None, "layer_types": None, "max_window_layers": 1}
    config, _ = read_config(changed("families/qwen2", tmp_path, **change), None)
    assert config.sliding_window.size == 4096
    assert config.windowed == (False, True, True)


def test_a_model_without_a_layer_that_has_experts(tmp_path):
    config = dataclasses.replace(model_of("glm4_moe").config, num_layers=1)
    assert [run.name for run in config.runs] == ["layers"]
    model = random_model(config, 0, dtype="float32")
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype="float32")
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, again.params))


@pytest.mark.usefixtures("one_width")
@pytest.mark.parametrize("name", ["gpt2", *slow("gemma3_text")])
def test_modules_have_their_targets_norms(name):
    """Layer norms with biases, and scales that are stored less one."""
    model = dataclasses.replace(model_of(name), mtp=None)
    head = mtp_head(model, decoder=model.config.one_layer())
    prompts = golden(name)["tokens"].tolist()
    request = greedy(max_new_tokens=8, ignore_eos=True)
    got = generate(model, prompts, drafter=head_drafter(head, model), sampling=request)
    assert got.token_ids == golden(name)["greedy"][:, :8].tolist()
    norms = head.config.parameter_table()["modules"]["0"]["final_norm"]
    assert set(norms) == ({"scale", "bias"} if name == "gpt2" else {"scale"})
    assert norms["scale"].kind == ("ones" if name == "gpt2" else "zeros")


@pytest.mark.parametrize("name", [*NAMES, "../variants/granitemoehybrid"])
def test_a_saved_model_loads_as_it_was(name, tmp_path):
    """In its family's names, which are the golden checkpoint's; and as a checkpoint of specjax."""
    model = dataclasses.replace(model_of(name), mtp=None)
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype="float32")
    assert again.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, again.params))
    written, theirs = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "saved", GOLDENS / name)
    )
    if name in registry.TEXT_PARTS:
        family = registry.FAMILIES[registry.TEXT_PARTS[name].family]
        theirs = {"architectures": [family.architecture], "model_type": family.model_type}
    assert written["architectures"] == theirs["architectures"]
    assert written["model_type"] == theirs["model_type"]
    save_checkpoint(model, tmp_path / "checkpoint")
    assert load_model(tmp_path / "checkpoint", dtype="float32").config == model.config


@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_does_not_have_cannot_be_saved(name, tmp_path):
    model = dataclasses.replace(model_of(name), mtp=None)
    other = dataclasses.replace(model.config, logit_softcap=7.0, rope_theta=123.0)
    config = dataclasses.replace(other, mlp=dataclasses.replace(other.mlp, activation="gelu"))
    with pytest.raises(InputError, match=r"(logit_softcap|mlp|rope_theta)=.* use another family"):
        save_model(dataclasses.replace(model, config=config), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


LINEAR = {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3 = {
    "rope_theta": 5000.0,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "layer_types": None,
    "sliding_window_pattern": 3,
}
SHORT = {"rope_theta": 1000.0, "layer_types": None}
OLMO3 = {
    "rope_theta": 1000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
GPT_OSS = {
    "rope_theta": 1000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
    "initial_context_length": 32,
    "swiglu_alpha": None,
}
DEEPSEEK = {
    "rope_theta": 1000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 32,
    },
    "head_dim": None,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "ep_size": 1,
}
PHI3 = {
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.0, 2.0, 3.5],
    },
}


@pytest.mark.parametrize(
    ("source", "old"),
    [
        ("grouped_tied", {"rope_theta": 10000.0, "rope_scaling": None}),
        ("linear", LINEAR),
        ("llama3", {"rope_theta": 100.0, "rope_scaling": LLAMA3}),
        ("families/gemma3_text", GEMMA3),
        ("families/gemma2", SHORT),
        ("families/glm4", {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}),
        ("families/qwen2", SHORT | {"_name_or_path": "x"}),
        ("families/smollm3", {"rope_theta": 1000.0}),
        ("families/olmo3", OLMO3),
        ("families/phi3", PHI3),
        ("families/gpt_oss", GPT_OSS),
        ("families/deepseek_v3", DEEPSEEK),
    ],
)
def test_the_fields_of_transformers_4_mean_the_same(tmp_path, source, old):
    change = {"rope_parameters": None, "dtype": None, "torch_dtype": "bfloat16"} | old
    copy = changed(source, tmp_path, **change)
    assert read_config(copy, None) == read_config(ROOT / source, None)


def test_the_layout_of_the_first_gpt2_is_read(tmp_path):
    """Names without a prefix, the causal masks that it kept, and the head beside the embedding."""
    from safetensors.numpy import load_file, save_file

    copy = changed("families/gpt2", tmp_path)
    path = copy / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    tensors["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    tensors["lm_head.weight"] = tensors["wte.weight"].copy()
    save_file(tensors, path)
    again = load_model(copy, dtype="float32")
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, model_of("gpt2").params))


def test_the_names_of_published_hybrids_are_read(tmp_path):
    """The prefix of Nemotron-H, whose layers are letters, and modules beside a text part."""
    from safetensors.numpy import load_file, save_file

    copy = changed("families/nemotron_h", tmp_path, layers_block_type=None)
    fields = json.loads((copy / "config.json").read_text())
    fields |= {"hybrid_override_pattern": "M-*-MM", "time_step_limit": [0.0, float("inf")]}
    (copy / "config.json").write_text(json.dumps(fields))
    path = copy / "model.safetensors"
    tensors = load_file(path).items()
    save_file({name.replace("model.", "backbone."): value for name, value in tensors}, path)
    again = load_model(copy, dtype="float32")
    assert again.config == model_of("nemotron_h").config
    jax.tree.map(np.testing.assert_array_equal, again.params, model_of("nemotron_h").params)
    assert model_of("qwen3_5").mtp is not None


def test_sizes_that_an_olmo_hybrid_need_not_state(tmp_path):
    """Three of four layers are recurrent, and not all of them in a small model."""
    fields = dict(model_type="olmo_hybrid", vocab_size=96, hidden_size=64, intermediate_size=40)
    fields |= dict(num_hidden_layers=3, num_attention_heads=4)
    ropes = [
        (dict(rope_parameters=None), 16),
        (dict(rope_parameters={"rope_type": "default"}), 16),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": None}), 0),
        (dict(rope_theta=None), 0),
    ]
    for rope, rotated in ropes:
        (tmp_path / "config.json").write_text(json.dumps(fields | rope))
        config, _ = read_config(tmp_path, None)
        assert (config.num_kv_heads, config.rotary_width) == (4, rotated)
    assert config.mixers == ("recurrent", "recurrent", "attention")
    found = config.recurrence
    assert (found.key_heads, found.value_heads, found.conv_width) == (4, 4, 4)
    assert (found.key_width, found.value_width, found.doubled) == (12, 24, True)


def test_granite_4_with_attention_alone(tmp_path):
    """Its config has the fields of Mamba-2, of no effect."""
    copy = changed(
        "families/granitemoehybrid",
        tmp_path,
        layer_types=["attention"] * 4,
        position_embedding_type="rope",
    )
    config, _ = read_config(copy, None)
    assert (config.recurrence, config.mixers, config.rotary_width) == (None, ("attention",), 8)
    model = random_model(config, 0, dtype="float32")
    save_model(model, tmp_path / "saved")
    assert load_model(tmp_path / "saved", dtype="float32").config == config


@pytest.mark.parametrize(
    ("flags", "period"),
    [
        ("1", "1"),
        ("0000", "0"),
        ("1010", "10"),
        ("10101", "10"),
        ("0011", "0011"),
        ("11011", "110"),
    ],
)
def test_the_shortest_period(flags, period):
    assert schema.shortest_period([flag == "1" for flag in flags]) == tuple(
        flag == "1" for flag in period
    )


def test_a_parameter_without_a_name_is_refused():
    config = dataclasses.replace(model_of("glm4").config, family="llama")
    with pytest.raises(InputError, match="family='llama': it has no name for layers.after_"):
        random_model(config, 0)


def test_training_refuses_a_target_that_limits_or_divides_its_logits():
    setup.check_logits(model_of("gemma3_text").config, "gemma3_text")
    with pytest.raises(InputError, match=r"gemma2 limits its logits \(logit_softcap=3.0\)"):
        setup.check_logits(model_of("gemma2").config, "gemma2")
    with pytest.raises(InputError, match=r"granite divides its logits \(logit_divisor=1.7\)"):
        setup.check_logits(model_of("granite").config, "granite")


def test_heads_say_which_layers_they_support():
    gemma, qwen = model_of("gemma2").config, model_of("qwen3").config
    sizes = {"target_hidden_size": 32, "draft_vocab_size": 96, "taps": ("layer_input:1",)}
    with pytest.raises(InputError, match="attention=.*qk_norm=True.*: an EAGLE head's layer is"):
        EagleConfig(decoder=dataclasses.replace(qwen, num_layers=1), version=3, **sizes)
    assert EagleConfig(decoder=qwen.llama_layers(1), version=3, **sizes).decoder.family == "llama"
    with pytest.raises(InputError, match="sliding_window=.*: an MTP module has no sliding window"):
        MtpConfig(decoder=dataclasses.replace(gemma, num_layers=1), draft_vocab_size=96)
    assert MtpConfig(decoder=gemma.one_layer(), draft_vocab_size=96).decoder.norm == gemma.norm
    for name, field in (
        ("olmo2", "norm"),
        ("smollm3", "attention"),
        ("granite", "embedding"),
    ):
        one = dataclasses.replace(model_of(name).config, num_layers=1, sliding_window=None)
        if name == "granite":
            one = dataclasses.replace(one, attention=Attention())
        with pytest.raises(InputError, match=f"{field}=.*: an EAGLE head's layer is"):
            EagleConfig(decoder=one, version=3, **sizes)
        MtpConfig(decoder=one.one_layer(), draft_vocab_size=96)
    divided = dataclasses.replace(qwen.one_layer(), logit_divisor=2.0)
    with pytest.raises(InputError, match=r"logit_divisor=2\.0: an MTP module has no"):
        MtpConfig(decoder=divided, draft_vocab_size=96)


@functools.partial(jax.jit, static_argnums=(0, 4))
def states_after(decoder, params, tokens, states, num_layers):
    positions = jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)
    parts = (tokens, positions, None, None, jnp.int32(0), causal(TOKENS))
    options = {"states": states, "num_layers": num_layers, "features": ("pre_norm",)}
    return decoder.extend(params, *parts, logits=False, **options).features["pre_norm"]


def test_layers_keep_their_windows_and_rotations():
    """A decoder of some of the layers computes what they do within the whole."""
    model, tokens = model_of("smollm3"), jnp.asarray(golden("smollm3")["tokens"])
    some = model.config.some_layers((1, 2))
    assert (some.unrotated, some.windowed) == ((True, False), (True, False))
    decoder, params = model.architecture, model.params
    before, after = (states_after(decoder, params, tokens, None, count) for count in (1, 3))
    two = {**params, "layers": jax.tree.map(lambda leaf: leaf[1:3], params["layers"])}
    decoder = dataclasses.replace(decoder, config=some)
    np.testing.assert_allclose(states_after(decoder, two, tokens, before, 2), after, atol=1e-6)


def test_the_other_parts_of_a_multimodal_model_are_counted(caplog):
    load_model(GOLDENS / "mistral3")
    (line,) = [line for line in caplog.messages if "text part" in line]
    assert line.endswith("model_type='mistral3', without the 15 tensors of its other parts")
