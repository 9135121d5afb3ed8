"""vLLM's speculative configs: each method decodes, and no key is dropped unsaid."""

import json

import pytest
from conftest import slow
from decoding import PROMPTS
from tiny_models import eagle_head, mtp_head, with_modules

import specjax
from specjax.errors import InputError
from specjax.loading.load import save_model
from specjax.methods.published_layouts import write_foreign
from specjax.methods.saved_heads import save_head
from specjax.methods.suffix import Suffix
from specjax.methods.vllm_config import from_vllm_speculative_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
SUFFIX = {"method": "suffix"}


def decode(target, **options):
    return specjax.generate(target, PROMPTS, sampling={"max_new_tokens": 12}, **options)


@pytest.fixture(scope="module")
def plain(tiny):
    return decode(tiny).token_ids


def test_ngram_with_vllms_defaults(tiny, plain, monkeypatch):
    asked = from_vllm_speculative_config(NGRAM, tiny)
    assert asked.drafter.name == "ngram"
    assert asked.drafter.drafter.num_speculative_tokens == asked.num_speculative_tokens == 5
    assert (asked.verify, asked.num_speculative_tokens_per_batch_size) == ("rejection", ())
    assert decode(tiny, **asked.options).token_ids == plain
    seen = []
    monkeypatch.setattr(
        "specjax.methods.vllm_config.make_drafter",
        lambda name, target, **options: seen.append(options) or asked.drafter,
    )
    for given, low, high in (
        ({}, 5, 5),
        ({"prompt_lookup_max": 4}, 4, 4),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, 1, 4),
    ):
        from_vllm_speculative_config(NGRAM | given, tiny)
        wanted = {"prompt_lookup_min": low, "prompt_lookup_max": high, "match": "earliest"}
        assert seen.pop() == wanted


def test_suffix_with_vllms_options(tiny, plain):
    asked = from_vllm_speculative_config(SUFFIX, tiny)
    assert (asked.drafter.name, asked.num_speculative_tokens) == ("suffix", 24)
    assert asked.drafter.drafter == Suffix(num_speculative_tokens=24)
    options = dict(suffix_decoding_max_tree_depth=16, suffix_decoding_max_spec_factor=2.0)
    config = SUFFIX | options | {"suffix_decoding_max_cached_requests": 0}
    asked = from_vllm_speculative_config(config, tiny)
    assert asked.drafter.drafter == Suffix(num_speculative_tokens=16, **options)
    asked = from_vllm_speculative_config(config | {"num_speculative_tokens": 3}, tiny)
    assert asked.drafter.drafter == Suffix(num_speculative_tokens=3, **options)
    assert decode(tiny, **asked.options).token_ids == plain


def test_json_and_keys_that_ask_for_nothing(tiny):
    config = {
        "model": "[ngram]",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "block",
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 1]],
        "draft_tensor_parallel_size": 1,
        "max_model_len": None,
        "enforce_eager": False,
    }
    asked = from_vllm_speculative_config(json.dumps(config), tiny)
    assert asked.verify == "block"
    assert asked.options == {
        "drafter": asked.drafter,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": ((1, 4, 3), (5, 16, 1)),
        "verify": "block",
    }
    assert max(decode(tiny, **asked.options).drafted.max(axis=1)) <= 3


@pytest.fixture(scope="module")
def heads(tiny, tmp_path_factory):
    """Directories by method, as specjax saves heads and as others lay them out."""
    folder = tmp_path_factory.mktemp("heads")
    save_model(tiny, folder / "draft_model")
    for method, version in (("eagle", 1), ("eagle3", 3)):
        head = eagle_head(tiny, version=version)
        save_head(head, folder / method)
        write_foreign(head, folder / f"{method}_foreign", method, tiny)
    save_head(mtp_head(tiny), folder / "mtp")
    return folder


@pytest.mark.parametrize(
    "name",
    ["eagle3_foreign", *slow("draft_model", "eagle", "eagle_foreign", "eagle3", "mtp")],
)
def test_models_and_heads(name, tiny, plain, heads):
    method = name.removesuffix("_foreign")
    config = {"method": method, "model": str(heads / name), "num_speculative_tokens": 2}
    asked = specjax.from_vllm_speculative_config(config, tiny)
    assert asked.drafter.name == method
    assert not asked.drafter.drafter.sampled  # vLLM's default is greedy, ours is not
    got = decode(tiny, **asked.options)
    assert got.token_ids == plain
    assert got.drafted.max() == 2
    config["draft_sample_method"] = "probabilistic"
    assert specjax.from_vllm_speculative_config(config, tiny).drafter.drafter.sampled


def test_modules_of_the_target(tiny):
    """As in vLLM, mtp without a model, or with the target's name, drafts with its own modules."""
    target, config = with_modules(tiny), {"method": "mtp", "num_speculative_tokens": 2}
    for given in (config, {**config, "model": target.name}):
        asked = specjax.from_vllm_speculative_config(given, target)
        assert (asked.drafter.name, asked.num_speculative_tokens) == ("mtp", 2)
        assert not asked.drafter.drafter.sampled


