"""The cache of compiled programs: whatever its state, it is said once and the run continues."""

import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from specjax.files import program_cache


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Calls `keep` for a folder as in a new process; returns the list that gets its messages."""
    names = (
        *("jax_enable_compilation_cache", "jax_compilation_cache_dir"),
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def again(home=tmp_path / "cache"):
        compilation_cache.reset_cache()
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        messages = []
        program_cache.keep(messages.append)
        return messages

    with warnings.catch_warnings():
        yield again
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compute():
    """Three programs, two of one name; of new functions, which the process has not compiled."""
    x = jnp.asarray([1.0, 2.0, 3.0])
    for function in (jnp.sin, jnp.cos):
        jax.jit(lambda x, function=function: function(x) * 2)(x).block_until_ready()
    assert float(jax.jit(lambda x: x.sum())(x)) == 6


def truncated(path):
    path.write_bytes(path.read_bytes()[:-20])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def emptied(path):
    path.write_bytes(b"")


def foreign(path):
    path.write_bytes(b"not a program at all")


@pytest.mark.parametrize("damage", [truncated, flipped, emptied, foreign])
def test_damaged_entries_are_replaced_and_said_once(damage, keep, tmp_path):
    folder = tmp_path / "cache" / "specjax" / "xla"
    messages = keep()
    compute()
    entries = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(entries) >= 3
    for path in entries:
        damage(path)
    again = keep()
    compute()
    assert again == [f"compiled programs in {folder}: damaged entries are replaced"]
    assert {path for path in folder.iterdir() if path.is_file()} == set(entries)
    # Each of them is good now.
    once_more = keep()
    compute()
    assert messages == once_more == []


@pytest.mark.parametrize("home", ["file", "file/below", "~nosuchuser", "/proc/nosuch"])
def test_a_folder_that_cannot_be_one(home, keep, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    messages = keep(home if home.startswith(("~", "/")) else tmp_path / home)
    compute()
    assert len(messages) == 1
    assert messages[0].startswith("compiled programs are not kept: ")
    assert home.strip("/").split("/")[0].strip("~") in messages[0]
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_cannot_be_written_to_any_more(keep, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "specjax" / "xla"
    messages = keep()
    folder.rmdir()
    folder.write_text("in its place")
    compute()
    # JAX opens its cache once, and is without one after that.
    assert len(messages) == 1
    assert messages[0].startswith(f"compiled programs in {folder}: reading fails (FileExistsError")


def test_other_warnings_are_shown_as_ever(keep):
    keep()
    with pytest.warns(UserWarning, match="something else"):
        warnings.warn("something else", stacklevel=1)


def test_two_at_once(keep, tmp_path):
    """A program that another process is writing is at worst taken for a damaged one."""
    folder = tmp_path / "cache" / "specjax" / "xla"
    keep()
    compute()
    entry = next(folder.glob("jit__lambda*"))
    whole = entry.read_bytes()
    stop = threading.Event()

    def write():
        while not stop.is_set():
            entry.write_bytes(whole[:100])
            entry.write_bytes(whole)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            messages = keep()
            compute()
            assert messages in (
                [],
                [f"compiled programs in {folder}: damaged entries are replaced"],
            )
    finally:
        stop.set()
        writer.join()
