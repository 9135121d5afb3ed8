"""One run in two processes on this machine: the same rows, one report, clear errors."""

import json
import socket

import pytest
import reports
from commands import ROOT, finish, free_port, joined, start
from conftest import slow

from specjax.distributed import processes
from specjax.engine.generate import generate
from specjax.errors import InputError
from specjax.loading.load import save_model

TEXTS = ["abc abc abc abc", "one", "two three two three two", "x y", "the end of the end of"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"question_id": i, "category": "qa", "turns": [t]} for i, t in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(chatty, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    save_model(chatty, path)
    return path


def job(model, prompts, **fields):
    """The command's arguments; `fields` have __ for the dot in their names."""
    values = dict(
        target=model,
        prompts=prompts,
        chat="false",
        dtype="float32",
        batch_size=3,
        num_speculative_tokens=3,
        sampling__max_new_tokens=10,
        sampling__temperature=0.8,
        sampling__ignore_eos="true",
        verify="coupled",
        compare="true",
    )
    flags = {name.replace("__", "."): value for name, value in (values | fields).items()}
    config = ROOT / "configs/decode_smollm2.py"
    return [f"--config={config}", *(f"--config.{name}={value}" for name, value in flags.items())]


# The comparison with plain decoding is in test_decode_cli, that of two processes with --slow.
@pytest.mark.parametrize(("length", "compared"), [("1", False), *slow(("1", True), ("auto", True))])
def test_two_processes_decode_what_one_does(length, compared, model, prompts, chatty, tmp_path):
    """Two processes of two devices: rows over `data`, weights over `model`."""
    address, report = f"127.0.0.1:{free_port()}", tmp_path / "report.jsonl"
    mesh = dict(mesh__data=2, mesh__model=2)
    options = dict(num_speculative_tokens=length, compare=compared, report=report)
    shared = job(model, prompts, **mesh, **options)
    ran = [start([*shared, *joined(address, number)], devices=2) for number in (0, 1)]
    (first, out, err), (second, silent, other) = map(finish, ran)
    assert (first, second) == (0, 0), err + other
    assert ("5 of 5 rows" in out) == compared
    assert "tokens/s" in out
    assert "tokens/s" not in silent
    content = reports.read_one(report)
    assert [row["question_id"] for row in content["rows"]] == list(range(len(TEXTS)))
    assert content["summary"]["identical_rows"] == (len(TEXTS) if compared else None)
    assert "(data=2, model=2) in 2 processes" in content["run"]["device"]
    alone = generate(
        chatty,
        TEXTS,
        verify="coupled",
        sampling=dict(max_new_tokens=10, temperature=0.8, ignore_eos=True),
    )
    assert [row["token_ids"] for row in content["rows"]] == alone.token_ids


@pytest.mark.parametrize("field", ["mesh__data", *slow("seed")])
def test_processes_with_other_configs_stop(field, model, prompts):
    """A mesh that only one process can make included."""
    address = f"127.0.0.1:{free_port()}"
    values = {"seed": (0, 1), "mesh__data": (2, 1)}[field]
    jobs = [job(model, prompts, **{"mesh__data": 2, field: value}) for value in values]
    ran = [start([*args, *joined(address, number)]) for number, args in enumerate(jobs)]
    for code, out, err in map(finish, ran):
        assert code == 2, err
        name = field.replace("__", ".")
        assert f"error: {name}='{values[0]}' on process 0, '{values[1]}' on process 1" in err
        assert "Traceback" not in out + err


def test_other_prompts_at_the_same_path_are_noticed(model, prompts, tmp_path):
    """Each process reads files of its own disk."""
    address = f"127.0.0.1:{free_port()}"
    ran = []
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = prompts.read_text().replace("x y", f"x {number}")
        (folder / "prompts.jsonl").write_text(text)
        arguments = job(model, "prompts.jsonl", mesh__data=2)
        ran.append(start([*arguments, *joined(address, number)], folder=folder))
    for code, _, err in map(finish, ran):
        assert code == 2, err
        assert "error: prompts=" in err
        assert "start all processes with the same command and files" in err


def test_an_error_of_one_process_ends_both(model, prompts, tmp_path):
    """The prompts are there for the first process only."""
    address, missing = f"127.0.0.1:{free_port()}", tmp_path / "missing.jsonl"
    script = tmp_path / "one.py"
    script.write_text(
        "import sys\n"
        "from specjax.distributed import processes\n"
        "from specjax.errors import InputError\n"
        "number = int(sys.argv[2])\n"
        "processes.join(coordinator_address=sys.argv[1], num_processes=2, process_id=number)\n"
        "def work():\n"
        "    if number == 1:\n"
        f"        raise InputError('prompts={missing.name} is not there')\n"
        "    # What is agreed inside of another agreement is not asked for twice.\n"
        "    processes.together(lambda: None)\n"
        "try:\n"
        "    processes.together(work)\n"
        "except InputError as error:\n"
        "    print('stopped:', error)\n"
    )
    ran = [start([address, str(number)], program=[str(script)]) for number in (0, 1)]
    (_, first, _), (_, second, _) = map(finish, ran)
    assert "stopped: process 1: prompts=missing.jsonl is not there" in first
    assert "stopped: prompts=missing.jsonl is not there" in second


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(coordinator_address="host:1"), "distributed.num_processes is missing"),
        (dict(process_id=0, num_processes=2), "distributed.coordinator_address is missing"),
        (
            dict(coordinator_address="host", process_id=0, num_processes=2),
            "coordinator_address='host': use HOST:PORT",
        ),
        (
            dict(coordinator_address="h:1", process_id=2, num_processes=2),
            "process_id=2: must be from 0 to num_processes - 1",
        ),
        (dict(cluster=True, process_id=1), "process_id=1: the cluster says this itself"),
        (dict(timeout_s=0), "timeout_s=0: use seconds above 0"),
    ],
)
def test_incomplete_settings_are_refused(given, said):
    with pytest.raises(InputError, match=said):
        processes.join(**given)


def test_a_port_in_use_is_said():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        address = f"127.0.0.1:{port}"
        with pytest.raises(InputError, match=f"port {port} cannot be used"):
            processes.join(coordinator_address=address, num_processes=2, process_id=0, timeout_s=2)


def test_one_process_needs_no_agreement():
    assert processes.together(lambda: 3) == 3
    with pytest.raises(InputError, match="mine"):
        processes.agree({}, "mine")
