"""The doctor names a planted fault in broken heads, and finds nothing in sound ones."""

import dataclasses
import functools
import importlib
import json
import re
from unittest import mock

import broken_heads
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bad_input import refused, refused_command
from conftest import FAST, slow, tiny_config
from tiny_models import block_head, eagle_head, medusa_head, mtp_head

from specjax.apps.doctor import changes, doctor
from specjax.apps.doctor.answers import read_answers
from specjax.apps.doctor.declared import check_files
from specjax.apps.doctor.diagnose import diagnose
from specjax.apps.doctor.teacher_forced import (
    UNLIMITED,
    Reading,
    num_programs,
    score,
)
from specjax.drafters import head_drafter, make_drafter, merge_drafters
from specjax.engine.generate import generate
from specjax.engine.requests import SamplingParams
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import random_model, save_model
from specjax.methods.draft_model.drafter import DraftModel
from specjax.methods.heads.examined import TrueText
from specjax.methods.heads.shared_parameters import share_anew
from specjax.methods.published_layouts import write_foreign
from specjax.methods.saved_heads import save_head
from specjax.models import decoder
from specjax.models.form import Form
from train.methods.distill import DistillLoss, distill_method

diagnosis = importlib.import_module("specjax.apps.doctor.diagnose")

pytestmark = pytest.mark.usefixtures("one_width")
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=40)
PREFIX = [7, 3, 9]
PROMPTS = [[*PREFIX, *row] for row in np.random.default_rng(1).integers(0, 61, (8, 5)).tolist()]
LENGTH = 2
TRAINED = ("norm_before_residual",)
"""Flags of the EAGLE-3 head with which it is trained."""
DSPARK = dict(block_size=LENGTH + 1, num_layers=1, markov_rank=3, confidence=True)


@functools.cache
def target():
    """A tiny target whose distributions depend on more than the last token."""
    model = random_model(
        tiny_config(max_positions=128), 0, dtype="float32", form=Form("stacked", "blocks")
    )
    head = {"kernel": 3 * model.params["head"]["kernel"]}
    return dataclasses.replace(model, params={**model.params, "head": head})


@functools.cache
def answers_of_target(seed=0):
    return generate(target(), PROMPTS, sampling=SAMPLING, batch_size=8, seed=seed).token_ids


@functools.cache
def trained(kind):
    """A sound drafter: a head fitted to answers of the target."""
    make = {
        "eagle3": lambda: eagle_head(target(), vocabulary=50, norm_before_residual=True),
        "mtp": lambda: mtp_head(target()),
        "medusa": lambda: medusa_head(target(), heads=LENGTH, original_lm_head=False),
        "dspark": lambda: block_head(target(), vocabulary=50, **DSPARK),
    }[kind]
    loaded = head_drafter(make(), target(), num_speculative_tokens=LENGTH)
    answers = [answer for seed in range(4) for answer in answers_of_target(seed)]
    read = read_answers(target(), 4 * PROMPTS, answers, loaded.drafter.features, SAMPLING)
    fixed = loaded.drafter.own_params(loaded.params).keys()
    fixed = {name: part for name, part in loaded.params.items() if name not in fixed}
    own = {name: part for name, part in loaded.params.items() if name not in fixed}
    ids, labels = fixed.get("draft_ids", jnp.arange(61)), read.logp.shape[1]

    def loss_of_row(own, tokens, first, logp, features):
        steps = jnp.arange(labels)
        features = {name: value[None] for name, value in features.items()}
        text = TrueText(tokens, features, UNLIMITED, first + steps)
        logits = loaded.drafter.teacher_forced({**own, **fixed}, text)
        total = 0.0
        for step, one in enumerate(logits):
            wanted = jnp.exp(logp)[jnp.minimum(steps + step, labels - 1)][:, ids]
            total -= (wanted * jax.nn.log_softmax(one)).sum(-1).mean()
        return total

    def loss(own):
        rows = (read.tokens, read.first, read.logp, read.features)
        return jax.vmap(functools.partial(loss_of_row, own))(*rows).mean()

    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 300))

    # It runs for longer than it takes to compile.
    @functools.partial(jax.jit, compiler_options=FAST)
    def fit(own):
        def step(carry, _):
            own, state = carry
            updates, state = optimizer.update(jax.grad(loss)(own), state)
            return (optax.apply_updates(own, updates), state), None

        return jax.lax.scan(step, (own, optimizer.init(own)), length=300)[0][0]

    # The caches are empty, and loops over their blocks have no gradient.
    with mock.patch.object(decoder, "attend_cache", lambda *args, start, **_: start):
        loaded = loaded._replace(params={**fit(own), **fixed})
    return with_estimates(loaded) if kind == "dspark" else loaded


