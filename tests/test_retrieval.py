"""Copying from a corpus and from finished requests: matches, drafts, and what an engine keeps."""

import dataclasses
import functools
from collections import Counter

import jax
import numpy as np
import pytest
from conftest import slow
from decoding import (
    PROMPTS,
    Scripted,
    changed,
    coupled,
    decode,
    greedy,
    make_call,
    mixed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafters import context_of, silence
from test_sharding import mesh_of
from tiny_models import bigrams, small_model

import specjax
from specjax.drafters import LoadedDrafter, TreeOptions, take_turns
from specjax.engine.generate import decode_requests
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.loading.load import place_model
from specjax.methods.corpus.drafter import Corpus
from specjax.methods.corpus.sorted_text import LONGEST_MATCH, sorted_text, with_separator
from specjax.testing.drafter_check import chi_square, output_distribution

TEXT_SIZE, LONGEST_ROW, END = 192, 24, 10**9
SHORT = dict(prompt_lookup_min=1, suffix_decoding_max_spec_factor=2.0)


def text_of(documents, size=TEXT_SIZE, dtype=np.uint16):
    return sorted_text([with_separator(document, dtype) for document in documents], size, dtype)


def of_documents(documents, size=TEXT_SIZE, **options):
    return LoadedDrafter(Corpus(**{**SHORT, **options}), (text_of(documents, size),))


def matched_by_hand(documents, row, most):
    """The length of the longest match, and the texts after its occurrences in their order."""
    found = {}
    for number, document in enumerate(documents):
        for at in range(len(document) - 1):
            before, length = document[at::-1], 0
            while length < min(most, len(row), at + 1) and before[length] == row[-1 - length]:
                length += 1
            text = [token for each in documents[:number] for token in [*each, END]]
            key = [*before, *[END], *text[-2::-1], *[END] * LONGEST_MATCH][:LONGEST_MATCH]
            found.setdefault(length, []).append((key, number, at, document[at + 1 :]))
    longest = max(found, default=0)
    return longest, [after for *_, after in sorted(found.get(longest, []))]


def drafted_by_hand(documents, row, drafter, limit):
    """The most frequent continuation of up to 32 occurrences, evenly spread."""
    longest, texts = matched_by_hand(documents, row, drafter.prompt_lookup_max)
    if longest < max(drafter.prompt_lookup_min, 1):
        return []
    counted = min(len(texts), 32)
    texts = [texts[number * len(texts) // counted] for number in range(counted)]
    copies = [(after + [END] * limit)[:limit] for after in texts]
    allowed = int(drafter.suffix_decoding_max_spec_factor * longest + 1e-4)
    draft, probability = [], 1.0
    for step in range(min(limit, allowed)):
        token, count = Counter(copy[step] for copy in copies).most_common(1)[0]
        probability *= count / len(copies)
        if token == END or probability < drafter.suffix_decoding_min_token_prob:
            break
        draft.append(token)
        copies = [copy for copy in copies if copy[step] == token]
    return draft


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, params, context):
    return drafter.propose(params, (), context, silence)[0]


def drafts_of(loaded, rows, limit=8):
    """What is drafted after each row; a last row, of no interest, fixes the width."""
    context = context_of([*rows, [0] * LONGEST_ROW], [limit] * (len(rows) + 1))
    draft = propose(loaded.drafter, loaded.params, context)
    assert draft.logq is None
    counts = np.asarray(draft.valid.sum(axis=1))
    return [np.asarray(draft.tokens[row, : counts[row]]).tolist() for row in range(len(rows))]


def tokens(most):
    return st.lists(st.integers(0, 2), max_size=most)


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(tokens(40), max_size=4),
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=3, max_size=3),
    options=st.sampled_from(
        [
            {},
            dict(prompt_lookup_min=4),
            dict(prompt_lookup_max=3, suffix_decoding_max_spec_factor=3.0),
            dict(suffix_decoding_min_token_prob=0.0, suffix_decoding_max_spec_factor=9.0),
        ]
    ),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_matches_and_drafts_as_by_hand(documents, rows, options, dtype):
    drafter = Corpus(**{**SHORT, **options})
    loaded = LoadedDrafter(drafter, (text_of(documents, dtype=dtype),))
    for row, drafted in zip(rows, drafts_of(loaded, rows), strict=True):
        assert drafted == drafted_by_hand(documents, row, drafter, 8)


def test_no_draft_crosses_a_document():
    documents = [[1, 2, 3], [4, 5, 6, 7]]
    rows = [[1, 2], [2, 3], [3, 4], [9, 4, 5], [7]]
    assert drafts_of(of_documents(documents), rows) == [[3], [], [5, 6], [6, 7], []]


def test_the_longer_match_counts_and_outputs_before_a_corpus():
    loaded = of_documents([[1, 2, 3, 4], [8, 2, 5]])
    outputs = text_of([[7, 2, 6], [1, 2, 9]], size=64)
    both = LoadedDrafter(loaded.drafter, (outputs, *loaded.params))
    # 1 2 is in both; 7 2 and 8 2 are in one of them.
    rows = [[1, 2], [7, 2], [8, 2], [3]]
    assert drafts_of(both, rows, limit=1) == [[9], [6], [5], [4]]


def test_a_tree_of_the_most_frequent_paths():
    tree = TreeOptions(kind="dynamic", topk=2, depth=2, num_nodes=3)
    documents = [[1, 2, 3, 5], [1, 2, 4], [1, 2, 3, 6], [1, 2, 3, 5]]
    loaded = of_documents(documents, tree=tree)
    draft = propose(loaded.drafter, loaded.params, context_of([[7, 1, 2], [2, 4]], [2, 2]))
    assert draft.valid.tolist() == [[True] * 3, [False] * 3]
    assert draft.tokens[0].tolist() == [3, 5, 4]
    assert draft.topology.row_parents[0].tolist() == [0, 1, 0]


def reads_ahead(real, params, state, context, noise):
    """The match may include the very token that is drafted."""
    return real(params, state, context.replace(length=context.length + 1), noise)


def test_a_match_that_reads_what_it_predicts_is_found():
    """What follows a row in its buffer is no part of it."""
    documents, row = [[1, 2, 59, 3], [1, 2, 4]], [1, 2]
    loaded = of_documents(documents)
    by_hand = drafted_by_hand(documents, row, loaded.drafter, 8)
    assert drafts_of(loaded, [row]) == [by_hand]
    broken = changed(loaded, propose=reads_ahead)
    assert drafts_of(broken, [row]) != [by_hand]


@pytest.fixture(scope="module")
def target():
    return bigrams(5)


@pytest.fixture(scope="module")
def plain(tiny):
    return coupled(tiny, batch_size=1)


@pytest.fixture(scope="module")
def loaded(plain):
    """A corpus of the target's own outputs, of which every third token is another one."""
    documents = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, plain.token_ids, strict=True)]
    for document in documents:
        document[::7] = [60] * len(document[::7])
    return of_documents(documents, size=512)


