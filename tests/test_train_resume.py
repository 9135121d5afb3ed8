"""Runs that are killed, interrupted or moved resume with the same curve; others are refused."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jaxtyping
import numpy as np
import pytest
from commands import ROOT, files_limited_to, free_port, joined
from conftest import slow, xla_flags
from rich.console import Console
from tensorboardX.proto import event_pb2
from test_folders import flip_four_bytes
from test_train_loop import Run, mesh_of, program_of, timeless
from toy_training import (
    LABELS,
    TOKENS,
    AnyData,
    Listed,
    ToyConfig,
    config_of,
    conversations,
    toy_method,
    toy_run,
    toy_target,
    write_data,
)

from specjax.errors import InputError
from specjax.files.folder_checksums import MARKER
from specjax.methods.saved_heads import read_head
from train.data.packing import Packing, Shape
from train.run import checkpoints, run, setup
from train.run import workdir as files
from train.run.tensorboard import TensorBoardWriter

SCRIPT = ROOT / "tests" / "toy_training.py"


@pytest.fixture(scope="module")
def target():
    return toy_target()


@pytest.fixture(scope="module")
def start():
    """Starts the toy's command line."""
    begun = []

    def start(workdir, *more, devices=1, quick=10**9):
        environment = {
            **os.environ,
            "XLA_FLAGS": xla_flags(devices),
            "PYTHONPATH": str(ROOT),
            "TOY_QUICK": str(quick),
        }
        fields = {"data": "memory", "workdir": workdir, "dtype": "float32", "eval.every": 6}
        given = [f"--config.{name}={value}" for name, value in fields.items()]
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), f"--config={SCRIPT}", *given, *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def trained_here(workdir):
    """What a process of its own prints, of the same command in this one."""
    fields = {"data": "memory", "workdir": workdir, "dtype": "float32", "eval.every": 6}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        # As in that process: conversations in memory are no `Sources`.
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setattr(
            setup, "load_model", lambda name, *, field, form, weights, mesh=None: toy_target(mesh)
        )
        patch.setattr(setup, "open_sources", lambda paths: Listed(conversations()))
        given = [f"--config.{name}={value}" for name, value in fields.items()]
        code = run.main(
            lambda target, data, config: toy_method(target), AnyData, [f"--config={SCRIPT}", *given]
        )
    assert code == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of a run that nothing has disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "w"
    assert "trained: step 12 of 12" in trained_here(workdir)
    return timeless(files.Workdir(workdir))


def wait_for_step(process, workdir, step, since=0.0):
    """Until the metrics, written anew since some time, reach that step."""
    path = workdir / "metrics.jsonl"
    for _ in range(18_000):
        assert process.poll() is None, process.communicate()
        fresh = path.exists() and path.stat().st_mtime > since
        if fresh and f'{{"step": {step},' in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


def steps_to_reads(steps):
    """Conversations that are read for so many steps, and a few."""
    source = Listed(conversations())
    chosen = np.flatnonzero(~source.validation)
    rows = Packing(source, chosen, Shape(4, TOKENS, LABELS), 0).rows(0)
    return sum(map(len, rows[: 4 * steps])) + 3


def test_a_killed_and_an_interrupted_run_go_on_to_the_same_curve(start, whole, tmp_path):
    workdir = tmp_path / "w"
    process = start(workdir, quick=steps_to_reads(8))
    wait_for_step(process, workdir, 8)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [row["step"] for row in files.read_metrics(files.Workdir(workdir))][-1] == 8
    killed_at = checkpoints.last_checkpoint(files.Workdir(workdir)).step
    assert killed_at == 5

    since = time.time()
    process = start(workdir, quick=steps_to_reads(8) - steps_to_reads(5))
    wait_for_step(process, workdir, 8, since)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert "resuming after step 5" in out
    assert "interrupted at step" in out
    assert "The same command resumes it" in out
    interrupted_at = checkpoints.last_checkpoint(files.Workdir(workdir)).step
    assert 8 <= interrupted_at < 12

    assert f"resuming after step {interrupted_at}" in trained_here(workdir)
    rows = timeless(files.Workdir(workdir))
    assert rows == whole
    assert [row["step"] for row in rows] == [4, 6, 8, 12, 12]


