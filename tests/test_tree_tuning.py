"""Rates of candidates by rank, and the tree that is chosen by them and by what passes cost here."""

import json
import sys

import jax
import numpy as np
import pytest
from bad_input import refused_command
from commands import script_module
from conftest import slow
from decoding import PROMPTS, decode, draft_model, greedy
from tiny_models import eagle_head

from specjax.apps.command_line.config_file import read_config
from specjax.apps.rows.decode_report import tree_record
from specjax.apps.run.decode_config import make_config_drafter, read_decode_config
from specjax.apps.tuning import measure_costs, round_seconds
from specjax.distributed.sharding import make_mesh
from specjax.drafters import TreeOptions, head_drafter, make_drafter, merge_drafters, take_turns
from specjax.errors import InputError
from specjax.loading.load import place_model, save_model
from specjax.methods import acceptance_rates
from specjax.methods.acceptance_rates import (
    known_acceptance,
    read_acceptance,
    write_acceptance,
)
from specjax.methods.ngram import Ngram
from specjax.trees import FastestTree, best_tree, tree_of_choices
from specjax.tuning import (
    choose_tree,
    measure_ranks,
    measure_tree_costs,
    with_fastest_trees,
    with_tree,
)

RATES = ((0.6, 0.2, 0.1), (0.5, 0.2, 0.1))


def test_ranks_are_those_of_the_targets_own_tokens(tiny, similar):
    """A similar model's candidates are right as often as a chain of its tokens is accepted."""
    drafter = draft_model(similar, num_speculative_tokens=2)
    other = measure_ranks(tiny, drafter, PROMPTS[:4], max_new_tokens=24, batch_size=1)
    assert other.tested[0] >= other.tested[1] > 0
    assert 0.05 < other.acceptance[0, 0] < 1
    assert 0 < other.acceptance[0, 1:].sum() <= 1 - other.acceptance[0, 0]
    options = dict(sampling=greedy(max_new_tokens=24), batch_size=1)
    run = decode(tiny, PROMPTS[:4], drafter=drafter, **options)
    drafted = run.drafted > 0
    assert (run.accepted[drafted] > 0).mean() == pytest.approx(other.acceptance[0, 0])


@pytest.fixture
def calibrate(monkeypatch):
    """The script, whose measurement ends with an error."""
    with script_module("calibrate_trees") as script:

        def load_model(path):
            raise InputError("measuring")

        monkeypatch.setattr(script, "load_model", load_model)
        yield script


def test_pictures_get_a_new_folder_before_the_measurement(calibrate, tmp_path, capsys):
    flags = ["--drafters=medusa", f"--out={tmp_path}"]
    assert "measuring" in refused_command(
        calibrate.main, [*flags, f"--pictures={tmp_path / 'some/new'}"], capsys
    )
    assert (tmp_path / "some/new").is_dir()
    write_acceptance(tmp_path / "medusa.ranks.json", RATES, {})
    other = tmp_path / "other/new"
    assert calibrate.main([*flags, f"--pictures={other}", "--nomeasure"]) == 0
    assert (other / "tree_medusa.svg").is_file()


@pytest.mark.parametrize("text", ["my notes", '{"acceptance": "all"}'])
def test_a_file_without_rates_is_not_replaced(text, calibrate, tmp_path, capsys):
    file = tmp_path / "medusa.ranks.json"
    flags = ["--drafters=eagle3,medusa", f"--out={tmp_path}"]
    file.write_text(text)
    said = refused_command(calibrate.main, flags, capsys)
    assert f"{file}: is there and holds no rates; move it away" in said
    assert file.read_text() == text
    write_acceptance(file, RATES, {})
    assert "measuring" in refused_command(calibrate.main, flags, capsys)


def test_drafters_without_distributions_have_no_ranks(tiny):
    with pytest.raises(InputError, match="'ngram': its tokens are not drawn"):
        measure_ranks(tiny, take_turns(Ngram()), PROMPTS[:1])


@pytest.fixture
def timed(monkeypatch):
    """Costs that a test sets, and how often they were measured."""
    calls = []

    def measured(slope, draft):
        def rounds(model, drafter, topology, widths, **sizes):
            calls.append(sizes)
            return {width: 1 + slope * (width - 1) for width in widths}

        def propose(plan, requests):
            return draft * plan.loop.drafter.num_speculative_tokens

        monkeypatch.setattr(round_seconds, "rounds_seconds", rounds)
        monkeypatch.setattr(measure_costs, "propose_seconds", propose)

    return measured, calls


def test_the_tree_follows_the_costs(tiny, similar, timed):
    measured, calls = timed
    drafter = draft_model(similar)
    measured(slope=0.0, draft=1e-6)
    found = choose_tree(tiny, drafter, RATES)
    assert found.tree == best_tree(RATES, 12)
    assert found.tokens_per_round == pytest.approx(found.tree.expected_tokens(RATES))
    small = choose_tree(tiny, drafter, RATES, max_nodes=4)
    assert small.tree.topology.num_nodes == 4
    measured(slope=5.0, draft=1e-6)
    none = choose_tree(tiny, drafter, RATES)
    assert none.tree.topology.num_nodes == 0
    assert len(calls) == 3


