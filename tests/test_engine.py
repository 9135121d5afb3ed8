"""The engine: rows come and go, and each gives what it gives alone."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import PROMPTS, Scripted, decode, drafters, greedy, make_call, mixed
from tiny_models import eagle_drafter, medusa_head, mtp_drafter

import specjax
from specjax.apps.rows.statistics import engine_summary
from specjax.core.state import Packed, admit
from specjax.distributed.sharding import make_mesh
from specjax.drafters import head_drafter, merge_drafters
from specjax.engine import device_rows, programs
from specjax.engine import engine as engine_module
from specjax.engine.device_rows import DeviceRows
from specjax.engine.engine import Engine
from specjax.engine.options import DecodeOptions
from specjax.engine.outputs import Times
from specjax.engine.plan import plan_engine
from specjax.engine.requests import Request, SamplingParams
from specjax.engine.rows import Row
from specjax.engine.scheduler import Scheduler
from specjax.engine.statistics import Percentiles, Statistics, Step
from specjax.errors import InputError
from specjax.loading.load import place_model
from specjax.methods.ngram import Ngram
from specjax.methods.token_recycling import TokenRecycling

NEW = [3, 20, 7, 12, 1, 16, 9, 14]
"""New tokens of each prompt: rows end at different times."""


def requests():
    return [
        dataclasses.replace(one, max_new_tokens=new) for one, new in zip(mixed(), NEW, strict=True)
    ]


def named(name, tiny, unrelated, similar):
    made = {
        "eagle3": lambda: eagle_drafter(tiny, spread=0.3),
        "mtp": lambda: mtp_drafter(tiny, num_modules=2, spread=0.3),
        "medusa": lambda: head_drafter(medusa_head(tiny), tiny),
        "token_recycling": lambda: TokenRecycling(tiny.config.vocab_size),
        "none": lambda: None,
    }
    return made[name]() if name in made else drafters(tiny, unrelated, similar)[name]


def call_of(tiny, drafter, rule="rejection", slots=3, **options):
    options = ({} if drafter is None else {"num_speculative_tokens": 3}) | options
    return make_call(
        tiny,
        PROMPTS,
        drafter=drafter,
        verify=rule,
        sampling=requests(),
        batch_size=slots,
        **options,
    )


def own_results(output):
    """What must not depend on other rows: tokens, reason and the row's own counts."""
    counts = [getattr(output.rounds, name).tolist() for name in ("drafted", "accepted", "emitted")]
    return output.token_ids, output.finish_reason, counts


def alone(call):
    """What each request gives in an engine without others."""
    engine = Engine.of(call.plan)
    return functools.reduce(
        dict.__or__, (ended(engine, call, [prompt]) for prompt in range(len(PROMPTS)))
    )


def ended(engine, call, index=None):
    for prompt in range(len(PROMPTS)) if index is None else index:
        engine.submit([call.requests[prompt]])
    outputs = [delta.output for delta in engine if delta.output is not None]
    assert [one.lossy for one in outputs] == [
        engine.plan.is_lossy(call.requests[one.id].sampling) for one in outputs
    ]
    assert engine.statistics.lossy >= any(one.lossy for one in outputs)
    return {one.id: own_results(one) for one in outputs}


def rows_left(call, monkeypatch):
    """What requests give of which one is left, and beside which another one is added then; and the
    rows of each step.
    """
    engine, sizes, step = Engine.of(call.plan.with_options(rounds_per_step=2)), [], DeviceRows.step

    def note(self, *arguments):
        seen = step(self, *arguments)
        sizes.append(len(seen.read().status))
        return seen

    found = {}
    with monkeypatch.context() as patched:
        patched.setattr(DeviceRows, "step", note)
        for prompt in (2, 1):
            engine.submit([call.requests[prompt]])
        # Rows that lost their places may never end.
        for _ in range(40):
            outputs = [one.output for one in engine.step() if one.output is not None]
            found |= {one.id: own_results(one) for one in outputs}
            if sizes[-1] == 1 and 5 not in found and not engine._scheduler.has(5):
                engine.submit([call.requests[5]])
    return found, [size for size, _ in itertools.groupby(sizes)]