@pytest.fixture(scope="module")
def together(tiny, loaded):
    """Eight rows of one batch."""
    return coupled(tiny, loaded)


@pytest.mark.slow
def test_asleep_and_woken(tiny, loaded, plain):
    """Without a state there is nothing to observe: the draft after a sleep is that of its row."""
    controller = Scripted((((3,), (0.0,), 1), ((0,), (0.0,), 2), ((1,), (0.0,), 1)))
    options = dict(verify="coupled", sampling=mixed(max_new_tokens=24), batch_size=8)
    call = make_call(tiny, PROMPTS, drafter=loaded, **options)
    got = decode_requests(*call.controlled_by(controller))
    assert got.token_ids == plain.token_ids
    assert got.accepted.max() > 1


def test_on_a_mesh(tiny, loaded, together):
    """Rows on two devices; the texts are whole on each."""
    got = coupled(place_model(tiny, mesh_of(2, 1)), loaded)
    assert got.token_ids == together.token_ids
    np.testing.assert_array_equal(got.drafted, together.drafted)


CACHED = dict(suffix_decoding_max_cached_requests=3, suffix_decoding_max_cached_tokens=64)


def cached_documents(drafter):
    """The documents in the parameters of a drafter that keeps outputs, the latest one first."""
    cached = jax.tree.map(np.asarray, drafter.params[0][0])
    ends = np.flatnonzero(cached.tokens == np.iinfo(cached.tokens.dtype).max)
    found = [part[part < 10**4].tolist() for part in np.split(cached.tokens, ends)]
    return [document for document in found if document]


def answer(engine, prompt, **options):
    engine.add(prompt, greedy(max_new_tokens=12, **options))
    (output,) = [delta.output for delta in engine if delta.output is not None]
    return output


@pytest.mark.parametrize("name", ["corpus", *slow("suffix|corpus", "corpus+early_exit")])
def test_finished_requests_are_copied_from(name, tiny):
    """A repeated request drafts its earlier output, in the programs that were there."""
    options = {"exit_layer": 2} if "early_exit" in name else {}
    made = specjax.make_drafter(name, tiny, num_speculative_tokens=4, **CACHED, **options)
    with specjax.Engine(tiny, drafter=made, batch_size=1, max_length=64) as engine:
        first = answer(engine, PROMPTS[1])
        programs = engine.compile()
        again = answer(engine, PROMPTS[1])
        assert engine.compile() is programs
    assert again.token_ids == first.token_ids
    assert (
        again.token_ids
        == decode(tiny, [PROMPTS[1]], sampling=greedy(max_new_tokens=12)).token_ids[0]
    )
    assert again.rounds.accepted.sum() > first.rounds.accepted.sum()
    assert len(again.rounds.emitted) <= 4