def test_two_processes_give_the_losses_of_one(start, whole, tmp_path):
    address, workdir = f"127.0.0.1:{free_port()}", tmp_path / "w"
    ran = [
        start(workdir, "--config.mesh.data=4", *joined(address, number), devices=2)
        for number in (0, 1)
    ]
    (first, out, err), (second, silent, other) = map(finish, ran)
    assert (first, second) == (0, 0), err + other
    assert "(data=4, model=1) in 2 processes" in out
    assert "step" not in silent
    rows = timeless(files.Workdir(workdir))
    assert [row.keys() for row in rows] == [row.keys() for row in whole]
    for mine, theirs in zip(rows, whole, strict=True):
        for name, value in mine.items():
            assert value == pytest.approx(theirs[name], rel=1e-5), name
    # One process resumes from what two have saved.
    saved = checkpoints.last_checkpoint(files.Workdir(workdir))
    program = program_of(config_of(), toy_target())
    restored = checkpoints.restore(saved, program.state)
    assert int(restored.step) == 12


def test_a_bad_loss_is_one_line_on_the_command_line(tmp_path, monkeypatch, capsys):
    write_data(tmp_path / "data")
    monkeypatch.setattr(
        setup, "load_model", lambda name, *, field, form, weights, mesh=None: toy_target(mesh)
    )
    fields = [f"--config.data={tmp_path / 'data'}", f"--config.workdir={tmp_path / 'w'}"]

    def make(target, data, config):
        return toy_method(target, poison=6)

    assert run.main(make, ToyConfig, fields) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: step 1: the loss is nan")
    assert err.count("\n") == 1
    assert "Traceback" not in out


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """The folder of a run to its end."""
    folder = tmp_path_factory.mktemp("trained") / "w"
    Run(folder, target, config_of()).train()
    return folder


@pytest.mark.parametrize(("before", "after"), [((4, True), (2, True)), *slow(((4, True), None))])
def test_a_run_resumes_on_another_mesh(before, after, target, trained, tmp_path):
    """Saved on one mesh, restored onto another; the curve stays the same up to rounding."""

    def part(shape, steps):
        mesh = None if shape is None else mesh_of(shape[0])
        config = config_of(steps=steps, fsdp=shape is not None, decay_steps=12)
        one = Run(tmp_path / "w", target, config, mesh=mesh)
        result = one.train()
        return result.state

    part(before, 6)
    state = part(after, 12)
    other = Run(shutil.copytree(trained, tmp_path / "whole"), target, config_of()).program.state
    for mine, theirs in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    if after is not None:
        parts = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)}
        assert parts == {after[0]}


def record(**changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return {"config": config_of(**changes).record, "data": {"tokens": 5}}


@pytest.fixture
def begun(tmp_path):
    """The folder of a run with a checkpoint."""
    workdir = files.open_workdir(tmp_path / "w", record(seed=5))
    # Nothing was saved, so that nothing would be mixed up.
    files.open_workdir(tmp_path / "w", record())
    (workdir.checkpoints / "step-000000001").mkdir(parents=True)
    return workdir


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (record(seed=3, learning_rate=0.5), "learning_rate=0.01 then, 0.5 now; seed=0 then, 3 now"),
        ({**record(), "data": {"tokens": 6}}, "data.tokens=5 then, 6 now"),
        ({**record(), "draft_vocabulary": "f3"}, "draft_vocabulary=None then, 'f3' now"),
        (record(steps=20), "decay_steps=12 then, 20 now .*steps"),
    ],
)
def test_another_run_is_refused_by_name(changed, said, begun):
    with pytest.raises(InputError, match=f"{said}.*another workdir"):
        files.open_workdir(begun.root, changed)


def test_fields_that_change_no_curve_may_differ(begun):
    free = dict(steps=99, minutes=3.0, log_every=1, checkpoint_every=7, workdir="elsewhere")
    free |= dict(fsdp=True, mesh__data=4, eval__every=3, decay_steps=12)
    files.open_workdir(begun.root, record(**free))


def test_a_workdir_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="^workdir=.*: a part of it is a file"):
        files.open_workdir(tmp_path / "notes.txt" / "w", record())


def test_metrics_after_the_checkpoint_are_dropped(tmp_path):
    workdir = files.open_workdir(tmp_path / "w", record())
    for step in (1, 2, 3, 4):
        files.append_metrics(workdir, {"step": step, "train/loss": 0.1 * step})
    with workdir.metrics.open("a") as file:
        file.write('{"step": 5, "train/lo')
    files.truncate_metrics(workdir, 3)
    assert [row["step"] for row in files.read_metrics(workdir)] == [1, 2, 3]
    assert [path.name for path in workdir.root.iterdir() if path.name[0] == "."] == []


