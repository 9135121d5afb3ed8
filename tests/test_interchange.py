"""Heads in other tools' layouts: same logits after a round trip, tensors mean what they should."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import GOLDENS, edit_head, written_head
from safetensors.numpy import load_file, save_file
from tiny_models import (
    SOME,
    VOCABULARY,
    block_head,
    draft_logits,
    eagle_head,
    medusa_head,
    noisy_medusa_head,
    peagle_head,
)

from specjax.errors import InputError
from specjax.files.folder_checksums import MARKER
from specjax.loading.load import load_model, random_model
from specjax.loading.quantize import in_stacked_form, quantized_model
from specjax.methods.block.head import BlockHead
from specjax.methods.eagle.head import EagleConfig
from specjax.methods.find_head import kind_of_head, read_any_head
from specjax.methods.heads import shared_with_target
from specjax.methods.heads.head import check_same, whole_vocabulary
from specjax.methods.medusa.head import Medusa
from specjax.methods.published_layouts import read_foreign, write_foreign
from specjax.methods.saved_heads import read_head, save_head

FORMS = {
    "medusa": ("medusa", lambda t: noisy_medusa_head(t)),
    "medusa_reduced": ("medusa", lambda t: noisy_medusa_head(t, VOCABULARY, layers=2)),
    "medusa_original": ("medusa", lambda t: noisy_medusa_head(t, original=True)),
    "medusa_original_reduced": (
        "medusa",
        lambda t: noisy_medusa_head(t, VOCABULARY, original=True),
    ),
    "eagle_bias": ("eagle", lambda t: eagle_head(t, version=1, fc_bias=True)),
    "eagle3_reduced": ("eagle3", lambda t: eagle_head(t, vocabulary=VOCABULARY)),
    "eagle3_flags": (
        "eagle3",
        lambda t: eagle_head(
            t,
            vocabulary=VOCABULARY,
            norm_before_residual=True,
            fc_norm=True,
            norm_output=True,
            own_embedding=True,
        ),
    ),
    "peagle": ("peagle", lambda t: peagle_head(t, vocabulary=VOCABULARY, num_layers=3)),
    "peagle_of_speculators": (
        "speculators",
        lambda t: peagle_head(t, num_layers=2, norm_before_residual=True, own_embedding=True),
    ),
    "dflash_causal": ("dflash", lambda t: block_head(t, causal=True)),
    "dflash2": (
        "dflash",
        lambda t: block_head(
            t, conv_kernel_size=2, conv_group_size=6, selector_rank=3, selector_top_k=5
        ),
    ),
    "dspark": (
        "dspark",
        lambda t: block_head(t, markov_rank=3, sample_from_anchor=True, confidence=True),
    ),
    "eagle3_norm_before_fc": (
        "eagle3",
        lambda t: eagle_head(t, norm_before_fc=True, num_kv_heads=4),
    ),
    "dspark_of_speculators": (
        "speculators",
        lambda t: block_head(t, markov_rank=3, sample_from_anchor=True, confidence=True),
    ),
    "dflash2_of_speculators": (
        "speculators",
        lambda t: block_head(
            t, conv_kernel_size=2, conv_group_size=6, selector_rank=3, selector_top_k=5
        ),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_re_imported_export_gives_the_same_logits(form, tiny, tmp_path):
    name, make = FORMS[form]
    head = make(tiny)
    path = written_head(tmp_path, head, name, tiny)
    again = read_foreign(path, tiny)
    assert (again.kind, again.config, again.target) == (head.kind, head.config, head.target)
    np.testing.assert_array_equal(draft_logits(again, tiny), draft_logits(head, tiny))
    check_same(head, again, "export")
    # A tool that keeps no notes loses the target's name only.
    edit_head(path)
    assert read_foreign(path, tiny).config == head.config


@pytest.fixture(scope="module")
def wide():
    """A target with kernels that can be rounded in groups of 32, by the bits of its weights."""
    from tiny_models import tiny_config

    config = tiny_config(hidden_size=32, intermediate_size=64, num_heads=4, head_dim=8)
    floats = in_stacked_form(random_model(config, 3, dtype="float32"))
    return {"float": floats, **{bits: quantized_model(floats, bits) for bits in ("int8", "int4")}}


BESIDE_FEW_BITS = {
    **{name: entry for name, entry in FORMS.items() if not name.startswith("dflash2")},
    **{
        f"{form}_reduced": (form, functools.partial(block_head, vocabulary=VOCABULARY, **options))
        for form, options in (
            ("dflash", {}),
            ("dspark", dict(markov_rank=3, confidence=True)),
            ("speculators", {}),
        )
    },
    "medusa_projection": ("medusa", functools.partial(medusa_head, projection=True)),
}


@pytest.mark.parametrize("form", BESIDE_FEW_BITS)
def test_heads_of_every_layout_load_beside_the_target_in_other_bits(form, wide, tmp_path, caplog):
    """Copies of the target's arrays in a head's file are those of other bits: the target's count.

    It says so. Rows of another target, or of other tokens, are refused.
    """
    name, make = BESIDE_FEW_BITS[form]
    for exported in wide:
        target = wide[exported]
        head = make(target)
        path = written_head(tmp_path / exported, head, name, target)
        wanted = read_foreign(path, target)
        stored = load_file(next(path.glob("*.safetensors")))
        has_copy = not isinstance(head.config, EagleConfig) and "lm_head.weight" in stored
        for loaded in wide:
            caplog.clear()
            again = read_foreign(path, wide[loaded])
            check_same(wanted, again, "other bits")
            # The output head has 8 bits in both.
            rounded = has_copy and (exported == "float") != (loaded == "float")
            assert ["up to rounding" in line for line in caplog.messages] == [True] * rounded
    if has_copy:
        rows = stored["lm_head.weight"]
        edit_head(path, tensors={"lm_head.weight": np.roll(rows, 1, axis=0)})
        with pytest.raises(
            InputError, match=r"lm_head\.weight differs from that of random-3, which"
        ):
            read_foreign(path, wide["int4"])


@pytest.mark.parametrize("form", ["eagle3_flags", "eagle3_norm_before_fc", "eagle3_reduced"])
def test_speculators_layout(form, tiny, tmp_path):
    head = FORMS[form][1](tiny)
    path = written_head(tmp_path, head, "speculators", tiny)
    names = load_file(path / "model.safetensors").keys()
    assert "layers.0.hidden_norm.weight" in names
    assert not any(name.startswith("midlayer") for name in names)
    again = read_foreign(path, tiny)
    assert again.config == head.config
    np.testing.assert_array_equal(draft_logits(again, tiny), draft_logits(head, tiny))


@pytest.mark.parametrize(
    ("family", "architecture", "model_type"),
    [
        ("qwen2", "Qwen2ForCausalLM", "qwen2"),
        ("glm4_moe", "Glm4MoeForCausalLM", "glm4_moe"),
        ("of our own", "LlamaForCausalLM", "llama"),
    ],
)
@pytest.mark.parametrize("make", [eagle_head, block_head])
def test_an_export_names_the_architecture_of_its_target(
    make, family, architecture, model_type, tiny, tmp_path
):
    """As in the target's own config.json; a family that no file names counts as Llama."""
    config = dataclasses.replace(tiny.config, family=family)
    target = dataclasses.replace(tiny, config=config)
    path = written_head(tmp_path, make(tiny), "speculators", target)
    config = json.loads((path / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": target.name,
        "architectures": [architecture],
        "model_type": model_type,
    }
    # The head's own layers are those of its kind.
    of_layers = config["transformer_layer_config"]["model_type"]
    assert of_layers == ("llama" if make is eagle_head else "qwen3")


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_the_architecture_is_that_of_the_targets_file(name, tmp_path):
    target = load_model(GOLDENS / "families" / name, dtype="float32")
    plain = dataclasses.replace(target, config=target.config.llama_layers(target.config.num_layers))
    path = written_head(tmp_path, eagle_head(plain), "speculators", target)
    written, own = (
        json.loads((folder / "config.json").read_text())
        for folder in (path, GOLDENS / "families" / name)
    )
    verifier = written["speculators_config"]["verifier"]
    assert verifier["architectures"] == own["architectures"]
    assert verifier["model_type"] == own["model_type"]


@pytest.mark.parametrize("ids", [None, SOME])
def test_projections_are_written_as_heads_of_their_own(ids, tiny, tmp_path):
    head = medusa_head(tiny, projection=True, ids=ids)
    again = read_foreign(written_head(tmp_path, head, "medusa", tiny), tiny)
    assert not again.config.original_lm_head
    assert not again.config.projection
    wanted = draft_logits(head, tiny)
    np.testing.assert_allclose(draft_logits(again, tiny), wanted, rtol=1e-4, atol=1e-4)
    without = dataclasses.replace(head.config, projection=False)
    params = {"blocks": head.params["blocks"]}
    plain = dataclasses.replace(head, config=without, params=params)
    assert np.abs(draft_logits(plain, tiny) - wanted).max() > 0.1


@pytest.mark.parametrize(("form", "vocabulary"), [("eagle3", VOCABULARY), ("speculators", None)])
def test_columns_of_the_targets_head_are_written_out(form, vocabulary, tiny, tmp_path):
    head = eagle_head(tiny, vocabulary=vocabulary, own_head=False)
    path = written_head(tmp_path, head, form, tiny)
    rows = shared_with_target.target_head(tiny)
    rows = rows if vocabulary is None else rows[head.draft_ids]
    np.testing.assert_array_equal(load_file(path / "model.safetensors")["lm_head.weight"], rows)
    again = read_foreign(path, tiny)
    assert again.config.own_head
    np.testing.assert_array_equal(draft_logits(again, tiny), draft_logits(head, tiny))
    # specjax's own layout has none.
    save_head(head, tmp_path / "own")
    check_same(head, read_head(tmp_path / "own"), "own")
    assert "head" not in head.params


def test_the_comparison_sees_one_changed_weight(tiny):
    for _, make in FORMS.values():
        head = make(tiny)
        leaves, tree = jax.tree.flatten(head.params)
        for index, leaf in enumerate(leaves):
            other = list(leaves)
            other[index] = np.asarray(leaf) * np.float32(1.01)
            changed = dataclasses.replace(head, params=jax.tree.unflatten(tree, other))
            with pytest.raises(InputError, match="another head"):
                check_same(head, changed, "export")


def torch_linear(weight, x):
    """What torch.nn.Linear does with a weight [out, in]."""
    return x @ weight.T


def test_medusa_tensors_mean_what_medusa_does(tiny, tmp_path):
    head = noisy_medusa_head(tiny, layers=2)
    stored = load_file(written_head(tmp_path, head, "medusa", tiny) / "medusa_lm_head.safetensors")
    x = np.random.default_rng(0).standard_normal((4, 24)).astype(np.float32)
    medusa = Medusa(head.config, tiny.dtype)
    states = jax.jit(medusa.states)(head.params, jnp.asarray(x)[None])
    for index in range(3):
        wanted = x
        for layer in range(2):
            y = torch_linear(stored[f"{index}.{layer}.linear.weight"], wanted)
            y = y + stored[f"{index}.{layer}.linear.bias"]
            wanted = wanted + y / (1 + np.exp(-y))
        got = medusa.logits(head.params, states[index], index)
        np.testing.assert_allclose(
            got[0], torch_linear(stored[f"{index}.2.weight"], wanted), rtol=1e-4, atol=1e-4
        )


def test_eagle_tensors_mean_what_eagle_does(tiny, tmp_path):
    """The first pair attends to itself alone, so that its value passes whatever RoPE does."""
    head = eagle_head(tiny, version=1)
    stored = load_file(written_head(tmp_path, head, "eagle", tiny) / "model.safetensors")
    assert "layers.0.input_layernorm.weight" not in stored
    rng = np.random.default_rng(0)
    feature = rng.standard_normal(24).astype(np.float32)
    embedding = shared_with_target.target_embedding(tiny)[7]
    x = torch_linear(stored["fc.weight"], np.concatenate([embedding, feature]))
    layer = {name.removeprefix("layers.0."): value for name, value in stored.items()}
    value = torch_linear(layer["self_attn.v_proj.weight"], x).reshape(2, 6)
    value = np.repeat(value, 2, axis=0).reshape(-1)
    x = x + torch_linear(layer["self_attn.o_proj.weight"], value)
    normed = x / np.sqrt(np.mean(x**2) + 1e-5) * layer["post_attention_layernorm.weight"]
    gate = torch_linear(layer["mlp.gate_proj.weight"], normed)
    up = torch_linear(layer["mlp.up_proj.weight"], normed)
    x = x + torch_linear(layer["mlp.down_proj.weight"], gate / (1 + np.exp(-gate)) * up)
    wanted = torch_linear(shared_with_target.target_head(tiny), x)
    np.testing.assert_allclose(first_pair(head, tiny, 7, feature), wanted, rtol=1e-4, atol=1e-4)


def first_pair(head, target, token, feature):
    from specjax.drafters import head_drafter
    from specjax.methods.eagle.head import Eagle

    params = head_drafter(head, target).params
    eagle = Eagle(head.config, target.dtype)

    @jax.jit
    def run(params, tokens, features):
        output, _ = eagle.extend(
            params,
            tokens,
            eagle.fuse(params, features),
            jnp.zeros((1, 1), jnp.int32),
            eagle.make_cache(1, 4),
            eagle.make_window(1, 1),
            0,
            jnp.ones((1, 1, 1), bool),
        )
        return eagle.logits(params, output)[0, 0]

    features = {"final_norm": jnp.asarray(feature)[None, None]}
    return run(params, jnp.full((1, 1), token), features)


def test_vocabulary_maps_are_offsets_and_a_mask(tiny, tmp_path):
    head = eagle_head(tiny, vocabulary=VOCABULARY)
    stored = load_file(written_head(tmp_path, head, "eagle3", tiny) / "model.safetensors")
    np.testing.assert_array_equal(np.arange(VOCABULARY) + stored["d2t"], head.draft_ids)
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), head.draft_ids)
    assert stored["d2t"].dtype == np.int64
    assert stored["t2d"].dtype == np.bool_
    assert stored["lm_head.weight"].shape == (VOCABULARY, 24)


