"""Engines with paged caches: rows that share pages, wait for them and are put back, as alone."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import decode, greedy, make_call
from test_engine import own_results
from test_sharding import collectives
from tiny_models import eagle_drafter

from specjax.distributed.sharding import make_mesh
from specjax.engine import device_rows, pages
from specjax.engine.device_rows import DeviceRows
from specjax.engine.engine import Engine
from specjax.engine.options import DecodeOptions
from specjax.engine.pages import PagePool, RowPages
from specjax.engine.plan import plan_requests
from specjax.engine.requests import Request, SamplingParams
from specjax.engine.rows import Row
from specjax.errors import InputError
from specjax.loading.load import place_model, random_model
from specjax.methods.ngram import Ngram
from specjax.methods.suffix import Suffix
from specjax.models.cpu import library
from specjax.models.layers import cpu_attention

SIZE, NUM_PAGES = 8, 13
BEGINNING = [int(token) for token in np.random.default_rng(3).integers(61, size=40)]
PROMPTS = [
    BEGINNING[:12],
    [*BEGINNING, 1, 2, 3],
    [7],
    [*BEGINNING, 1, 2, 3],
    [*BEGINNING[:SIZE], 60, 4],
    [*BEGINNING[:SIZE], 59, 4, 5],
    [*BEGINNING, 9],
    [*BEGINNING[: 3 * SIZE], 8, 8],
    BEGINNING[:33],
    [*BEGINNING[:SIZE], 58],
]
"""Some are equal, some end or part at the end of a page."""
NEW = [25, 40, 35, 40, 30, 30, 20, 30, 30, 30]


def paged(call, num_pages, shares, size=SIZE):
    """The call with pages, by default smaller ones than users may choose."""
    call = call.with_loop(page_size=size, num_pages=num_pages)
    return call.with_options(kv_page_size=128, enable_prefix_caching=shares, rounds_per_step=2)


def call_of(tiny, drafter, rule, prompts=PROMPTS, **fields):
    sampling = [SamplingParams(**{"temperature": 0.9} | fields, max_new_tokens=new) for new in NEW]
    return make_call(
        tiny,
        prompts,
        drafter=drafter,
        sampling=sampling,
        verify=rule,
        batch_size=3,
        **({} if drafter is None else {"num_speculative_tokens": 3}),
    )


def results(engine, call, aborted=()):
    """What the call's prompts give, the last ones added later; some are aborted meanwhile."""
    found = {}

    def steps(count):
        for _ in range(count):
            for delta in engine.step():
                if delta.output is not None:
                    found[delta.id] = own_results(delta.output)

    for prompt in range(5):
        engine.submit([call.requests[prompt]])
    steps(3)
    for prompt in range(5, len(call.requests)):
        engine.submit([call.requests[prompt]])
    for prompt in aborted:
        engine.abort(prompt)
        steps(2)
    for _ in range(400):
        if not engine.num_unfinished:
            return found
        steps(1)
    raise AssertionError("some rows never ended")


def assert_nothing_is_held(engine):
    for pool in engine._scheduler.pages.pools:
        assert pool.num_unused == pool.num_pages
        assert not pool._held
        assert not any(pool._holders)
    assert not engine._scheduler.pages._pool_of


BLOCK = 64
"""The number of keys that the kernel for CPUs reads at a time."""


