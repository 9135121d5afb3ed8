"""The profile of a training step: operations counted by hand, and a table that has every part."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from toy_training import get_config, read, toy_method, toy_target, write_data

from train.run import setup
from train.run.step import LATE

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from training import profile_training


def counted(function, *given):
    return profile_training.products(jax.make_jaxpr(function)(*given).jaxpr)


def test_operations_of_products_are_counted():
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    one = 2 * 3 * 5 * 7
    assert counted(jnp.matmul, a, b) == one
    assert counted(lambda a, b: jax.jit(jnp.matmul)(a, b) + jnp.ones((3, 7)), a, b) == one

    def looped(a, b):
        return jax.lax.scan(lambda x, _: (x, x @ b), a, length=4)[1]

    assert counted(looped, a, b) == 4 * one
    assert counted(lambda a, b: jax.lax.map(lambda x: x @ b, jnp.stack([a, a])), a, b) == 2 * one

    # Of a product's gradient in both factors, twice as much again; under remat the forward twice.
    def loss(a, b):
        return jnp.tanh(a @ b).sum()

    assert counted(jax.grad(loss, (0, 1)), a, b) == 3 * one
    assert counted(jax.grad(jax.checkpoint(loss), (0, 1)), a, b) == 4 * one


def test_every_part_is_of_a_step_late_in_the_run(tmp_path, monkeypatch):
    write_data(tmp_path / "data")
    monkeypatch.setattr(
        setup, "load_model", lambda name, *, field, form, mesh=None: toy_target(mesh)
    )
    config = get_config()
    config.data, config.workdir = str(tmp_path / "data"), str(tmp_path / "w")
    seen = []

    def noted(target, data, config):
        toy = toy_method(target)

        def loss(params, target_params, batch, key, step):
            jax.debug.callback(lambda step: seen.append(int(step)), step)
            return toy.loss(params, target_params, batch, key)

        return toy._replace(loss=loss, takes_step=True)

    profile_training.profile(setup.set_up(read(config), noted), steps=2)
    jax.effects_barrier()
    assert seen
    assert min(seen) >= LATE > config.steps


@pytest.mark.parametrize("name", ["train.typo", "train.methods.losses", ""])
def test_a_method_that_is_none(name, capsys):
    assert profile_training.main([f"--method={name}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --method={name!r}: ")
    assert error.count("\n") == 1
    assert "use a module with make_method and Config" in error


def test_every_part_is_in_the_table(tmp_path, monkeypatch, capsys):
    write_data(tmp_path / "data")
    monkeypatch.setattr(
        setup, "load_model", lambda name, *, field, form, mesh=None: toy_target(mesh)
    )
    config = get_config()
    config.data, config.workdir = str(tmp_path / "data"), str(tmp_path / "w")
    config.accumulate = 2
    made = setup.set_up(read(config), lambda target, data, config: toy_method(target))
    profile_training.profile(made, steps=2)
    text = capsys.readouterr().out
    for words in (
        "toy for random-0",
        "2 micro-batches",
        "target forward",
        "loss forward",
        "backward",
        "update",
        "waiting for data",
        "whole step",
        "reading a batch",
        "tokens/s",
    ):
        assert words in text, words