def test_maps_in_another_order_are_sorted_with_their_rows(tiny, tmp_path):
    head = eagle_head(tiny, vocabulary=VOCABULARY)
    path = written_head(tmp_path, head, "eagle3", tiny)
    stored = load_file(path / "model.safetensors")
    order = np.random.default_rng(0).permutation(VOCABULARY)
    ids = head.draft_ids[order]
    edit_head(
        path,
        tensors={
            "d2t": ids - np.arange(VOCABULARY),
            "lm_head.weight": stored["lm_head.weight"][order],
        },
    )
    check_same(head, read_foreign(path, tiny), "sorted")


def test_a_map_of_zeros_that_nothing_confirms_is_said(tiny, tmp_path, caplog):
    head = eagle_head(tiny, vocabulary=VOCABULARY)
    first = dataclasses.replace(head, draft_ids=np.arange(VOCABULARY, dtype=np.int32))
    path = written_head(tmp_path, first, "eagle3", tiny)
    edit_head(path)
    np.testing.assert_array_equal(read_foreign(path, tiny).draft_ids, np.arange(VOCABULARY))
    assert not caplog.messages
    edit_head(path, drop=["t2d"])
    np.testing.assert_array_equal(read_foreign(path, tiny).draft_ids, np.arange(VOCABULARY))
    (line,) = caplog.messages
    assert "all offsets of d2t are 0" in line
    assert "drafts the tokens 0..39;" in line
    caplog.clear()
    edit_head(path, tensors={"d2t": head.draft_ids - np.arange(VOCABULARY)})
    np.testing.assert_array_equal(read_foreign(path, tiny).draft_ids, head.draft_ids)
    assert not caplog.messages
    # A mask that was never filled in contradicts the map.
    edit_head(path, tensors={"d2t": 0 * head.draft_ids, "t2d": np.zeros(61, np.bool_)})
    with pytest.raises(InputError, match="t2d and d2t disagree about 40 tokens, such as 0"):
        read_foreign(path, tiny)