def test_rows_that_are_left_decode_without_the_others(tiny, unrelated, similar, monkeypatch):
    """And go back to their slots when a row is added; whatever takes others' places is found."""
    drafter = named("similar", tiny, unrelated, similar)
    call = call_of(tiny, drafter, slots=2, num_speculative_tokens=1)
    monkeypatch.setattr(device_rows, "_SAVED", 0.0)
    engine = Engine.of(call.plan.with_options(rounds_per_step=2))
    wanted = ended(engine, call, (2, 1, 5))
    monkeypatch.setattr(device_rows, "_SAVED", 1e9)
    assert rows_left(call, monkeypatch) == (wanted, [2, 1, 2, 1])
    take, put = device_rows.take_rows, device_rows.put_rows
    for name, broken in (
        ("take_rows", lambda state, rows, spare: take(state, 1 - rows, spare)),
        ("put_rows", lambda state, slots, few: put(state, 1 - slots, few)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(device_rows, name, broken)
            assert rows_left(call, monkeypatch)[0] != wanted


@pytest.fixture(scope="module")
def undrafted(tiny):
    """A call without a drafter, and what each of its requests gives alone."""
    call = call_of(tiny, None)
    return call, alone(call)


@pytest.mark.parametrize("forgets", ["round", "length", "cache", "rows", "tokens", "status"])
def test_an_admission_that_forgets_a_part_is_found(forgets, undrafted):
    """A row that keeps something of the one before it in its slot does not give what it should.

    What a drafter knew of the row before was released with it: it would only read again.
    """
    call, wanted = undrafted

    @jax.jit
    def broken(state, slots, sources, new):
        return admit(state, slots, new).replace(**{forgets: getattr(state, forgets)}), slots

    engine = Engine.of(call.plan.with_options(rounds_per_step=4))
    rows = engine._rows
    rows._programs = engine.compile()._replace(admit=broken)
    for prompt in range(len(PROMPTS)):
        engine.submit([call.requests[prompt]])
    found = {}
    for _ in range(60):
        found |= {
            one.id: own_results(one.output) for one in engine.step() if one.output is not None
        }
    assert found != wanted


@pytest.mark.parametrize(
    ("most", "chunks", "longest_wait"),
    [(5, (64,), 64), (100, (64,), 64), (256, (256, 64), 256), (600, (256, 64), 499)],
)
def test_tokens_of_a_long_prompt_are_read_a_few_at_a_time(most, chunks, longest_wait, tiny):
    """Decoding rows wait for at most so many, in whole chunks, and all start after whole chunks."""
    rng = np.random.default_rng(0)
    prompts = [[1, 2], rng.integers(61, size=300).tolist(), rng.integers(61, size=500).tolist()]
    options = dict(sampling=greedy(max_new_tokens=40), batch_size=3)
    call = make_call(tiny, prompts, rounds_per_step=2, max_prefill_tokens=most, **options)
    wanted = decode(tiny, prompts, **options).token_ids
    engine = Engine.of(call.plan)
    compiled, order = engine.compile(), []

    def read(*arguments):
        begin, end = map(int, arguments[-2:])
        order.append(end - begin)
        assert begin % chunks[0] == 0
        return compiled.read(*arguments)

    def step(*arguments):
        order.append("step")
        return compiled.step(*arguments)

    engine._rows._programs = compiled._replace(read=read, step=step)
    for prompt in range(3):
        engine.submit([call.requests[prompt]])
    outputs = {one.id: one.output.token_ids for one in engine if one.output is not None}
    assert [outputs[prompt] for prompt in range(3)] == wanted
    assert engine.plan.loop.chunks == chunks
    waits, read = [], 0
    assert order[0] == 1
    for one in order[1:]:
        waits, read = ([*waits, read], 0) if one == "step" else (waits, read + one)
    # The first step has read the first prompt too, for which no row waited.
    assert sum(waits) == 299 + 499
    assert max(waits) == longest_wait


def test_a_slot_is_refilled_as_soon_as_its_row_has_ended(tiny):
    call = make_call(
        tiny, [[7]] * 24, sampling=[greedy(max_new_tokens=5 + 7 * (i % 5)) for i in range(24)]
    )
    call = call.with_options(batch_size=4)
    engine = Engine.of(call.plan.with_options(rounds_per_step=64))
    for prompt in range(24):
        engine.submit([call.requests[prompt]])
    reasons = [one.finish_reason for one in engine if one.output is not None]
    assert reasons == ["length"] * 24
    summary = engine.statistics.summary()
    assert summary.occupancy_waiting == 1.0
    assert summary.occupancy > 0.8
    assert summary.requests == 24
    assert summary.tokens == sum(5 + 7 * (i % 5) for i in range(24))
    # Two rows at a time: fewer returns to the host, and slots that stand empty.
    other = Engine.of(call.plan.with_options(rounds_per_step=64, refill_rows=2))
    for prompt in range(24):
        other.submit([call.requests[prompt]])
    list(other)
    assert 0.7 < other.statistics.summary().occupancy_waiting < 1.0
    assert len(other.statistics.steps) < len(engine.statistics.steps)


def test_one_program_serves_prompts_and_answers_of_any_length(tiny):
    engine = Engine(tiny, drafter="ngram", batch_size=2, max_length=500, num_speculative_tokens=1)
    engine.add([1, 2, 3], greedy(max_new_tokens=4))
    list(engine)
    before = programs._compile.cache_info().misses
    compiled = engine.compile()
    for length, new in ((1, 1), (200, 60), (450, 50), (499, 9)):
        engine.add([5] * length, greedy(max_new_tokens=new))
    outputs = [one.output for one in engine if one.output is not None]
    assert sorted(len(output.token_ids) for output in outputs) == [1, 1, 50, 60]
    assert programs._compile.cache_info().misses == before
    assert engine.compile() is compiled


def test_an_engine_without_requests_holds_nothing_on_the_devices(tiny):
    engine = Engine(tiny, batch_size=2)
    assert engine.step() == []
    engine.add([1, 2], greedy(max_new_tokens=3))
    assert engine.num_unfinished == engine.num_waiting == 1
    list(engine)
    assert engine._rows._state is engine._rows._new is None
    assert engine.num_unfinished == 0
    assert not engine._scheduler._by_id


def test_samples_of_one_request(tiny):
    """The first is what the request gives alone, the others are as independent as other seeds."""
    drawn = SamplingParams(temperature=1.0, max_new_tokens=12, seed=5)
    engine = Engine(tiny, batch_size=2)
    engine.add([3, 4], drawn)
    (single,) = (one.output.token_ids for one in engine if one.output is not None)
    assert engine.add([3, 4], drawn, id="a", n=4) == "a"
    outputs = {one.sample: one.output for one in engine if one.output is not None}
    assert sorted(outputs) == [0, 1, 2, 3]
    assert outputs[0].token_ids == single
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 4
    engine.add([3, 4], drawn, id="a", n=2)
    again = {one.sample: one.output.token_ids for one in engine if one.output is not None}
    assert [again[0], again[1]] == [outputs[0].token_ids, outputs[1].token_ids]


@pytest.fixture
def reads(monkeypatch):
    """From where to where prompts were read, part by part."""
    parts, read = [], device_rows.DeviceRows.read

    def note(self, begin, end, pages):
        parts.append((begin, end))
        return read(self, begin, end, pages)

    monkeypatch.setattr(device_rows.DeviceRows, "read", note)
    return parts


@pytest.mark.parametrize("mesh", [False, *slow(True)])
def test_rows_with_the_same_prompt_read_it_once(mesh, tiny, unrelated, reads):
    target = place_model(tiny, make_mesh(2, 1, jax.devices()[:2])) if mesh else tiny
    drafter = specjax.make_drafter("draft_model", target, path=unrelated)
    long, short = [5] * 90, [5] * 89
    drawn = SamplingParams(temperature=1.0, max_new_tokens=12, seed=1)
    briefly = dataclasses.replace(drawn, max_new_tokens=5, seed=2)
    asked = [(long, drawn), (long, briefly), (long, greedy(max_new_tokens=9)), (long, drawn)]
    asked += [(short, drawn), (long, briefly)]
    engine = Engine(target, drafter=drafter, num_speculative_tokens=1, batch_size=2, max_length=200)

    def answers():
        for number, (prompt, params) in enumerate(asked):
            engine.add(prompt, params, id=number)
        return {one.id: one.output.token_ids for one in engine if one.output is not None}

    outputs = answers()
    assert reads == [(0, 89), (0, 88), (0, 89)]
    if not mesh:
        # What was read into one slot is copied into the other; without that, answers change.
        compiled = engine.compile()

        def uncopied(state, slots, sources, new):
            return compiled.admit(state, slots, slots, new)

        engine._rows._programs = compiled._replace(admit=uncopied)
        assert answers() != outputs
        engine._rows._programs = compiled
    for number, (prompt, params) in enumerate(asked):
        engine.add(prompt, params)
        (output,) = (one.output for one in engine if one.output is not None)
        assert outputs[number] == output.token_ids


IN_PARTS = dict(batch_size=3, max_length=520, max_prefill_tokens=64, rounds_per_step=2)
"""Of engines with one program, which read a long prompt a few tokens at a time."""


def read_alone(target, prompts, sampling):
    """The tokens of prompts that are each read and decoded without others, in parts as well.

    That parts change nothing is in test_tokens_of_a_long_prompt_are_read_a_few_at_a_time.
    """
    engine = Engine(target, **IN_PARTS)
    tokens = []
    for prompt in prompts:
        engine.add(prompt, sampling)
        tokens += [one.output.token_ids for one in engine if one.output is not None]
    return tokens


def test_other_parameters_read_a_prompt_anew(tiny, reads):
    """Also where they come while it is being read."""
    fresh = jax.tree.map(lambda leaf: leaf * 1.1, tiny.params)
    long = [3] * 200
    engine = Engine(tiny, **IN_PARTS)
    engine.add([1, 2, 3], greedy(max_new_tokens=30))
    engine.step()
    engine.add(long, greedy(max_new_tokens=3))
    engine.step()
    parts = [(0, 64), (64, 128), (128, 192), (192, 199)]
    assert reads == [(0, 2), parts[0]]
    engine.update_params(fresh)
    engine.add(long, greedy(max_new_tokens=3), id="new")
    outputs = {one.id: one.output.token_ids for one in engine if one.output is not None}
    assert reads == [(0, 2), *parts, *parts]
    other = dataclasses.replace(tiny, params=fresh)
    assert [outputs["new"]] == read_alone(other, [long], greedy(max_new_tokens=3))


@pytest.mark.parametrize("refill_rows", [1, 2])
def test_the_loop_is_told_whether_anyone_waits(refill_rows, tiny, monkeypatch):
    """More rows to wait for than there are: nobody takes the slot of one that ends."""
    engine = Engine(tiny, batch_size=2, refill_rows=refill_rows, rounds_per_step=2)
    seen, step = [], device_rows.DeviceRows.step

    def note(self, limits, ended, max_rounds, enough, pages):
        seen.append((engine.num_waiting > 0, enough > 2))
        return step(self, limits, ended, max_rounds, enough, pages)

    monkeypatch.setattr(device_rows.DeviceRows, "step", note)
    for new in (4, 8, 4):
        engine.add([1, 2], greedy(max_new_tokens=new))
    list(engine)
    assert set(seen) == {(True, False), (False, True)}


def test_what_a_request_asks_for_is_served_from_then_on(tiny):
    """Log-probabilities, filters: the programs follow, and rows that decode stay what they are."""
    prompts = [PROMPTS[1], PROMPTS[4], PROMPTS[2]]
    asked = [
        greedy(max_new_tokens=20),
        SamplingParams(temperature=0.8, top_k=5, seed=1, max_new_tokens=6, logprobs=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_new_tokens=6),
    ]
    wanted = specjax.generate(tiny, prompts, sampling=asked, batch_size=3)
    engine = Engine(tiny, batch_size=2, rounds_per_step=2)
    outputs = {}
    for prompt, params in zip(prompts, asked, strict=True):
        engine.add(prompt, params)
        outputs |= {one.id: one.output for one in engine.step() if one.output is not None}
    outputs |= {one.id: one.output for one in engine if one.output is not None}
    assert [outputs[number].token_ids for number in range(3)] == wanted.token_ids
    np.testing.assert_allclose(outputs[1].logprobs, wanted.logprobs[1], rtol=1e-6)
    assert outputs[0].logprobs is None


def test_a_row_that_fails_harms_no_other(tiny):
    """A NaN in the embedding of one token: the rows that meet it end, and say which they are."""
    params = jax.tree.map(lambda leaf: leaf, tiny.params)
    table = params["embed"]["embedding"]
    params["embed"] = params["embed"] | {"embedding": table.at[9].set(jnp.nan)}
    broken = dataclasses.replace(tiny, params=params)
    engine = Engine(broken, batch_size=2)
    for number, prompt in enumerate(([1, 2], [9, 9], [3, 4], [5])):
        engine.add(prompt, greedy(max_new_tokens=8), id=f"r{number}")
    outputs = {one.id: one.output for one in engine if one.output is not None}
    assert outputs["r1"].finish_reason == "error"
    assert "request 'r1'" in outputs["r1"].error
    assert "not numbers" in outputs["r1"].error
    good = specjax.generate(tiny, [[1, 2], [3, 4], [5]], sampling=greedy(max_new_tokens=8))
    for name, tokens in zip(("r0", "r2", "r3"), good.token_ids, strict=True):
        ours = outputs[name].token_ids
        assert ours == tokens[: len(ours)]
        assert outputs[name].error is None or 9 in tokens


def test_other_parameters(tiny, unrelated):
    """Rows continue with the new ones or end; what comes later is theirs alone."""
    fresh = jax.tree.map(lambda leaf: leaf * 1.1, tiny.params)
    other = dataclasses.replace(tiny, params=fresh)
    another = Engine(other, batch_size=2)
    another.add([4, 5], greedy(max_new_tokens=8))
    (wanted,) = (one.output.token_ids for one in another if one.output is not None)
    engine = Engine(
        tiny,
        drafter=Ngram(num_speculative_tokens=1),
        controller=Scripted((((1,), (0.0,), 2),)),
        batch_size=2,
    )
    before = programs._compile.cache_info().misses
    engine.add([1, 2], greedy(max_new_tokens=30), id="runs")
    engine.add([1, 2, 3], greedy(max_new_tokens=30), id="waits")
    engine.step()
    compiled = programs._compile.cache_info().misses
    assert compiled >= before
    assert engine._control.state > 0
    engine.update_params(fresh, running="abort")
    # What was learned of draft lengths is forgotten.
    assert engine._control.state == 0
    engine.add([4, 5], greedy(max_new_tokens=8), id="new")
    outputs = {one.id: one.output for one in engine if one.output is not None}
    assert outputs["runs"].finish_reason == outputs["waits"].finish_reason == "abort"
    assert outputs["new"].token_ids == wanted
    engine.add([1, 2], greedy(max_new_tokens=9))
    engine.step()
    engine.update_params(tiny.params)
    (output,) = (one.output for one in engine if one.output is not None)
    assert (len(output.token_ids), output.finish_reason) == (9, "length")
    assert programs._compile.cache_info().misses == compiled
    with pytest.raises(InputError, match="^params: its tree, shapes or dtypes are not those"):
        engine.update_params(unrelated.params)
    with pytest.raises(InputError, match="running='stop' is unknown: use continue, abort"):
        engine.update_params(fresh, running="stop")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: engine.abort("x"), "id='x': no unfinished request has this id; abort one"),
        (lambda engine: engine.add([1], id="a"), "id='a': a request with this id is unfinished"),
        (lambda engine: engine.add([1], id=True), "id=True: use a whole number or a text"),
        (
            lambda engine: engine.add([1] * 50, id="b"),
            "prompt of request 'b' has 50 tokens, which leaves no",
        ),
        (
            lambda engine: engine.add([], id="b"),
            "prompt of request 'b' is empty: give at least one token",
        ),
        (lambda engine: engine.add([61], id="b"), "prompt of request 'b': token id 61 is outside"),
        (lambda engine: engine.add([1], n=0), "n=0: use a whole number of at least 1"),
        (lambda engine: engine.add([1], {"stop": "x"}), "sampling.stop: .* has no tokenizer"),
        (
            lambda engine: engine.add([1], {"stop_token_ids": list(range(9))}),
            "sampling.stop_token_ids: prompt of request 1 has 9 tokens that end its output",
        ),
        (lambda engine: (engine.close(), engine.step()), "the engine is closed: make another"),
        (lambda engine: (engine.close(), engine.add([1])), "the engine is closed"),
    ],
)
def test_calls_that_cannot_be_served(call, said, tiny):
    engine = Engine(tiny, batch_size=2, max_length=50)
    engine.add([1, 2], id="a")
    with pytest.raises(InputError, match=f"^{said}"):
        call(engine)
    assert engine.num_unfinished == (0 if "closed" in said else 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rounds_per_step": 0}, "rounds_per_step=0"),
        ({"refill_rows": 0}, "refill_rows=0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens=0"),
        ({"max_length": 601}, "max_length=601 exceeds the 600 positions"),
        ({"drafter": "ngarm"}, "drafter='ngarm'"),
    ],
)
def test_engines_that_cannot_be(options, said, tiny):
    with pytest.raises(InputError, match=said):
        Engine(tiny, **options)


