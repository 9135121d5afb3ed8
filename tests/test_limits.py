"""Numbers of any size: refused by name, or without effect on time and memory."""

import jax
import numpy as np
import pytest
from decoding import PROMPTS, Shifting, decode, greedy

from specjax.distributed import device_memory
from specjax.engine.generate import generate
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_requests
from specjax.engine.programs import compile_plan, row_arguments
from specjax.errors import InputError, shown
from specjax.fields import Items, Number, Whole, check_values
from specjax.methods.ngram import Ngram

WISH = {"max_new_tokens": 10**9, "stop_token_ids": list(range(61))}


def test_buffers_follow_the_positions_and_not_the_wish(tiny):
    """`tiny` has 600 positions."""
    drafter, options = Ngram(prompt_lookup_max=64), DecodeOptions(num_speculative_tokens=1024)
    plan, requests = plan_requests(
        tiny, [[1, 2, 3]], drafter=drafter, sampling=WISH, options=options
    )
    assert plan.loop.capacity < 600 + 256
    assert plan.loop.drafter.num_speculative_tokens == 600 - 2
    assert row_arguments(plan, requests)[1].max_length.tolist() == [600]
    result = generate(tiny, [[1, 2, 3]], sampling=WISH)
    assert result.token_ids[0][0] < 61
    assert result.finish_reasons == ["stop"]


def test_drafts_are_no_longer_than_what_a_row_may_emit(tiny):
    options = DecodeOptions(max_length=5)
    plan, _ = plan_requests(tiny, [[1, 2, 3]], drafter=Ngram(), options=options)
    assert plan.loop.drafter.num_speculative_tokens == 3
    assert plan.loop.widths[-1] == 4


def test_each_step_of_a_ladder_runs_at_the_width_that_holds_it(tiny):
    """Rows end one after the other: five, four and three draft two tokens, the others six."""
    requests = [greedy(max_new_tokens=new) for new in (4, 8, 12, 40, 40)]
    drafter, ladder = Shifting(tiny.config.vocab_size), ((1, 2, 6), (3, 8, 2))
    options = dict(sampling=requests, num_speculative_tokens_per_batch_size=ladder)
    got = decode(tiny, PROMPTS[:5], drafter=drafter, **options)
    drafted, width = (counts[got.emitted > 0] for counts in (got.drafted, got.width))
    assert set(zip(drafted.tolist(), width.tolist(), strict=True)) >= {(2, 4), (6, 7)}
    # The last token of a row is not drafted.
    assert set(width.tolist()) == {1, 4, 7}


def test_too_little_memory_is_said_before_the_first_token(tiny, monkeypatch):
    plan, _ = plan_requests(tiny, [[1, 2, 3]], sampling=WISH)
    programs = compile_plan(plan)
    state = programs.empty(plan.params, *row_arguments(plan, []))
    caches, weights, everything = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for tree in (state.cache, tiny.params, state)
    )
    memory = programs.memory
    assert (memory.arrays[device_memory.CACHES], memory.weights) == (caches, weights)
    # A prompt is read into its slot's cache. Beside these there are limits and keys.
    assert memory.arrays["prompts being read"] < caches / 20
    assert abs(everything - sum(memory.arrays.values())) < 8000
    monkeypatch.setattr(device_memory, "free_bytes", lambda: 1000)
    with pytest.raises(InputError, match=r"memory: .* GiB are free; lower batch_size, max_length"):
        compile_plan(plan)


def test_the_message_says_how_many_rows_and_tokens_fit(monkeypatch):
    gib = 1 << 30
    arrays = {device_memory.CACHES: 8 * gib, "drafters": gib}
    plan = device_memory.MemoryPlan(weights=16 * gib, arrays=arrays, temporaries=gib)
    monkeypatch.setattr(device_memory, "free_bytes", lambda: 10 * gib)
    plan.check("lower batch_size", 8, 4096)
    monkeypatch.setattr(device_memory, "free_bytes", lambda: 5 * gib)
    with pytest.raises(
        InputError,
        match=r"10\.0 GiB .* 5\.0 GiB .*batch_size \(about 4 rows or 1536 tokens per row",
    ):
        plan.check("lower batch_size", 8, 4096)
    with pytest.raises(InputError, match=r"lower num_kv_pages \(about 96 pages would fit\)"):
        plan.check("lower num_kv_pages", 8, 4096, num_pages=256)
    plan.check("lower batch_size", 8, 4096, begun=True)
    monkeypatch.setattr(device_memory, "free_bytes", lambda: gib // 100)
    with pytest.raises(
        InputError, match=r"lower batch_size\. Per device: weights 16\.00 GiB, caches"
    ):
        plan.check("lower batch_size", 8, 4096)


def test_free_memory_of_a_container(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300\n")
    assert device_memory._left_in_group(tmp_path) == 1300
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory._left_in_group(tmp_path) is None
    assert device_memory.free_bytes() > 0


def test_values_are_shown_whatever_they_are():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    assert shown(10**5000) == "<int that cannot be printed>"
    assert shown(Odd()).startswith("<Odd ")
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 10_000)) == 60
    assert Number().check("n", np.float32(0.5)) == 0.5
    assert Items(Whole()).check("n", np.array([1, 2])) == (1, 2)
    assert type(Whole().check("n", np.int64(3))) is int


def test_all_that_is_wrong_is_listed_at_once():
    kinds = {"a": Whole(), "b": {"c": Number(), "d": Whole()}, "e": Whole()}
    with pytest.raises(InputError) as raised:
        check_values(kinds, {"a": -1, "b": {"c": float("nan"), "d": 1}, "f": 2})
    said = str(raised.value).split("; ")
    assert [one.partition("=")[0] for one in said[1:3]] == ["a", "b.c"]
    assert said[0].startswith("f=2 is not supported")
    assert said[3].startswith("e is missing")