def test_a_padded_vocabulary_is_truncated(tiny, tmp_path):
    head = eagle_head(tiny, vocabulary=VOCABULARY, own_embedding=True)
    path = written_head(tmp_path, head, "eagle3", tiny)
    stored = load_file(path / "model.safetensors")
    edit_head(
        path,
        config={"vocab_size": 64},
        tensors={
            "t2d": np.pad(stored["t2d"], (0, 3)),
            "embed_tokens.weight": np.pad(stored["embed_tokens.weight"], ((0, 3), (0, 0))),
        },
    )
    check_same(head, read_foreign(path, tiny), "truncated")


PADDED = 64
"""Rows of a target whose embedding is padded beyond its 61 tokens."""


@pytest.mark.parametrize("form", ["eagle3", "speculators", "medusa"])
def test_a_draft_vocabulary_may_name_padding(tiny, tmp_path, form):
    """Too few tokens in the training data: the map is filled with rows that have no token."""
    medusa = form == "medusa"
    make = noisy_medusa_head if medusa else eagle_head
    head = make(tiny, vocabulary=VOCABULARY)
    path = written_head(tmp_path, head, form, tiny)
    ids = np.concatenate([head.draft_ids[:-2], [62, 63]]).astype(np.int64)
    maps = {"token_map": ids}
    if not medusa:
        known = np.zeros(PADDED, np.bool_)
        known[ids] = True
        maps = {"d2t": ids - np.arange(VOCABULARY), "t2d": known}
    config = json.loads((path / "config.json").read_text())
    layer = "transformer_layer_config"
    changed = {layer: {**config[layer], "vocab_size": PADDED}} if layer in config else {}
    edit_head(path, config=changed or {"vocab_size": PADDED}, tensors=maps)
    again = read_foreign(path, tiny)
    np.testing.assert_array_equal(again.draft_ids, head.draft_ids[:-2])
    kernel, own = (np.asarray(one.params["head"]["kernel"]) for one in (again, head))
    np.testing.assert_array_equal(kernel, own[..., :-2])
    # Ids beyond the stated rows are still refused.
    edit_head(path, tensors={next(iter(maps)): np.full(VOCABULARY, 99)})
    with pytest.raises(InputError, match="out of range"):
        read_foreign(path, tiny)


