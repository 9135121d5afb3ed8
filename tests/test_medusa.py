"""Medusa heads: in the decoding loop, and their losses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_config
from decoding import PROMPTS, decode, first_state, greedy, make_session, mixed, rounds

from specjax import loop
from specjax.errors import InputError
from specjax.heads.drafters import head_drafter
from specjax.heads.head import Head, TargetFacts
from specjax.models.loading import random_model
from specjax.models.medusa import Medusa, MedusaConfig, parameter_table
from specjax.models.parameters import Parameter
from specjax.prefill import prefill
from specjax.sampling_params import SamplingParams
from specjax.testing import check_drafter
from train.batches import Batch
from train.medusa import MedusaLoss, first_params, medusa_method
from train.medusa2 import JointLoss, medusa2_method
from train.method import Method
from train.teacher import fill_features

pytestmark = pytest.mark.usefixtures("quick_compile")
NEW = 24
V = 61
SOME = np.sort(np.random.default_rng(0).choice(V, 40, replace=False)).astype(np.int32)
KEY = jax.random.key(0)
FORMS = {
    "shared": dict(original_lm_head=True, ids=SOME),
    "own": dict(original_lm_head=False, num_layers=2),
}


def medusa_config(target, heads=3, num_layers=1, original_lm_head=True, ids=None):
    vocab = target.config.vocab_size
    size = vocab if ids is None else len(ids)
    return MedusaConfig(target.config.hidden_size, vocab, heads, num_layers, size, original_lm_head)


def medusa_head(target, ids=None, spread=1.0, seed=0, **options):
    """Random heads; own ones are the target's, with noise."""
    config = medusa_config(target, ids=ids, **options)
    rng = np.random.default_rng(seed)

    def noise(entry):
        size = spread * (0.1 if len(entry.shape) == 3 else entry.shape[-2] ** -0.5)
        return jnp.asarray(size * rng.standard_normal(entry.shape, np.float32))

    table = {"blocks": parameter_table(config)["blocks"]}
    params = jax.tree.map(noise, table, is_leaf=lambda node: isinstance(node, Parameter))
    if not config.original_lm_head:
        start = first_params(Medusa(config, jnp.dtype("float32")), target, ids, KEY)
        params["head"] = start["head"]
    return Head("medusa", config, params, ids, TargetFacts.of(target))


@pytest.fixture(scope="module")
def plain(tiny):
    options = dict(sampling=mixed(max_new_tokens=NEW), batch_size=1)
    return decode(tiny, PROMPTS, verify="coupled", **options)


@pytest.mark.parametrize(
    ("form", "length"), [("shared", 5), pytest.param("own", 2, marks=pytest.mark.slow)]
)
def test_coupled_and_greedy_rows_are_those_of_plain_decoding(form, length, tiny, plain):
    got = decode(
        tiny,
        PROMPTS,
        drafter=head_drafter(medusa_head(tiny, **FORMS[form]), tiny),
        verify="coupled",
        sampling=mixed(max_new_tokens=NEW),
        num_speculative_tokens=length,
    )
    assert got.token_ids == plain.token_ids
    # There are three heads, whatever is asked for.
    assert got.drafted.max() == min(length, 3)
    took_part = got.emitted > 0
    assert 0 < got.accepted[took_part].sum() < got.drafted[took_part].sum()
    # A prompt of one token has no feature to draft from.
    assert [row for row in range(8) if got.drafted[row, 0] == 0] == [0, 5]


def test_as_many_tokens_as_heads_by_default(tiny):
    drafter = head_drafter(medusa_head(tiny), tiny, draft_sample_method="greedy")
    assert drafter.num_speculative_tokens == 3
    assert not drafter.sampled
    with pytest.raises(InputError, match=r"draft_p_min=1\.0"):
        head_drafter(medusa_head(tiny), tiny, draft_p_min=1.0)


def test_a_row_does_not_depend_on_its_neighbours(tiny, plain):
    drafter = head_drafter(medusa_head(tiny, ids=SOME), tiny, draft_p_min=0.06)
    request = dict(drafter=drafter, sampling=mixed(max_new_tokens=9))
    together = decode(tiny, PROMPTS, **request, batch_size=8)
    alone = decode(tiny, PROMPTS, **request, batch_size=1)
    assert together.token_ids == alone.token_ids
    for row in (0, 5):
        assert together.token_ids[row] == plain.token_ids[row][:9]
    drafted = set(together.drafted[together.emitted > 0].tolist())
    assert drafted == {0, 1, 2, 3}


