"""The runner of `decode`, `spec_bench` and `bench`: conversations decoded in several ways in turn.

A way is plain decoding or a drafter. Speeds are compared between ways that take turns, so that a
slow phase of the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from jax.sharding import Mesh

from specjax.apps.command_line.console import Screen
from specjax.apps.rows.compare_outputs import Difference, compare_row
from specjax.apps.rows.decode_report import PLAIN, Clock, DrafterRun, device_name, tree_record
from specjax.apps.rows.records import Conditions, DecodedRow, RunHeader
from specjax.apps.run.conversations import Conversations, Turn
from specjax.apps.run.decode_config import ConfigDrafter, DecodeConfig, DrafterConfig
from specjax.apps.tuning.weight_bandwidth import pass_bytes
from specjax.controllers import Fixed
from specjax.drafters import DRAFTER_KIND
from specjax.engine.engine import Engine
from specjax.engine.generate import Generation, decode_requests, open_engine
from specjax.engine.outputs import Delta, failure_message
from specjax.engine.plan import DecodePlan
from specjax.engine.requests import Request
from specjax.errors import InputError
from specjax.files.package_versions import versions
from specjax.loading.model import Model
from specjax.loading.texts.questions import Question, digest


@dataclass(eq=False)
class Program:
    """A plan, and its engine once one was opened; ways may share it."""

    plan: DecodePlan
    engine: Engine | None = None

    def open(self, name: str, requests: Sequence[Request], screen: Screen, clock: Clock) -> None:
        """Compile an engine and run its first round, unless there is one.

        The round decodes some of `requests` and is discarded, since first rounds are slow. The
        seconds of compiling are added to `clock` under `name`.
        """
        if self.engine is not None:
            return
        begin = time.perf_counter()
        self.engine = open_engine(self.plan)
        with screen.working(f"compiling {'plain decoding' if name == PLAIN else name}"):
            self.engine.compile()
        clock.compiled(name, time.perf_counter() - begin)
        with open_engine(self.plan, 1) as engine:
            engine.submit(requests[: self.plan.options.batch_size])
            engine.step()

    def close(self) -> None:
        """Free the engine's caches."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


@dataclass(eq=False)
class Way:
    """A way to decode: its name, its program, and the run that its rows are added to, if any.

    `limit` is the maximum number of draft tokens, if it is less than the program's.
    """

    name: str
    program: Program
    run: DrafterRun | None = None
    limit: int | None = None

    @property
    def plan(self) -> DecodePlan:
        """The plan of the program."""
        return self.program.plan

    def decode(self, turn: Turn, follow: Callable[[list[Delta]], None] | None = None) -> Generation:
        """Decode the requests of a turn; `follow` is called with the deltas of each step."""
        engine, drafter = self.program.engine, self.plan.loop.drafter
        if self.limit is not None:
            engine.control(Fixed(self.limit))
        result = decode_requests(self.plan, turn.requests, engine=engine, follow=follow)
        if self.limit is None or any(part.branches for part in drafter.parts):
            return result
        return replace(result, longest_path=min(result.longest_path, self.limit))


@dataclass(frozen=True)
class Answers:
    """What a way answered to one turn of a group of conversations."""

    turn: Turn
    result: Generation

    def rows(
        self,
        drafter: str,
        batch: int,
        questions: Sequence[Question],
        plain: Generation | None,
        differences: Sequence[Difference | None] | None,
        repeated_speeds: Sequence[tuple[float, float]] = (),
    ) -> list[DecodedRow]:
        """Return the records of the answers of a drafter, which were decoded as one group.

        `batch` is the number of the group in the run, and `questions` are those of the
        conversations. Row i of `plain` is plain decoding's answer; `plain` is None if it was not
        run. Entry i of `differences` is None if both answers are equal; `differences` is None if
        they are not compared. `repeated_speeds` has, for each of several repeats, tokens/s of the
        drafter and of plain decoding.
        """
        result = self.result
        asked = [questions[index] for index in self.turn.questions]
        compared = differences or [None] * len(asked)
        return [
            DecodedRow(
                drafter=drafter,
                question_id=question.question_id,
                category=question.category,
                turn=self.turn.number,
                prompt_hash=digest(question),
                token_ids=tuple(result.token_ids[index]),
                text=result.texts[index],
                finish_reason=result.finish_reasons[index],
                text_error=failed.text_error if (failed := result.failed_rows.get(index)) else None,
                logprobs=logprobs and tuple(logprobs),
                **_rounds(result, index),
                longest_path=result.longest_path,
                batch=batch,
                first_round=int(result.first_round[index]),
                prefill_s=result.prefill_s,
                decode_s=result.decode_s,
                **asdict(result.times[index]),
                plain_new_tokens=len(plain.token_ids[index]) if plain else None,
                plain_prefill_s=plain.prefill_s if plain else None,
                plain_decode_s=plain.decode_s if plain else None,
                plain_passes=len(plain.passes()[0]) if plain else None,
                identical=None if differences is None else compared[index] is None,
                near_ties=compared[index].near_ties if compared[index] else (),
                repeated_speeds=tuple(repeated_speeds),
            )
            for index, (question, logprobs) in enumerate(zip(asked, result.logprobs, strict=True))
        ]

    def differences(self, plan: DecodePlan, plain: Generation) -> list[Difference | None]:
        """Return each row's difference from plain decoding; `plan` is the plan of the way."""
        rows = zip(self.turn.requests, self.result.token_ids, plain.token_ids, strict=True)
        return [compare_row(plan, *row) for row in rows]


