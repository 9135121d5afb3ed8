"""`scripts/report_heads.py`: its runs, tables and cards; the decoding itself is left out."""

import dataclasses
import json
import runpy

import pytest
from heads import eagle_head, medusa_head
from reports import as_lines, content
from script_modules import SCRIPTS, script_module

from specjax import decode
from specjax.cli.config_file import read_config
from specjax.loading.heads.head import save_head

CURVE = [
    {"step": 5, "tokens": 1_000_000.0, "loss": 3.0, "tau_sim": 1.5, "tau": 1.25},
    {"step": 9, "tokens": 2_000_000.0, "loss": 2.0, "tau_sim": 1.75, "tau": 1.5, "tau_t1": 1.375},
]


@pytest.fixture(scope="module")
def report_heads():
    with script_module("report_heads") as module:
        yield module


@pytest.fixture
def cells_run(report_heads, monkeypatch):
    """Cells only write a report; the list has their configs."""
    done = []

    def run_cell(cell):
        config = read_config(list(cell.arguments), decode.CONFIG)
        done.append(config)
        found = content(config.drafter.name, prompts="all", sampling=config.sampling)
        found["run"] |= {"batch_size": config.batch_size, "config": config.to_dict()}
        cell.report.write_text(as_lines(found))
        return 0

    monkeypatch.setattr(report_heads.sweep, "run_cell", run_cell)
    return done


def recorded(method, **changes):
    """A config as heads record it, JSON-ready."""
    file = SCRIPTS.parent / "configs" / f"train_{method}.py"
    config = json.loads(runpy.run_path(str(file))["get_config"]().to_json())
    for name in ("data", "target", "workdir", "start_from", "distributed", "mesh"):
        del config[name]
    return config | {"learning_rate_scales": {}} | changes


