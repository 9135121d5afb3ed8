"""Heads that learn while they decode: batches of recorded rows, budgets, tokens and noise."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import greedy
from tiny_models import (
    SOME,
    block_head,
    eagle_drafter,
    eagle_head,
    medusa_head,
    mtp_head,
    peagle_head,
    small_model,
)

from specjax.distributed.sharding import make_mesh
from specjax.drafters import head_drafter, make_drafter, take_turns
from specjax.engine.engine import Engine
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.loading.load import place_model
from specjax.methods.medusa.drafter import MedusaDrafter
from specjax.methods.saved_heads import read_head, save_head
from specjax.sampling import derive_from_text
from specjax.testing.drafter_check import chi_square, output_distribution
from train.data.batches import build
from train.data.examples import Example
from train.data.packing import Shape
from train.methods.blocks.block import BlockLoss, block_method
from train.methods.distill import DistillLoss, distill_method
from train.methods.eagle import EagleLoss, eagle_method
from train.methods.medusa import MedusaLoss, medusa_method
from train.methods.medusa2 import JointLoss, medusa2_method
from train.methods.mtp import mtp_method
from train.methods.mtp_loss import MtpLoss
from train.methods.packed_rows import fill_features
from train.methods.peagle import peagle_method
from train.run.optimizer import Optimization
from train.run.step import Program
from train.while_decoding import Learner, LearnerOptions, batch_of, policy_loss

LENGTH, LABELS = 32, 24
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(61, size=size).tolist() for size in RNG.integers(1, 9, size=200)]
FAST = Optimization(learning_rate=3e-3, schedule="constant")
STEPS = EagleLoss(steps=2)


def distilled(tiny):
    """Some layers of the target, as a draft model that learns."""
    method = distill_method(tiny, (0, 2), SOME, DistillLoss())
    return method.head(method.init(jax.random.key(0)), {})


KINDS = {
    # name: (head, method of a head)
    "eagle3": (
        functools.partial(eagle_head, vocabulary=40),
        lambda tiny, head: eagle_method(tiny, head.config, head.draft_ids, STEPS),
    ),
    "medusa": (
        medusa_head,
        lambda tiny, head: medusa_method(tiny, head.config, head.draft_ids, MedusaLoss()),
    ),
    "mtp": (
        mtp_head,
        lambda tiny, head: mtp_method(tiny, head.config, None, MtpLoss(), exports="head"),
    ),
    "peagle": (
        peagle_head,
        lambda tiny, head: peagle_method(tiny, head.config, None, STEPS, start="random"),
    ),
    "draft_model": (
        lambda tiny, spread: distilled(tiny),
        lambda tiny, head: distill_method(tiny, (0, 2), head.draft_ids, DistillLoss()),
    ),
    "block": (
        block_head,
        lambda tiny, head: block_method(tiny, head.config, None, BlockLoss(anchors=8)),
    ),
}


def made(tiny, kind="eagle3", share=1.0, clock=None, **options):
    """A learner of a head with small weights, and its engine."""
    head, method = KINDS[kind][0](tiny, spread=0.3), KINDS[kind][1]
    engine = Engine(tiny, drafter=head_drafter(head, tiny), batch_size=4, max_length=LENGTH)
    options = dict(batch_size=4, row_labels=LABELS, row_tokens=LENGTH, share=share) | options
    clock = {} if clock is None else {"clock": clock}
    return Learner(engine, head, method(tiny, head), LearnerOptions(**options), FAST, **clock)


def decode(deltas, engine, prompts, **sampling):
    """The outputs of prompts, by their order."""
    ids = [engine.add(prompt, greedy(max_new_tokens=20), **sampling) for prompt in prompts]
    outputs = {delta.id: delta.output for delta in deltas if delta.output is not None}
    return [outputs[id] for id in ids]


def per_pass(outputs):
    rounds = sum(len(output.rounds.emitted) for output in outputs)
    return sum(len(output.token_ids) for output in outputs) / rounds


class Texts(list):
    """Examples as a source of training."""

    lengths = num_labels = property(lambda self: np.array([len(one.tokens) for one in self]))


@pytest.mark.parametrize(
    "kind", ["eagle3", *slow("block", "draft_model", "medusa", "mtp", "peagle")]
)
def test_a_loss_is_that_of_the_texts(tiny, kind):
    """Features that decoding left, and those of a pass over the texts, give the same loss."""
    learner = made(tiny, kind)
    engine, method = learner.engine, learner._method
    outputs = decode(engine, engine, PROMPTS[:5])
    rows = np.array([4, 0, 2])
    batch = batch_of(engine.recorded, rows, num_labels=LABELS)
    asked = [(prompt, one.token_ids) for prompt, one in zip(PROMPTS, outputs, strict=False)]
    # In the order in which they ended.
    texts = [np.asarray(engine.recorded.tokens[row]) for row in rows]
    examples = []
    for text in texts:
        ((prompt, new),) = [
            one for one in asked if text.tolist()[: len(one[0]) + len(one[1])] == [*one[0], *one[1]]
        ]
        tokens = np.array([*prompt, *new], np.int32)
        examples.append(Example(tokens, np.arange(len(tokens)) >= len(prompt)))
    wanted = build(Texts(examples), [[0], [1], [2]], Shape(3, LENGTH, LABELS))
    wanted = jax.tree.map(jnp.asarray, wanted)
    wanted = fill_features(tiny.architecture, tiny.params, wanted, method.features)
    for name in ("tokens", "positions", "segments", "labels"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(wanted, name))
    loss = jax.jit(method.loss)
    params, key = method.init(jax.random.key(0)), jax.random.key(0)
    found, expected = (loss(params, tiny.params, each, key)[0] for each in (batch, wanted))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.isfinite(found)


def test_a_head_learns_and_the_tokens_stay(tiny):
    """Greedy tokens are those of plain decoding, in more tokens per pass than with the old head."""
    learner = made(tiny, passes=8.0, update_every=4)
    drafter = head_drafter(KINDS["eagle3"][0](tiny, spread=0.3), tiny)
    frozen = Engine(tiny, drafter=drafter, batch_size=4, max_length=LENGTH)
    for first in range(0, 96, 32):
        outputs = decode(learner, learner.engine, PROMPTS[first : first + 32])
    plain = Engine(tiny, batch_size=4, max_length=LENGTH)
    others = decode(plain, plain, PROMPTS[64:96])
    assert [one.token_ids for one in outputs] == [one.token_ids for one in others]
    before = per_pass(decode(frozen, frozen, PROMPTS[64:96]))
    assert per_pass(outputs) > before + 0.25
    assert learner.steps == 8 * 96 // 4


def test_a_learned_head_is_saved_and_decodes_alike(tiny, tmp_path):
    learner = made(tiny, "medusa", update_every=1)
    decode(learner, learner.engine, PROMPTS[:8])
    save_head(learner.head(), tmp_path / "head")
    head = read_head(tmp_path / "head")
    assert head.training == {"method": "medusa", "step": 4, "while_decoding": True}
    engine = Engine(tiny, drafter=head_drafter(head, tiny), batch_size=4, max_length=LENGTH)
    for name in ("blocks", "shared"):
        jax.tree.map(
            np.testing.assert_array_equal,
            engine.plan.drafter.params[0][name],
            learner.engine.plan.drafter.params[0][name],
        )


class Clock:
    """A clock that a step of the engine, and one of training, put forward by given seconds."""

    def __init__(self, monkeypatch, decoding, training):
        self.now = 0.0
        self._lasts(monkeypatch, Engine, "step", decoding)
        monkeypatch.setattr(Program, "compile", lambda *_: self.program(training))

    def __call__(self):
        return self.now

    def _lasts(self, monkeypatch, kind, name, seconds):
        original = getattr(kind, name)

        def timed(*arguments):
            self.now += seconds
            return original(*arguments)

        monkeypatch.setattr(kind, name, timed)

    def program(self, seconds):
        """A training step that changes nothing, and takes its time."""
        self.now += 50.0

        def step(state, teacher, batches):
            self.now += seconds
            measures = type("Measures", (), {"weight": 1.0})
            return state, type("Report", (), {"loss": 1.0, "measures": measures, "grad_norm": 1.0})

        return step


@pytest.mark.parametrize(("share", "passes"), [(0.25, 1e6), (0.0, 1e6), (0.1, 0.5), (1.0, 2.0)])
def test_training_stays_within_its_budget(tiny, monkeypatch, share, passes):
    clock = Clock(monkeypatch, decoding=1.0, training=2.0)
    learner = made(tiny, "medusa", share, clock, passes=passes, rows=16)
    for prompt in PROMPTS[:60]:
        learner.engine.add(prompt, greedy(max_new_tokens=20))
    decoded = 0.0
    while learner.engine.num_unfinished:
        clock.now += 100.0  # the caller's own time counts for nothing
        learner.step()
        # The first step costs an unknown time.
        assert learner.train_s <= max(share * (decoded + learner.train_s), 2.0)
        assert learner.steps * 4 <= passes * learner.engine.num_recorded
        decoded += 1.0
    assert learner.train_s == 2.0 * learner.steps
    assert learner.compile_s == (50.0 if learner.steps else 0.0)
    assert learner.losses == [1.0] * learner.steps
    assert (learner.steps > 0) == (share > 0)
    if share == 0.25:  # the time is what limits it, and is used
        assert learner.train_s > share * (decoded + learner.train_s) - 4.0
    if share == 1.0:
        list(learner)
        assert learner.steps == 60 * 2 // 4


def test_what_was_missed_is_not_made_up_for(tiny, monkeypatch):
    """Of many requests that were not trained on, the latest alone count."""
    learner = made(tiny, "medusa", clock=Clock(monkeypatch, 1.0, 1.0), passes=2.0, rows=8)
    decode(learner.engine, learner.engine, PROMPTS[:40])
    list(learner)
    assert learner.steps == 8 * 2 // 4


def test_a_target_may_change_meanwhile(tiny):
    """The head learns from the target that decodes; with the old one the loss is another."""
    learner = made(tiny, "medusa", update_every=1)
    decode(learner.engine, learner.engine, PROMPTS[:8])
    jax.tree.map(
        np.testing.assert_array_equal, learner._target_params()["head"], tiny.params["head"]
    )
    fresh = jax.tree.map(lambda leaf: leaf * 1.1, tiny.params)
    learner.engine.update_params(fresh)
    learner.train()
    np.testing.assert_array_equal(
        learner._target_params()["head"]["kernel"], fresh["head"]["kernel"]
    )
    (params,) = learner.engine.plan.drafter.params
    for name in ("embed", "head"):
        if name in params["shared"]:
            jax.tree.map(np.testing.assert_array_equal, params["shared"][name], fresh[name])


def test_a_head_that_has_learned_draws_with_other_noise(tiny):
    """It may have learned from an output of the same seed, whose noise it must not know."""
    learner = made(tiny, "medusa", update_every=2)
    found = []
    for _ in range(3):
        params = learner.engine.plan.drafter.params
        digests = learner.engine.plan.loop.drafter.text_digests(params)
        key = jax.random.key(0)
        for digest in digests:
            key = derive_from_text(key, digest)
        found.append(jax.random.key_data(key))
        decode(learner.engine, learner.engine, PROMPTS[:4])
        learner.train()
    # No update came after the first step, and one after the second.
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


def repeats(params, token):
    """Medusa heads that draft one token, whatever they read."""
    (name,) = [name for name in params if name not in ("shared", "digest", "head", "draft_ids")]
    blocks = jax.tree.map(jnp.zeros_like, params[name])
    blocks["bias"] = blocks["bias"] + 5.0
    kernel = jnp.zeros_like(params["head"]["kernel"]).at[:, :, token].set(2.0)
    return {**params, name: blocks, "head": {"kernel": kernel}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaysNothing(MedusaDrafter):
    """Heads that do not say what they were trained on."""

    def text_digests(self, params):
        return ()


@pytest.mark.parametrize("kind", [MedusaDrafter, SaysNothing])
def test_a_head_may_repeat_an_output_of_the_same_seed(kind):
    """The second output of a seed does not depend on the first, which the head then knows."""
    target, count = small_model(4), 1000
    head = medusa_head(target, original_lm_head=False)
    drafter = head_drafter(head, target)
    drafter = drafter._replace(drafter=kind(drafter.drafter.head, num_speculative_tokens=2))
    engine = Engine(target, drafter=drafter, batch_size=64, max_length=8)

    def first_tokens(seeds):
        for seed in seeds:
            engine.add([1, 2], temperature=1.0, max_new_tokens=2, seed=seed, id=seed)
        outputs = {delta.id: delta.output for delta in engine if delta.output is not None}
        return np.array([outputs[seed].token_ids[0] for seed in seeds])

    seeds = np.arange(count)
    engine.update_params(drafter_params=repeats(drafter.params, 0))
    first = first_tokens(seeds.tolist())
    second = np.zeros_like(first)
    for token in range(4):
        # Nothing is said of what the new parameters were trained on.
        engine.update_params(drafter_params=repeats(drafter.params, token))
        (mine,) = np.nonzero(first == token)
        second[mine] = first_tokens(mine.tolist())
    request = SamplingParams(temperature=1.0, max_new_tokens=2)
    law = output_distribution(target.architecture, target.params, [1, 2], request, 2)
    law = law.reshape(4, 4).sum(axis=1)
    found = chi_square(np.bincount(4 * first + second, minlength=16), np.outer(law, law).ravel())
    if kind is MedusaDrafter:
        assert found.statistic < found.threshold
    else:
        assert found.statistic > 2 * found.threshold


@pytest.mark.parametrize("rule", ["rejection", *slow("block")])
def test_a_head_that_changes_every_round_leaves_the_law(rule):
    """Outcomes of three tokens, in rows whose head is another one in each of their rounds."""
    target, count, length = small_model(4), 2000, 3
    heads = [head_drafter(medusa_head(target, seed=seed), target) for seed in range(3)]
    options = dict(num_speculative_tokens=2, batch_size=64, rounds_per_step=1, verify=rule)
    engine = Engine(target, drafter=heads[0], max_length=8, **options)
    request = SamplingParams(temperature=1.0, max_new_tokens=length)
    for _ in range(count):
        engine.add([1, 2], request)
    outputs = []
    for head in itertools.cycle(heads):
        if not engine.num_unfinished:
            break
        outputs += [delta.output for delta in engine.step() if delta.output is not None]
        engine.update_params(drafter_params=head.params)
    accepted = sum(int(np.maximum(output.rounds.accepted, 0).sum()) for output in outputs)
    assert accepted > count / 4
    tokens = np.array([output.token_ids for output in outputs])
    code = np.ravel_multi_index(tuple(tokens.T), (4,) * length)
    law = output_distribution(target.architecture, target.params, [1, 2], request, length)
    found = chi_square(np.bincount(code, minlength=4**length), law)
    assert found.statistic < found.threshold


def test_only_the_head_of_a_joined_drafter_learns(tiny):
    head = medusa_head(tiny, spread=0.3)
    drafter = take_turns(make_drafter("ngram", tiny), head_drafter(head, tiny))
    engine = Engine(tiny, drafter=drafter, batch_size=4, max_length=LENGTH)
    method = KINDS["medusa"][1](tiny, head)
    learner = Learner(engine, head, method, LearnerOptions(share=1.0, update_every=1), FAST)
    outputs = decode(learner, engine, PROMPTS[:8])
    plain = Engine(tiny, batch_size=4, max_length=LENGTH)
    assert [one.token_ids for one in outputs] == [
        one.token_ids for one in decode(plain, plain, PROMPTS[:8])
    ]
    assert learner.steps


def test_what_does_not_fit_is_refused(tiny):
    head = medusa_head(tiny)
    method = KINDS["medusa"][1](tiny, head)
    engine = Engine(tiny, drafter=head_drafter(head, tiny), batch_size=2, max_length=LENGTH)
    other = Engine(tiny, drafter=eagle_drafter(tiny), batch_size=2, max_length=LENGTH)
    joint = medusa2_method(tiny, head.config, None, MedusaLoss(), JointLoss(steps=10))
    other_shape, tokens = medusa_head(tiny, num_layers=2), np.arange(61, dtype=np.int32)
    other_tokens = dataclasses.replace(head, draft_ids=tokens)
    for arguments, message in [
        ((engine, head, joint), "^method='medusa2': trains the target too; use another"),
        ((other, head, method), "^engine: 0 drafters of eagle3 are of the kind medusa; make it"),
        ((engine, other_tokens, method), "^head: drafts other tokens than the method; give"),
        ((engine, other_shape, method), "^head: the parameters do not fit the config"),
    ]:
        with pytest.raises(InputError, match=message):
            Learner(*arguments)
    for optimization in (Optimization(), Optimization(schedule="constant", decay_steps=None)):
        with pytest.raises(InputError, match="^optimization.decay_steps=(1|None): the number of"):
            Learner(engine, head, method, optimization=optimization)
    with pytest.raises(InputError, match="^share=2"):
        LearnerOptions(share=2)
    with pytest.raises(InputError, match="^passes=0.5, rows=6: too few for a step of batch_size=4"):
        LearnerOptions(passes=0.5, rows=6, batch_size=4)
    learner = Learner(engine, head, method)
    with pytest.raises(InputError, match="^train: no request has finished yet"):
        learner.train()
    engine.add([1, 2], max_new_tokens=3)
    with pytest.raises(InputError, match="^record: 1 requests are unfinished"):
        Learner(engine, head, method)


@functools.partial(jax.jit, static_argnums=0)
def policy_gradient(decoder, params, batch, advantages):
    return jax.grad(lambda params: policy_loss(decoder, params, batch, advantages))(params)


def test_a_policy_gradient_raises_what_is_rewarded(tiny):
    """The gradient's step makes rewarded texts likelier, and the others less likely."""
    engine = Engine(tiny, batch_size=4, max_length=LENGTH)
    engine.record(("final_norm",), rows=8, tokens=LENGTH)
    decode(engine, engine, PROMPTS[:8], temperature=1.0)
    batch = batch_of(engine.recorded, np.arange(8), num_labels=LABELS)
    advantages = jnp.asarray([1.0, -1.0] * 4)
    gradient = policy_gradient(tiny.architecture, tiny.params, batch, advantages)
    after = jax.tree.map(lambda param, slope: param - 0.01 * slope, tiny.params, gradient)
    loss = jax.jit(policy_loss, static_argnums=0)
    for rows, sign in ((slice(0, None, 2), 1), (slice(1, None, 2), -1)):
        some = jax.tree.map(lambda leaf: leaf[rows], dataclasses.replace(batch, features={}))  # noqa: B023
        before, now = (
            -float(loss(tiny.architecture, params, some, jnp.ones(4)))
            for params in (tiny.params, after)
        )
        assert sign * (now - before) > 0