ROW = Request(0, (1,), SamplingParams())


def scheduler_of(tiny, slots):
    return Scheduler(plan_engine(tiny, None, DecodeOptions(batch_size=slots)))


def test_the_scheduler_keeps_the_order_of_arrival(tiny):
    scheduler = scheduler_of(tiny, 2)
    for name in "abcda":
        scheduler.add(Row(name, ROW, None, 0.0))
    taken = scheduler.take(scheduler.free_slots)
    assert [(slot, one.id) for slot, one in taken.items()] == [(0, "a"), (1, "b")]
    assert scheduler.take(scheduler.free_slots) == {}
    first, last = scheduler.samples("a")
    assert scheduler.slots[0] is first
    assert scheduler.free(first) == 0
    assert scheduler.has("a")
    (waits,) = scheduler.samples("d")
    assert scheduler.free(waits) is None
    assert not scheduler.has("d")
    assert scheduler.samples("d") == []
    taken = scheduler.take(scheduler.free_slots)
    assert [(slot, one.id) for slot, one in taken.items()] == [(0, "c")]
    assert [one.id for one in scheduler] == ["c", "b", "a"]
    assert (len(scheduler), scheduler.free_slots, scheduler.num_waiting) == (3, [], 1)
    assert scheduler.free(last) is None
    assert not scheduler.has("a")