def with_estimates(loaded):
    """The drafter with an estimate of acceptance that is right on average of other answers."""
    answers = answers_of_target(seed=9)
    read = read_answers(target(), PROMPTS, answers, loaded.drafter.features, SAMPLING)
    mean = score(
        Reading(loaded.drafter, loaded.params, read.features), read, SAMPLING
    ).values.mean()
    scale, odds = loaded.params["confidence"]["scale"], np.log(mean / (1 - mean))
    estimates = {"scale": 1e-3 * scale, "bias": jnp.full(1, odds, jnp.float32)}
    return loaded._replace(params={**loaded.params, "confidence": estimates})


def examined(loaded, prompts=PROMPTS, **options):
    return diagnose(target(), loaded, prompts, sampling=SAMPLING, **options)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", *slow("mtp", "dspark")])
def test_sound_heads(kind):
    result = examined(trained(kind))
    assert not result.findings
    assert not result.notes
    assert "nothing found" in str(result)
    assert result.measured.overlap[0].value > result.measured.chance + 0.09
    # Decoding accepts what teacher forcing predicts.
    predicted, decoded = result.measured.predicted[0], result.measured.decoded[0]
    assert predicted.value == pytest.approx(decoded.value, abs=0.15)


GREEDY, CUT = (dataclasses.replace(SAMPLING, **one) for one in ({"temperature": 0.0}, {"top_k": 5}))
MARK = 60
MARKED = [[MARK] * len(PREFIX) + prompt[len(PREFIX) :] for prompt in PROMPTS]


class LateDraftModel(DraftModel):
    """A draft model that observes each token one position too late."""

    def observe(self, params, state, context, accepted):
        late = context.replace(tokens=jnp.roll(context.tokens, 1, axis=1))
        return super().observe(params, state, late, accepted)


def right_in_half_of_the_rows(kind=DraftModel, **options):
    """A draft model that takes the marked prompts for others, and else is the target."""
    embedding = target().params["embed"]["embedding"].at[MARK].multiply(-30.0)
    params = {**target().params, "embed": {"embedding": embedding}}
    other = dataclasses.replace(target(), params=params)
    loaded = make_drafter("draft_model", target(), other, num_speculative_tokens=4, **options)
    own = {one.name: getattr(loaded.drafter, one.name) for one in dataclasses.fields(DraftModel)}
    return loaded._replace(drafter=kind(**own))


@pytest.mark.parametrize(
    ("sampling", "method"),
    [
        (GREEDY, "probabilistic"),
        (CUT, "greedy"),
        *slow((GREEDY, "greedy"), (CUT, "probabilistic")),
    ],
)
def test_rounds_accept_what_is_predicted_for_them(sampling, method):
    """Rounds begin mostly where the drafter is wrong: means over all positions say nothing."""
    loaded = right_in_half_of_the_rows(draft_sample_method=method)
    result = diagnose(target(), loaded, [*PROMPTS[:4], *MARKED[4:]], sampling=sampling)
    assert not result.findings
    measured = result.measured
    if sampling == GREEDY:
        assert measured.agreement[0].value > measured.decoded[0].value + 0.1
        predicted, decoded = measured.predicted, measured.decoded
        assert [one.value for one in predicted] == pytest.approx([one.value for one in decoded])


