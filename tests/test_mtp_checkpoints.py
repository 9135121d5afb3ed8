"""Modules for multi-token prediction in published layouts, against transformers' layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import greedy
from model_files import GOLDENS
from test_decoder import one_pass
from test_mtp import chained

from specjax import generate, load_model, make_drafter
from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.loading.load import save_model
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.mtp import own_modules
from specjax.models.mtp import Mtp

FAMILIES = GOLDENS / "families"
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
NAMES = ("glm4_moe", "mimo", "deepseek_v3", *QWEN)


@pytest.fixture(params=NAMES, scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return load_model(FAMILIES / name, dtype="float32")


def golden(name):
    with np.load(FAMILIES / name / "golden.npz") as file:
        return dict(file)


def test_logits_and_recursion_are_those_of_transformers_layers(name, model):
    wanted = golden(name)
    head = own_modules(model)
    params, mtp = complete_parameters(head, model), Mtp(head.config, model.dtype)
    each_pair = jax.jit(functools.partial(chained, mtp))
    for row, tokens in enumerate(wanted["tokens"]):
        read = one_pass(model, tokens[None], features=("final_norm",)).features
        features = {"final_norm": np.asarray(read["final_norm"])[0, :-1]}
        (logits,) = each_pair(params, tokens, features)
        assert np.abs(np.asarray(logits) - wanted["mtp_logits"][row]).max() <= 1e-4
    drafter = make_drafter("mtp", model, num_speculative_tokens=2)
    prompts = wanted["tokens"].tolist()
    plain = wanted["greedy"][:, :16].tolist()
    request = greedy(max_new_tokens=16, ignore_eos=True)
    got = generate(model, prompts, drafter=drafter, sampling=request)
    assert got.token_ids == plain
    # The first round's drafts follow x_39: accepted as far as they are the model's own tokens.
    for row, drafts in enumerate(wanted["mtp_drafts"].tolist()):
        agree = np.cumprod(np.equal(drafts[:2], plain[row][:2])).sum()
        assert got.accepted[row, 0] == agree


# Trees of modules are in test_mtp, experts on a mesh in test_experts, modules in test_sharding.
@pytest.mark.parametrize("kind", slow("static", "dynamic"))
def test_trees_and_meshes(kind, name, model):
    """A layer with experts over a level of several tokens, and split over devices."""
    prompts = golden(name)["tokens"][:, :9].tolist()
    request = greedy(max_new_tokens=12)
    tree = {"kind": kind, "depth": 3, "topk": 3, "num_nodes": 8}
    plain = generate(model, prompts, sampling=request)
    drafter = make_drafter("mtp", model, tree=tree)
    assert generate(model, prompts, drafter=drafter, sampling=request).token_ids == plain.token_ids
    split = load_model(
        FAMILIES / name, dtype="float32", mesh=sharding.make_mesh(2, 2, jax.devices()[:4])
    )
    drafter = make_drafter("mtp", split, tree=tree)
    assert generate(split, prompts, drafter=drafter, sampling=request).token_ids == plain.token_ids


def test_a_model_with_modules_is_no_directory_of_transformers(model, tmp_path):
    with pytest.raises(InputError, match="mtp=None"):
        save_model(model, tmp_path / "saved")
    assert jnp.isfinite(model.mtp.params["modules"]["0"]["projection"]["kernel"]).all()