def test_a_padded_medusa_head_need_not_state_its_rows(tiny, tmp_path):
    head = noisy_medusa_head(tiny)
    path = written_head(tmp_path, head, "medusa", tiny)
    stored = load_file(next(path.glob("*.safetensors")))
    wide = {
        name: np.pad(value, ((0, PADDED - len(value)), (0, 0)), constant_values=9)
        for name, value in stored.items()
        if value.shape[0] == tiny.config.vocab_size
    }
    assert wide
    edit_head(path, config={"vocab_size": None, "truncated_vocab_size": None}, tensors=wide)
    check_same(head, read_foreign(path, tiny), "truncated")


def test_an_embedding_that_is_the_targets_is_borrowed(tiny, tmp_path):
    path = written_head(tmp_path, eagle_head(tiny), "eagle3", tiny)
    embedding = shared_with_target.target_embedding(tiny)
    edit_head(path, tensors={"embed_tokens.weight": embedding})
    assert not read_foreign(path, tiny).config.own_embedding
    edit_head(path, tensors={"embed_tokens.weight": embedding + 1})
    assert read_foreign(path, tiny).config.own_embedding


def test_half_precision_stays_as_it_is_stored(tiny, tmp_path):
    head = eagle_head(tiny, vocabulary=VOCABULARY)
    half = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), head.params)
    head = dataclasses.replace(head, params=half, training={"tokens": 12})
    path = written_head(tmp_path, head, "speculators", tiny)
    again = read_foreign(path, tiny)
    assert {leaf.dtype for leaf in jax.tree.leaves(again.params)} == {np.dtype("float16")}
    assert again.training == {"tokens": 12}
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "float16"


