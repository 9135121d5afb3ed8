"""`generate` and `stream`: where output ends, what is reported of it, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers
from conftest import slow
from decoding import PROMPTS, decode, drafters, greedy, make_call, mixed, replay
from test_decoder import one_pass

import specjax
from specjax.engine.engine import Engine
from specjax.engine.options import DecodeOptions
from specjax.engine.requests import SamplingParams
from specjax.fields import INT32_MAX
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.methods.ngram import Ngram

PROMPT = [3, 1, 4, 1, 5]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"
LENGTH = 12


def drawn(**fields):
    """Sampled requests that all draw alike, so that rows with one prompt agree."""
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_new_tokens": LENGTH, **fields})


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of one letter a token; the last one ends a sequence."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, eos_ids=(60,))


@pytest.fixture(scope="module")
def speaking(tiny, letters):
    """The tiny target with that tokenizer."""
    return dataclasses.replace(tiny, tokenizer=letters)


@pytest.fixture(scope="module")
def plain(tiny):
    """What plain decoding draws after the prompt, with the noise of `coupled`."""
    return decode(tiny, [PROMPT], verify="coupled", sampling=drawn())


@pytest.fixture(scope="module")
def right(tiny, plain):
    """A drafter that is always right about that."""
    return replay(tiny, dataclasses.replace(plain, token_ids=plain.token_ids * 64), 1.0)


@pytest.fixture(scope="module")
def wavering(tiny, plain):
    """A drafter that is right about that four times in five."""
    return replay(tiny, dataclasses.replace(plain, token_ids=plain.token_ids * 64), 0.8)


def until(tokens, stop):
    """The tokens up to the first that is `stop`, which is part of the output."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@pytest.mark.parametrize("quality", ["right", *slow("wavering")])
def test_a_stop_token_at_every_position_of_a_path(quality, tiny, plain, request):
    (tokens,) = plain.token_ids
    stops = [*tokens, 60]
    got = decode(
        tiny,
        [PROMPT] * len(stops),
        drafter=request.getfixturevalue(quality),
        verify="coupled",
        sampling=[drawn(stop_token_ids=(60, stop)) for stop in stops],
        num_speculative_tokens=4,
        batch_size=LENGTH,
    )
    wanted = [until(tokens, stop) for stop in stops]
    assert got.token_ids == wanted
    assert {len(each) % 5 for each in wanted} == {0, 1, 2, 3, 4}
    for row, stop in enumerate(stops):
        assert got.finish_reasons[row] == ("stop" if stop in tokens else "length")
    assert np.maximum(got.emitted, 0).sum(axis=1).tolist() == [len(each) for each in wanted]


