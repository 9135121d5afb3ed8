"""P-EAGLE: training runs what decoding runs, masks see what they should, files of other tools."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import slow
from flax.core import meta
from model_files import edit_head, written_head
from safetensors.numpy import load_file
from test_drafters import context_of
from test_train_eagle import FLAGS, taps_of
from tiny_models import VOCABULARY, peagle_config, peagle_head
from toy_training import two_rows, with_features

from specjax.core.drafter import Accepted
from specjax.drafters import head_drafter
from specjax.errors import InputError
from specjax.methods.find_head import kind_of_head
from specjax.methods.heads.examined import TrueText
from specjax.methods.heads.shared_parameters import share
from specjax.methods.peagle.head import PEagle
from specjax.methods.published_layouts import read_foreign
from specjax.methods.vllm_config import from_vllm_speculative_config
from train.methods.eagle import EagleLoss, eagle_loss
from train.methods.peagle import depths_at_labels, peagle_method

DEPTHS = 4
NORMS = {name: flag for name, flag in FLAGS.items() if name != "norm_output"}


def made(tiny, **flags):
    head = peagle_head(tiny, **flags)
    ids = None if head.draft_ids is None else jnp.asarray(head.draft_ids)
    params = {**head.params, "shared": share(tiny.params, ids, head=head.config.shares_output)}
    names = tuple(dict.fromkeys((*head.config.taps, "final_norm")))
    batch = with_features(tiny, two_rows(tiny.config.vocab_size), names)
    return PEagle(head.config, jnp.dtype("float32")), params, ids, batch


@functools.partial(jax.jit, static_argnums=(0, 3))
def trained(head, params, batch, depths):
    """The outputs of training, compiled as one program."""
    steps = depths_at_labels(head, params, batch, taps_of(head, batch), depths)
    return [step.output for step in steps]


def observed(drafter, params, batch, row, first, label, chunk):
    """The drafter's state before a label, after the row's pairs from `first` on, in chunks."""
    state, observe = drafter.init(params, 1, 64), jax.jit(type(drafter).observe, static_argnums=0)
    taps = taps_of(drafter.head, batch)
    for start in range(first, label - 1, chunk):
        here = slice(start, start + chunk)
        accepted = Accepted(
            tokens=batch.tokens[row : row + 1, start + 1 : start + 1 + chunk],
            count=jnp.array([min(chunk, label - 1 - start)]),
            features={name: value[row : row + 1, here] for name, value in taps.items()},
        )
        state = observe(drafter, params, state, context_of([[0]], [0]), accepted)
    return state


@pytest.mark.parametrize("flags", [dict(num_layers=2, **NORMS), *slow({})])
def test_training_runs_what_decoding_runs(flags, tiny):
    """The state after any chunks of pairs, some of them in part, has the outputs of training."""
    head, params, _, batch = made(tiny, **flags)
    loaded = head_drafter(peagle_head(tiny, **flags), tiny, num_speculative_tokens=DEPTHS)
    outputs = np.stack(trained(head, params, batch, DEPTHS))
    for row, column, chunk in ((0, 0, 3), (0, 7, 5), (1, 12, 4)):
        label, segment = int(batch.labels[row, column]), np.asarray(batch.segments[row])
        first = int(np.argmax(segment == segment[label]))
        state = observed(loaded.drafter, loaded.params, batch, row, first, label, chunk)
        assert int(state.caches[0].length[0]) == label - 1 - first
        np.testing.assert_allclose(state.outputs[0], outputs[:, row, column], atol=2e-5, rtol=2e-4)


def test_the_doctors_drafts_are_those_of_training(tiny):
    head, params, _, batch = made(tiny, num_layers=2)
    loaded = head_drafter(peagle_head(tiny, num_layers=2), tiny, num_speculative_tokens=DEPTHS)
    features = {name: value[1:] for name, value in taps_of(head, batch).items()}
    text = TrueText(batch.tokens[1], features, np.int64(64), batch.labels[1, :18])
    found = jax.jit(type(loaded.drafter).teacher_forced, static_argnums=0)(
        loaded.drafter, loaded.params, text
    )
    for logits, output in zip(found, trained(head, params, batch, DEPTHS), strict=True):
        np.testing.assert_allclose(
            logits, head.logits(params, output)[1, :18], atol=2e-5, rtol=2e-4
        )


def test_every_parameter_learns_and_what_follows_teaches_nothing(tiny):
    head, params, ids, batch = made(tiny, num_layers=2, own_embedding=True, **NORMS)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(params, features):
        one, shared = batch.replace(features=features), params["shared"]
        params = {**params, "shared": jax.lax.stop_gradient(shared)}
        loss, steps = EagleLoss(steps=DEPTHS), depths_at_labels
        return eagle_loss(head, params, tiny.params, ids, one, None, loss, steps)[0]

    learned, felt = gradients(params, batch.features)
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(learned, shared={})):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path
    # The mask token, which is in none of the rows, has an embedding of its own to learn.
    assert not np.isin(head.config.mask_token_id, batch.tokens)
    assert np.abs(learned["embed"]["embedding"][head.config.mask_token_id]).max() > 0
    for name in head.config.taps:
        moved = np.abs(np.asarray(felt[name])).max(axis=2) > 0
        assert not moved[0, 18:].any()
        assert moved[0, :8].all()


def test_it_learns(tiny):
    """Two rows by heart: at every depth, though no mask knows the tokens drafted before it."""
    config = peagle_config(tiny, num_layers=2)
    loss = EagleLoss(steps=3)
    method = peagle_method(tiny, config, None, loss)
    batch = with_features(tiny, two_rows(tiny.config.vocab_size), method.features)
    params, optimizer = method.init(jax.random.key(0)), optax.adam(3e-3)
    last = tiny.params["layers"]["mlp"]["down"]["kernel"][-1]
    np.testing.assert_array_equal(params["layers"]["1"]["mlp"]["down"]["kernel"], last)

    @jax.jit
    def step(params, state):
        value = functools.partial(method.loss, target_params=tiny.params, batch=batch, key=None)
        (_, measures), gradient = jax.value_and_grad(value, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, measures

    state = optimizer.init(params)
    for number in range(120):
        params, state, measures = step(params, state)
        if not number:
            first = measures.correct / measures.counts
    found = measures.correct / measures.counts
    assert (first < 0.2).all(), first
    assert (found > 0.9).all(), found
    assert method.head(params, {}).kind == "peagle"


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_files_of_other_tools(axes, tiny, tmp_path):
    """Amazon's names of tensors, SpecForge's, and NeMo's of the mask token."""
    head = peagle_head(tiny, vocabulary=VOCABULARY, num_layers=3)
    path = written_head(tmp_path, head, "peagle", tiny)
    stored = load_file(path / "model.safetensors")
    assert {"midlayer.hidden_norm.weight", "layers.2.input_layernorm.weight"} < stored.keys()
    assert kind_of_head(path) == "peagle"
    mask = stored["mask_hidden"].reshape((1,) * (axes - 1) + (-1,))
    changed, token = {"mask_hidden": mask}, head.config.mask_token_id
    names = [name for name in stored if name.startswith("midlayer.")]
    config = {"num_depths": 8, "parallel_drafting": True}
    if axes == 3:
        changed |= {name.replace("midlayer", "layers.0"): stored[name] for name in names}
        config |= {"mask_token_id": token, "pard_token": token, "ptd_token_id": None}
    edit_head(path, config, changed, drop=names if axes == 3 else ())
    again = read_foreign(path, tiny)
    assert (again.kind, again.config) == (head.kind, head.config)
    np.testing.assert_array_equal(again.params["mask"]["features"], head.params["mask"]["features"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pard_token": 3}, "ptd_token_id has 60; repair config.json"),
        ({"ptd_token_id": None}, "mask_token_id"),
        ({"ptd_token_id": 61}, "mask_token_id=61: must be one of the target's 61 tokens"),
        ({"parallel_drafting": False}, "parallel_drafting"),
    ],
)
def test_what_files_are_refused(config, said, tiny, tmp_path):
    path = written_head(tmp_path, peagle_head(tiny), "peagle", tiny)
    edit_head(path, config)
    with pytest.raises(InputError, match=said):
        read_foreign(path, tiny)