def in_turn(
    conversations: Conversations,
    group: Sequence[int],
    ways: Sequence[Way],
    decode: Callable[[Way, Turn], Generation],
    asked: Sequence[Turn] = (),
) -> Iterator[tuple[Way, list[Answers]]]:
    """Decode all turns of a group of questions in each of `ways`; yield each with its answers.

    The answers of the first way are the history of later turns for all ways, unless the turns are
    given: `asked`. `decode` decodes a turn in a way.
    """
    for way in ways:
        if asked:
            yield way, [Answers(turn, decode(way, turn)) for turn in asked]
            continue
        answers: list[Answers] = []
        texts: dict[int, list[str]] = {index: [] for index in group}
        while (turn := conversations.turn(len(answers), texts)) is not None:
            answers.append(Answers(turn, decode(way, turn)))
            for index, text in zip(turn.questions, answers[-1].result.texts, strict=True):
                texts[index].append(text)
        asked = [one.turn for one in answers]
        yield way, answers


def check_answered(conversations: Conversations, way: Way, answers: Sequence[Answers]) -> None:
    """Raise InputError if a row of a way failed."""
    for one in answers:
        for row, failure in one.result.failed_rows.items():
            question = conversations.questions[one.turn.questions[row]]
            name = conversations.name(question.question_id, one.turn.number)
            named = {f"{name}, with {way.name}": failure}
            raise InputError(failure_message(conversations.model, named))


def open_run(
    config: DecodeConfig,
    drafter: DrafterConfig,
    made: ConfigDrafter,
    model: Model,
    mesh: Mesh | None,
    rows: Sequence[DecodedRow] = (),
) -> DrafterRun:
    """Return the run of one of a config's drafters; `rows` are those that were reported before."""
    header = RunHeader(
        drafter=drafter.name,
        target=config.target,
        conditions=Conditions(
            device=device_name(mesh),
            dtype=model.weights,
            batch_size=config.options.batch_size,
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
        ),
        lossy=config.lossy,
        versions=versions(),
        trees={name: tree_record(chosen) for name, chosen in made.trees.items()},
        config=config.written_for(drafter),
        drafter_bytes=DRAFTER_KIND.check("drafter", made.loaded).own_bytes(model.params),
        pass_bytes=pass_bytes(model, config.options.batch_size),
    )
    return DrafterRun(header, made.trees, rows=list(rows), num_reported=len(rows) or -1)


def turn_order(ways: int, repeat: int) -> list[int]:
    """Return the order in which a repeat (from 0) decodes in each of `ways` ways.

    Every other repeat runs backwards, so that a machine that slows down steadily affects all ways
    equally, and each pair of repeats starts with another way.
    """
    return np.roll(range(ways), -(repeat // 2))[:: -1 if repeat % 2 else 1].tolist()


def _rounds(result: Generation, index: int) -> dict[str, tuple[int, ...]]:
    """Return the raw counts, by name, of the rounds in which row `index` was active."""
    active = result.emitted[index] >= 0
    counts = {
        "drafted": result.drafted,
        "accepted": result.accepted,
        "emitted": result.emitted,
        "width": result.width,
        "drafter_index": result.drafter,
    }
    return {name: tuple(table[index][active].tolist()) for name, table in counts.items()}
