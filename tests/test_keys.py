"""Keys and noise: every draw has its own, and no draft knows the noise that verifies it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import row_count

from specjax import sampling
from specjax.core.initial_state import start
from specjax.core.loop import run
from specjax.core.none import NoDrafter
from specjax.drafters import LoadedDrafter, take_turns
from specjax.engine.requests import SamplingParams
from specjax.methods.ngram import Ngram
from specjax.methods.simulated import Simulated
from specjax.sampling import RULES
from specjax.testing import Tabular
from specjax.testing.drafter_check import chi_square, first_rows, make_plan

VOCAB, LENGTH, ROWS = 3, 3, 20_000
REQUEST = SamplingParams(temperature=1.0)
TARGET = Tabular(VOCAB), jnp.log(jnp.array([0.5, 0.3, 0.2]))


def data(keys):
    return [tuple(key) for key in np.asarray(jax.random.key_data(keys)).reshape(-1, 2).tolist()]


def test_no_two_keys_are_the_same():
    """Where a request's seed is that of the call, and numbers are alike, as elsewhere."""
    seed, numbers = 7, jnp.arange(4)
    rows = [sampling.row_key(seed, number) for number in range(4)]
    rows += [sampling.row_key(seed, 0, own=own) for own in (*range(3), seed)]
    prompts = ([1, 2], [1, 2, 3], [1, 3], [2, 1], [])
    rows += [sampling.row_key(seed, 0, own=seed, prompt=prompt) for prompt in prompts]
    rows += [sampling.row_key(seed, 1, prompt=prompt) for prompt in prompts]
    rows += [sampling.sample_key(key, sample) for key in rows for sample in (1, 2)]
    rows = jnp.stack(rows)
    rounds = [sampling.fold_round(rows, number) for number in numbers]
    texts = [sampling.text_digest(prompt) for prompt in prompts]
    rounds += [sampling.derive_from_text(key, text) for key in rounds[:2] for text in texts]
    used = [*data(rows), *(key for keys in rounds for key in data(keys))]
    for keys in rounds:
        used += [key for part in sampling.split_keys(keys) for key in data(part)]
    assert len(set(used)) == len(used)


def test_a_row_key_is_a_function_of_seed_and_prompt():
    assert data(sampling.row_key(3, 1, own=5)) == data(sampling.row_key(9, 2, own=5))
    assert sampling.sample_key(key := sampling.row_key(3, 1), 0) is key
    same = [sampling.row_key(3, 1, prompt=kind([4, 5])) for kind in (list, tuple, np.uint16)]
    assert len({data(key)[0] for key in same}) == 1
    for number, tokens in enumerate((range(3_000_000), [2**31 - 1], [])):
        digest = sampling.text_digest(tokens)
        assert digest.dtype == np.uint32, number
        assert digest.shape == (2,)
    # The whole of a text counts.
    assert (sampling.text_digest([0] * 2_000_000) != sampling.text_digest([0] * 1_999_999)).any()


def test_seeds_of_other_purposes_are_others():
    """An answer that a head was trained on has other noise than the measurement of that head."""
    purposes = ("turn", "spec_bench", "training answer", "training question")
    seeds = {sampling.derived_seed(0, purpose, n) for purpose in purposes for n in range(100)}
    assert len(seeds) == 100 * len(purposes)
    assert sampling.derived_seed(0, "turn", 1) == sampling.derived_seed(0, "turn", 1)


def decoded(loaded, prompts, keys, rule, length=LENGTH):
    """Return the next tokens [N, length] of prompts [N, T] whose rows have the given keys."""
    drafter, params = take_turns(loaded)
    size = prompts.shape[1]
    plan = make_plan(
        TARGET[0], drafter, length, verify=RULES[rule], request=REQUEST, capacity=size + 2 * length
    )
    return _decoded(plan, length, (TARGET[1], params), jnp.asarray(prompts, jnp.int32), keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decoded(plan, length, params, prompts, keys):
    count, size = prompts.shape
    tokens, rows, *others = first_rows(plan, [0] * size, REQUEST, jnp.arange(count), 0)
    tokens = tokens.at[:, :size].set(prompts)
    state = start(plan, params, tokens, rows.replace(key=keys), *others)
    state = run(plan, params, state, jnp.int32(length))[0]
    return jax.lax.dynamic_slice_in_dim(state.tokens, size, length, axis=1)


def row_keys(count, prompts=None):
    """Return the keys of requests with the seeds 0, 1, ..., and without prompts those of earlier
    versions, in which a key did not depend on the prompt."""
    if prompts is None:
        return jax.vmap(lambda seed: sampling.row_key(0, seed))(jnp.arange(count))
    digests = np.array([sampling.text_digest(prompt) for prompt in prompts])
    return jax.vmap(sampling.derive_from_text)(row_keys(count), digests)


def independent(first, second):
    """Test whether the pairs of first and second outputs are two independent draws."""
    logp = np.log(np.asarray(jnp.exp(TARGET[1]), np.float64))
    tokens = np.concatenate([first, second], axis=1)
    code = np.ravel_multi_index(tuple(tokens.T), (VOCAB,) * tokens.shape[1])
    expected = np.zeros(1)
    for _ in range(tokens.shape[1]):
        expected = (expected[:, None] + logp).ravel()
    counted = np.bincount(code, minlength=len(expected))
    return chi_square(counted, np.exp(expected) / np.exp(expected).sum())


@pytest.mark.parametrize("depends_on_prompt", [True, False])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_prompt_may_contain_an_answer_of_the_same_seed(rule, depends_on_prompt):
    """As a chat's next turn does; with keys that do not depend on the prompt it shows."""
    count = row_count(ROWS)
    prompts = np.zeros((count, 1), int)
    first = decoded(NoDrafter(), prompts, row_keys(count, [[0]] * count), rule)
    if not depends_on_prompt:
        first = decoded(NoDrafter(), prompts, row_keys(count), rule)
    longer = np.concatenate([prompts, first, prompts], axis=1)
    keys = row_keys(count, longer if depends_on_prompt else None)
    second = decoded(Ngram(prompt_lookup_min=1), longer, keys, rule)
    found = independent(np.asarray(first)[:, :2], np.asarray(second)[:, :2])
    if depends_on_prompt:
        assert found.statistic < found.threshold
    else:
        assert found.statistic > 10 * found.threshold


class SaysNothing(Simulated):
    """A replay that does not name the text in its parameters."""

    def text_digests(self, params):
        return ()


@pytest.mark.parametrize("kind", [Simulated, SaysNothing])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_an_output_of_the_same_seed_may_be_copied(rule, kind):
    """Pairs of requests, of which the second one's draft is the first one's output."""
    count = row_count(ROWS)
    prompts, keys = np.zeros((count, 1), int), row_keys(count)
    first = decoded(NoDrafter(), prompts, keys, rule)
    drafter = kind(acceptance=1.0)
    loaded = LoadedDrafter(drafter, drafter.replay(np.asarray(first).tolist(), VOCAB))
    second = decoded(loaded, prompts, keys, rule)
    found = independent(np.asarray(first)[:, :2], np.asarray(second)[:, :2])
    if kind is Simulated:
        assert found.statistic < found.threshold
    else:
        assert found.statistic > 10 * found.threshold
    # Under `coupled` an output is a function of seed and prompt.
    if rule == "block":
        again = decoded(loaded, prompts, keys, "coupled")
        np.testing.assert_array_equal(decoded(NoDrafter(), prompts, keys, "coupled"), again)