def test_what_is_done_for_one_request_does_not_depend_on_how_many_wait(tiny):
    """Nothing looks through the queue: no request is compared with another one."""

    class Compared(Row):
        count = 0

        def __eq__(self, other):
            Compared.count += 1
            return self is other

        __hash__ = Row.__hash__

    scheduler = scheduler_of(tiny, 1)
    for name in range(1000):
        scheduler.add(Compared(name, ROW, None, 0.0))
    scheduler.take(scheduler.free_slots)
    for name in reversed(range(1000)):
        (one,) = scheduler.samples(name)
        scheduler.free(one)
    assert not scheduler
    assert Compared.count <= 1000


@pytest.mark.parametrize(
    ("rule", "lossy"), [("rejection", [False, False]), ("typical", [False, True])]
)
def test_a_rule_that_changes_the_distribution_says_so(rule, lossy, tiny):
    """Of sampled rows: greedy ones keep their tokens."""
    asked = [greedy(max_new_tokens=2), SamplingParams(max_new_tokens=2, temperature=0.8)]
    call = make_call(tiny, PROMPTS[:2], sampling=asked, verify=rule)
    assert [call.plan.is_lossy(one.sampling) for one in call.requests] == lossy
    assert engine_summary(Statistics(num_slots=2, lossy=any(lossy)))["lossy"] == any(lossy)


