"""Outputs that follow a grammar: with and without drafts, beside others, in pages, over HTTP."""

import dataclasses
import json
import re

import jax
import jsonschema
import numpy as np
import openai
import pytest
import tokenizers
from bad_input import refused
from conftest import slow, tiny_config
from decoding import decode, draft_model, make_call
from json_schemas import SCHEMAS
from test_engine import own_results
from test_paged_engine import paged
from test_sharding import mesh_of

from specjax import SamplingParams
from specjax.apps.serve.engine_thread import warm_up
from specjax.apps.serve.serve_config import ServeConfig
from specjax.apps.serve.server import served
from specjax.drafters import TreeOptions, merge_drafters, take_turns
from specjax.engine import grammars
from specjax.engine.engine import Engine
from specjax.engine.grammars import table_of
from specjax.loading.load import place_model, random_model
from specjax.loading.tokenizers.detokenizer import _BYTES
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.methods.forced import Forced
from specjax.methods.ngram import Ngram
from specjax.processors import Grammar

CHARACTERS = {byte: character for character, byte in _BYTES.items()}
MERGES = ('"n', "am", "am e", '"n ame', '": ', "tr", "tr ue", "ab", "12", ', "')
END, THOUGHT = "<end>", "</think>"


def bytes_tokenizer():
    """A byte-level vocabulary with some longer tokens, an end, and a special token."""
    vocabulary = {CHARACTERS[byte]: byte for byte in range(256)}
    merges = []
    for merge in MERGES:
        one, *more = merge.split(" ") if len(merge) > 3 else (merge[:1], merge[1:])
        pair = one, "".join(more)
        written = tuple("".join(CHARACTERS[b] for b in part.encode()) for part in pair)
        for part in written:
            vocabulary.setdefault(part, len(vocabulary))
        merges.append(written)
        vocabulary.setdefault("".join(written), len(vocabulary))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END, THOUGHT])
    return Tokenizer(backend, eos_ids=(backend.token_to_id(END),))


@pytest.fixture(scope="module")
def speaker():
    """A random model with that vocabulary."""
    tokenizer = bytes_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_positions=512)
    return random_model(config, 3, tokenizer, dtype="float32")


@pytest.fixture(scope="module")
def near(speaker):
    """The model with noise on its weights."""
    rng = np.random.default_rng(0)

    def noisy(leaf):
        return leaf * (1 + 0.05 * rng.standard_normal(leaf.shape, np.float32))

    return dataclasses.replace(speaker, params=jax.tree.map(noisy, speaker.params))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "true": {"type": "boolean"},
    },
    "required": ["name", "age", "true"],
}
ASKED = (
    {"regex": "[a-f]{2,9}(12)*"},
    {"json_schema": PERSON},
    {"choice": ["yes", "no", "nothing else"]},
    {},
    {"regex": "é+|€{3}", "grammar_after": THOUGHT},
    {"json_schema": PERSON, "frequency_penalty": 0.5, "logit_bias": {101: 3.0}},
    {"choice": ["abc", "abcabc"], "banned_token_ids": [98]},
    {"regex": "(ab|c){3,4}", "min_tokens": 4},
)
"""What the rows of one batch ask for; the merge "ab" is left where the letter is banned."""
PROMPTS = ["Say it.", "a", "{}", "abc abc abc", "12", "Again, again, again", "é", "name"]


def requests(temperature=None, new_tokens=40):
    """The sampling parameters of the rows, every other one sampled unless they all have one."""
    return [
        SamplingParams(
            max_new_tokens=new_tokens,
            temperature=0.9 * (row % 2) if temperature is None else temperature,
            **fields,
        )
        for row, fields in enumerate(ASKED)
    ]


def follows(fields, text):
    """Whether a text is what a row asked for."""
    if after := fields.get("grammar_after"):
        text = text.partition(after)[2]
    if "regex" in fields:
        return re.fullmatch(fields["regex"], text) is not None
    if "choice" in fields:
        return text in fields["choice"]
    if "json_schema" in fields:
        jsonschema.validate(json.loads(text), fields["json_schema"])
    return True


