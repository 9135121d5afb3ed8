"""Trained heads on disk: what comes back, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    block_head,
    eagle_config,
    eagle_head,
    medusa_head,
    mtp_head,
    some_ids,
    with_modules,
)

import specjax
from specjax.core.draft_vocabulary import check_draft_ids, expand, most_frequent
from specjax.drafters import head_drafter
from specjax.errors import InputError
from specjax.files import folders
from specjax.loading.checkpoints import load_drafter, save_checkpoint, save_drafter
from specjax.loading.load import random_model
from specjax.loading.quantize import is_quantized, quantized_params
from specjax.methods.find_head import SHIPPED, open_head, shipped_heads
from specjax.methods.heads.compact import compact_arrays, float_params
from specjax.methods.heads.head import TargetMetadata, check_same
from specjax.methods.saved_heads import compacted, read_head, save_head
from specjax.models.layers.quantized import GroupedKernel


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_head_comes_back_whole(dtype, tiny, tmp_path):
    head = eagle_head(tiny, vocabulary=20, norm_output=True)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), head.params)
    head = dataclasses.replace(head, params=params, training={"tokens": 3})
    save_head(head, tmp_path / "head")
    again = read_head(tmp_path / "head")
    assert (again.kind, again.config, again.target) == (head.kind, head.config, head.target)
    assert again.training == {"tokens": 3}
    np.testing.assert_array_equal(again.draft_ids, head.draft_ids)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    drafter = specjax.make_drafter("eagle3", tiny, tmp_path / "head", draft_p_min=0.5)
    assert drafter.params["fc"]["kernel"].dtype == jnp.float32
    # The rest is the target's: its embedding, and what its head has of the 20 tokens.
    size = sum(leaf.size for leaf in jax.tree.leaves(head.params)) + len(head.draft_ids)
    size += drafter.params["digest"].size
    assert drafter.own_bytes(tiny.params) == 4 * size
    assert specjax.make_drafter("early_exit", tiny, exit_layer=1).own_bytes(tiny.params) == 0


@pytest.fixture(scope="module")
def wide(tiny):
    """A target with kernels of 32 and 64 inputs, and others that are not whole groups."""
    return other(tiny, hidden_size=32)


COMPACT = {
    "eagle3": lambda target: eagle_head(target, vocabulary=40),
    "medusa": lambda target: medusa_head(target, some_ids(target, 40, 0), original_lm_head=False),
    "dspark": lambda target: block_head(target, markov_rank=32, confidence=True),
}


def stored_arrays(head):
    return compact_arrays("head", head.config.parameter_table(), head.params)


def largest_error(head, arrays):
    """The largest difference of compact arrays to a head, relative to a leaf's largest weight."""
    params = float_params(head.config.parameter_table(), arrays)
    errors = jax.tree.map(lambda a, b: abs(a - b).max() / abs(b).max(), params, head.params)
    return max(jax.tree.leaves(errors))


@pytest.mark.parametrize("kind", COMPACT)
def test_a_compact_head_comes_back_rounded_once(kind, wide, tmp_path):
    head = COMPACT[kind](wide)
    save_head(head, tmp_path / "head", compact=True)
    again = read_head(tmp_path / "head")
    check_same(compacted(head), again, "compact")
    check_same(again, compacted(again), "rounded twice")
    assert {leaf.dtype for leaf in jax.tree.leaves(again.params)} == {jnp.dtype("float32")}
    arrays, integers = load_drafter(tmp_path / "head")[0], 0
    table = head.config.parameter_table()
    loaded = quantized_params(table, again.params, "int8", fitting=True)
    for path, leaf in jax.tree_util.tree_leaves_with_path(loaded, is_leaf=is_quantized):
        stored = functools.reduce(lambda node, step: node[step.key], path, arrays)
        if is_quantized(leaf):
            kernel = GroupedKernel(stored["values"], stored["scales"].astype(np.float32), None)
            np.testing.assert_array_equal(leaf.dequantized(), kernel.dequantized())
        elif path[-1].key == "embedding":
            assert stored["values"].shape == leaf.shape
        else:
            assert stored.dtype == jnp.float16
        integers += leaf.size * isinstance(stored, dict)
    assert integers > 0.6 * sum(leaf.size for leaf in jax.tree.leaves(again.params))
    assert largest_error(head, stored_arrays(head)) < 1 / 250