def test_statistics_of_steps():
    statistics = Statistics(num_slots=4)
    assert statistics.summary().occupancy is None
    assert statistics.summary().total == Percentiles(None, None, None)
    statistics.add_step(Step(1.0, 0.5, rounds=10, row_rounds=40, tokens=60, waiting=2))
    statistics.add_step(Step(2.0, 0.5, rounds=10, row_rounds=10, tokens=15, waiting=0))
    statistics.prefill_s = 1.0
    summary = statistics.summary()
    assert (summary.occupancy, summary.occupancy_waiting) == (50 / 80, 1.0)
    assert (summary.tokens, summary.rounds, summary.tokens_per_second) == (75, 20, 37.5)
    assert Percentiles.of(range(101)) == (50, 95, 99)
    statistics.add_request(Times(0.25, 0.5, 1.0))
    assert repr(statistics) == (
        "Statistics(4 slots, 1 finished requests, 75 new tokens in 20 rounds)"
    )
    lines = dict(re.split("  +", line) for line in str(statistics.summary()).splitlines())
    assert lines["tokens/s"] == "37.5"
    assert lines["occupancy"] == "62% of slots and rounds, 100% while requests waited"
    assert lines["first token, s"] == "p50 0.500, p95 0.500, p99 0.500"
    assert lines["between tokens, s"] == "p50 -, p95 -, p99 -"