@pytest.fixture(scope="module")
def deep():
    """A target of ten layers, whose published taps are 2, 5 and 7."""
    from tiny_models import tiny_config

    return random_model(tiny_config(num_layers=10), 3, dtype="float32")


def test_layer_ids_count_inputs_or_outputs(deep, tmp_path):
    head = eagle_head(deep)
    assert head.config.taps == ("layer_input:2", "layer_input:5", "layer_input:7")
    for convention, ids in (("input", [2, 5, 7]), ("output", [1, 4, 6])):
        path = written_head(tmp_path / convention, head, "eagle3", deep, layer_ids=convention)
        config = json.loads((path / "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
        assert read_foreign(path, deep).config.taps == head.config.taps
        other = {"input": "output", "output": "input"}[convention]
        with pytest.raises(InputError, match="the export says"):
            read_foreign(path, deep, layer_ids=other)
        # Without our notes the file does not say.
        edit_head(path)
        assert read_foreign(path, deep, layer_ids=convention).config.taps == head.config.taps
    with pytest.raises(InputError, match=r"may count outputs .* layer_ids=output or"):
        read_foreign(path, deep)
    edit_head(path, config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 10]}})
    assert read_foreign(path, deep).config.taps[-1] == "pre_norm"
    edit_head(path, config={"eagle_config": {}})
    assert read_foreign(path, deep).config.taps == head.config.taps


@pytest.mark.parametrize("layer_ids", [None, "input", "output"])
def test_target_layer_ids_number_outputs_whatever_the_others_do(deep, tmp_path, layer_ids):
    """As DeepSpec and the tools that train on its heads write them, at the top of config.json."""
    head = eagle_head(deep)
    path = written_head(tmp_path, head, "eagle3", deep)
    published = {"target_layer_ids": [1, 4, 6], "num_target_layers": 10, "ttt_length": 7}
    edit_head(path, config={"eagle_config": None, **published})
    assert read_foreign(path, deep, layer_ids=layer_ids).config.taps == head.config.taps
    edit_head(path, config={"target_layer_ids": [-1, 4, 9]})
    taps = read_foreign(path, deep, layer_ids=layer_ids).config.taps
    assert taps == ("layer_input:0", "layer_input:5", "pre_norm")
    # Both names: what one numbers says what the other does.
    others = {"input": [2, 5, 7], "output": [1, 4, 6]}
    for convention, ids in others.items():
        name = "eagle_aux_hidden_state_layer_ids"
        edit_head(path, config={"target_layer_ids": [1, 4, 6], "eagle_config": {name: ids}})
        if layer_ids in (None, convention):
            assert read_foreign(path, deep, layer_ids=layer_ids).config.taps == head.config.taps
            continue
        with pytest.raises(
            InputError, match=r"target_layer_ids=\[1, 4, 6\]: eagle_aux.* names oth"
        ):
            read_foreign(path, deep, layer_ids=layer_ids)
    edit_head(path, config={"eagle_config": None, "target_layer_ids": [1, 4, 10]})
    with pytest.raises(InputError, match=r"target_layer_ids=\[1, 4, 10\]: out of range: .* has 10"):
        read_foreign(path, deep, layer_ids=layer_ids)
    edit_head(path, config={"target_layer_ids": [1, 4, 6], "num_target_layers": 12})
    with pytest.raises(InputError, match="num_target_layers=12: random-3 has 10; use a head made"):
        read_foreign(path, deep, layer_ids=layer_ids)


def test_medusa_under_vllms_names_and_as_published(tiny, tmp_path):
    head = noisy_medusa_head(tiny, layers=2)
    path = written_head(tmp_path, head, "medusa", tiny)
    file = path / "medusa_lm_head.safetensors"
    stored = load_file(file)
    renamed = {
        (
            f"blocks.{name[0]}.layers.{name[2]}.{name.split('.')[-1]}"
            if "linear" in name
            else f"lm_heads.{name[0]}.weight"
        ): value
        for name, value in stored.items()
    }
    save_file(renamed, file)
    (path / MARKER).unlink()
    check_same(head, read_foreign(path, tiny), "vLLM's names")
    save_file({f"medusa_heads.{name}": value for name, value in stored.items()}, file)
    # The published config says no more than this.
    published = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    (path / "config.json").write_text(json.dumps(published))
    check_same(head, read_foreign(path, tiny), "published")