@pytest.mark.parametrize(
    "line",
    [
        b"5",
        b"null",
        b'{"train/loss": 1.0}',
        b'{"step": true}',
        b'{"step": "3"}',
        b'{"step": 3, "train/tokens": "many"}',
        b'{"step": 3, "eval/loss": null}',
        b'{"step": 3, "eval/loss": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_damaged_metrics_end_where_they_are_damaged(line, tmp_path):
    workdir = files.open_workdir(tmp_path / "w", record())
    files.append_metrics(workdir, {"step": 1, "train/loss": 0.5})
    files.append_metrics(workdir, {"step": 2, "eval/loss": 0.5, "eval/tau": float("nan")})
    with workdir.metrics.open("ab") as file:
        file.write(line + b"\n" + b'{"step": 3}\n')
    assert files.is_evaluated(workdir, 2)
    assert files.learning_curve(workdir) == [{"step": 2, "tokens": 0.0, "loss": 0.5}]
    files.truncate_metrics(workdir, 9)
    assert [row["step"] for row in files.read_metrics(workdir)] == [1, 2]
    assert workdir.metrics.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("text", ["5", "[]", "{", '{"config": ' * 100_000, '{"a": 1, "a": 2}'])
def test_a_damaged_record_of_a_run_is_an_error(text, begun):
    begun.config.write_text(text)
    with pytest.raises(InputError, match=r"config.json is .*; restore it, or use another workdir"):
        files.open_workdir(begun.root, record())


# Where compiling is slow, its result would be kept on that disk too.
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache entry")
def test_a_full_disk_leaves_the_earlier_checkpoint(target, tmp_path):
    first = Run(tmp_path / "w", target, config_of(steps=3, decay_steps=12))
    first.train()
    second = Run(tmp_path / "w", target, config_of())
    with files_limited_to(1000), pytest.raises(InputError, match="cannot be written"):
        second.train()
    assert second.steps() == [3]
    third = Run(tmp_path / "w", target, config_of())
    assert third.progress.step == 3
    assert third.train().step == 12


def test_a_tensorboard_writer_on_a_full_disk_is_an_error(tmp_path):
    writer = TensorBoardWriter(tmp_path, 0)
    writer.write(1, {"train/loss": 1.0})
    size = next(tmp_path.iterdir()).stat().st_size
    with files_limited_to(size + 10), pytest.raises(InputError, match="cannot be written"):
        writer.write(2, {"train/loss": 2.0})
    writer.close()
    with pytest.raises(InputError, match="cannot be written"):
        TensorBoardWriter(next(tmp_path.iterdir()), 0)


DAMAGES = {
    "a missing index": (
        lambda folder: (folder / "params" / "_METADATA").unlink(),
        "the checkpoint is damaged",
    ),
    "flipped bytes": (lambda folder: flip_four_bytes(folder / "params"), "SHA-256 differs"),
    "no marker": (lambda folder: (folder / MARKER).unlink(), "lacks specjax_folder.json"),
    "no metadata": (
        lambda folder: (folder / "specjax_checkpoint.json").unlink(),
        "specjax_checkpoint.json: no such file",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage, trained, tmp_path):
    workdir = files.Workdir(shutil.copytree(trained, tmp_path / "w"))
    change, said = DAMAGES[damage]
    change(workdir.checkpoints / "step-000000012")
    found = checkpoints.last_checkpoint(workdir)
    assert (found.step, found.damaged) == (10, (12,))
    change(workdir.checkpoints / "step-000000010")
    with pytest.raises(InputError, match=f"step-000000012: .*{said}"):
        checkpoints.last_checkpoint(workdir)


def test_a_damaged_checkpoint_is_kept_under_another_name(target, trained, tmp_path):
    workdir = files.Workdir(shutil.copytree(trained, tmp_path / "w"))
    flip_four_bytes(workdir.checkpoints / "step-000000012")
    run = Run(workdir.root, target, config_of())
    assert run.progress.step == 10
    run.train()
    assert sorted(path.name for path in workdir.checkpoints.iterdir()) == [
        "damaged-step-000000012",
        "step-000000010",
        "step-000000012",
    ]
    assert checkpoints.last_checkpoint(workdir).step == 12


def test_folders_that_hold_more_than_specjax_wrote_are_kept(target, tmp_path):
    """A user's file, and another checkpoint in a folder inside the step's."""
    Run(tmp_path / "w", target, config_of(steps=5, decay_steps=12)).train()
    workdir = files.Workdir(tmp_path / "w")
    now = workdir.checkpoints / "step-000000005"
    earlier = workdir.checkpoints / "step-000000003" / "copy"
    shutil.copytree(now, earlier)
    (now / "params" / "note.txt").write_text("mine")
    half_deleted = workdir.checkpoints / "step-000000002" / "params" / "d"
    half_deleted.mkdir(parents=True)
    (half_deleted / "part").write_text("ours")
    Run(tmp_path / "w", target, config_of()).train()
    assert workdir.steps == [3, 5, 10, 12]
    assert (now / "params" / "note.txt").read_text() == "mine"


def test_an_interrupted_first_save_counts_for_nothing(target, tmp_path):
    run = Run(tmp_path / "w", target, config_of())
    (run.workdir.checkpoints / "step-000000005.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    assert checkpoints.last_checkpoint(run.workdir) is None
    run.train()
    assert sorted(path.name[-2:] for path in run.workdir.checkpoints.iterdir()) == ["10", "12"]


def test_a_checkpoint_of_other_parameters_is_refused(target, tmp_path):
    Run(tmp_path / "w", target, config_of(steps=2)).train()
    method = toy_method(target)
    wider = method._replace(
        init=lambda key: {**method.init(key), "more": {"kernel": np.ones((2, 2), np.float32)}}
    )
    with pytest.raises(InputError, match=r"missing: .*params\.more\.kernel.*; use another workdir"):
        Run(tmp_path / "w", target, config_of(), method=wider)


def events(workdir):
    """What TensorBoard would show: (step, name, value)."""
    found = []
    for path in sorted(workdir.tensorboard.iterdir()):
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            size = int.from_bytes(content[offset : offset + 8], "little")
            event = event_pb2.Event.FromString(content[offset + 12 : offset + 12 + size])
            found += [(event.step, one.tag, one.simple_value) for one in event.summary.value]
            offset += 12 + size + 4
    return found


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "screen.txt").open("w+") as file:
        yield Console(file=file, width=160)


def said(console):
    console.file.flush()
    console.file.seek(0)
    return console.file.read()


def test_a_whole_run_from_data_on_disk(tmp_path, console):
    """Data, training, held-out losses, decoding, export, screen, JSONL and TensorBoard."""
    evaluated = {"eval.every": 8, "eval.prompts": 2, "eval.new_tokens": 8}
    write_data(tmp_path / "data", features=("layer_input:1",))
    assert toy_run(tmp_path, console, **evaluated) == 0
    text = said(console)
    for words in (
        "toy for random-0",
        "parameters, on cpu",
        "58 conversations",
        "features computed in the step, since the data has no final_norm",
        "loading smollm2-135m-instruct and data=",
        "compiling the training step",
        "step 1/12  ",
        "step 4/12  loss ",
        "step 8, held out: decoding 2 prompt(s) at temperature 0 (compiles first) ...",
        "  cond 0.",
        "tau_sim",
        "tokens/s",
        "step 8, held out: loss",
        "tau_t1",
        "step 12, held out: decoding 2 prompt(s) at temperature 0, 1 (about ",
        "trained: step 12 of 12",
    ):
        assert words in text, words
    workdir = files.Workdir(tmp_path / "w")
    rows = files.read_metrics(workdir)
    assert [row["step"] for row in rows] == [4, 8, 8, 12, 12]
    for name in ("train/loss", "train/acc_pos_0", "train/full_acc_1", "train/cond_acc_1"):
        assert name in rows[0]
    assert rows[0]["train/seconds_left"] > rows[3]["train/seconds_left"] == 0
    assert {"eval/loss", "eval/tau", "eval/decoded_acc_pos_0"} <= rows[2].keys()
    assert "eval/tau_t1" in rows[4]
    shown = {(step, name): value for step, name, value in events(workdir)}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                assert shown[row["step"], name] == pytest.approx(value, rel=1e-6)
    head = read_head(workdir.export)
    assert (head.kind, head.training["step"], head.training["method"]) == ("medusa", 12, "toy")
    assert json.loads(workdir.config.read_text())["config"]["steps"] == 12

    # The same call has nothing left to do, and spoils nothing.
    assert toy_run(tmp_path, console, **evaluated) == 0
    assert files.read_metrics(workdir) == rows
    again = said(console).removeprefix(text)
    assert "this run was finished before: step 12 of 12" in again
    assert f"another workdir and --config.start_from={workdir.export}" in again
    assert "resuming" not in again
    assert "compiling" not in again


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": None}, "data is missing"),
        ({"workdir": None}, "workdir is missing"),
        ({"features": "stored"}, "features='stored': .* has no final_norm .*there are none"),
        ({"data": "nowhere"}, "no such"),
        ({"row_tokens": 3}, "row_tokens=3: use a whole number from 4 to"),
        (
            {"eval.prompts": 1, "eval.new_tokens": 200},
            "eval.new_tokens=200: random-0 has 200 positions.* at most 199",
        ),
        ({}, "written by another target, .* hidden_size=16"),
    ],
)
def test_bad_settings_are_named_before_any_work(changes, said, tmp_path):
    def target(mesh):
        model = toy_target(mesh)
        size = model.config.hidden_size if changes else 20
        return dataclasses.replace(
            model, config=dataclasses.replace(model.config, hidden_size=size)
        )

    with pytest.raises(InputError, match=said):
        toy_run(tmp_path, target=target, **changes)
    assert not (tmp_path / "w").exists()