def test_a_request_s_parameters_may_be_keywords(tiny):
    """They replace those in `sampling`, which may be a dict."""
    engine = Engine(tiny, batch_size=1)
    for sampling in ({"top_k": 3, "max_new_tokens": 9}, greedy(top_k=3, max_new_tokens=9)):
        engine.add([1, 2], sampling, temperature=0.5, max_new_tokens=4, seed=7)
    engine.add([1, 2], stop_token_ids=[5])
    first, second, third = (row.request.sampling for row in engine._scheduler)
    assert first == second
    assert first == SamplingParams(temperature=0.5, top_k=3, max_new_tokens=4, seed=7)
    assert third == SamplingParams(stop_token_ids=(5,))


def test_an_abort_of_what_is_being_read(tiny):
    """Its prompt is read no further, and later requests get their slots and their bounds."""
    long = np.random.default_rng(0).integers(61, size=500).tolist()
    engine = Engine(tiny, **IN_PARTS)
    engine.add([1, 2], greedy(max_new_tokens=4), id="short")
    engine.add(long, greedy(max_new_tokens=4), id="long")
    engine.step()
    assert engine._scheduler.reading is not None
    engine.abort("long")
    assert engine._scheduler.reading is None
    reasons = {one.id: one.finish_reason for one in engine if one.output is not None}
    assert reasons == {"long": "abort", "short": "length"}
    engine.add([1, 2], greedy(max_new_tokens=4), id="again")
    engine.add(long, greedy(max_new_tokens=4), id="long")
    outputs = {one.id: one.output.token_ids for one in engine if one.output is not None}
    wanted = read_alone(tiny, [[1, 2], long], greedy(max_new_tokens=4))
    assert [outputs["again"], outputs["long"]] == wanted


def test_a_prompt_that_was_read_in_part_is_read_again(tiny):
    """Read beside a shorter one, which goes on when the request of the longer one is aborted."""
    target = place_model(tiny, make_mesh(2, 1, jax.devices()[:2]))
    first, second = (np.random.default_rng(n).integers(61, size=400).tolist() for n in (0, 1))
    second = second[:150]
    options = {"batch_size": 4, "max_length": 420, "max_prefill_tokens": 64, "rounds_per_step": 2}
    engine = Engine(target, **options)
    engine.add([1, 2], greedy(max_new_tokens=60), id="short")
    engine.step()
    engine.add(first, greedy(max_new_tokens=4), id="long")
    engine.add(second, greedy(max_new_tokens=4), id="beside")
    engine.step()
    assert engine._scheduler.reading is not None
    engine.abort("long")
    outputs = []
    while "beside" not in {one.id for one in outputs}:
        outputs += [one.output for one in engine.step() if one.output is not None]
    engine.add(first, greedy(max_new_tokens=4), id="again")
    outputs += [one.output for one in engine if one.output is not None]
    found = {one.id: one.token_ids for one in outputs}
    wanted = read_alone(tiny, [first, second], greedy(max_new_tokens=4))
    assert [found["again"], found["beside"]] == wanted