def test_eagle1_with_the_targets_embedding_and_head(tiny, tmp_path):
    head = eagle_head(tiny, version=1)
    path = written_head(tmp_path, head, "eagle", tiny)
    both = {
        "embed_tokens.weight": shared_with_target.target_embedding(tiny).astype(np.float16),
        "lm_head.weight": shared_with_target.target_head(tiny),
    }
    edit_head(path, tensors=both)
    check_same(head, read_foreign(path, tiny), "with both")
    edit_head(path, tensors={"lm_head.weight": 2 * both["lm_head.weight"]})
    with pytest.raises(InputError, match="lm_head.weight differs from that of random-0"):
        read_foreign(path, tiny)
    edit_head(path, tensors=both, config={"bias": True})
    with pytest.raises(InputError, match="bias=True: the file has no fc.bias"):
        read_foreign(path, tiny)


def test_dflash_tensors_mean_what_dflash_does(tiny, tmp_path):
    """At position 0 nothing is rotated: keys and values of the features are plain products."""
    head = block_head(tiny, num_layers=1, block_size=2)
    path = written_head(tmp_path, head, "dflash", tiny)
    stored = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [0, 1]
    assert head.config.taps == ("layer_input:1", "layer_input:2")
    assert config["block_size"] == 2
    rng = np.random.default_rng(0)
    taps = rng.standard_normal((2, 24)).astype(np.float32)
    x = torch_linear(stored["fc.weight"], taps.reshape(-1))
    fused = x / np.sqrt(np.mean(x**2) + 1e-5) * stored["hidden_norm.weight"]
    layer = {name.removeprefix("layers.0."): value for name, value in stored.items()}
    key = torch_linear(layer["self_attn.k_proj.weight"], fused).reshape(2, 6)
    key = key / np.sqrt(np.mean(key**2, axis=1, keepdims=True) + 1e-5)
    value = torch_linear(layer["self_attn.v_proj.weight"], fused).reshape(2, 6)
    block = BlockHead(head.config, tiny.dtype)
    features = dict(zip(head.config.taps, jnp.asarray(taps)[:, None, None], strict=True))
    window = jax.jit(
        lambda params: block.context(
            params, block.fuse(params, features), jnp.zeros((1, 1), jnp.int32)
        )
    )(head.params)
    np.testing.assert_allclose(window.v[0, 0, :, 0], value, rtol=1e-4, atol=1e-4)
    wanted = key * layer["self_attn.k_norm.weight"]
    np.testing.assert_allclose(window.k[0, 0, :, 0], wanted, rtol=1e-4, atol=1e-4)


def test_block_drafters_as_published(tiny, tmp_path):
    """The fields of z-lab's config.json, and DeepSpec's, whose taps and mask are at the top."""
    head = block_head(tiny)
    path = written_head(tmp_path / "dflash", head, "dflash", tiny)
    section = {"mask_token_id": 60, "target_layer_ids": [0, 1]}
    published = {
        **{"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlash"}},
        **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"},
        **{"initializer_range": 0.02, "layer_types": ["full_attention"] * 2, "use_cache": True},
        **{"max_window_layers": 2, "num_target_layers": 3, "sliding_window": None},
        **{"use_sliding_window": False, "is_causal": False, "dflash_config": section},
    }
    edit_head(path, config=published)
    assert read_foreign(path, tiny).config == head.config
    edit_head(path, config={"is_causal": True})
    assert read_foreign(path, tiny).config.causal
    (path / "mask_embedding.pt").touch()
    with pytest.raises(InputError, match="mask_embedding.pt has another embedding for mask tokens"):
        read_foreign(path, tiny)

    head = block_head(tiny, markov_rank=3, sample_from_anchor=True, confidence=True)
    path = written_head(tmp_path / "dspark", head, "dspark", tiny)
    edit_head(path, config={**section, "dflash_config": {}, "sample_from_anchor": None})
    assert read_foreign(path, tiny).config == head.config
    edit_head(path, config={"markov_head_type": "gated"})
    with pytest.raises(InputError, match="markov_head_type='gated'"):
        read_foreign(path, tiny)