@pytest.mark.parametrize(
    "method",
    ["deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "ernie_mtp", "hy_v3_mtp"],
)
def test_the_older_names_of_mtp(method, tiny):
    target = with_modules(tiny)
    asked = specjax.from_vllm_speculative_config({"method": method}, target)
    assert asked.drafter.name == "mtp"
    assert asked.num_speculative_tokens == target.mtp.config.num_modules
    asked = specjax.from_vllm_speculative_config(
        {"model": target.name, "num_speculative_tokens": 2}, target
    )
    assert (asked.drafter.name, asked.num_speculative_tokens) == ("mtp", 2)


@pytest.mark.parametrize("name", ["ngram", "[ngram]", "ngram_gpu", "prompt_lookup"])
@pytest.mark.parametrize("key", ["method", "model"])
def test_the_names_of_ngram(name, key, tiny):
    config = {key: name, "num_speculative_tokens": 3, "disable_logprobs": True}
    assert from_vllm_speculative_config(config, tiny).drafter.name == "ngram"


@pytest.mark.parametrize(
    "name", ["draft_model", "eagle", "eagle_foreign", "eagle3", "eagle3_foreign"]
)
def test_a_model_tells_its_method(name, tiny, heads):
    config = {"model": str(heads / name), "num_speculative_tokens": 2}
    asked = specjax.from_vllm_speculative_config(config, tiny)
    assert asked.drafter.name == name.removesuffix("_foreign")


@pytest.mark.parametrize(("rule", "drawn"), [("strict", False), ("probabilistic", True)])
def test_earlier_names_of_rules(rule, drawn, tiny, heads):
    config = {"model": str(heads / "eagle3"), "num_speculative_tokens": 2}
    asked = specjax.from_vllm_speculative_config(config | {"rejection_sample_method": rule}, tiny)
    assert (asked.verify, asked.drafter.drafter.sampled) == ("rejection", drawn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"disable_by_batch_size": 4}, "disable_by_batch_size=4: is not supported"),
        (
            {"num_speculative_token": 5},
            "num_speculative_token=5: is unknown: did you mean num_spec",
        ),
        ({"colour": 1}, "colour=1: is unknown: use method, model"),
        ({"quantization": "fp8"}, "quantization='fp8': is not supported; leave it out"),
        ({"enforce_eager": True}, "enforce_eager=True: is not supported"),
        ({"parallel_drafting": True}, "parallel_drafting=True"),
        ({"method": "medusa2"}, "method='medusa2': is not supported; use ngram, suffix, draft_m"),
        (SUFFIX | {"suffix_decoding_min_token_prob": 2.0}, "min_token_prob=2.0: use a number from"),
        (
            SUFFIX | {"suffix_decoding_max_cached_requests": 5},
            "requests=5: is not supported; leave",
        ),
        (SUFFIX | {"model": "some/model"}, "model='some/model': suffix takes no model"),
        (SUFFIX | {"prompt_lookup_max": 3}, "prompt_lookup_max=3: suffix does not take it"),
        ({"suffix_decoding_max_tree_depth": 9}, "tree_depth=9: ngram does not take it; leave it"),
        ({"method": "mtp"}, "drafter.name=mtp: random-0 has no MTP modules"),
        ({"method": "eagle4"}, "method='eagle4': is not supported; use"),
        ({"method": None}, "method=None: is needed; use"),
        ({"method": None, "model": "no-such"}, "drafter.path='no-such': no such file"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens=None: is needed"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: use a whole number"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True: use a whole number"),
        ({"num_speculative_tokens_per_batch_size": [[1, 2]]}, r"use a list of \[low, high, k\]"),
        ({"rejection_sample_method": "synthetic"}, "there is the drafter 'simulated'"),
        ({"rejection_sample_method": "typical"}, "use standard or block$"),
        ({"draft_sample_method": "probabilistic"}, "ngram has no distribution to draw from"),
        ({"draft_sample_method": "beam"}, "use greedy or probabilistic"),
        ({"model": "some/model"}, "ngram takes no model"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_max=2: must be at least"),
        ({"prompt_lookup_max": "many"}, "prompt_lookup_max='many'"),
        ({"method": "eagle3"}, "model=None: eagle3 needs a directory"),
        (
            {"method": "draft_model", "model": "~nosuchuser/x"},
            r"^speculative_config.model='~nosuchuser/x': Could not determine home",
        ),
        ({"method": "eagle3", "model": "a" * 300}, "^speculative_config.model='a.*: File name too"),
        ({"method": "eagle3", "model": "/nowhere"}, "model='/nowhere': no such directory"),
        (
            {"method": "eagle", "model": "x", "prompt_lookup_max": 3},
            "prompt_lookup_max=3: eagle does not take it",
        ),
    ],
)
def test_what_is_not_understood_is_named(change, message, tiny):
    with pytest.raises(InputError, match=message) as caught:
        from_vllm_speculative_config(NGRAM | change, tiny)
    assert "\n" not in str(caught.value)


def test_not_a_config_and_not_that_method(tiny, heads):
    for config in ("{", "[1]", '"ngram"', "[" * 100_000, '{"model": "a", "model": "b"}'):
        with pytest.raises(InputError, match="speculative_config"):
            from_vllm_speculative_config(config, tiny)
    config = {"method": "eagle", "model": str(heads / "eagle3"), "num_speculative_tokens": 2}
    with pytest.raises(InputError, match="method='eagle': .* is a head of the kind eagle3"):
        from_vllm_speculative_config(config, tiny)