@pytest.fixture(scope="module")
def heads(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    data = {"conversations": 3, "tokens": 500, "labels": 200}

    def stage(rate, **more):
        config = recorded("eagle3", steps=9, decay_steps=9, learning_rate=rate)
        about = {"method": "eagle3", "data": data | {"sources": ["a", "b"]}, "config": config}
        return about | {"step": 9, "tokens": 2_000_000, "curve": CURVE} | more

    training = stage(1e-4, earlier=stage(2e-3))
    head = dataclasses.replace(eagle_head(tiny, vocabulary=40), training=training)
    save_head(head, folder / "eagle3")
    return folder


def test_runs_tables_and_cards(report_heads, cells_run, heads, tmp_path, capsys):
    argv = [f"--heads={heads}", f"--out={tmp_path}", "--per_task=2", "--data=From nowhere."]
    argv += ["--nopictures"]
    assert report_heads.main(argv) == 0
    assert [
        (one.drafter.name, one.sampling.temperature, one.verify, one.batch_size, one.compare)
        for one in cells_run
    ] == [
        (drafter, *rest)
        for drafter in ("ngram", "eagle3", "ngram+eagle3")
        for rest in (
            (0.0, "rejection", 1, True),
            (0.8, "coupled", 8, True),
            (1.0, "rejection", 8, False),
        )
    ]
    assert {one.per_task for one in cells_run} == {2}
    paths = [one.drafter.path for one in cells_run[::3]]
    assert paths == [None, str(heads / "eagle3"), str(heads / "eagle3")]
    # By itself a head drafts K tokens; beside another each has its own length.
    assert [one.num_speculative_tokens for one in cells_run[::3]] == ["fixed", "4", "fixed"]
    report = (tmp_path / "heads.md").read_text()
    assert "temperature 0.8" in report
    assert "| 2.00M | 1.750 | 1.500 | 1.375 |" in report
    # The second run's tokens are counted after the first one's.
    assert "| 4.00M | 1.750 | 1.500 | 1.375 |" in report
    card = (tmp_path / "cards" / "eagle3.md").read_text()
    assert "over 40 of" in card
    assert "3 conversations, 500 tokens, of which 200," in card
    assert "From nowhere." in card
    assert "on 4.00 million tokens in 18 steps" in card
    assert (
        "(`--config.data` names folders that `train.generate` wrote, EXPORT_N is W_N/export):"
        in (card)
    )
    assert "reproduce_heads.py --workdir=W --kinds=eagle3` does not repeat these runs" in card
    first, second = card.split("```")[1].strip().split("python -m ")[1:]
    both = "train.eagle --config=configs/train_eagle3.py --config.data=a,b"
    assert " ".join(first.replace("\\", "").split()) == (
        f"{both} --config.workdir=W_1 --config.steps=9"
    )
    assert " ".join(second.replace("\\", "").split()) == (
        f"{both} --config.start_from=EXPORT_1 --config.workdir=W_2 --config.steps=9 "
        "--config.learning_rate=0.0001"
    )
    assert "| 0 | greedy |" in card
    assert "| 0.8 | coupled |" in card
    assert "| 1.00M | 1.500 | 1.250 |  |" in card

    cells_run.clear()
    assert report_heads.main([*argv, "--drafters=eagle3", "--nocompare"]) == 0
    # The run at temperature 1 is that of before.
    (one,) = cells_run
    assert (one.sampling.temperature, one.batch_size, one.compare) == (0.0, 8, False)

    cells_run.clear()
    assert report_heads.main([*argv, "--drafters=eagle3", "--nospeed"]) == 0
    (one,) = cells_run
    assert (one.sampling.temperature, one.batch_size, one.compare) == (0.0, 8, True)

    cells_run.clear()
    assert report_heads.main([*argv, "--drafters=eagle3"]) == 0
    assert cells_run == []

    assert report_heads.main([*argv, "--drafters=ngram+eagle3", "--draft_p_min=0.2"]) == 0
    assert {one.drafter.draft_p_min for one in cells_run} == {0.2}
    assert "9 cells, 0 of them finished" in capsys.readouterr().out


def test_a_card_says_what_later_fields_were_when_a_head_was_trained(report_heads, tiny):
    def command(config, method="medusa"):
        data = {"conversations": 3, "tokens": 500, "labels": 200, "sources": ["a"]}
        about = {"method": method, "data": data, "config": config, "step": 9, "tokens": 100}
        head = dataclasses.replace(medusa_head(tiny), training=about)
        text = report_heads.card(head)
        assert "EXPORT" not in text
        return " ".join(text.split("```")[1].replace("\\", "").split()), text

    now = "python -m train.medusa --config=configs/train_medusa.py --config.data=a"
    now += " --config.workdir=W_1"
    config = recorded("medusa")
    assert command(config)[0] == now

    # As the first head was: before there were other optimizers, and projections.
    del config["optimizer"], config["medusa"]["projection"]
    then = "--config.optimizer=adamw --config.medusa.projection=False"
    assert command(config)[0] == f"{now} {then}"

    # A field without a recorded earlier value.
    del config["clip"], config["eval"]["prompts"]
    assert command(config)[0] == (
        "# not there when this was trained, what it was then is not known: clip=1.0, "
        f"eval.prompts=8 {now} {then}"
    )

    config = recorded("medusa2", learning_rate_scales={"target": 0.02})
    shown, text = command(config, "medusa2")
    assert shown == now.replace("train_medusa.py", "train_medusa2.py")
    assert "reproduce_heads.py" not in text
    config["learning_rate_scales"] = {"target": 0.02, "layers": {"0": 0.5}}
    shown, _ = command(config, "medusa2")
    assert "--config.learning_rate_scales=target:0.02,layers.0:0.5" in shown

    config = recorded("mtp")
    config["mtp"]["export"] = "head"
    shown, text = command(config, "mtp")
    assert shown == f"{now.replace('medusa', 'mtp')} --config.mtp.export=head"
    assert "reproduce_heads.py --workdir=W --kinds=mtp`" in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "out is missing: pass --out=VALUE"),
        (["--out=x", "--heads=nowhere"], "heads='nowhere': no such folder"),
        (["--out=x", "--heads=tests/goldens/linear"], "linear': no head is there"),
        (["--out=x", "--heads={heads}", "--drafters=eagle"], "drafters='eagle': there are ngram,"),
        (["--out=x", "--heads={heads}", "--drafters=ngram+eagle"], "joined by +"),
        (["--out=x", "what"], "unrecognized arguments: what"),
        (["--out=x", "--batch_size=many"], "batch_size='many': use a whole number"),
    ],
)
def test_bad_input(argv, said, report_heads, heads, capsys):
    assert report_heads.main([one.format(heads=heads) for one in argv]) == 2
    assert said in capsys.readouterr().err