def test_the_end_of_room_and_of_sequence(tiny):
    drafter = head_drafter(medusa_head(tiny, ids=SOME), tiny)
    rng = np.random.default_rng(1)
    lengths = (570, 590, 598, 599)
    prompts = [rng.integers(V, size=length).tolist() for length in lengths]
    # The noise is shared, so that drafts of sampled rows are accepted.
    drawn = SamplingParams(temperature=0.8, seed=3, max_new_tokens=12)
    requests = [greedy(max_new_tokens=50)] * 4 + [drawn]
    options = dict(verify="coupled", batch_size=16)
    plain = decode(tiny, [*prompts, PROMPTS[1]], sampling=requests, **options)
    tokens = plain.token_ids[4]
    # A stop token at each place of a path.
    requests[4:] = [dataclasses.replace(drawn, stop_token_ids=(stop,)) for stop in tokens]
    prompts += [PROMPTS[1]] * len(tokens)
    got = decode(tiny, prompts, sampling=requests, drafter=drafter, **options)
    assert got.token_ids[:4] == plain.token_ids[:4]
    assert [len(each) for each in got.token_ids[:4]] == [30, 10, 2, 1]
    assert got.token_ids[4:] == [tokens[: tokens.index(stop) + 1] for stop in tokens]
    assert set(got.finish_reasons[4:]) == {"stop"}
    assert got.accepted[4:].max() > 0


def assert_fresh(session, state):
    """The state is the true feature of the last token but one."""
    target, params = session.plan.target, session.params[0]
    cache = target.make_cache(len(state.tokens), session.plan.capacity)
    program = jax.jit(prefill, static_argnums=(0, 5, 6))
    lengths = state.length - 1
    _, features = program(target, params, state.tokens, lengths, cache, 64, ("final_norm",))
    context = loop._context(session.plan, params, state)
    wanted = session.drafter.init(session.params[1], context, features).feature
    # A finished row's feature is not read any more.
    active = np.asarray(state.active)
    got = np.asarray(state.drafter.feature)[active]
    np.testing.assert_allclose(got, np.asarray(wanted)[active], atol=3e-5, rtol=1e-4)


def test_the_state_equals_a_fresh_one_after_every_round(tiny):
    drafter = head_drafter(medusa_head(tiny, spread=0.3), tiny)
    session = make_session(tiny, PROMPTS, drafter=drafter, sampling=mixed(max_new_tokens=NEW))
    before = first_state(session)
    assert_fresh(session, before)
    for state in rounds(session, before):
        assert_fresh(session, state)
        late, before = state.replace(drafter=before.drafter, status=0 * state.status), state
    # The comparison finds a feature of another place.
    with pytest.raises(AssertionError):
        assert_fresh(session, late)
    took_part = np.asarray(state.rounds.emitted) > 0
    assert {0, 1, 2, 3} <= set(np.asarray(state.rounds.accepted)[took_part].tolist())


@pytest.fixture(scope="module")
def small():
    shape = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4)
    config = tiny_config(vocab_size=8, num_layers=2, max_positions=64, **shape)
    return random_model(config, 0, dtype="float32")


def first_law_for_all(drafter):
    """The broken twin claims that every token was drawn from the first head's law."""

    def propose(params, state, context, noise):
        draft, state = drafter.propose(params, state, context, noise)
        return draft.replace(law=0 * draft.law), state

    return dataclasses.replace(drafter, propose=propose)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("rejection", False),
        ("rejection", True),
        pytest.param("block", False, marks=pytest.mark.slow),
    ],
)
def test_the_law_is_the_targets(rule, broken, small):
    head = medusa_head(
        small, heads=2, original_lm_head=False, spread=3.0, ids=np.arange(7, dtype=np.int32)
    )
    drafter = head_drafter(head, small)
    drafter = first_law_for_all(drafter) if broken else drafter
    check = check_drafter(drafter, small, 60_000, verify=rule)
    assert check.passed != broken, check
    assert 1.2 < check.acceptance_length < 2.5