def test_costs_are_those_of_the_next_wider_pass_and_of_levels(tiny, similar, timed):
    measured, _ = timed
    measured(slope=0.5, draft=0.25)
    times = measure_tree_costs(tiny, draft_model(similar), depth=3)
    assert [times.pass_seconds(width) for width in (1, 2, 4, 33)] == [1.0, 1.5, 3.0, 17.0]
    assert [times.draft_seconds(depth) for depth in (1, 2, 3)] == [0.25, 0.5, 0.75]
    with pytest.raises(InputError, match="width=34: passes of at most 33 slots were timed"):
        times.pass_seconds(34)
    # What is measured of a wider pass may be less, by chance.
    measured(slope=-0.01, draft=0.25)
    noisy = measure_tree_costs(tiny, draft_model(similar), depth=3, batch_size=2)
    assert set(noisy.passes) == {1.0}


def test_the_levels_of_a_draft_are_those_of_the_tree_that_is_timed(tiny, similar, timed):
    """Of the likeliest 32 nodes none is at depth 6."""
    measured, _ = timed
    measured(slope=0.5, draft=0.25)
    times = measure_tree_costs(tiny, draft_model(similar), depth=6)
    assert [times.draft_seconds(depth) for depth in (1, 2, 6)] == pytest.approx([0.25, 0.5, 1.5])


def test_timed_rounds_are_of_the_widths_and_lengths_that_are_asked(tiny, monkeypatch):
    """Each is a round of the loop whose drafts have one node less than its pass has slots."""
    ran = []

    def run(*calls):
        ran.extend(call() for call in calls)
        return [0.4 * (1 + number) for number in range(len(calls))]

    monkeypatch.setattr(measure_costs, "median_seconds", run)
    topology = best_tree(RATES, 6).topology
    sizes = {"batch_size": 2, "context": 20}
    drafter = head_drafter(eagle_head(tiny), tiny).drafter
    assert drafter.features
    seconds = round_seconds.rounds_seconds(tiny, drafter, topology, (1, 3, 7), **sizes)
    assert seconds == {1: pytest.approx(0.1), 3: pytest.approx(0.2), 7: pytest.approx(0.3)}
    for width, rounds in zip(seconds, ran, strict=True):
        count = int((rounds.width[0] > 0).sum())
        assert count == 4
        assert (rounds.width[:, :count] == width).all()
        assert (rounds.drafted[:, :count] == width - 1).all()
    with pytest.raises(ValueError, match=r"the topology has 6 nodes; give one of 8"):
        round_seconds.rounds_seconds(tiny, drafter, topology, (1, 9), **sizes)


def test_on_a_mesh_rounds_are_timed_too(tiny, similar, monkeypatch):
    target = place_model(tiny, make_mesh(2, 2, jax.devices()[:4]))
    monkeypatch.setattr(sys.modules[measure_tree_costs.__module__], "_WIDTHS", (1, 3))
    times = measure_tree_costs(target, draft_model(similar), depth=1, batch_size=3, context=16)
    assert times.widths == (1, 3)
    assert min(times.passes) > 0


@pytest.mark.parametrize("join", [take_turns, *slow(merge_drafters)])
def test_each_part_gets_its_tree(join, tiny, similar, timed):
    measured, _ = timed
    measured(slope=0.02, draft=0.01)
    together = join(Ngram(), draft_model(similar))
    options = TreeOptions(kind="auto")
    rates = {"draft_model": RATES}
    chosen, found = with_fastest_trees(tiny, together, options, acceptance=rates)
    assert list(found) == ["draft_model"]
    # Rates may be an array, as `RankCounts.acceptance` is.
    array = {"draft_model": np.array(RATES)}
    assert with_fastest_trees(tiny, together, options, acceptance=array)[1] == found
    assert chosen.drafter.parts[1].tree == found["draft_model"].tree
    alone = dict(sampling=greedy(max_new_tokens=16), batch_size=1)
    plain = decode(tiny, PROMPTS[:3], **alone)
    got = decode(tiny, PROMPTS[:3], drafter=chosen, **alone)
    assert got.token_ids == plain.token_ids
    with pytest.raises(InputError, match="how often draft_model's candidates are accepted"):
        with_fastest_trees(tiny, together, options)
    with pytest.raises(InputError, match="ngram drafts no trees of candidates"):
        with_fastest_trees(tiny, take_turns(Ngram()), options)


