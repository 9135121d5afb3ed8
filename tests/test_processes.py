"""One run in two processes on this machine: the same rows, one report, clear errors."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import slow, xla_flags

from specjax.decoding.generate import generate
from specjax.distributed import processes
from specjax.errors import InputError
from specjax.loading.load import save_model

ROOT = Path(__file__).parent.parent
TEXTS = ["abc abc abc abc", "one", "two three two three two", "x y", "the end of the end of"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(arguments, *, program=("-m", "specjax.decode"), devices=1, folder=ROOT):
    """A process of its own with so many fake devices; what it prints is kept."""
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags(devices),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def joined(address, number, count=2, timeout=60):
    return [
        f"--config.distributed.coordinator_address={address}",
        f"--config.distributed.num_processes={count}",
        f"--config.distributed.process_id={number}",
        f"--config.distributed.timeout_s={timeout}",
    ]


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


def job(model, prompts, *more):
    return [
        "--config=configs/decode_smollm2.py",
        f"--config.target={model}",
        f"--config.prompts={prompts}",
        "--config.chat=false",
        "--config.dtype=float32",
        "--config.batch_size=3",
        "--config.num_speculative_tokens=3",
        "--config.sampling.max_new_tokens=10",
        "--config.sampling.temperature=0.8",
        "--config.sampling.ignore_eos=true",
        "--config.verify=coupled",
        "--config.compare=true",
        *more,
    ]


# The comparison with plain decoding is in test_decode_cli, that of two processes with --slow.
@pytest.mark.parametrize(("length", "compared"), [("1", False), *slow(("1", True), ("auto", True))])
def test_two_processes_decode_what_one_does(length, compared, model, prompts, chatty, tmp_path):
    """Two processes of two devices: rows over `data`, weights over `model`."""
    address, report = f"127.0.0.1:{free_port()}", tmp_path / "report.json"
    shared = job(
        model,
        prompts,
        "--config.mesh.data=2",
        "--config.mesh.model=2",
        f"--config.num_speculative_tokens={length}",
        f"--config.compare={compared}",
        f"--config.report={report}",
    )
    ran = [start([*shared, *joined(address, number)], devices=2) for number in (0, 1)]
    (first, out, err), (second, silent, other) = map(finish, ran)
    assert (first, second) == (0, 0), err + other
    assert ("5 of 5 rows" in out) == compared
    assert "tokens/s" in out
    assert "tokens/s" not in silent
    content = json.loads(report.read_text())
    assert [row["question_id"] for row in content["rows"]] == list(range(len(TEXTS)))
    assert content["summary"]["identical_rows"] == (len(TEXTS) if compared else None)
    assert "(data=2, model=2) in 2 processes" in content["summary"]["device"]
    alone = generate(
        chatty,
        TEXTS,
        verify="coupled",
        sampling=dict(max_new_tokens=10, temperature=0.8, ignore_eos=True),
    )
    assert [row["token_ids"] for row in content["rows"]] == alone.token_ids


@pytest.mark.parametrize("field", ["mesh.data", *slow("seed")])
def test_processes_with_other_configs_stop(field, model, prompts):
    """A mesh that only one process can make included."""
    address = f"127.0.0.1:{free_port()}"
    values = {"seed": (0, 1), "mesh.data": (2, 1)}[field]
    ran = [
        start(
            [
                *job(model, prompts, "--config.mesh.data=2", f"--config.{field}={value}"),
                *joined(address, number),
            ]
        )
        for number, value in enumerate(values)
    ]
    for code, out, err in map(finish, ran):
        assert code == 2, err
        said = f"error: {field}='{values[0]}' on process 0, '{values[1]}' on process 1"
        assert said in err
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
        arguments = [*job(model, "prompts.jsonl", "--config.mesh.data=2"), *joined(address, number)]
        arguments[0] = f"--config={ROOT / arguments[0].partition('=')[2]}"
        ran.append(start(arguments, folder=folder))
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


@pytest.mark.parametrize("number", [0, *slow(1)])
def test_a_process_that_never_comes_is_named(number, model, prompts):
    address = f"127.0.0.1:{free_port()}"
    code, out, err = finish(
        start([*job(model, prompts, "--config.mesh.data=2"), *joined(address, number, timeout=1)])
    )
    assert code == 2
    assert f"distributed.coordinator_address='{address}'" in err
    wanted = ["process 1 of 2 did not come within 1 s", "process 0 did not answer"][number]
    assert wanted in err
    assert "Traceback" not in out + err


def test_a_number_that_is_taken_is_refused():
    port = free_port()
    address = f"127.0.0.1:{port}"
    call = (
        "from specjax.distributed import processes\n"
        f"processes.join(coordinator_address='{address}', num_processes=3, process_id=1, "
        "timeout_s=20)"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", call], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        with pytest.raises(InputError, match="process_id=1: two processes say so"):
            processes.join(coordinator_address=address, num_processes=3, process_id=0, timeout_s=60)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


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
        with pytest.raises(InputError, match=f"port {port} cannot be used"):
            processes.join(
                coordinator_address=f"127.0.0.1:{port}",
                num_processes=2,
                process_id=0,
                timeout_s=2,
            )


def test_one_process_needs_no_agreement():
    assert processes.together(lambda: 3) == 3
    with pytest.raises(InputError, match="mine"):
        processes.agree({}, "mine")