def test_the_latest_outputs_are_kept(tiny):
    """First in, first out: three requests, and of the oldest what there is room for."""
    made = specjax.make_drafter("corpus", tiny, num_speculative_tokens=2, **CACHED)
    with specjax.Engine(tiny, drafter=made, batch_size=2, max_length=64) as engine:
        outputs = []
        for prompt in PROMPTS[:5]:
            outputs.append([*prompt[-LONGEST_MATCH:], *answer(engine, prompt).token_ids])
            engine.add(PROMPTS[5], greedy(max_new_tokens=1))
            engine.abort(max(one.id for one in engine._scheduler))
            list(engine)
        answer(engine, PROMPTS[6])
        kept = cached_documents(engine.plan.drafter)
    # The last one ended after the last step; the one before it began none.
    assert kept[0] == outputs[4]
    assert kept[1] == outputs[3]
    room = 64 - len(kept[0]) - len(kept[1]) - 2
    assert kept[2] == [*outputs[2], None][-room:-1]
    assert len(kept) == 3


def test_outputs_do_not_change_what_is_compiled_or_the_callers_drafter(tiny):
    made = specjax.make_drafter("corpus", tiny, **CACHED)
    (empty,) = made.params
    after = made.drafter.with_outputs(made.params, [([1, 2], [3, 4])])
    assert int(after[0].count) == 3
    assert int(empty.count) == 0
    assert jax.tree.map(np.shape, after) == jax.tree.map(np.shape, made.params)
    fixed = dataclasses.replace(made.drafter, suffix_decoding_max_cached_requests=0)
    assert fixed.with_outputs(made.params, [([1], [2, 3])]) is made.params


@pytest.mark.parametrize("name", ["corpus", "suffix|corpus", "corpus+early_exit"])
def test_rounds_draw_with_other_noise_once_outputs_are_cached(name, tiny):
    """Since an output with the same seed may be among them."""
    options = {"exit_layer": 2} if "early_exit" in name else {}
    drafter, params = take_turns(specjax.make_drafter(name, tiny, **CACHED, **options))

    digests = [np.array(drafter.text_digests(params))]
    assert digests[0].shape == (1, 2)
    for outputs in ([([1, 2], [3, 4])], [([1, 2], [3, 5])], [([1, 2], [3, 4])]):
        pairs = zip(drafter.parts, params, strict=True)
        params = tuple(part.with_outputs(each, outputs) for part, each in pairs)
        digests.append(np.array(drafter.text_digests(params)))
    # Other noise even where the text is that of an earlier time.
    assert len(np.unique(np.concatenate(digests), axis=0)) == len(digests)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_seed_may_be_used_again_where_its_output_is_the_draft(rule):
    """Two requests with the same prompt and seed are independent, seed by seed.

    With so few tokens an output is often the text that is cached already.
    """
    vocab, pairs, tokens = 3, 1_000, 2
    target = small_model(vocab)
    made = specjax.make_drafter(
        "corpus", target, num_speculative_tokens=2, suffix_decoding_max_cached_requests=1
    )
    options = dict(verify=rule, batch_size=1, max_length=16, num_speculative_tokens="fixed")
    found = []
    with specjax.Engine(target, drafter=made, **options) as engine:
        for seed in range(pairs):
            request = SamplingParams(
                temperature=1.0, seed=seed, max_new_tokens=tokens, ignore_eos=True
            )
            for _ in range(2):
                engine.add([1, 2, 0], request)
                found += [delta.output.token_ids for delta in engine if delta.output is not None]
    codes = np.array(found) @ [vocab, 1]
    one = output_distribution(target.architecture, target.params, (1, 2, 0), request, tokens)
    counted = np.bincount(codes[::2] * vocab**2 + codes[1::2], minlength=vocab**4)
    test = chi_square(counted, np.outer(one, one).ravel())
    assert test.statistic < test.threshold


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(prompt_lookup_max=17), "drafter.prompt_lookup_max=17: use a whole number from 1 to"),
        (
            dict(prompt_lookup_max=2, prompt_lookup_min=3),
            "drafter.prompt_lookup_max=2: must be at least prompt_lookup_min=3",
        ),
        (
            dict(suffix_decoding_max_cached_tokens=1),
            "drafter.suffix_decoding_max_cached_tokens=1: use a whole number from 64 to",
        ),
        ({}, "drafter.corpus is missing: make an index by python -m specjax.corpus_index"),
    ],
)
def test_bad_input(options, said, tiny):
    with pytest.raises(InputError, match=said):
        specjax.make_drafter("corpus", tiny, **options)
