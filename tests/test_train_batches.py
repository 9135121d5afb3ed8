"""Packing: every conversation once an epoch, labels where they belong, any position again."""

import itertools
import threading
import time
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from toy_training import Listed, conversations

from specjax.errors import InputError
from train.data.batches import build, read_ahead
from train.data.packing import Packing, Position, Shape
from train.run.loop import Feed
from train.run.sharding import Placement

SHAPE = Shape(rows=4, tokens=32, labels=20)


def one(tokens, mask, **features):
    return SimpleNamespace(
        tokens=np.asarray(tokens, np.int32), loss_mask=np.asarray(mask, bool), features=features
    )


def packed(source, shape=SHAPE, seed=0):
    return Packing(source, np.arange(len(source)), shape, seed)


@pytest.fixture(scope="module")
def source():
    return Listed(conversations(200))


def test_an_epoch_holds_every_conversation_once(source):
    packing = packed(source)
    for epoch in (0, 1):
        rows = packing.rows(epoch)
        assert sorted(itertools.chain(*rows)) == list(range(200))
        assert all(source.lengths[row].sum() <= 32 for row in rows)
        assert all(np.minimum(source.num_labels[row], 20).sum() <= 20 for row in rows)


def test_another_epoch_or_seed_has_another_order(source):
    packing = packed(source)
    first = packing.rows(0)
    assert packing.rows(1) != first
    assert packing.rows(0) == first
    assert packed(source, seed=1).rows(0) != first
    assert packed(source).rows(0) == first


def test_rows_are_filled_well():
    """Lengths as of real conversations; neighbours in the order of reading waste far more."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.2, 0.6, 2000), 20, 1024).astype(int)
    source = Listed(one(np.zeros(size), np.arange(size) >= size // 3) for size in lengths)
    packing = packed(source, Shape(8, 1024, 720))
    assert packing.fill_rate() > 0.96
    in_order, room = 1, 1024
    for size in lengths:
        in_order, room = (in_order + 1, 1024 - size) if size > room else (in_order, room - size)
    assert lengths.sum() / (in_order * 1024) < 0.93


def test_a_row_holds_conversations_whole(source):
    packing = packed(source)
    rows = packing.rows(0)[:4]
    batch = build(source, rows, SHAPE)
    for row, members in enumerate(rows):
        labelled = set(batch.labels[row][batch.labels[row] >= 0].tolist())
        expected, start = set(), 0
        for number, member in enumerate(members, start=1):
            example = source[member]
            here = slice(start, start + len(example.tokens))
            assert (batch.tokens[row, here] == example.tokens).all()
            assert (batch.positions[row, here] == np.arange(len(example.tokens))).all()
            assert (batch.segments[row, here] == number).all()
            expected |= {start + index for index in np.flatnonzero(example.loss_mask) if index >= 2}
            start = here.stop
        assert labelled == set(sorted(expected)[:20])
        assert (batch.segments[row, start:] == 0).all()
        assert (np.diff(batch.labels[row][batch.labels[row] >= 0]) > 0).all()


def test_features_lie_beside_their_tokens():
    shape = Shape(2, 32, 20, ("final_norm",), 16)
    source = Listed(conversations(20, features=("final_norm", "pre_norm")))
    rows = packed(source, shape).rows(0)[:2]
    batch = build(source, rows, shape)
    assert set(batch.features) == {"final_norm"}
    assert batch.features["final_norm"].dtype == np.float16
    for row, members in enumerate(rows):
        start = 0
        for member in members:
            values = source[member].features["final_norm"]
            assert (batch.features["final_norm"][row, start : start + len(values)] == values).all()
            start += len(values)
        assert not batch.features["final_norm"][row, start:].any()


def test_long_conversations_are_truncated_and_many_labels_dropped():
    source = Listed([one(np.arange(50), np.arange(50) >= 1)])
    batch = build(source, [[0]], SHAPE)
    assert (batch.tokens[0] == np.arange(32)).all()
    # The first two tokens of a conversation are no labels, whatever the mask says.
    assert batch.labels[0].tolist() == list(range(2, 22))


def test_what_cannot_teach_is_left_out():
    masked = one(np.arange(10), np.zeros(10))
    late = one(np.arange(40), np.arange(40) >= 36)
    good = one(np.arange(10), np.arange(10) >= 5)
    packing = packed(Listed([masked, good, late]))
    assert packing.rows(0) == [[1]]
    assert packing.left_out == 2
    for source in ([masked, late], []):
        with pytest.raises(InputError, match="none of the . conversations has a token to learn"):
            packed(Listed(source))


def batches(source, position, count, own=(0, 1, 2, 3)):
    placement = Placement(micro=1, per_micro=4, held=own, mesh=None)
    return list(islice(Feed(source, packed(source), SHAPE, placement).batches(position), count))


def test_every_position_can_be_gone_on_from(source):
    """Across the end of an epoch too."""
    whole = batches(source, Position(0, 0), 70)
    assert whole[-1][1].epoch > 0
    for start in (1, 34, 69):
        (again, after) = batches(source, whole[start - 1][1], 1)[0]
        batch, position = whole[start]
        assert after == position
        assert (again.tokens == batch.tokens).all()
        assert (again.labels == batch.labels).all()


def test_processes_read_their_own_rows(source):
    """Together they have what one process has."""
    read = []

    class Watched(Listed):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    (whole, _) = batches(source, Position(0, 0), 1)[0]
    (part, _) = batches(Watched(source), Position(0, 0), 1, own=(1, 3))[0]
    assert (part.tokens == whole.tokens[:, [1, 3]]).all()
    rows = packed(source).rows(0)
    assert read == rows[1] + rows[3]


def test_reading_ahead_keeps_order_stops_at_its_depth_and_ends():
    made, threads = [], threading.active_count()

    def items():
        for number in itertools.count():
            made.append(number)
            yield number

    ahead = read_ahead(items(), depth=2)
    assert list(islice(ahead, 20)) == list(range(20))
    time.sleep(0.3)
    assert len(made) == 22
    ahead.close()
    assert threading.active_count() == threads


def test_what_the_thread_raises_is_raised_here():
    def items():
        yield 1
        raise InputError("conversation 7 cannot be read")

    ahead = read_ahead(items())
    assert next(ahead) == 1
    with pytest.raises(InputError, match="conversation 7"):
        next(ahead)