def batch_of(seed=0):
    """Two rows: two conversations and padding, and one that fills its row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (2, 24)).astype(np.int32)
    segments = np.array([[1] * 10 + [2] * 11 + [0] * 3, [1] * 24], np.int32)
    positions = np.array([[*range(10), *range(11), 0, 0, 0], [*range(24)]], np.int32)
    labels = np.full((2, 20), -1, np.int32)
    labels[0, :12] = [*range(4, 10), *range(14, 20)]
    labels[1, :18] = [*range(2, 12), *range(16, 24)]
    return Batch(*map(jnp.asarray, (tokens, positions, segments, labels)), {})


def with_features(target, batch):
    fill = functools.partial(fill_features, target.architecture, names=("final_norm",))
    return quickly(fill, target.params, batch)(target.params, batch)


@pytest.fixture(scope="module")
def batch(tiny):
    return with_features(tiny, batch_of())


def method_of(target, labels="laws", **options) -> Method:
    config = medusa_config(target, **options)
    loss = MedusaLoss(labels=labels, decay=0.5)
    return medusa_method(target, config, options.get("ids"), loss)


def quickly(function, *example):
    """The function compiled for such arguments, in the short time that the fixture asks for."""
    return jax.jit(function).lower(*example).compile()


def silu(x):
    return x / (1 + np.exp(-x))


def slow_loss(params, target, batch, ids, own, labels):
    """The definition: label by label, head by head."""
    head = np.asarray(target.params["head"]["kernel"], np.float64)
    ids = np.arange(V) if ids is None else ids
    features = np.asarray(batch.features["final_norm"], np.float64)
    kernels, biases = (
        np.asarray(params["blocks"][name], np.float64) for name in ("kernel", "bias")
    )
    heads, weight = len(kernels), 0
    losses, correct, along, counts = np.zeros((4, heads))
    for row in range(2):
        there = {int(label) for label in batch.labels[row] if label >= 0}
        for label in there:
            weight += 1
            prefix = True
            for number in range(heads):
                if not set(range(label, label + number + 1)) <= there:
                    break
                x = features[row, label - 2]
                for kernel, bias in zip(kernels[number], biases[number], strict=True):
                    x = x + silu(x @ kernel + bias)
                kernel = params["head"]["kernel"][number] if own else head[:, ids]
                q = np.exp(x @ np.asarray(kernel, np.float64))
                q /= q.sum()
                p = np.exp(features[row, label + number - 1] @ head[:, ids])
                p /= p.sum()
                counts[number] += 1
                token = int(batch.tokens[row, label + number])
                right = token in ids and p.argmax() == q.argmax()
                if token in ids and labels == "laws":
                    losses[number] += np.sum(p * np.log(p / q))
                elif token in ids:
                    losses[number] -= np.log(q[ids.tolist().index(token)])
                prefix &= right
                correct[number] += right
                along[number] += prefix
    return np.dot(0.5 ** np.arange(heads), losses), losses, weight, correct, along, counts


@pytest.mark.parametrize(("form", "labels"), [("shared", "laws"), ("own", "tokens")])
def test_the_loss_by_definition(form, labels, tiny, batch):
    options = FORMS[form]
    method = method_of(tiny, labels, **options)
    params = medusa_head(tiny, spread=0.2, **options).params
    arguments = (params, tiny.params, batch, KEY)
    total, measures = quickly(method.loss, *arguments)(*arguments)
    own = not options["original_lm_head"]
    wanted = slow_loss(params, tiny, batch, options.get("ids"), own, labels)
    np.testing.assert_allclose(total, wanted[0], rtol=1e-4)
    for number, loss in enumerate(wanted[1]):
        np.testing.assert_allclose(measures.losses[f"head_{number}"], loss, rtol=1e-4)
    assert measures.weight == wanted[2]
    for got, want in zip(
        (measures.correct, measures.prefix_correct, measures.counts), wanted[3:], strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert (measures.counts[:-1] > measures.counts[1:]).all()


@pytest.mark.parametrize("form", FORMS)
def test_heads_start_as_the_targets_own(form, tiny, batch):
    """At first each head repeats what the target itself says of the token before the label."""
    options = FORMS[form]
    method = method_of(tiny, **options)
    params = method.init(KEY)
    head = Medusa(medusa_config(tiny, **options), jnp.dtype("float32"))
    features = batch.features["final_norm"]
    kernel = tiny.params["head"]["kernel"]
    kernel = kernel if options.get("ids") is None else kernel[:, SOME]
    whole = {**params, "shared": {"draft_head": {"kernel": kernel}}}

    def every(params, features):
        states = head.states(params, features)
        return [head.logits(params, states[number], number) for number in range(3)]

    for got in quickly(every, whole, features)(whole, features):
        np.testing.assert_allclose(got, jnp.einsum("btd,dv->btv", features, kernel), atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form, tiny, batch):
    method = method_of(tiny, **FORMS[form])
    params = medusa_head(tiny, spread=0.2, **FORMS[form]).params
    both = jax.value_and_grad(method.loss, has_aux=True)
    gradient = quickly(both, params, tiny.params, batch, KEY)
    (total, _), grads = gradient(params, tiny.params, batch, KEY)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        # Every head, and every block of it.
        assert np.abs(leaf).reshape(3, -1).max(axis=1).all(), jax.tree_util.keystr(path)
    labels = np.asarray(batch.labels)
    tokens = np.ones((2, 24), bool)
    rows = np.zeros((2, 24), bool)
    for row in range(2):
        there = labels[row][labels[row] >= 0]
        tokens[row, there] = False
        rows[row, np.union1d(there - 1, there - 2)] = True
    features = jnp.where(rows[:, :, None], batch.features["final_norm"], 7.0)
    other = batch.replace(
        tokens=jnp.where(tokens, 0, batch.tokens), features={"final_norm": features}
    )
    (again, _), theirs = gradient(params, tiny.params, other, KEY)
    np.testing.assert_allclose(again, total, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, theirs)
    # One label less, and it is another gradient.
    less = batch.replace(labels=batch.labels.at[1, 0].set(-1))
    assert gradient(params, tiny.params, less, KEY)[0][0] < total


def cycling():
    """A target that only counts: behind x comes x + 7, whatever was before."""
    config = tiny_config(num_layers=1)
    target = random_model(config, 0, dtype="float32")
    params = jax.tree.map(jnp.zeros_like, target.params)
    table = np.random.default_rng(0).standard_normal((V, config.hidden_size)).astype(np.float32)
    table /= np.sqrt((table**2).mean(axis=1, keepdims=True))
    params["embed"] = {"embedding": jnp.asarray(table)}
    params["final_norm"] = {"scale": jnp.ones(config.hidden_size)}
    params["head"] = {"kernel": jnp.asarray(np.roll(table, 7, axis=0).T)}
    return dataclasses.replace(target, params=params)


def trainer(method, target, batch, steps=60, rate=3e-2):
    """A function from a batch to parameters after a few steps of Adam, and the last measures."""
    optimizer = optax.adam(rate)

    def step(params, state, number, batch):
        more = (number,) if method.takes_step else ()
        grads, measures = jax.grad(method.loss, has_aux=True)(
            params, target.params, batch, KEY, *more
        )
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, measures

    first = method.init(KEY)
    begin = (first, optimizer.init(first))
    compiled = quickly(step, *begin, jnp.int32(0), batch)

    def train(batch):
        params, state = begin
        for number in range(steps):
            params, state, measures = compiled(params, state, jnp.int32(number), batch)
        return params, measures

    return train


def counting_batch(target, late=0):
    """Every token of the cycle, followed by what the target says; `late` breaks the alignment."""
    tokens = (7 * np.arange(64)[None, :] + np.arange(2)[:, None]).astype(np.int32) % V
    every = np.ones((2, 64), np.int32)
    labels = np.tile(np.arange(2, 64, dtype=np.int32), (2, 1))
    batch = Batch(
        *map(jnp.asarray, (tokens, every * np.arange(64, dtype=np.int32), every, labels)), {}
    )
    batch = with_features(target, batch)
    features = jnp.roll(batch.features["final_norm"], late, axis=1)
    return batch.replace(features={"final_norm": features})


PAIRS = [[start, (start + 7) % V] for start in range(0, V, 5)]


def behind_pairs(count):
    return [[(start + 7 * i) % V for i in range(2, count + 2)] for start, _ in PAIRS]


def test_trained_heads_are_right_and_those_a_row_off_are_not():
    target = cycling()
    method = method_of(target, "tokens", original_lm_head=False, heads=2)
    drafter = head_drafter(method.head(method.init(KEY), {}), target)
    train = trainer(method, target, counting_batch(target))
    for late in (0, 1):
        params, measures = train(counting_batch(target, late))
        drafter = dataclasses.replace(drafter, params={**drafter.params, **params})
        got = decode(target, PAIRS, drafter=drafter, sampling=greedy(max_new_tokens=9))
        assert got.token_ids == behind_pairs(9)
        took_part = got.emitted > 0
        if late:
            # It learned just as well, but what decoding does not ask for.
            assert measures.losses["head_0"] < 0.5 * measures.weight
            assert got.accepted[took_part].mean() < 0.2
        else:
            np.testing.assert_array_equal(measures.correct, measures.counts)
            assert (got.accepted == got.drafted).all()


def test_the_target_learns_too(tiny, batch):
    """Two stages: the heads alone, then both, and the target stays close to what it said."""
    config = medusa_config(tiny, heads=2, ids=SOME)
    joint = JointLoss(heads=0.1, warm_steps=3, steps=10)
    method = medusa2_method(tiny, config, SOME, MedusaLoss(), joint)
    params = method.init(KEY)
    params["heads"] = medusa_head(tiny, heads=2, ids=SOME, spread=0.2).params
    both = jax.value_and_grad(method.loss, has_aux=True)
    gradient = quickly(both, params, tiny.params, batch, KEY, jnp.int32(0))

    (alone, _), grads = gradient(params, tiny.params, batch, KEY, jnp.int32(2))
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads["target"]))
    assert all(leaf.any() for leaf in jax.tree.leaves(grads["heads"]))
    first = medusa_method(tiny, config, SOME, MedusaLoss())
    arguments = (params["heads"], tiny.params, batch, KEY)
    wanted, _ = quickly(first.loss, *arguments)(*arguments)
    np.testing.assert_allclose(alone, wanted, rtol=1e-5)

    for step, share in ((3, np.sin(np.pi / 14)), (9, 1.0), (2**31 - 1, 1.0)):
        (total, measures), grads = gradient(params, tiny.params, batch, KEY, jnp.int32(step))
        # The target is still what it was: its own loss is zero.
        np.testing.assert_allclose(measures.losses["target"], 0, atol=1e-3)
        np.testing.assert_allclose(total, 0.1 * share * wanted, rtol=1e-3, atol=1e-3)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert leaf.any(), jax.tree_util.keystr(path)

    moved = {**params, "target": jax.tree.map(lambda leaf: 1.1 * leaf, params["target"])}
    (_, measures), _ = gradient(moved, tiny.params, batch, KEY, jnp.int32(9))
    assert measures.losses["target"] > 1
    np.testing.assert_array_equal(
        method.tuned(moved).params["final_norm"]["scale"], moved["target"]["final_norm"]["scale"]
    )


def test_medusa_2_on_a_cycle():
    """The tuned target and its heads decode together, exactly."""
    target = cycling()
    config = medusa_config(target, heads=2, original_lm_head=False)
    joint = JointLoss(target="tokens", heads=0.2, ramp=False, warm_steps=40, steps=60)
    method = medusa2_method(target, config, None, MedusaLoss(labels="tokens"), joint)
    batch = counting_batch(target)
    params, measures = trainer(method, target, batch)(batch)
    assert measures.losses["target"] / measures.weight < 0.1
    tuned, head = method.tuned(params), method.head(params, {})
    drafter = head_drafter(head, tuned)
    got = decode(tuned, PAIRS, drafter=drafter, sampling=greedy(max_new_tokens=9))
    assert got.token_ids == behind_pairs(9)
    assert (got.accepted == got.drafted).all()


def test_bad_input_names_the_remedy():
    for make, message in (
        (lambda: MedusaLoss(labels="soft"), r"loss\.labels='soft': use tokens or laws"),
        (lambda: MedusaLoss(decay=0.0), r"loss\.decay=0\.0"),
        (lambda: MedusaLoss(decay=float("nan")), r"loss\.decay=nan"),
        (lambda: JointLoss(target="both"), r"joint\.target='both': use self or tokens"),
        (lambda: JointLoss(heads=0.0), r"joint\.heads=0\.0"),
        (lambda: JointLoss(warm_steps=-1), r"joint\.warm_steps=-1"),
    ):
        with pytest.raises(InputError, match=message):
            make()