@pytest.mark.parametrize("sampling", [SAMPLING, *slow(GREEDY)])
def test_what_observe_keeps_is_compared(sampling):
    loaded = right_in_half_of_the_rows(LateDraftModel)
    (finding,) = diagnose(target(), loaded, PROMPTS, sampling=sampling).findings
    assert finding.fault == changes.DECODING
    assert re.search(
        r"teacher forcing predicts [1-4].\d\d for the same \d+ rounds", finding.evidence
    )
    assert finding.before > finding.after + 0.3
    assert "observe" in finding.remedy


def rounded(loaded):
    """The drafter with weights in steps of a quarter."""
    fixed = {name: loaded.params[name] for name in ("shared", "draft_ids", "digest")}
    own = {name: part for name, part in loaded.params.items() if name not in fixed}
    coarse = jax.tree.map(lambda leaf: jnp.round(leaf * 3) / 3, own)
    return loaded._replace(params={**coarse, **fixed})


def wrong_taps(loaded):
    """The drafter that reads outputs of the layers whose inputs it was trained on."""
    assert loaded.drafter.features == ("layer_input:0", "layer_input:1", "layer_input:2")
    return broken_heads.with_config(loaded, taps=("layer_input:1", "layer_input:2", "pre_norm"))


def unnormed(loaded):
    """The drafter of an engine that leaves out the norm of the residual stream."""
    return broken_heads.with_config(loaded, norm_before_residual=False)


def draft_model(**options):
    """The target as its own draft model, which is as sound as can be."""
    return make_drafter("draft_model", target(), target(), num_speculative_tokens=2, **options)


BARE = [prompt[len(PREFIX) :] for prompt in PROMPTS]
FAULTS = {
    changes.POSITIONS: lambda: examined(broken_heads.shifted(trained("eagle3"))),
    changes.TAPS: lambda: examined(wrong_taps(trained("eagle3"))),
    changes.NORM: lambda: examined(unnormed(trained("eagle3"))),
    changes.VOCABULARY: lambda: examined(broken_heads.next_tokens(trained("eagle3"))),
    changes.TEMPLATE: lambda: examined(
        trained("eagle3"), BARE, other_prompts={"chat=true": PROMPTS}
    ),
    changes.DTYPE: lambda: examined(
        rounded(trained("eagle3")), in_float32=lambda: (target(), trained("eagle3"))
    ),
    changes.WINDOW: lambda: examined(broken_heads.narrow(draft_model(), 4)),
    changes.TARGET: lambda: examined(broken_heads.of_another_target(trained("eagle3"))),
}


def other_map(loaded):
    """The block drafter with the target's columns of another draft vocabulary."""
    ids = jnp.clip(loaded.params["draft_ids"] + 1, 0, 60)
    return loaded._replace(params=share_anew({**loaded.params, "draft_ids": ids}, target().params))


def draft_model_of(ids):
    """All of the target's layers as a draft model of some tokens, which is as sound as can be."""
    method = distill_method(target(), (0, 1, 2), np.asarray(ids, np.int32), DistillLoss())
    params = method.init(jax.random.key(0))
    return head_drafter(method.head(params, {}), target(), num_speculative_tokens=LENGTH)


def test_a_map_of_other_tokens_is_named():
    """Of a head that gathers the target's columns by its map: in any order they are the same."""
    likely = np.argsort(-np.bincount(np.concatenate(answers_of_target()), minlength=61))
    # Neither the tokens after the likely ones nor those before them are likely ones.
    far = np.setdiff1d(np.arange(61), [likely[:12] + by for by in (-1, 0, 1)])
    # As many, so that both have one program.
    sound = examined(draft_model_of(np.sort(likely[: len(far)])))
    assert not sound.findings
    tried = [what for what, _ in sound.tried if changes.VOCABULARY in what]
    assert len(tried) == 4
    assert not any("entry" in what for what in tried)
    (finding,) = examined(draft_model_of(far)).findings
    assert finding.fault == changes.VOCABULARY
    assert "likeliest tokens of these answers" in finding.evidence
    assert "whole_vocabulary" in finding.remedy


def sure(loaded):
    """The drafter with a confidence head that expects more than there is."""
    estimates = {**loaded.params["confidence"], "bias": jnp.full(1, 5.0)}
    return loaded._replace(params={**loaded.params, "confidence": estimates})