def test_a_table_of_candidates_brings_its_own_rates(tiny, timed):
    """Nothing was trained for a target, and nothing measured: the usual rates are taken."""
    measured, _ = timed
    measured(slope=0.001, draft=0.0)
    drafter = make_drafter("token_recycling", tiny)
    options = TreeOptions(kind="auto", num_nodes=8)
    lines = []
    chosen, found = with_fastest_trees(tiny, drafter, options, tell=lines.append)
    assert any("its usual acceptance rates are taken" in line for line in lines)
    assert found["token_recycling"].tree == chosen.drafter.tree
    assert chosen.drafter.tree.num_nodes == 8
    rates = drafter.drafter.usual_acceptance
    assert found["token_recycling"].tree == best_tree(rates, 8)
    other = {"token_recycling": RATES}
    assert with_fastest_trees(tiny, drafter, options, acceptance=other)[1] != found


@pytest.fixture
def own(chatty, tmp_path):
    """A model of one's own that drafts, and the command's config with it."""
    path = tmp_path / "own" / "model"
    save_model(chatty, path)

    def read(*flags):
        given = [
            "--config.drafter.name=ngram+draft_model",
            f"--config.drafter.path={path}",
            "--config.tree.kind=auto",
            "--config.prompt=abc abc ab",
            "--config.chat=false",
            "--config.dtype=float32",
            *flags,
        ]
        return read_decode_config(read_config(given, "configs/decode_smollm2.py").to_dict())

    return path, read


def test_a_drafter_of_ones_own_has_the_rates_beside_it(own, chatty, timed, tmp_path, monkeypatch):
    """And not those that come with specjax."""
    measured, _ = timed
    measured(slope=0.02, draft=0.01)
    shipped = tmp_path / chatty.name
    shipped.mkdir()
    monkeypatch.setattr(acceptance_rates, "SHIPPED", tmp_path)
    write_acceptance(shipped / "draft_model.ranks.json", ((0.9,),), {})
    assert known_acceptance("draft_model", chatty) == ((0.9,),)
    path, read = own
    config = read()
    says = r"no draft_model\.ranks\.json is beside drafter\.path="
    with pytest.raises(InputError, match=says):
        make_config_drafter(config, config.drafters[0], chatty)
    with pytest.raises(InputError, match=says):
        with_fastest_trees(chatty, draft_model(chatty), TreeOptions(kind="auto"), path=chatty)
    write_acceptance(path.parent / "draft_model.ranks.json", RATES, {})
    assert known_acceptance("draft_model", chatty, path) == RATES
    made = make_config_drafter(config, config.drafters[0], chatty)
    found = made.trees["draft_model"]
    assert found.tokens_per_round == pytest.approx(found.tree.expected_tokens(RATES))
    static = {"kind": "static", "num_nodes": 6}
    drafter = make_drafter("draft_model", chatty, path, tree=static).drafter
    assert drafter.tree == TreeOptions(**static, acceptance=RATES).shape()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_only_of_greedy_decoding_is_anything_expected(temperature, own, chatty, timed):
    """With rows and contexts as they will be."""
    measured, calls = timed
    measured(slope=0.0, draft=1e-6)
    path, read = own
    write_acceptance(path.parent / "draft_model.ranks.json", RATES, {})
    heat = f"--config.sampling.temperature={temperature}"
    config = read(heat, "--config.sampling.max_new_tokens=12", "--config.batch_size=4")
    lines = []
    made = make_config_drafter(config, config.drafters[0], chatty, tell=lines.append)
    prompt = len(chatty.tokenizer.encode("abc abc ab"))
    assert [(sizes["batch_size"], sizes["context"]) for sizes in calls] == [(1, prompt + 6)]
    assert made.loaded.drafter.parts[1].tree == best_tree(RATES, 12)
    what = "draft_model: tree.kind=auto: 12 nodes in 2 levels"
    tree = tree_record(made.trees["draft_model"])
    assert len(tree["choices"]) == 12
    if temperature:
        assert lines[-1] == what
        assert len(tree) == 1
    else:
        assert lines[-1].startswith(f"{what}, 2.62 tokens per round and ")
        assert tree["expected_tokens_per_round"] == pytest.approx(2.62)
        assert set(tree) == {"choices", "expected_tokens_per_round", "expected_round_s"}


def test_a_chain_stays_one(similar):
    drafter = with_tree(draft_model(similar), tree_of_choices([[0], [0, 0]])).drafter
    assert drafter.tree is None
    assert drafter.num_speculative_tokens == 2


def test_rates_are_written_and_read(tmp_path):
    file = tmp_path / "mine.ranks.json"
    write_acceptance(file, RATES, {"target": "tiny", "tested": [7, 3]})
    assert read_acceptance(file) == RATES
    assert json.loads(file.read_text())["tested"] == [7, 3]
    file.write_text('{"acceptance": [[2]]}')
    with pytest.raises(InputError, match="must be lists of rates from 0 to 1"):
        read_acceptance(file)


def test_a_report_says_what_was_chosen_and_expected():
    fastest = FastestTree(best_tree(RATES, 3), 1.9, 0.05)
    assert tree_record(fastest) == {
        "choices": [[0], [0, 0], [1]],
        "expected_tokens_per_round": 1.9,
        "expected_round_s": 0.05,
    }