def test_texts_without_their_beginning_have_no_policy_gradient(tiny):
    """Their probabilities are those of other texts."""
    engine = Engine(tiny, batch_size=4, max_length=LENGTH)
    engine.record(("final_norm",), rows=4, tokens=12)
    decode(engine, engine, PROMPTS[:4], temperature=1.0)
    batch = batch_of(engine.recorded, np.arange(4), num_labels=8)
    assert (np.asarray(engine.recorded.first) > 0).all()
    loss = jax.jit(policy_loss, static_argnums=0)
    assert loss(tiny.architecture, tiny.params, batch, jnp.ones(4)) == 0
    config = dataclasses.replace(tiny.config, logit_softcap=3.0)
    limited = dataclasses.replace(tiny.architecture, config=config)
    with pytest.raises(InputError, match="the target limits its logits"):
        policy_loss(limited, tiny.params, batch, jnp.ones(4))


@pytest.mark.parametrize("data", slow(2))
def test_a_head_learns_on_a_mesh(tiny, data):
    model = place_model(tiny, make_mesh(data=data, model=2, devices=jax.devices()[: 2 * data]))
    learner = made(model, update_every=1)
    alone = made(tiny, update_every=1)
    for each in (learner, alone):
        decode(each.engine, each.engine, PROMPTS[:1])
        each.train()
        each.train()
    np.testing.assert_allclose(learner.losses, alone.losses, rtol=1e-4)
    outputs = decode(learner, learner.engine, PROMPTS[:8])
    plain = Engine(tiny, batch_size=4, max_length=LENGTH)
    assert [one.token_ids for one in outputs] == [
        one.token_ids for one in decode(plain, plain, PROMPTS[:8])
    ]