TAPS = ("layer_input:1", "layer_input:2")
BLOCK_FAULTS = {
    "order": (changes.TAPS, lambda one: broken_heads.with_config(one, taps=TAPS[::-1])),
    "layers": (changes.TAPS, lambda one: broken_heads.with_config(one, taps=(TAPS[1], "pre_norm"))),
    "positions": (changes.POSITIONS, broken_heads.shifted),
    "mask": (changes.MASK, lambda one: broken_heads.with_config(one, mask_token_id=5)),
    "anchor": (
        changes.BLOCK,
        lambda one: broken_heads.with_config(one, sample_from_anchor=True, block_size=LENGTH),
    ),
    "map": (changes.VOCABULARY, other_map),
    "confidence": (changes.CONFIDENCE, sure),
}


@pytest.mark.parametrize(
    "name", ["mask", "confidence", *slow("order", "layers", "positions", "anchor", "map")]
)
def test_a_planted_fault_of_a_block_drafter_is_named(name):
    fault, broken = BLOCK_FAULTS[name]
    sound = trained("dspark")
    assert sound.drafter.features == TAPS
    result = examined(broken(sound))
    assert [one.fault for one in result.findings] == [fault]
    assert result.findings[0].remedy in str(result)
    said = {"mask": "mask_token_id=60 in", "anchor": "sample_from_anchor=false in"}
    assert said.get(name, "") in result.findings[0].remedy
    if name == "confidence":
        assert "draft_p_min" in str(result)
        assert result.findings[0].before > 0.1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    result = FAULTS[fault]()
    assert result.findings[0].fault == fault
    assert fault in str(result)
    assert result.findings[0].remedy in str(result)
    if fault != changes.TARGET:
        assert len(result.findings) == 1
        assert result.findings[0].after > result.findings[0].before + 0.02


def test_changes_are_operands():
    """All changes of a head run in the program that measures it, but for its own flags."""
    trained("eagle3")
    jax.clear_caches()
    result = examined(trained("eagle3"))
    flags = [what for what, _ in result.tried if "=" in what]
    assert len(flags) == 2
    assert len(result.tried) >= 14
    assert num_programs() == 1 + len(flags)


def test_without_weights_there_is_nothing_to_examine():
    result = examined(make_drafter("ngram", target()))
    assert not result.examined
    assert result.measured.overlap is None
    assert result.measured.decoded
    assert result.measured.acceptance_length >= 1
    assert "ngram reads no features and has no head: nothing to examine" in str(result)


def test_weights_that_were_not_loaded_are_noted():
    loaded = trained("eagle3")
    params = {**loaded.params, "final_norm": {"scale": jnp.ones(24)}}
    assert "final_norm.scale: exactly 1" in examined(loaded._replace(params=params)).notes[0]


def test_shares_of_0_and_1_are_in_their_intervals():
    for count in (1, 5, 30):
        shares = [diagnosis._share(np.full(count, value)) for value in (False, True)]
        assert str(shares[0]).startswith("0.00 [0.00, ")
        assert str(shares[1]).endswith(", 1.00]")
        assert all(0 <= one.low <= one.value <= one.high <= 1 for one in shares)