def test_what_cannot_be_compiled_changes_nothing(tiny, monkeypatch):
    """A request that needs another program, added while a prompt is read in parts."""
    long = np.random.default_rng(0).integers(61, size=300).tolist()
    wanted = read_alone(tiny, [[1, 2], long], greedy(max_new_tokens=9))
    engine = Engine(tiny, **IN_PARTS)
    engine.add([1, 2], greedy(max_new_tokens=9))
    engine.add(long, greedy(max_new_tokens=9))
    engine.step()
    drawn = {"temperature": 1.0, "logprobs": True, "max_new_tokens": 3}

    def full(*arguments, **options):
        raise InputError("memory: too little")

    with monkeypatch.context() as patched:
        patched.setattr(device_rows, "compile_plan", full)
        with pytest.raises(InputError, match="^memory: too little"):
            engine.add([3], drawn)
    assert engine.num_unfinished == 2
    assert engine.add([3], drawn) == 2
    outputs = {one.id: one.output.token_ids for one in engine if one.output is not None}
    assert [outputs[0], outputs[1]] == wanted
    assert len(outputs[2]) == 3


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_costs_are_known_before_the_first_token(tiny):
    """Each width and the drafter are timed once per program, and only where a controller asks."""
    drafter = Ngram(prompt_lookup_min=1, num_speculative_tokens=3)
    options = dict(batch_size=2, max_length=77)
    with Engine(tiny, drafter=drafter, **options) as fixed:
        assert not fixed.compile().timed
    with Engine(tiny, drafter=drafter, num_speculative_tokens="auto", **options) as engine:
        timed = engine.compile().timed
        widths = engine.plan.loop.widths
        assert [np.flatnonzero(one.passes).tolist() for one in timed[:-1]] == [[0], [0], [1], [2]]
        assert [one.rounds for one in timed] == [1] + [4] * (len(widths) + 1)
        assert [one.limits.longest for one in timed] == [(0,)] * (1 + len(widths)) + [(2,)]
        assert timed[-1].ran.sum() == timed[-1].rounds
        assert engine._control.state.costs_measured
        before = list(timed)
        text = engine.add([5, 6, 5, 6], greedy(max_new_tokens=12))
        tokens = [token for delta in engine for token in delta.token_ids]
    wanted = specjax.generate(tiny, [[5, 6, 5, 6]], sampling=greedy(max_new_tokens=12)).token_ids
    assert (text, [tokens]) == (0, wanted)
    with Engine(tiny, drafter=drafter, num_speculative_tokens="auto", **options) as again:
        assert list(map(id, again.compile().timed)) == list(map(id, before))


def test_results_of_a_step_are_one_array():
    arrays = {
        "tokens": jnp.arange(6).reshape(2, 3),
        "logp": jnp.array([[-0.5], [np.nan]]),
        "no": None,
    }
    packed = jax.jit(Packed.of)(arrays)
    assert len(jax.tree.leaves(packed)) == 1
    read = packed.read()
    for name in ("tokens", "logp"):
        np.testing.assert_array_equal(read[name], arrays[name])
        assert read[name].dtype == arrays[name].dtype
    assert read["no"] is None
    with pytest.raises(ValueError, match="pack arrays of 32 bits"):
        Packed.of({"flags": jnp.ones(2, bool)})