def test_scales_of_another_column_are_noticed(wide):
    head = COMPACT["eagle3"](wide)
    arrays = stored_arrays(head)
    scales = arrays["fc"]["kernel"]["scales"]
    arrays["fc"]["kernel"]["scales"] = np.roll(scales, 1, axis=0)
    assert largest_error(head, arrays) > 1 / 50


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda kernel: kernel.update(scales=kernel["scales"][:, 1:]), r"scales bfloat16\[32, 2\]"),
        (lambda kernel: kernel.update(values=kernel["values"].T), r"values int8\[96, 32\]"),
        (
            lambda kernel: kernel.update(scales=kernel["scales"].astype(np.float32)),
            r"scales float32\[32, 3\], not bfloat16\[32, 3\]",
        ),
        (lambda kernel: kernel.pop("scales"), r"\(missing: fc\.kernel\.scales\)"),
    ],
)
def test_arrays_that_no_compact_head_has(change, says, wide, tmp_path):
    save_head(COMPACT["eagle3"](wide), tmp_path / "head", compact=True)
    arrays, metadata = load_drafter(tmp_path / "head")
    change(arrays["fc"]["kernel"])
    save_drafter(tmp_path / "other", arrays, metadata)
    with pytest.raises(InputError, match=rf"other: compact: .*{says}.*; export the head again$"):
        read_head(tmp_path / "other")


def test_numbers_that_a_compact_head_cannot_hold(wide, tmp_path):
    head = COMPACT["eagle3"](wide)
    scale = head.params["final_norm"]["scale"].at[0].set(1e6)
    large = dataclasses.replace(head, params={**head.params, "final_norm": {"scale": scale}})
    with pytest.raises(InputError, match=r"head: final_norm\.scale does not fit in half precision"):
        save_head(large, tmp_path / "head", compact=True)
    assert not (tmp_path / "head").exists()


def other(tiny, **changes):
    return random_model(dataclasses.replace(tiny.config, **changes), 1, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 62}, "vocab_size=61, and random-1 has 62"),
        ({"hidden_size": 16}, "hidden_size=24, and random-1 has 16"),
        ({"num_layers": 4}, "num_layers=3, and random-1 has 4"),
    ],
)
def test_a_head_of_another_target_is_refused(changes, says, tiny):
    with pytest.raises(InputError, match=says):
        head_drafter(eagle_head(tiny), other(tiny, **changes))


def test_modules_as_a_head_and_of_the_target(tiny, tmp_path):
    head = mtp_head(tiny, 2, vocabulary=20, recursion="raw")
    save_head(head, tmp_path / "head")
    again = read_head(tmp_path / "head")
    assert (again.kind, again.config) == ("mtp", head.config)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    drafter = specjax.make_drafter("mtp", tiny, tmp_path / "head", draft_p_min=0.5)
    assert drafter.drafter.num_speculative_tokens == 1
    own = with_modules(tiny, 3)
    assert specjax.make_drafter("mtp", own, tmp_path / "head").drafter.head.config == head.config
    loaded = specjax.make_drafter("ngram+mtp", own, num_speculative_tokens=5)
    assert loaded.drafter.parts[1].head.config == own.mtp.config
    assert loaded.drafter.parts[1].num_speculative_tokens == 5
    module = own.mtp.params["modules"]["0"]["projection"]["kernel"]
    assert loaded.params[1]["modules"]["0"]["projection"]["kernel"] is module
    with pytest.raises(InputError, match="random-0 has no MTP modules, .* as drafter.path="):
        specjax.make_drafter("mtp", tiny)
    with pytest.raises(InputError, match="num_layers=3, and random-1 has 4"):
        specjax.make_drafter("mtp", other(tiny, num_layers=4), tmp_path / "head")
    with pytest.raises(InputError, match="hidden_size=24, and the model has 32"):
        dataclasses.replace(other(tiny, hidden_size=32), mtp=own.mtp)