def all_text(model, ids):
    """The text of an output without its end, special tokens included."""
    ended = ids[:-1] if ids[-1:] == [model.tokenizer.eos_ids[0]] else ids
    return model.tokenizer.decode(ended, skip_special_tokens=False)


TREE = TreeOptions(kind="static", choices=((0,), (1,), (0, 0), (1, 0)))
DRAFTERS = {
    "forced": lambda model, near: Forced(),
    "chain": lambda model, near: draft_model(near),
    "tree": lambda model, near: draft_model(near, tree=TREE),
    "dynamic": lambda model, near: draft_model(
        near, tree=TreeOptions(kind="dynamic", topk=2, depth=3, num_nodes=5)
    ),
    "merged": lambda model, near: merge_drafters(Forced(), draft_model(near)),
    "turns": lambda model, near: take_turns(Forced(), Ngram(prompt_lookup_min=1)),
}


# Forced drafts alone are in the matrix.
@pytest.mark.parametrize("name", ["merged", *slow("forced", "chain", "tree", "dynamic", "turns")])
def test_outputs_follow_their_grammars_with_the_tokens_of_plain_decoding(name, speaker, near):
    options = dict(sampling=requests(), batch_size=4, verify="coupled")
    plain = decode(speaker, PROMPTS, **options)
    found = decode(speaker, PROMPTS, drafter=DRAFTERS[name](speaker, near), **options)
    assert found.token_ids == plain.token_ids
    assert found.finish_reasons == plain.finish_reasons
    for row, fields in enumerate(ASKED):
        if fields:
            assert found.finish_reasons[row] == "stop"
            assert follows(fields, all_text(speaker, found.token_ids[row])), found.texts[row]
    assert (np.asarray(found.accepted) > 0).any()


@pytest.mark.parametrize("rule", ["rejection", *slow("block", "typical")])
@pytest.mark.parametrize("name", ["merged", *slow("tree", "dynamic")])
def test_sampled_outputs_follow_their_grammars(rule, name, speaker, near):
    options = dict(sampling=requests(1.0), batch_size=8, verify=rule)
    found = decode(speaker, PROMPTS, drafter=DRAFTERS[name](speaker, near), **options)
    for row, fields in enumerate(ASKED):
        assert follows(fields, all_text(speaker, found.token_ids[row])), found.texts[row]


def test_a_row_without_a_grammar_has_the_tokens_that_it_has_alone(speaker):
    """Also where its neighbours have large tables."""
    row, sampling = ASKED.index({}), requests(0.0)
    drafter = Ngram(prompt_lookup_min=1)
    found = decode(speaker, PROMPTS, sampling=sampling, batch_size=8, drafter=drafter)
    alone = decode(speaker, [PROMPTS[row]], sampling=[sampling[row]])
    assert found.token_ids[row] == alone.token_ids[0]


def test_outputs_are_completed_within_their_limit(speaker):
    """Whatever the limit, down to the shortest output; below that it is refused."""
    table = table_of(speaker, SamplingParams(json_schema=PERSON))
    least = int(table.least[0])
    for limit in (least, least + 1, least + 5):
        sampling = SamplingParams(json_schema=PERSON, max_new_tokens=limit, temperature=2.0)
        found = decode(speaker, PROMPTS, sampling=[sampling] * len(PROMPTS), drafter=Forced())
        assert set(found.finish_reasons) == {"stop"}
        assert all(follows({"json_schema": PERSON}, text) for text in found.texts)
        assert max(map(len, found.token_ids)) <= limit
    short = SamplingParams(json_schema=PERSON, max_new_tokens=least - 1)
    message = f"max_new_tokens={least - 1}: the shortest output of sampling.json_schema has {least}"
    refused(lambda: decode(speaker, ["a"], sampling=[short]), message)


def outputs_of(engine):
    return {one.id: one.output for one in engine if one.output is not None}