def test_heads_that_are_refused(tiny):
    config = peagle_config(tiny)
    for changes, said in (
        (dict(norm_output=True), "norm_output=True: no draft step reads an output"),
        (dict(version=1, taps=("final_norm",)), "version=1: a peagle head is EAGLE-3's"),
        (dict(mask_token_id=61), "mask_token_id=61: must be one of the target's 61 tokens"),
    ):
        with pytest.raises(InputError, match=said):
            dataclasses.replace(config, **changes)
    decoder = dataclasses.replace(config.decoder, intermediate_size=44)
    wider = dataclasses.replace(config, decoder=decoder)
    with pytest.raises(InputError, match="the head's layer has another shape"):
        peagle_method(tiny, wider, None, EagleLoss()).init(jax.random.key(0))
    random = peagle_method(tiny, wider, None, EagleLoss(), start="random").init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, meta.unbox(random)) is not None


def test_vllms_parallel_drafting(tiny, tmp_path):
    path = str(written_head(tmp_path, peagle_head(tiny), "peagle", tiny))
    config = dict(method="eagle3", model=path, num_speculative_tokens=5, parallel_drafting=True)
    for settings in (config, dict(config, method="peagle"), dict(config, method=None)):
        drafter = from_vllm_speculative_config(settings, tiny).drafter.drafter
        assert (drafter.name, drafter.num_speculative_tokens) == ("peagle", 5)
    for settings, said in (
        (dict(config, parallel_drafting=False), "is a head of the kind peagle"),
        (dict(config, method="mtp"), "parallel_drafting=True: is not supported for mtp"),
        (dict(config, parallel_drafting=1), "parallel_drafting=1: use true or false"),
    ):
        with pytest.raises(InputError, match=said):
            from_vllm_speculative_config(settings, tiny)