def test_block_drafters_of_speculators(tiny, tmp_path):
    """As the library writes them: its own fields, and layer ids of inputs."""
    head = block_head(tiny)
    path = written_head(tmp_path / "head", head, "speculators", tiny)
    config = json.loads((path / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [1, 2]
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert kind_of_head(path) == "dflash"
    edit_head(
        path,
        config={
            **{"projector_type": "dflash", "pure_draft_prefix_len": 1, "emb_dim": 256},
            **{"gru_hidden_dim": 1024, "lambda_base_start": 1.0, "auf": True},
            **{"sliding_window_non_causal": False, "target_hidden_size": None},
        },
    )
    assert read_foreign(path, tiny).config == head.config
    edit_head(path, config={"projector_type": "domino"})
    with pytest.raises(InputError, match="projector_type='domino'"):
        read_foreign(path, tiny)
    edit_head(path, config={"projector_type": "dflash", "aux_hidden_state_layer_ids": [1, 3]})
    with pytest.raises(
        InputError, match=r"aux_hidden_state_layer_ids=\[1, 3\]: must name inputs of layers 1\.\.2"
    ):
        read_foreign(path, tiny)
    edit_head(path, config={"aux_hidden_state_layer_ids": None})
    with pytest.raises(InputError, match="aux_hidden_state_layer_ids=None: must name inputs of"):
        read_foreign(path, tiny)
    edit_head(path, config={"speculators_model_type": "jetspec"})
    with pytest.raises(InputError, match="speculators_model_type='jetspec'"):
        read_foreign(path, tiny)
    with pytest.raises(InputError, match="no causal blocks.*format=dflash"):
        write_foreign(block_head(tiny, causal=True), tmp_path / "causal", "speculators", tiny)


def test_a_mask_token_may_be_a_row_of_padding(tiny, tmp_path):
    """As z-lab's for Qwen3: of the head's own embedding or of the target's, which agree."""
    rows = np.random.default_rng(0).standard_normal((3, 24)).astype(np.float32)
    rows[1] = shared_with_target.target_embedding(tiny)[60]
    target = dataclasses.replace(tiny, padding_embeddings=rows)
    options = dict(mask_token_id=62, markov_rank=3, confidence=True)
    head = block_head(tiny, **options)
    head.params["mask"]["embedding"] = jnp.asarray(rows[1])
    path = written_head(tmp_path / "head", head, "dspark", target)
    config = json.loads((path / "config.json").read_text())
    assert (config["vocab_size"], config["dflash_config"]["mask_token_id"]) == (64, 62)
    stored = load_file(path / "model.safetensors")
    # Its tensors over the vocabulary have rows for padding.
    assert stored["markov_head.markov_w1.weight"].shape == (64, 3)
    again = read_foreign(path, target)
    check_same(head, again, "padded")
    token = dataclasses.replace(head.config, mask_token_id=60)
    params = {name: part for name, part in head.params.items() if name != "mask"}
    plain = dataclasses.replace(head, config=token, params=params)
    np.testing.assert_array_equal(draft_logits(again, target), draft_logits(plain, tiny))
    # Without the target's row, the head's own embedding has it.
    with pytest.raises(
        InputError, match=r"mask_token_id=62: the target has the tokens 0\.\.60, and"
    ):
        read_foreign(path, tiny)
    table = np.concatenate([shared_with_target.target_embedding(tiny), rows])
    edit_head(path, tensors={"embed_tokens.weight": table})
    check_same(head, read_foreign(path, tiny), "own")
    with pytest.raises(InputError, match="from the target, and random-0 as loaded has not"):
        write_foreign(head, tmp_path / "other", "dspark", tiny)
    section = {**config["dflash_config"], "mask_token_id": 64}
    edit_head(path, config={"dflash_config": section})
    with pytest.raises(InputError, match="mask_token_id=62: dflash_config has 64"):
        read_foreign(path, target)
    edit_head(path, config={"mask_token_id": 64})
    with pytest.raises(InputError, match=r"mask_token_id=64: the target has the tokens 0\.\.60"):
        read_foreign(path, target)


@pytest.mark.parametrize("form", ["dflash", "dspark", "speculators"])
def test_a_draft_vocabulary_of_block_drafters(form, tiny, tmp_path):
    """As vLLM reads it: the target's rows of those tokens, and offsets to their ids."""
    rows = np.ones((3, 24), np.float32)
    target = dataclasses.replace(tiny, padding_embeddings=rows)
    options = {} if form == "dflash" else dict(markov_rank=3, confidence=True)
    head = block_head(tiny, vocabulary=VOCABULARY, **options)
    path = written_head(tmp_path, head, form, target)
    config = json.loads((path / "config.json").read_text())
    layers = config["transformer_layer_config"] if form == "speculators" else config
    assert (layers["vocab_size"], config["draft_vocab_size"]) == (64, VOCABULARY)
    stored, ids = load_file(path / "model.safetensors"), np.asarray(head.draft_ids)
    np.testing.assert_array_equal(stored["d2t"] + np.arange(VOCABULARY), ids)
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), ids)
    np.testing.assert_array_equal(
        stored["lm_head.weight"], shared_with_target.target_head(tiny)[ids]
    )
    if options:
        assert stored["markov_head.markov_w1.weight"].shape == (64, 3)
        assert stored["markov_head.markov_w2.weight"].shape == (VOCABULARY, 3)
    check_same(head, read_foreign(path, target), "export")
    # Another tool's file may have the tokens in another order, of which `d2t` is the record.
    order = np.random.default_rng(0).permutation(VOCABULARY)
    mixed = {"d2t": ids[order] - np.arange(VOCABULARY)}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in stored:
            mixed[name] = stored[name][order]
    edit_head(path, tensors=mixed)
    check_same(head, read_foreign(path, target), "sorted")
    edit_head(path, tensors={"d2t": stored["d2t"]})
    with pytest.raises(
        InputError, match="lm_head.weight differs from that of .*, which a block drafter"
    ):
        read_foreign(path, target)
    edit_head(path, drop=("d2t", "t2d", "lm_head.weight"))
    with pytest.raises(InputError, match="d2t that maps them .* is missing"):
        read_foreign(path, target)


