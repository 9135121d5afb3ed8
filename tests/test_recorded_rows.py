"""Recorded rows: an engine's texts, with the features that a pass over each text gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import PROMPTS, mixed
from test_paged_engine import PROMPTS as SHARING
from tiny_models import eagle_drafter, medusa_head

from specjax.distributed.sharding import make_mesh
from specjax.drafters import head_drafter
from specjax.engine import recording
from specjax.engine.engine import Engine
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_engine
from specjax.errors import InputError
from specjax.loading.load import place_model

NAMES = ("layer_input:1", "final_norm")
NEW = [3, 20, 7, 12, 1, 16, 9, 14]
LENGTH = 64
DRAFTERS = {
    "none": lambda tiny: None,
    "eagle3": lambda tiny: eagle_drafter(tiny, spread=0.3),
    "medusa": lambda tiny: head_drafter(medusa_head(tiny), tiny),
}


@functools.partial(jax.jit, static_argnums=0)
def pass_over(decoder, params, tokens):
    """The features of each text of a batch, by a pass without a cache."""
    size = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    causal = jnp.tril(jnp.ones((1, size, size), bool))
    return decoder.extend(
        params, tokens, positions, None, None, 0, causal, features=NAMES, logits=False
    ).features


def engine_of(tiny, name="eagle3", **options):
    options = {"batch_size": 3, "max_length": LENGTH, "num_speculative_tokens": 3} | options
    return Engine(tiny, drafter=DRAFTERS[name](tiny), **options)


def decoded(engine, prompts=PROMPTS, new=NEW, **sampling):
    """The texts of requests in the order in which they end: tokens of the prompt, all tokens."""
    asked = {}
    for number, (prompt, count) in enumerate(zip(prompts, new, strict=True)):
        params = dataclasses.replace(mixed()[number % 8], max_new_tokens=count, **sampling)
        asked[engine.add(prompt, params)] = prompt
    outputs = [delta.output for delta in engine if delta.output is not None]
    return [(len(asked[one.id]), [*asked[one.id], *one.token_ids]) for one in outputs]


def check(engine, model, texts, size, first=None):
    """Compare all recorded rows with the texts, of which the first tokens may be left out."""
    recorded, rows = jax.device_get(engine.recorded), len(engine.recorded.length)
    assert engine.num_recorded == len(texts)
    padded = np.zeros((len(texts), 128), np.int32)
    for index, (_, tokens) in enumerate(texts):
        padded[index, : len(tokens)] = tokens
    wanted = jax.device_get(pass_over(model.architecture, model.params, padded))
    for index in range(max(len(texts) - rows, 0), len(texts)):
        at, (output, tokens) = index % rows, texts[index]
        begin, count = recorded.first[at], recorded.length[at]
        assert begin == max(len(tokens) - size, 0 if first is None else first[index])
        assert begin + count == len(tokens)
        assert recorded.output[at] == max(output - begin, 0)
        np.testing.assert_array_equal(recorded.tokens[at, :count], tokens[begin:])
        for name in NAMES:
            found = recorded.features[name][at]
            known = wanted[name][index, begin : len(tokens) - 1]
            np.testing.assert_allclose(found[: count - 1], known, atol=2e-5)
            assert not found[count - 1 :].any()


@pytest.mark.parametrize(
    ("name", "size"),
    [("none", LENGTH), ("eagle3", 12), *slow(("none", 12), ("eagle3", LENGTH), ("medusa", 12))],
)
def test_features_are_those_of_a_pass(tiny, name, size):
    """In rings that go on, with texts that are longer than a row, in an engine that rested."""
    engine = engine_of(tiny, name)
    engine.record(NAMES, rows=5, tokens=size)
    assert not engine.recorded.length.any()
    texts = decoded(engine)
    check(engine, tiny, texts, size)
    texts += decoded(engine, PROMPTS[:2], NEW[:2])
    check(engine, tiny, texts, size)


def test_tokens_are_those_without_recording(tiny):
    engines = engine_of(tiny), engine_of(tiny)
    engines[0].record(NAMES)
    assert decoded(engines[0]) == decoded(engines[1])


def test_fewer_rows_are_recorded_in_their_places(tiny, monkeypatch):
    engine = engine_of(tiny, batch_size=4, rounds_per_step=2)
    engine.record(NAMES, rows=8, tokens=LENGTH)
    monkeypatch.setattr(engine, "_seconds_left", lambda rows: 1e9)
    narrowed = []
    narrow = engine._rows.narrow

    def noted(slots, seconds):
        narrow(slots, seconds)
        narrowed.append(engine._rows._few is not None)

    monkeypatch.setattr(engine._rows, "narrow", noted)
    new = [3, 30, 5, 25]
    check(engine, tiny, decoded(engine, PROMPTS[:4], new), LENGTH)
    assert any(narrowed)


@pytest.mark.parametrize("data", [1, *slow(2)])
def test_shared_beginnings_are_left_out(tiny, data):
    """Rows that share pages, wait for them, and are put back have what they read themselves."""
    mesh = make_mesh(data=data, devices=jax.devices()[:data])
    model = tiny if data == 1 else place_model(tiny, mesh)
    options = DecodeOptions(batch_size=4, max_length=104, num_speculative_tokens=3)
    plan = plan_engine(model, DRAFTERS["eagle3"](model), options)
    loop = dataclasses.replace(plan.loop, page_size=8, num_pages=20 * data)
    shares = dict(kv_page_size=128, enable_prefix_caching=True, rounds_per_step=2)
    engine = Engine.of(dataclasses.replace(plan.with_options(**shares), loop=loop))
    engine.record(NAMES, rows=16, tokens=104)
    first, end = {}, engine._end

    def noted(row, delta):
        first[row.id] = row.num_shared
        end(row, delta)

    engine._end = noted
    texts = decoded(engine, SHARING, [25, 40, 35, 40, 30, 30, 20, 30, 30, 30])
    check(engine, tiny, texts, 104, list(first.values()))
    assert any(first.values())
    assert engine.statistics.put_back or data > 1


def test_a_mesh(tiny):
    model = place_model(tiny, make_mesh(data=2, model=2, devices=jax.devices()[:4]))
    engine = Engine(model, drafter=DRAFTERS["eagle3"](model), batch_size=4, max_length=LENGTH)
    engine.record(NAMES, rows=8, tokens=LENGTH)
    check(engine, tiny, decoded(engine), LENGTH)


def test_stopped_rows_end_where_the_output_does_and_aborted_ones_are_left_out(tiny):
    engine = engine_of(tiny)
    engine.record(NAMES, tokens=LENGTH)
    free = decoded(engine, [[3, 4, 5]], [20])[0][1]
    for id in ("stops", "aborted"):
        engine.add([3, 4, 5], max_new_tokens=20, stop_token_ids=[free[8]], id=id)
    engine.abort("aborted")
    outputs = {delta.id: delta.output for delta in engine if delta.output is not None}
    assert outputs["aborted"].finish_reason == "abort"
    stopped = [3, 4, 5, *outputs["stops"].token_ids]
    assert stopped == free[: len(stopped)]
    assert len(stopped) < len(free)
    check(engine, tiny, [(3, free), (3, stopped)], LENGTH)


def test_tokens_after_a_stop_string_leave_no_features(chatty):
    """The devices have gone on when the host finds it, and may not overwrite what is recorded."""
    engine, size = engine_of(chatty), 34
    engine.record(NAMES, tokens=size)
    request = dict(temperature=1.0, seed=3, max_new_tokens=LENGTH - 3, ignore_eos=True)

    def output_of(**more):
        engine.add([3, 4, 5], **request, **more)
        (output,) = [delta.output for delta in engine if delta.output is not None]
        return output, [3, 4, 5, *output.token_ids]

    free = output_of()[1]
    stop = chatty.tokenizer.decode(free[42:45])
    output, stopped = output_of(stop=[stop])
    assert output.finish_reason == "stop"
    assert size < len(stopped) < len(free) - 8
    check(engine, chatty, [(3, free), (3, stopped)], size)


def test_samples_of_one_prompt(tiny):
    """Rows that start from what was read for another one have its features."""
    engine = engine_of(tiny)
    engine.record(NAMES, tokens=LENGTH)
    engine.add(PROMPTS[2][:30], n=5, temperature=1.0, max_new_tokens=9)
    outputs = [delta.output for delta in engine if delta.output is not None]
    check(engine, tiny, [(30, [*PROMPTS[2][:30], *one.token_ids]) for one in outputs], LENGTH)


BROKEN = {
    # A row's features, moved by one position, or those of another row.
    "moved": lambda texts, kept, row: (texts, jax.tree.map(lambda x: jnp.roll(x, 1, 1), kept), row),
    "other": lambda texts, kept, row: (texts, kept, (row + 1) % len(texts)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_recordings_are_found(tiny, name, monkeypatch):
    def broken(recorded, at, texts, kept, row, *numbers):
        return recording.with_row(recorded, at, *BROKEN[name](texts, kept, row), *numbers)

    monkeypatch.setattr("specjax.engine.device_rows.with_row", broken)
    engine = engine_of(tiny)
    engine.record(NAMES, rows=8, tokens=LENGTH)
    texts = decoded(engine)
    with pytest.raises(AssertionError):
        check(engine, tiny, texts, LENGTH)


def test_what_cannot_be_recorded_is_refused(tiny):
    engine = engine_of(tiny)
    for names, message in [
        ("final_norm", "^features='final_norm': use names of features, such as"),
        (["logits"], "^features: feature 'logits' is unknown: use final_norm, pre_norm or"),
        (["layer_input:3"], "^features: feature 'layer_input:3' is unknown"),
    ]:
        with pytest.raises(InputError, match=message):
            engine.record(names)
    with pytest.raises(InputError, match="^rows=0: "):
        engine.record(NAMES, rows=0)
    with pytest.raises(InputError, match="^tokens=1: "):
        engine.record(NAMES, tokens=1)
    engine.add([1, 2], max_new_tokens=4)
    with pytest.raises(InputError, match="^record: 1 requests are unfinished; call it before"):
        engine.record(NAMES)
    list(engine)
    engine.record([])
    assert decoded(engine, PROMPTS[:1], NEW[:1])
    assert (engine.recorded, engine.num_recorded) == (None, 0)
    engine.close()
    with pytest.raises(InputError, match="^the engine is closed"):
        engine.record(NAMES)