def test_interrupted_calls_lose_nothing(tiny, monkeypatch):
    """Neither what a step has added, nor the deltas that a loop over them did not get to."""
    prompts = [[1, 2], [3], [4, 5, 6]]
    wanted = specjax.generate(tiny, prompts, sampling=greedy(max_new_tokens=12)).token_ids
    engine = Engine(tiny, batch_size=2, rounds_per_step=3)
    for prompt in prompts:
        engine.add(prompt, greedy(max_new_tokens=12))
    tokens = [[] for _ in prompts]

    for number in range(40):
        if number == 2:
            with monkeypatch.context() as patched:
                patched.setattr(Packed, "read", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
        for delta in engine:
            tokens[delta.id] += delta.token_ids
            break
    assert tokens == wanted


def test_an_interrupted_admission_is_made_again(tiny, monkeypatch):
    prompts = [[1, 2], [3], [4, 5, 6]]
    wanted = specjax.generate(tiny, prompts, sampling=greedy(max_new_tokens=8)).token_ids
    engine = Engine(tiny, batch_size=2, rounds_per_step=3)
    for prompt in prompts:
        engine.add(prompt, greedy(max_new_tokens=8))

    for name in ("begin", "reuse_rows"):
        with monkeypatch.context() as patched:
            patched.setattr(device_rows.DeviceRows, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    outputs = {one.id: one.output for one in engine if one.output is not None}
    assert [outputs[number].token_ids for number in range(3)] == wanted


def test_an_interrupted_end_is_made_again(tiny, monkeypatch):
    engine = Engine(tiny, batch_size=2, rounds_per_step=3)
    engine.add([1, 2], greedy(max_new_tokens=20))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine_module.jax, "block_until_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    with pytest.raises(InputError, match="the engine is closed"):
        next(iter(engine))
    assert engine._rows._state is not None
    engine.close()
    assert engine._rows._state is None


def test_a_request_without_text_ends_alone(undrafted, monkeypatch):
    """Its tokens are none that the tokenizer knows; the others do not notice."""
    call, wanted = undrafted
    engine = Engine.of(call.plan.with_options(rounds_per_step=2))
    end = Row._end

    def refuses(row, *arguments):
        if row is broken and len(row.token_ids) > 2:
            raise InputError("token 99 is unknown")
        return end(row, *arguments)

    monkeypatch.setattr(Row, "_end", refuses)
    for prompt in range(len(PROMPTS)):
        engine.submit([call.requests[prompt]])
    broken = next(one for one in engine._scheduler if one.id == 1)
    deltas = list(engine)
    outputs = {one.id: one.output for one in deltas if one.output is not None}
    assert outputs[1].finish_reason == "error"
    assert outputs[1].error == "request 1: token 99 is unknown"
    assert 2 < len(outputs[1].token_ids) < NEW[1]
    assert wanted[1][0][: len(outputs[1].token_ids)] == outputs[1].token_ids
    told_of = [token for one in deltas if one.id == 1 for token in one.token_ids]
    assert told_of == outputs[1].token_ids
    assert outputs[1].rounds.emitted.sum() == len(outputs[1].token_ids)
    assert "".join(one.text for one in deltas if one.id == 1) == outputs[1].text
    others = [prompt for prompt in range(len(PROMPTS)) if prompt != 1]
    assert {n: own_results(outputs[n])[0] for n in others} == {n: wanted[n][0] for n in others}


def test_what_tears_a_step_apart_ends_the_engine(tiny, monkeypatch):
    """Tokens that were taken off the devices and are in no delta would be missing unnoticed."""
    engine = Engine(tiny, batch_size=2, rounds_per_step=3)
    engine.add([1, 2], greedy(max_new_tokens=20))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(Row, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    for call in (engine.step, lambda: engine.add([3]), lambda: list(engine)):
        with pytest.raises(InputError, match="failed or was interrupted within a step, some of"):
            call()
    engine.close()


def test_a_request_is_unfinished_until_its_last_delta_was_handed_out(tiny):
    engine = Engine(tiny, batch_size=2, rounds_per_step=16)
    engine.add([1, 2], greedy(max_new_tokens=30))
    engine.add([3], greedy(max_new_tokens=30))
    engine.step()
    engine.abort(0)
    # What is under way ends the other one.
    engine.update_params(tiny.params)
    outputs = []
    while engine.num_unfinished:
        outputs += [one.output for one in engine.step() if one.output is not None]
    assert [(one.id, one.finish_reason) for one in outputs] == [(0, "abort"), (1, "length")]
    assert engine.step() == []
    summary = engine.statistics.summary()
    assert (summary.requests, summary.aborted, len(engine.statistics.total_s)) == (2, 1, 1)


HEADS = {
    "eagle3": lambda target: eagle_drafter(target, spread=0.3),
    "medusa": lambda target: head_drafter(medusa_head(target, ids=np.arange(0, 61, 2)), target),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_takes_what_it_shares_from_the_new_target(name, tiny):
    """Its own parameters stay, or are those that are given."""
    fresh = jax.tree.map(lambda leaf: leaf * 1.1, tiny.params)
    other = dataclasses.replace(tiny, params=fresh)
    drafter, wanted = HEADS[name](tiny), HEADS[name](other)
    engine = Engine(tiny, drafter=drafter, num_speculative_tokens=2, batch_size=2, max_length=64)
    engine.update_params(fresh)
    (ours,) = engine.plan.drafter.params
    jax.tree.map(np.testing.assert_array_equal, ours["shared"], wanted.params["shared"])
    own = {key: part for key, part in drafter.params.items() if key != "shared"}
    jax.tree.map(np.testing.assert_array_equal, {key: ours[key] for key in own}, own)
    both = merge_drafters(Ngram(), drafter)
    merged = both.drafter.for_target(both.params, fresh)
    jax.tree.map(np.testing.assert_array_equal, merged, ((), ours))

    changed = jax.tree.map(lambda leaf: leaf * 2, drafter.params)
    engine.update_params(fresh, changed)
    (ours,) = engine.plan.drafter.params
    # Nothing is said of what it was trained on.
    assert (ours.pop("digest") != changed.pop("digest")).any()
    jax.tree.map(np.testing.assert_array_equal, ours, changed)
    for bad in (tiny, {"a": 1.0}, unlike(drafter.params)):
        with pytest.raises(InputError, match="^drafter_params: its tree, shapes or dtypes are not"):
            engine.update_params(fresh, bad)
    with pytest.raises(InputError, match="^params: its tree, shapes or dtypes are not those"):
        engine.update_params(other)


def unlike(params):
    return {**params, "shared": {}}


def test_ids_that_are_taken_are_not_given(tiny):
    engine = Engine(tiny, batch_size=2)
    assert engine.add([1], greedy(max_new_tokens=2), id=1) == 1
    assert engine.add([1], greedy(max_new_tokens=2)) == 2
    assert engine.add([1], greedy(max_new_tokens=2)) == 3
    assert {one.id for one in engine if one.output is not None} == {1, 2, 3}


@pytest.mark.parametrize("wanted", [199, 10**9])
def test_more_tokens_than_fit_are_not_waited_for(wanted, tiny, caplog):
    """Programs of fewer rows are compiled for what a row can still get."""
    with caplog.at_level("INFO", "specjax"), Engine(tiny, batch_size=4, max_length=64) as engine:
        for new in (20, wanted):
            engine.add([1, 2], greedy(max_new_tokens=new))
        assert sum(len(delta.token_ids) for delta in engine) == 20 + 62
    assert len(caplog.records) <= 1