def test_dflash2_has_no_draft_vocabulary(tiny, tmp_path):
    options = dict(selector_rank=3, conv_kernel_size=2, conv_group_size=6)
    head = block_head(tiny, vocabulary=VOCABULARY, **options)
    with pytest.raises(InputError, match="no draft vocabulary.*whole_vocabulary"):
        write_foreign(head, tmp_path / "head", "dflash", tiny)
    path = written_head(tmp_path, whole_vocabulary(head), "dflash", tiny)
    ids = np.arange(VOCABULARY)
    edit_head(path, config={"draft_vocab_size": VOCABULARY}, tensors={"d2t": 0 * ids})
    with pytest.raises(InputError, match="draft_vocab_size=40: a selector's candidates"):
        read_foreign(path, tiny)


def test_layouts_say_what_a_block_drafter_has(tiny, tmp_path):
    """Parts that no layout has together are refused; sizes of parts that are absent are dropped."""
    convolutions = dict(conv_kernel_size=2, conv_group_size=6)
    for form, options in (
        ("dflash", convolutions),
        ("speculators", dict(selector_rank=3)),
        ("dspark", dict(markov_rank=3, **convolutions)),
    ):
        with pytest.raises(InputError, match=f"format='{form}': there are layouts for heads with"):
            write_foreign(block_head(tiny, **options), tmp_path / "head", form, tiny)
    head = block_head(tiny, conv_group_size=6, selector_top_k=7)
    check_same(head, read_foreign(written_head(tmp_path, head, "dflash", tiny), tiny), "export")


def test_a_whole_vocabulary_of_dspark(tiny, tmp_path):
    options = dict(markov_rank=3, sample_from_anchor=True, confidence=True)
    head = block_head(tiny, vocabulary=VOCABULARY, **options)
    whole = whole_vocabulary(head)
    write_foreign(whole, tmp_path / "head", "dspark", tiny)
    np.testing.assert_allclose(
        draft_logits(whole, tiny)[:, head.draft_ids], draft_logits(head, tiny), rtol=1e-5, atol=1e-5
    )


def test_a_part_of_the_vocabulary_in_eagle1(tiny, tmp_path):
    head = eagle_head(tiny, version=1, vocabulary=VOCABULARY)
    with pytest.raises(InputError, match="no draft vocabulary.*whole_vocabulary"):
        write_foreign(head, tmp_path / "head", "eagle", tiny)
    whole = whole_vocabulary(head)
    write_foreign(whole, tmp_path / "head", "eagle", tiny)
    np.testing.assert_allclose(
        draft_logits(whole, tiny)[:, head.draft_ids], draft_logits(head, tiny), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(InputError, match="has its own output head"):
        whole_vocabulary(eagle_head(tiny, vocabulary=VOCABULARY))


def test_attention_biases_come_with_a_zero_on_the_output(tmp_path):
    from tiny_models import tiny_config

    target = random_model(tiny_config(attention_bias=True, mlp_bias=True), 5, dtype="float32")
    head = eagle_head(target)
    path = written_head(tmp_path, head, "eagle3", target)
    stored = load_file(path / "model.safetensors")
    assert not stored["midlayer.self_attn.o_proj.bias"].any()
    assert stored["midlayer.self_attn.q_proj.bias"].any()
    edit_head(path, tensors={"midlayer.self_attn.o_proj.bias": np.ones(24, np.float32)})
    with pytest.raises(InputError, match="o_proj.bias is not zero"):
        read_foreign(path, target)


def test_own_folders_and_those_of_others_are_told_apart(tiny, tmp_path):
    head, own, theirs = eagle_head(tiny), tmp_path / "own", tmp_path / "theirs"
    save_head(head, own)
    write_foreign(head, theirs, "eagle3", tiny)
    assert (own / "model.safetensors").is_file()
    assert (theirs / "model.safetensors").is_file()
    assert kind_of_head(own) == kind_of_head(theirs) == "eagle3"
    for path in (own, theirs):
        check_same(head, read_any_head(path, tiny, "drafter.path"), str(path))
    with pytest.raises(InputError, match=r"own: no config.json"):
        read_foreign(own, tiny)
    with pytest.raises(InputError, match=r"theirs: holds no checkpoint"):
        read_head(theirs)
    with pytest.raises(InputError, match=r"own: holds a drafter, not a model"):
        load_model(own)
    # What is missing is named, also where the rest looks like the folder of another tool.
    (own / "specjax_checkpoint.json").unlink()
    shutil.copy(theirs / "config.json", own)
    assert kind_of_head(own) is None
    with pytest.raises(InputError, match=r"own: .*specjax_checkpoint.json: no such file"):
        read_any_head(own, tiny, "drafter.path")