def test_max_new_tokens_is_never_overshot(tiny, plain, right):
    (tokens,) = plain.token_ids
    lengths = range(1, LENGTH + 1)
    got = decode(
        tiny,
        [PROMPT] * LENGTH,
        drafter=right,
        verify="coupled",
        sampling=[drawn(max_new_tokens=length) for length in lengths],
        num_speculative_tokens=4,
    )
    assert got.token_ids == [tokens[:length] for length in lengths]
    assert got.finish_reasons == ["length"] * LENGTH
    # What could not be emitted is not drafted either.
    assert np.maximum(got.drafted, 0).sum(axis=1).tolist() == [
        4 * (length // 5) + max(length % 5 - 1, 0) for length in lengths
    ]


@pytest.mark.parametrize("stop", ["\n", "\n\n", " "])
def test_a_stop_string_may_be_spaces(stop):
    assert SamplingParams(stop=stop).stop == (stop,)


def test_a_stop_token_as_the_last_one_allowed(tiny, plain):
    (tokens,) = plain.token_ids
    index = next(i for i in range(3, LENGTH) if tokens[i] not in tokens[:i])
    request = drawn(max_new_tokens=index + 1, stop_token_ids=(tokens[index],))
    got = decode(tiny, [PROMPT], verify="coupled", sampling=request)
    assert got.token_ids == [tokens[: index + 1]]
    assert got.finish_reasons == ["stop"]


def test_max_length_counts_the_prompt(tiny, plain):
    got = decode(tiny, [PROMPT], verify="coupled", sampling=drawn(), max_length=len(PROMPT) + 3)
    assert got.token_ids == [plain.token_ids[0][:3]]
    assert got.finish_reasons == ["length"]


def test_the_models_own_end_of_sequence(speaking, plain):
    (tokens,) = plain.token_ids
    index = next(i for i in range(2, LENGTH) if tokens[i] not in tokens[:i])
    ends = dataclasses.replace(speaking.tokenizer, eos_ids=(tokens[index],))
    model = dataclasses.replace(speaking, tokenizer=ends)
    got = decode(
        model,
        [PROMPT, PROMPT],
        verify="coupled",
        sampling=[drawn(), drawn(ignore_eos=True)],
    )
    assert got.token_ids == [tokens[: index + 1], tokens]
    assert got.finish_reasons == ["stop", "length"]


def spelled(tokens):
    return "".join(LETTERS[token] for token in tokens)


def stop_cases(text):
    """Stop strings of one to three letters at each index, with the text and tokens they leave."""
    cases = []
    for size in (1, 2, 3):
        for index in range(len(text) - size + 1):
            stop = text[index : index + size]
            first = text.find(stop)
            cases.append(((stop, "never"), text[:first], first + size))
    return cases


@pytest.mark.parametrize("rounds", [3, None, *slow(1)])
def test_stop_strings_that_span_rounds(rounds, speaking, plain, right):
    (tokens,) = plain.token_ids
    cases = stop_cases(spelled(tokens))
    options = dict(
        drafter=right,
        verify="coupled",
        sampling=[drawn(stop=stop, logprobs=True) for stop, _, _ in cases],
        num_speculative_tokens=4,
        batch_size=11,
    )
    prompts = [PROMPT] * len(cases)
    if rounds is None:
        got = specjax.generate(speaking, prompts, **options)
        assert got.texts == [text for _, text, _ in cases]
        assert got.token_ids == [tokens[:count] for _, _, count in cases]
        assert set(got.finish_reasons) == {"stop"}
        # Tokens after the stop string are in no count.
        emitted = np.maximum(got.emitted, 0).sum(axis=1)
        assert emitted.tolist() == [count for _, _, count in cases]
        assert list(map(len, got.logprobs)) == emitted.tolist()
        return
    texts, ids, flags = streamed(speaking, prompts, rounds_per_step=rounds, **options)
    assert texts == [text for _, text, _ in cases]
    assert ids == [tokens[:count] for _, _, count in cases]
    assert list(map(len, flags)) == list(map(len, ids))


def test_stop_strings_with_a_special_token(speaking, plain, right):
    """It is not in the text, and ends the output all the same, alone or with what is around it."""
    (tokens,) = plain.token_ids
    index = next(i for i in range(2, LENGTH - 1) if tokens[i] not in tokens[:i])
    written = spelled(tokens)
    backend = tokenizers.Tokenizer.from_str(speaking.tokenizer.backend.to_str())
    backend.add_special_tokens([written[index]])
    model = dataclasses.replace(speaking, tokenizer=Tokenizer(backend))
    cases = [case for case in stop_cases(written) if written[index] in case[0][0]]
    assert len(cases) > 3
    options = dict(
        drafter=right,
        verify="coupled",
        sampling=[drawn(stop=stop) for stop, _, _ in cases],
        num_speculative_tokens=4,
        batch_size=11,
    )
    texts, ids, _ = streamed(model, [PROMPT] * len(cases), rounds_per_step=3, **options)
    assert texts == [text for _, text, _ in cases]
    assert ids == [tokens[:count] for _, _, count in cases]


def streamed(model, prompts, **options):
    """Texts, token ids and flags of a stream, put together; the last delta alone has a reason."""
    texts = ["" for _ in prompts]
    ids, flags, reasons = ([[] for _ in prompts] for _ in range(3))
    for delta in specjax.stream(model, prompts, **options):
        assert not reasons[delta.id]
        texts[delta.id] += delta.text
        ids[delta.id] += delta.token_ids
        flags[delta.id] += delta.drafted
        if delta.finish_reason is not None:
            reasons[delta.id].append(delta.finish_reason)
    assert all(len(each) == 1 for each in reasons)
    return texts, ids, flags


@pytest.mark.parametrize("rounds", [1, *slow(4)])
def test_a_stream_adds_up_to_the_generation(rounds, speaking, tiny, unrelated, similar):
    options = dict(
        drafter=drafters(tiny, unrelated, similar)["early_exit"],
        sampling=mixed(max_new_tokens=20, logprobs=True),
        num_speculative_tokens=3,
        batch_size=5,
        seed=3,
    )
    whole = specjax.generate(speaking, PROMPTS, **options)
    texts, ids, flags = streamed(speaking, PROMPTS, rounds_per_step=rounds, **options)
    assert ids == whole.token_ids
    assert texts == whole.texts == [spelled(tokens) for tokens in whole.token_ids]
    assert flags == [whole.was_drafted(row) for row in range(len(PROMPTS))]
    assert any(map(any, flags))


def test_what_was_drafted(tiny, plain, right):
    got = decode(
        tiny,
        [PROMPT] * LENGTH,
        drafter=right,
        verify="coupled",
        sampling=drawn(),
        num_speculative_tokens=4,
        every_width=True,
    )
    assert got.was_drafted(0) == [True] * 4 + [False] + [True] * 4 + [False] + [True, False]
    assert got.accepted[0, :3].tolist() == [4, 4, 1]
    assert got.width[0, :3].tolist() == [5, 5, 3]
    assert (got.emitted[0, 3:] == -1).all()
    assert not any(plain.was_drafted(0))


@pytest.mark.parametrize("rule", ["rejection", *slow("coupled")])
def test_logprobs_are_those_of_a_full_forward(rule, tiny, unrelated, similar):
    got = decode(
        tiny,
        PROMPTS,
        drafter=drafters(tiny, unrelated, similar)["early_exit"],
        verify=rule,
        sampling=[
            dataclasses.replace(request, logprobs=row != 2)
            for row, request in enumerate(mixed(max_new_tokens=16))
        ],
        num_speculative_tokens=3,
        batch_size=5,
    )
    sequences = np.zeros((8, 64), np.int32)
    for row, prompt in enumerate(PROMPTS):
        sequences[row, : len(prompt) + 16] = [*prompt, *got.token_ids[row]]
    logp = np.asarray(jax.nn.log_softmax(one_pass(tiny, sequences).logits, axis=-1))
    for row, prompt in enumerate(PROMPTS):
        if row == 2:
            assert got.logprobs[row] is None
            continue
        indices = len(prompt) - 1 + np.arange(16)
        wanted = logp[row, indices, got.token_ids[row]]
        np.testing.assert_allclose(got.logprobs[row], wanted, atol=2e-5)


@pytest.mark.parametrize("rule", ["rejection", *slow("coupled")])
def test_seeds_belong_to_requests(rule, tiny, unrelated, similar):
    """With its own seed a request's output does not depend on its index; without, it does."""
    drafter = drafters(tiny, unrelated, similar)["early_exit"]
    options = dict(drafter=drafter, verify=rule, num_speculative_tokens=3, batch_size=5)
    seeds = [None, 5, None, 5, 6]
    # The same kinds of requests as above, so that programs are shared.
    kinds = dict(top_k=40, top_p=0.99, min_p=0.001, logprobs=True)
    requests = [drawn(seed=seed, **kinds) for seed in seeds]
    requests.append(greedy(max_new_tokens=LENGTH))
    first = decode(tiny, [PROMPT] * 6, sampling=requests, seed=0, **options)
    assert first.token_ids[1] == first.token_ids[3]
    others = [first.token_ids[row] for row in (0, 1, 2, 4)]
    assert all(a != b for i, a in enumerate(others) for b in others[:i])
    again = decode(tiny, [PROMPT] * 6, sampling=requests, seed=1, **options)
    same = [a == b for a, b in zip(first.token_ids, again.token_ids, strict=True)]
    assert same == [False, True, False, True, True, True]


def test_the_next_step_is_under_way_unless_the_host_decides(speaking):
    """Stop strings decide which rows continue: then each step is read before the next."""
    for stop, ahead in (((), 1), (("never",), 0)):
        sampling = greedy(max_new_tokens=6, stop=stop, ignore_eos=True)
        prompts = [PROMPT, PROMPT]
        call = make_call(speaking, prompts, sampling=sampling, rounds_per_step=1)
        engine = Engine.of(call.plan)
        compiled, begun = engine.compile(), []

        def step(*arguments, compiled=compiled, begun=begun):
            begun.append(arguments[1])
            return compiled.step(*arguments)

        engine._rows._programs = compiled._replace(step=step)
        for prompt in range(2):
            engine.submit([call.requests[prompt]])
        for number in range(1, 7):
            deltas = engine.step()
            assert len(begun) == number + ahead
            # The states that were handed on are gone, their buffers being the later ones'.
            assert all(state.cache.k.is_deleted() for state in begun)
            assert [len(delta.token_ids) for delta in deltas] == [1, 1]
        assert engine.num_unfinished == 0


def test_progress_is_called_at_every_step(tiny):
    seen = []
    specjax.generate(
        tiny, PROMPTS[:3], batch_size=2, sampling=greedy(max_new_tokens=20), progress=seen.append
    )
    assert [one.total for one in seen] == [3] * len(seen)
    finished, tokens = zip(*((one.finished, one.new_tokens) for one in seen), strict=True)
    assert (finished[0], finished[-1]) == (0, 3)
    assert (tokens[0], tokens[-1]) == (2 * 16, 3 * 20)
    assert list(tokens) == sorted(tokens)


def test_a_single_text_is_one_prompt(speaking):
    got = specjax.generate(speaking, "hello", sampling={"max_new_tokens": 3})
    assert len(got.texts) == 1
    assert got.new_tokens == 3
    assert got.texts == [spelled(got.token_ids[0])]


@pytest.mark.slow  # what others show of small models
@pytest.mark.usefixtures("fast_programs")
def test_real_text_with_a_stop_string(smollm2):
    """On the default model: the n-gram drafter changes nothing, and a stop string truncates."""
    prompt = "one two three four one two three four one two"
    requests = {"max_new_tokens": 12}
    plain = specjax.generate(smollm2, prompt, sampling=requests)
    drafter = specjax.make_drafter("ngram", smollm2)
    copied = specjax.generate(smollm2, prompt, drafter=drafter, sampling=requests)
    assert copied.texts == plain.texts
    assert copied.accepted.max() > 0
    text = plain.texts[0]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = specjax.generate(
        smollm2, prompt, drafter=drafter, sampling={**requests, "stop": (stop,)}
    )
    assert stopped.texts == [text[: text.find(stop)]]
    assert stopped.finish_reasons == ["stop"]


@pytest.mark.parametrize("prompt", [[3, 4, 5], np.array([3, 4, 5]), np.array([[3, 4, 5]])])
def test_one_prompt_may_be_given_alone(prompt, tiny):
    wanted = specjax.generate(tiny, [[3, 4, 5]], max_new_tokens=4)
    assert specjax.generate(tiny, prompt, max_new_tokens=4).token_ids == wanted.token_ids


def test_prompts_are_read_at_once_unless_told_otherwise():
    assert DecodeOptions().prefill_budget == 512
    assert DecodeOptions().offline().prefill_budget == INT32_MAX
    assert DecodeOptions(max_prefill_tokens=64).offline().prefill_budget == 64


def test_fields_of_sampling_are_arguments(tiny):
    """They hold for every prompt, whatever else `sampling` says."""
    prompts = [[3, 4], [5]]
    stops = {"stop_token_ids": [9]}
    wanted = specjax.generate(tiny, prompts, sampling={**stops, "max_new_tokens": 7})
    for sampled in (stops, [SamplingParams(stop_token_ids=(9,), max_new_tokens=3), stops]):
        result = specjax.generate(tiny, prompts, sampling=sampled, max_new_tokens=7)
        assert result.token_ids == wanted.token_ids
    assert specjax.generate(tiny, [3, 4], max_new_tokens=5, seed=3, temperature=1.0).new_tokens == 5


def test_seconds_of_compiling_are_told_once(tiny, caplog):
    """By the call that compiled; requests' times are without them."""
    options = dict(batch_size=2, num_speculative_tokens=3, max_new_tokens=4)
    with caplog.at_level("INFO", "specjax"):
        seconds = specjax.compile(tiny, Ngram(prompt_lookup_max=5), **options)
        engine = Engine(tiny, batch_size=2, max_length=64, max_prefill_tokens=64)
        engine.add([1, 2, 3])
        (output,) = [delta.output for delta in engine if delta.output is not None]
    compiled = [record.args for record in caplog.records if "compiling" in record.msg]
    wanted = [
        "ngram with drafts of 3 tokens, verify=rejection, greedy, for 2 rows of up to 256 tokens",
        "plain decoding, verify=rejection, sampled, for 2 rows of up to 256 tokens",
    ]
    assert [text.split(", prompt")[0] for (text,) in compiled] == wanted
    result = specjax.generate(tiny, [[1, 2, 3], [4]], drafter=Ngram(prompt_lookup_max=5), **options)
    assert 0 < 20 * result.compile_s < seconds
    assert output.times.total_s < engine.statistics.compile_s