@pytest.fixture(scope="module")
def in_blocks():
    """A call of a model whose attention is the kernel's, and what its rows give without pages.

    Prompts share as many pages of BLOCK tokens as `PROMPTS` do of SIZE.
    """
    if not library.available():
        pytest.skip("no C++ compiler")
    model = random_model(tiny_config(head_dim=8, num_layers=2), 0, dtype="float32")
    prompts = [[token for token in prompt for _ in range(BLOCK // SIZE)] for prompt in PROMPTS]
    call = call_of(model, Ngram(prompt_lookup_min=1), "rejection", prompts)
    return call, results(Engine.of(call.plan), call)


@pytest.mark.parametrize("broken", [False, True])
def test_the_kernel_for_cpus_reads_pages_of_whole_blocks(broken, in_blocks, monkeypatch):
    """The variant that reads each row's first page twice is found."""
    call, wanted = in_blocks
    kernel, caches = cpu_attention.attend_window_and_cache, []

    def attend(query, cache, *rest, **limits):
        caches.append(cache)
        pages = cache.pages.at[:, 1].set(cache.pages[:, 0]) if broken else cache.pages
        return kernel(query, cache.replace(pages=pages), *rest, **limits)

    monkeypatch.setattr(cpu_attention, "attend_window_and_cache", attend)
    # Another number of pages makes another program.
    engine = Engine.of(paged(call, NUM_PAGES + broken, True, BLOCK).plan)
    found = results(engine, call)
    assert {cache.k.shape[3] for cache in caches} == {BLOCK}
    assert (found == wanted) != broken
    assert engine.statistics.shared_tokens > 3 * BLOCK


def on_mesh(tiny, name, data, model):
    """An engine with pages on a mesh, and a call."""
    placed = place_model(tiny, make_mesh(data, model, devices=jax.devices()[: data * model]))
    drafter = None if name == "none" else eagle_drafter(placed, spread=0.3)
    call = paged(call_of(placed, drafter, "coupled"), NUM_PAGES * data, True)
    return Engine.of(call.plan), call


@pytest.fixture(scope="module", params=["eagle3", *slow("none")])
def alone(request, tiny):
    """The name of a drafter, and the tokens without pages and without a mesh."""
    drafter = None if request.param == "none" else eagle_drafter(tiny, spread=0.3)
    call = call_of(tiny, drafter, "coupled")
    found = results(Engine.of(call.plan), call)
    return request.param, {prompt: result[0] for prompt, result in found.items()}


@pytest.mark.parametrize(("data", "model"), [(2, 2), *slow((1, 2), (2, 1))])
def test_pages_on_several_devices(data, model, alone, tiny):
    """Each device has its heads of the pages of its rows."""
    name, wanted = alone
    engine, call = on_mesh(tiny, name, data, model)
    for aborted in ((), (1, 5)):
        for prompt, result in results(engine, call, aborted).items():
            tokens = result[0]
            assert tokens == wanted[prompt][: len(tokens) if prompt in aborted else None]
        assert_nothing_is_held(engine)
    assert engine.statistics.put_back > 0
    assert engine.statistics.shared_tokens > 3 * SIZE
    keys = engine._rows._state.cache.k
    _, pages, heads, *_ = keys.sharding.shard_shape(keys.shape)
    assert (data * pages, model * heads) == (keys.shape[1], keys.shape[2])


def test_devices_do_not_send_each_other_keys(alone, tiny):
    engine, _ = on_mesh(tiny, alone[0], 2, 2)
    programs, width = engine.compile(), tiny.config.head_dim
    sent = {shape for one in (programs.read, programs.step) for _, shape in collectives(one)}
    assert sent
    assert not [shape for shape in sent if shape.endswith((f",{width}]", f",{SIZE},1]"))]


class TakesPagesOfAnotherDevice(RowPages):
    """Broken: all rows have pages of the first device; the last slots come first."""

    def pool(self, slot):
        return self.pools[0]

    def find_slot(self, row, free, others, rounds):
        return super().find_slot(row, free[::-1], others, rounds)


def test_pages_of_another_device_are_found(alone, tiny, monkeypatch):
    name, wanted = alone
    engine, call = on_mesh(tiny, name, 2, 2)
    monkeypatch.setattr(engine._scheduler, "pages", TakesPagesOfAnotherDevice(call.plan))
    found = results(engine, call)
    assert {prompt: result[0] for prompt, result in found.items()} != wanted


def test_a_request_gets_a_slot_where_its_beginning_is_and_there_is_room(tiny):
    _, call = on_mesh(tiny, "none", 2, 1)
    pages = RowPages(call.plan)
    assert [pages.pool(slot) is pages.pools[0] for slot in range(4)] == [True, True, False, False]

    def row(number, prompt, new):
        request = Request(number, tuple(prompt), SamplingParams(max_new_tokens=new))
        return Row(number, request, None, 0.0)

    first, second, other = row(0, BEGINNING, 1), row(1, BEGINNING, 1), row(2, [7], 1)
    assert pages.find_slot(first, [0, 1, 2, 3], [], 0) == 0
    assert pages.begin(first, 0) == 0
    pages.take_back(first, len(BEGINNING) - 2)
    assert pages.find_slot(second, [1, 2, 3], [first], 0) == 1
    assert pages.find_slot(other, [1, 2, 3], [first], 0) == 2
    large = row(3, range(60), 35)
    assert pages.find_slot(large, [1], [first], 40) is None
    assert pages.find_slot(large, [1, 2], [first], 40) == 2
    assert pages.begin(second, 1) == len(BEGINNING) - SIZE
    assert pages.begin(large, 3) == 0
    pages.begin(other, 2)
    large.rounds_under_way = 40
    assert pages.reserve([first, second, large, other], 0) is None
    assert [pool.num_unused for pool in pages.pools] == [NUM_PAGES - 6, 1]
    other.request = dataclasses.replace(other.request, prompt=(7,) * 19)
    assert pages.reserve([first, other], 0) is pages.pools[1]
    assert pages.reserve([first], 0) is None
    for one in (first, second, large, other):
        pages.close(one)
    assert all(pool.num_unused == pool.num_pages for pool in pages.pools)


class SharesPartOfAPage(PagePool):
    """Broken: a page is shared that is not full yet."""

    def publish(self, request, tokens, filled):
        if request not in self._held or not self._held[request].pages:
            return
        most = len(self._held[request].pages) * self.size
        padded = min(-(-filled // self.size) * self.size, most)
        super().publish(request, [*tokens, *BEGINNING[len(tokens) :], 0], padded)


class ForgetsTheNextToken(PagePool):
    """Broken: the token after a page does not matter."""

    def __init__(self, num_pages, size, following, num_states):
        super().__init__(num_pages, size, following - 1, num_states)


@pytest.fixture(scope="module")
def with_eagle(tiny):
    """A call whose drafter reads the next token, and what its rows give."""
    call = paged(call_of(tiny, eagle_drafter(tiny, spread=2.0), "rejection"), NUM_PAGES, True)
    return call, results(Engine.of(call.plan), call)


@pytest.mark.parametrize("broken", [SharesPartOfAPage, ForgetsTheNextToken])
def test_broken_pages_are_found(broken, with_eagle, monkeypatch):
    call, wanted = with_eagle
    monkeypatch.setattr(pages, "PagePool", broken)
    try:
        found = results(Engine.of(call.plan), call)
    except (AssertionError, KeyError):
        return
    assert found != wanted


class FreesSharedPages(PagePool):
    """Broken: pages of an ended request are free, whoever else holds them."""

    def _release(self, pages):
        for page in pages:
            self._holders[page] = 0
            self._unused[page] = None
            self._unused.move_to_end(page, last=False)


def test_a_page_that_is_freed_while_shared_is_found(with_eagle, monkeypatch):
    """A short row ends that shares its prompt with a long one, and a third prompt is read."""
    call, _ = with_eagle
    strange = tuple((7 * token + 3) % 61 for token in range(30))
    rows = [((*BEGINNING, 1), 40), ((*BEGINNING, 9), 2), ((7,), 30), (strange, 20)]

    def answers():
        engine = Engine.of(call.plan)
        for number, (prompt, new) in enumerate(rows):
            sampling = SamplingParams(temperature=0.9, max_new_tokens=new)
            engine.submit([Request(number, tuple(prompt), sampling)])
        outputs = (one.output for one in engine if one.output is not None)
        return {one.id: own_results(one) for one in outputs}

    wanted = answers()
    monkeypatch.setattr(pages, "PagePool", FreesSharedPages)
    assert answers() != wanted


@pytest.mark.parametrize("lost", ["emitted", "rounds"])
def test_a_row_that_resumes_without_a_part_is_found(lost, with_eagle, monkeypatch):
    call, wanted = with_eagle
    resume_later = Row.resume_later

    def forgetful(self):
        before = getattr(self.request, lost)
        resume_later(self)
        self.request = dataclasses.replace(self.request, **{lost: before})

    monkeypatch.setattr(Row, "resume_later", forgetful)
    assert results(Engine.of(call.plan), call) != wanted


def test_a_row_that_was_put_back_has_begun(tiny):
    """Its time in the queue ended with its first slot, and it ends where new weights end rows."""
    call = paged(call_of(tiny, None, "rejection"), NUM_PAGES, False)
    engine = Engine.of(call.plan)
    for prompt in range(len(PROMPTS)):
        engine.submit([call.requests[prompt]])
    outputs = {}
    while not engine.statistics.put_back:
        outputs |= {one.id: one.output for one in engine.step() if one.output is not None}
    begun = [one for one in engine._scheduler if one.begun is not None]
    back = [one for one in begun if one not in engine._scheduler.slots]
    assert back[0].request.emitted
    engine.update_params(tiny.params, running="abort")
    outputs |= {one.id: one.output for one in engine if one.output is not None}
    aborted = {one for one, output in outputs.items() if output.finish_reason == "abort"}
    assert aborted == {one.id for one in begun}
    assert outputs.keys() == set(range(len(PROMPTS)))
    assert_nothing_is_held(engine)
    for prompt in range(len(PROMPTS)):
        engine.submit([call.requests[prompt]])
    times = [one.output.times for one in engine if one.output is not None]
    assert engine.statistics.put_back > 1
    assert all(one.waiting_s <= one.first_token_s <= one.total_s for one in times)


def test_numbers_that_are_not_finite_spoil_no_later_row(tiny):
    """Pages of a pool are not cleared, so that they hold what earlier rows left."""
    call = paged(call_of(tiny, None, "rejection"), NUM_PAGES, False)
    wanted = results(Engine.of(call.plan), call)
    engine = Engine.of(call.plan)
    engine.compile()
    engine._rows.begin()
    state = engine._rows._state
    nothing = {name: getattr(state.cache, name) * np.nan for name in ("k", "v")}
    engine._rows._state = state.replace(cache=state.cache.replace(**nothing))
    assert results(engine, call) == wanted


def test_rows_that_are_left_keep_their_pages(with_eagle, monkeypatch):
    """In programs for fewer rows, and back in their slots."""
    call, wanted = with_eagle
    sizes, step = [], DeviceRows.step

    def note(self, *arguments):
        seen = step(self, *arguments)
        sizes.append(len(seen.read().status))
        return seen

    monkeypatch.setattr(DeviceRows, "step", note)
    monkeypatch.setattr(device_rows, "_SAVED", 1e9)
    engine = Engine.of(call.plan)
    for _ in range(2):
        assert results(engine, call) == wanted
        assert_nothing_is_held(engine)
    assert {1, 2, 4} <= set(sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_page_size": 32}, "kv_page_size=32: use 64, 128 or 256"),
        ({"kv_page_size": 200}, "kv_page_size=200: use 64, 128 or 256"),
        ({"num_kv_pages": 9}, "num_kv_pages=9: caches have no pages; set kv_page_size"),
        ({"enable_prefix_caching": True}, "caches have no pages; set kv_page_size"),
        (
            {"kv_page_size": 128, "num_kv_pages": 4},
            "num_kv_pages=4: a request of 600 tokens needs 5 pages of 128; use that many at least",
        ),
        (
            {"kv_page_size": 256, "enable_prefix_caching": True, "drafter": Suffix()},
            "enable_prefix_caching=True: suffix has to observe all tokens of each prompt",
        ),
        (
            {"kv_page_size": 128, "num_kv_pages": 7, "mesh": True},
            "num_kv_pages=7: each of mesh.data=2 devices has as many pages; use a multiple of 2",
        ),
        (
            {"kv_page_size": 128, "num_kv_pages": 8, "mesh": True},
            "num_kv_pages=8: a request of 600 tokens needs 5 pages of 128; use 10, for mesh.data=2",
        ),
    ],
)
def test_pages_that_cannot_be_are_refused(options, message, tiny):
    if "mesh" in options:
        options = options | {"mesh": make_mesh(data=2, devices=jax.devices()[:2])}
    with pytest.raises(InputError, match=message):
        Engine(tiny, **options)


def test_a_pool_is_as_large_as_the_longest_row_needs(tiny):
    """Not as the capacity, which is rounded up; and the last token is in no cache."""

    def plan(new):
        options, sampling = (
            DecodeOptions(kv_page_size=64, num_kv_pages=2),
            greedy(max_new_tokens=new),
        )
        return plan_requests(tiny, [[1] * 100], options=options, sampling=sampling)[0]

    assert plan(29).loop.num_pages == 2
    with pytest.raises(InputError, match="num_kv_pages=2: a request of 130 tokens needs 3 pages"):
        plan(30)


def test_the_next_turn_of_a_conversation_finds_the_turns_before_it(tiny):
    """Output tokens are shared too, after the engine has rested; new weights share nothing.

    The samples of a request share its prompt.
    """
    engine = Engine(
        tiny, batch_size=2, max_length=512, kv_page_size=128, enable_prefix_caching=True
    )
    sampling = greedy(max_new_tokens=100)

    def answer(prompt):
        before = engine.statistics.shared_tokens
        engine.add(prompt, sampling)
        (output,) = (delta.output for delta in engine if delta.output is not None)
        return output.token_ids, engine.statistics.shared_tokens - before

    prompt = [*BEGINNING] * 3
    first, shared = answer(prompt)
    assert shared == 0
    turn = [*prompt, *first, 4, 5, 6]
    second, shared = answer(turn)
    assert shared == 128
    assert decode(tiny, [turn], sampling=sampling).token_ids == [second]
    engine.update_params(tiny.params)
    assert answer(turn) == (second, 0)
    shared = engine.statistics.shared_tokens
    engine.add([5] * 130, greedy(max_new_tokens=2), n=3)
    samples = [one.output.token_ids for one in engine if one.output is not None]
    assert samples == [samples[0]] * 3
    assert engine.statistics.shared_tokens == shared + 2 * 128
    with engine:
        pass
    assert engine._rows._state is None


def test_interruptions_lose_no_page_and_share_none_of_other_weights(tiny, monkeypatch):
    call = paged(call_of(tiny, None, "rejection"), NUM_PAGES, True)
    engine = Engine.of(call.plan)
    update = DeviceRows.update_params

    def interrupted(*arguments):
        if isinstance(arguments[0], DeviceRows):
            update(*arguments)
        raise KeyboardInterrupt

    def interrupt(call, kind, name):
        with monkeypatch.context() as patched:
            patched.setattr(kind, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()

    for _ in range(2):
        engine.submit([call.requests[1]])
        list(engine)
        interrupt(lambda: engine.update_params(tiny.params), DeviceRows, "update_params")
    assert engine.statistics.shared_tokens == 0
    engine.submit([call.requests[1]])
    interrupt(engine.step, RowPages, "reserve")
    with pytest.raises(InputError, match="failed or was interrupted within a step"):
        engine.step()


def test_pages_in_8_bits_hold_what_rows_in_8_bits_do(tiny):
    call = call_of(dataclasses.replace(tiny, kv_cache_dtype="int8"), None, "rejection")
    assert call.plan.loop.target.cache_dtype == "int8"
    wanted = results(Engine.of(call.plan), call)
    assert results(Engine.of(paged(call, NUM_PAGES, True).plan), call) == wanted