def test_larger_tables_join_rows_that_decode(speaker):
    """The program is made anew for a larger table, and rows continue as if alone."""
    options = dict(batch_size=4, verify="coupled", drafter=Forced(), rounds_per_step=2)
    small = {"regex": "[ab]{20,30}", "temperature": 1.0, "seed": 3, "max_new_tokens": 32}
    large = {"regex": "(ab|cd){40}e", "temperature": 1.0, "seed": 4, "max_new_tokens": 90}
    alone = {}
    for name, params in {"small": small, "large": large}.items():
        engine = Engine(speaker, **options)
        engine.add("a", params, id=name)
        alone |= outputs_of(engine)
    engine = Engine(speaker, **options)
    engine.add("a", small, id="small")
    for _ in range(3):
        assert not any(delta.output for delta in engine.step())
    before = engine.plan.loop.processors
    engine.add("a", large, id="large")
    assert before[0].num_states < engine.plan.loop.processors[0].num_states
    found = outputs_of(engine)
    for name in alone:
        assert found[name].token_ids == alone[name].token_ids
        assert found[name].finish_reason == "stop"


@pytest.mark.parametrize("narrows", [False, True])
def test_a_grammar_joins_a_row_without_one(narrows, speaker):
    """Whose limit is its own, after more tokens than a request has by default; also where only one
    of several rows decodes in a smaller program."""
    options = dict(batch_size=4, drafter=Ngram(prompt_lookup_min=1), rounds_per_step=4)
    plain = SamplingParams(max_new_tokens=170)
    engine = Engine(speaker, **options)
    engine.add("a", plain, id="plain")
    alone = outputs_of(engine)["plain"]
    engine = Engine(speaker, **options)
    engine.add("a", plain, id="plain")
    if narrows:
        few = Engine(speaker, **options | {"batch_size": 1})
        few.compile()  # so that it pays off
    found = {}
    while sum(len(row.token_ids) for row in engine._scheduler) < 130:
        engine.step()
    assert narrows == (engine._rows._few is not None)
    engine.add("a", {"regex": "a{3}b", "max_new_tokens": 9}, id="grammar")
    found = outputs_of(engine)
    assert found["plain"].token_ids == alone.token_ids
    assert found["plain"].finish_reason == "length"
    assert found["grammar"].text == "aaab"


def test_states_that_are_not_carried_over_are_found(speaker, monkeypatch):
    """Broken: rows start their grammar anew when a larger table comes."""
    monkeypatch.setattr(
        "specjax.engine.device_rows.carried_states", lambda plan, before, states, fresh: fresh
    )
    with pytest.raises(AssertionError):
        test_larger_tables_join_rows_that_decode(speaker)


def test_rows_that_wait_are_put_back_and_resume(speaker):
    """In pages, as each row alone: the state of a grammar follows from a row's tokens."""
    sampling = [
        SamplingParams(
            **[{"regex": "[a-f]{34,38}"}, {"json_schema": PERSON}, {}][row % 3],
            temperature=0.9,
            max_new_tokens=44,
        )
        for row in range(6)
    ]
    prompts = [[*range(60 + row, 80 + row)] for row in range(6)]
    options = dict(drafter=Forced(), verify="coupled", batch_size=3)
    call = make_call(speaker, prompts, sampling=sampling, **options)
    alone = {}
    for number, request in enumerate(call.requests):
        engine = Engine.of(call.plan)
        engine.submit([request])
        alone[number] = own_results(outputs_of(engine)[number])
    engine = Engine.of(paged(call, 13, False).plan)
    engine.submit(call.requests)
    found = {number: own_results(output) for number, output in outputs_of(engine).items()}
    assert engine.statistics.put_back
    assert found == alone


def test_a_complete_output_ends_without_a_token_that_ends_it(speaker):
    found = decode(
        speaker,
        ["a", "b"],
        sampling=[
            SamplingParams(regex="ab?c", ignore_eos=True),
            SamplingParams(regex="ab?c", min_tokens=9),
        ],
        drafter=Forced(),
    )
    assert found.finish_reasons == ["stop", "grammar"]
    assert all(re.fullmatch("ab?c", text) for text in found.texts)