def test_bad_calls():
    ngram = make_drafter("ngram", target())
    refused(lambda: diagnose(target(), ngram, []), "prompts is empty")
    refused(lambda: diagnose(target(), ngram, [[1, 99]]), r"prompts\[0\]: token id 99")
    joined = merge_drafters(ngram, make_drafter("suffix", target()))
    refused(lambda: diagnose(target(), joined, PROMPTS), "joined drafters")
    head = eagle_head(target())
    tree = head_drafter(head, target(), tree={"kind": "static"})
    refused(lambda: diagnose(target(), tree, PROMPTS), "drafts a tree")
    narrow = draft_model(sliding_window=8)
    refused(lambda: diagnose(target(), narrow, PROMPTS), "sliding_window=8: examine the drafter")
    none = head_drafter(head, target(), num_speculative_tokens=0)
    refused(lambda: diagnose(target(), none, PROMPTS), "num_speculative_tokens=0")
    beyond = broken_heads.with_config(head_drafter(head, target()), taps=("layer_input:9",))
    refused(lambda: diagnose(target(), beyond, PROMPTS), "feature 'layer_input:9' is unknown")
    two = broken_heads.with_config(head_drafter(head, target()), taps=("layer_input:1", "pre_norm"))
    refused(
        lambda: diagnose(target(), two, PROMPTS),
        "2 features of width 24, and the head's fc reads 72",
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("drafter.name=ngram,eagle3", "one drafter is examined at a time"),
        ("drafter.name=ngram+eagle3", "one drafter is examined at a time"),
        ("drafter.name=none", "nothing to examine"),
        ("turns=all", "first turns are examined"),
        ("num_speculative_tokens=0", "num_speculative_tokens=0"),
        ("limit=0", "limit=0"),
    ],
)
def test_bad_configs(flag, said, capsys):
    assert said in refused_command(doctor.main, [f"--config.{flag}"], capsys)


def edited(folder, **fields):
    """The head's folder with other fields in its config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


BLOCK_IDS = {"dflash": "target_layer_ids", "speculators": "aux_hidden_state_layer_ids"}


@pytest.fixture
def nothing_loads(monkeypatch):
    def loads(*_):
        pytest.fail("it was loaded")

    monkeypatch.setattr(doctor, "_load", loads)


@pytest.mark.parametrize("form", ["checkpoint", "eagle3"])
def test_files_are_checked_before_anything_is_loaded(form, tmp_path, capsys, nothing_loads):
    """The path, the kind, and the layers of each layout of a head and of a target."""
    head = eagle_head(target(), vocabulary=50)
    folder = tmp_path / "head"
    if form == "checkpoint":
        save_head(head, folder)
    else:
        write_foreign(head, folder, "eagle3", target())
    shallow = random_model(tiny_config(num_layers=1, max_positions=128), 0, dtype="float32")
    save_model(shallow, tmp_path / "model")
    save_checkpoint(shallow, tmp_path / "saved")

    def said(name, path, model="smollm2-135m-instruct"):
        fields = {"drafter.name": name, "drafter.path": path, "target": model}
        given = [f"--config.{name}={value}" for name, value in fields.items()]
        return refused_command(doctor.main, given, capsys)

    assert "no such directory" in said("eagle3", tmp_path / "none")
    assert "holds no head in a known layout" in said("eagle3", tmp_path / "model")
    assert "a head of the kind eagle3; use drafter.name=eagle3" in said("medusa", folder)
    for model in ("model", "saved"):
        assert "reads the state of layer 2, and " in said("eagle3", folder, tmp_path / model)
    if form == "eagle3":
        edited(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 31])
        assert "reads the state of layer 31, and smollm2-135m-instruct has 30" in said(
            "eagle3", folder
        )
        for form, field in BLOCK_IDS.items():
            block = tmp_path / form
            write_foreign(block_head(target()), block, form, target())
            edited(block, **{field: [1, 31], "dflash_config": {}})
            assert f"repair its taps ({field})" in said("dflash", block)


def test_a_head_of_another_target_by_its_own_files_is_noted(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    head = eagle_head(target(), vocabulary=50)
    save_head(
        dataclasses.replace(head, target=dataclasses.replace(head.target, name="org/Other-1B")),
        ours,
    )
    write_foreign(head, theirs, "eagle3", target())
    edited(theirs, speculators_config={"verifier": {"name_or_path": "org/Other-1B"}})
    for folder in (ours, theirs):
        for same in ("other-1b", "/models/Other-1B-Q4_1.gguf", "org/other_1b"):
            assert check_files("eagle3", str(folder), same) == ()
        (note,) = check_files("eagle3", str(folder), "org/Model-1B")
        assert "made for org/Other-1B by its own files, and the target is org/Model-1B" in note
    assert check_files("ngram", None, "org/Model-1B") == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", broken_heads.CASES)
def test_heads_of_the_default_model(name):
    found = [one.fault for one in broken_heads.examine(name).findings]
    assert found[:1] == ([] if name in ("eagle3", "medusa", "draft_model") else [name])