def test_modules_inside_a_model_are_a_head(tiny, tmp_path):
    own = with_modules(tiny, 2, hidden="pre_norm")
    save_checkpoint(own, tmp_path / "model")
    head = open_head("mtp", tmp_path / "model", tiny)
    assert (head.kind, head.config, head.draft_ids) == ("mtp", own.mtp.config, None)
    jax.tree.map(np.testing.assert_array_equal, head.params, own.mtp.params)
    loaded = specjax.make_drafter("mtp", tiny, tmp_path / "model", num_speculative_tokens=2)
    assert loaded.drafter.head.config == own.mtp.config
    with pytest.raises(InputError, match=r"a head of the kind mtp; use drafter\.name=mtp"):
        open_head("eagle3", tmp_path / "model", tiny)
    with pytest.raises(InputError, match=r"drafter\.path: made for \S+/model with num_layers=3"):
        specjax.make_drafter("mtp", other(tiny, num_layers=4), tmp_path / "model")


@pytest.mark.parametrize(
    "tap", ["layer_input:x", "layer_input:-1", "layer_input:3", "embedding", "x:1"]
)
def test_taps_that_the_target_does_not_have(tap, tiny):
    head = eagle_head(tiny)
    config = dataclasses.replace(head.config, taps=(tap, *head.config.taps[1:]))
    said = rf"^drafter\.path: taps: feature '{tap}' is unknown: use .* with i < 3$"
    with pytest.raises(InputError, match=said):
        head_drafter(dataclasses.replace(head, config=config), tiny)


def test_another_tokenizer_is_refused(tiny, chatty):
    head = eagle_head(chatty)
    strange = dataclasses.replace(head.target, tokenizer="0" * 64)
    with pytest.raises(InputError, match="tokenizer=0000000000000000, and random-2 has"):
        head_drafter(dataclasses.replace(head, target=strange), chatty)
    # A model of bare token ids has no tokenizer to compare.
    assert strange.matches(dataclasses.replace(strange, tokenizer=None))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda head: {"kind": "eagle4"}, "kind='eagle4' is unknown"),
        (lambda head: {"kind": "eagle"}, "eagle needs version=1"),
        (lambda head: {"params": {**head.params, "extra": np.zeros(1)}}, "unexpected: extra"),
        (lambda head: {"params": {"fc": head.params["fc"]}}, "missing: final_norm"),
        (
            lambda head: {"params": {**head.params, "fc": {"kernel": np.zeros((3, 24))}}},
            r"fc.kernel \[3, 24\], not \[72, 24\]",
        ),
        (lambda head: {"draft_ids": None}, "its map to the target's 61 tokens is missing"),
        (lambda head: {"draft_ids": head.draft_ids[1:]}, "19 token ids for draft_vocab_size=20"),
        (lambda head: {"draft_ids": head.draft_ids + 40}, r"token id \d+ is not in 0..60"),
        (lambda head: {"draft_ids": head.draft_ids[::-1]}, "ids must ascend"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, says, tiny):
    head = eagle_head(tiny, vocabulary=20)
    with pytest.raises(InputError, match=says):
        dataclasses.replace(head, **change(head))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version=2: use 1"),
        ({"draft_vocab_size": 62}, "draft_vocab_size=62: must be in 1..61"),
        ({"taps": ()}, "taps is empty"),
        ({"version": 1}, "version 1 reads one feature"),
        ({"version": 1, "norm_output": True}, "norm_output=True: version 1 has no such part"),
        ({"version": 1, "taps": ("final_norm",), "target_hidden_size": 8}, "as wide as its target"),
        ({"own_head": False, "target_hidden_size": 8}, "hidden_size=24: must be as wide as its"),
    ],
)
def test_senseless_configs_are_refused(changes, says, tiny):
    with pytest.raises(InputError, match=says):
        dataclasses.replace(eagle_config(tiny), **changes)