def test_log_probabilities_are_those_of_the_target(speaker):
    sampling = SamplingParams(choice=["yes", "no"], logprobs=True)
    (got,) = decode(speaker, ["a"], sampling=[sampling], drafter=Forced()).logprobs
    assert max(got) < -0.1  # the grammar has one token at some of these places


def test_programs_are_made_for_sizes_of_tables(speaker):
    def plan(*patterns):
        sampling = [SamplingParams(regex=pattern) for pattern in patterns]
        return make_call(speaker, ["a"] * len(patterns), sampling=sampling).plan.loop.processors

    assert plan("a{3}") == plan("b{4}c")
    (one,) = plan("a{3}", "(a|b|c|d|e){90}")
    assert isinstance(one, Grammar)
    assert one.num_states >= 90
    assert plan("a{3}")[0].num_states < one.num_states


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": "(a"}, r"sampling.regex='\(a': not a regular expression"),
        ({"regex": "[^\\s\\S]"}, "no text matches it"),
        ({"regex": "a", "choice": ["a"]}, "sampling.choice: sampling.regex says already"),
        ({"choice": []}, r"sampling.choice=\[\]: no output is allowed"),
        ({"grammar_after": "x"}, "sampling.grammar_after='x': nothing begins after it"),
        ({"json_schema": {"type": "nosuch"}}, "json_schema"),
        ({"json_schema": {"type": "integer", "multipleOf": 7.5}}, "multipleOf"),
        ({"json_schema": "{"}, "sampling.json_schema is not JSON"),
        ({"regex": "a{9000}", "max_new_tokens": 9}, "states, more than 8192; simplify"),
        ({"regex": "a{9}", "max_new_tokens": 3}, "the shortest output of sampling.regex has 10"),
        ({"regex": "c", "banned_token_ids": [99]}, "no tokens of the vocabulary make such"),
        ({"regex": "ab", "forced_token_ids": [99]}, "no output of sampling.regex begins with them"),
        (
            {"regex": "abab", "forced_token_ids": [97], "max_new_tokens": 3},
            "the shortest output of sampling.regex has 4 tokens",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(fields, says, speaker):
    refused(lambda: decode(speaker, ["a"], sampling=[SamplingParams(**fields)]), says)


def test_a_prompt_that_leaves_too_little_room_is_refused(speaker):
    sampling = SamplingParams(regex="a{30}", max_new_tokens=40)
    options = dict(sampling=[sampling], max_length=64)
    assert decode(speaker, [[97] * 20], **options).finish_reasons == ["stop"]
    refused(
        lambda: decode(speaker, [[97] * 40], **options),
        "has 40 tokens, which leaves no room for the 31 tokens of the shortest output in "
        "max_length=64: shorten it or raise max_length",
    )


def test_stop_tokens_with_a_text_are_no_part_of_an_output(speaker):
    """Which would end with them, and have their text too often, or be cut."""
    close = ord("}")
    sampling = SamplingParams(regex=r"\{a*\}", stop_token_ids=[97], max_new_tokens=20)
    assert decode(speaker, ["a"], sampling=[sampling]).texts == ["{}"]
    sampling = dataclasses.replace(sampling, stop_token_ids=[close])
    says = "no tokens of the vocabulary make such a text"
    refused(lambda: decode(speaker, ["a"], sampling=[sampling]), says)


def test_special_tokens_beyond_the_embedding_are_left_out(speaker):
    """As in Gemma 3, whose tokenizer has one for images."""
    size = speaker.config.vocab_size
    backend = tokenizers.Tokenizer.from_str(speaker.tokenizer.backend.to_str())
    backend.add_special_tokens(["<image>"])
    tokenizer = Tokenizer(backend, eos_ids=speaker.tokenizer.eos_ids).limited(size, "rows")
    model = dataclasses.replace(speaker, tokenizer=tokenizer)
    assert decode(model, ["a"], sampling=[SamplingParams(regex="b{3}")]).texts == ["bbb"]


def test_tables_are_made_once_while_they_are_used(speaker, monkeypatch):
    made = []
    real = grammars._table
    monkeypatch.setattr(grammars, "_table", lambda *arguments: made.append(0) or real(*arguments))
    monkeypatch.setattr(grammars, "_KEPT", 1)
    engine = Engine(speaker, batch_size=2, drafter=Forced())
    for number in range(6):
        engine.add("a", {"regex": f"xyz{number}"}, id=number)
    assert {output.text for output in outputs_of(engine).values()} == {f"xyz{n}" for n in range(6)}
    assert len(made) == 6


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_larger_tables_join_rows_on_a_mesh(speaker):
    placed = place_model(speaker, mesh_of(2, 1))
    test_larger_tables_join_rows_that_decode(placed)


def test_a_model_without_a_tokenizer_follows_no_grammar(tiny):
    refused(
        lambda: decode(tiny, [[1]], sampling=[SamplingParams(regex="a")]),
        "sampling.regex: .* has no tokenizer; leave it out",
    )


SOME = [SCHEMAS[at] for at in range(0, len(SCHEMAS), 12)]


@pytest.mark.parametrize("schemas", ["some", *slow("all")])
def test_json_parses_and_is_valid(schemas, speaker, near):
    """With and without drafts, with the same tokens."""
    chosen = SOME if schemas == "some" else SCHEMAS
    sampling = [SamplingParams(json_schema=one, max_new_tokens=300) for _, one in chosen]
    prompts = ["{"] * len(chosen)
    plain = decode(speaker, prompts, sampling=sampling, batch_size=8)
    drafter = merge_drafters(Forced(), Ngram(prompt_lookup_min=1))
    found = decode(speaker, prompts, sampling=sampling, batch_size=8, drafter=drafter)
    assert found.token_ids == plain.token_ids
    for text, (name, schema) in zip(found.texts, chosen, strict=True):
        jsonschema.validate(json.loads(text), schema), name


@pytest.fixture(scope="module")
def url(speaker):
    options = ServeConfig(target="toy", port=0)
    sampling = dataclasses.replace(options.sampling, max_new_tokens=60)
    options = dataclasses.replace(options, sampling=sampling)
    engine = Engine(speaker, drafter="forced", batch_size=2, max_length=128)
    warm_up(engine, options.sampling)
    with served(engine, options) as url:
        yield url


def test_formats_of_the_openai_package(url):
    """OpenAI's `response_format`, and vLLM's names beside it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def text(**fields):
            answer = client.completions.create(
                model="toy", prompt="a", temperature=0, extra_body=fields
            )
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].text

        schema = {"name": "person", "schema": PERSON, "strict": True}
        by_format = text(response_format={"type": "json_schema", "json_schema": schema})
        jsonschema.validate(json.loads(by_format), PERSON)
        assert text(guided_json=PERSON) == by_format
        assert text(json_schema=json.dumps(PERSON)) == by_format
        assert text(structured_outputs={"json": PERSON}) == by_format
        assert isinstance(json.loads(text(response_format={"type": "json_object"})), dict)
        assert text(guided_choice=["yes", "no"]) in ("yes", "no")
        assert re.fullmatch("a+b", text(guided_regex="a+b"))
        assert re.fullmatch("a+b", text(structured_outputs={"regex": "a+b"}))
        for fields, says in (
            ({"response_format": {"type": "json"}}, "use {"),
            ({"response_format": {"type": "json_schema"}}, "use {"),
            ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
            ({"guided_regex": "a", "guided_choice": ["a"]}, "leave one of the two out"),
            ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "asks for regex twice"),
            ({"guided_regex": "a", "regex": "b"}, "asks for regex twice"),
            ({"guided_regex": "(a"}, "not a regular expression"),
            ({"guided_json": {"type": "nosuch"}}, "nosuch"),
        ):
            with pytest.raises(openai.BadRequestError, match=re.escape(says)):
                text(**fields)