def test_only_heads_of_the_kind_asked_for(tiny, tmp_path):
    save_head(eagle_head(tiny), tmp_path / "head")
    save_checkpoint(tiny, tmp_path / "model")
    for kind, folder, says in (
        ("medusa", "head", "kind eagle3; use drafter.name=eagle3"),
        ("medusa", "none", "no such directory"),
        ("eagle3", "model", r"drafter.path='\S+/model': a model without MTP modules"),
        ("eagle3", "", r"trained together; use drafter.path='\S+/head' with"),
    ):
        with pytest.raises(InputError, match=says):
            open_head(kind, tmp_path / folder, tiny)
    with pytest.raises(InputError, match="no eagle comes with specjax for random-0"):
        specjax.make_drafter("eagle", tiny)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda metadata: metadata.pop("target"), "'target' is missing"),
        (lambda metadata: metadata.update(more=1), "'more' is unknown"),
        (lambda metadata: metadata["config"].pop("taps"), "'taps' is missing"),
        (lambda metadata: metadata["config"].update(version="x"), "version='x' is of no use"),
        (lambda metadata: metadata["config"]["decoder"].update(num_heads=0), "num_heads=0"),
        (lambda metadata: metadata.update(kind="other"), "kind='other' is of no use"),
    ],
)
def test_damaged_metadata_are_refused(change, says, tiny, tmp_path):
    save_head(eagle_head(tiny), tmp_path / "head")
    params, metadata = specjax.loading.checkpoints.load_drafter(tmp_path / "head")
    metadata = json.loads(json.dumps(metadata))
    change(metadata)
    save_drafter(tmp_path / "other", params, metadata)
    with pytest.raises(InputError, match=says):
        read_head(tmp_path / "other")


def test_logits_over_a_part_of_the_vocabulary():
    ids = np.array([1, 4, 5], np.int32)
    logits = jnp.array([[0.5, -1.0, 2.0]])
    whole = expand(logits, jnp.asarray(ids), 7)
    wanted = np.full((1, 7), -np.inf)
    wanted[0, ids] = logits[0]
    np.testing.assert_array_equal(whole, wanted)
    assert expand(logits, None, 3) is logits


def test_the_most_frequent_tokens():
    counts = np.array([3, 0, 5, 5, 1])
    np.testing.assert_array_equal(most_frequent(counts, 3), [0, 2, 3])
    np.testing.assert_array_equal(most_frequent(counts, 1), [2])
    check_draft_ids(most_frequent(counts, 5), 5)


def test_what_is_shipped():
    kinds = ["draft_model", "medusa", "eagle3", "dspark"]
    assert shipped_heads() == {"smollm2-135m-instruct": kinds}
    folder = SHIPPED / "smollm2-135m-instruct"
    for kind in kinds:
        folders.check_replaceable(folder / kind, "drafter", "no file is left unlisted")
        head = read_head(folder / kind)
        assert (head.kind, head.target.name) == (kind, "smollm2-135m-instruct")
        assert {leaf.dtype for leaf in jax.tree.leaves(head.params)} == {jnp.dtype("float32")}
        arrays = load_drafter(folder / kind)[0]
        stored = [leaf for leaf in jax.tree.leaves(arrays) if leaf.dtype != jnp.int32]
        assert {leaf.dtype.name for leaf in stored} == {"int8", "bfloat16", "float16"}
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(head.params))
        card = (folder / f"{kind}.md").read_text()
        count = sum(leaf.size for leaf in jax.tree.leaves(head.params))
        assert f"{count / 1e6:.2f} million parameters" in card
        assert "- Trained on" in card
        assert "## Tau by task" in card
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size <= 40e6


def test_a_targets_metadata(chatty):
    metadata = TargetMetadata.of(chatty)
    assert len(metadata.tokenizer) == 64
    assert metadata == TargetMetadata.of(dataclasses.replace(chatty, params={}))
