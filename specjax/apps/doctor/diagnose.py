"""Measure a drafter, teacher-forced and decoded, and test what may explain a low acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specjax import metrics
from specjax.apps.doctor import changes as faults
from specjax.apps.doctor.answers import Answers, read_answers, warp_arguments
from specjax.apps.doctor.changes import Change, Finding
from specjax.apps.doctor.rounds import Rounds, read_rounds
from specjax.apps.doctor.teacher_forced import Reading, Scores, confidence, score
from specjax.apps.doctor.weight_checks import weight_notes
from specjax.drafters import LoadedDrafter, Merged, Turns
from specjax.engine.generate import Generation, generate
from specjax.engine.processing import check_unprocessed
from specjax.engine.requests import Prompts, SamplingParams, as_prompts, encode_prompt
from specjax.errors import InputError
from specjax.loading.model import MODEL_KIND, Model
from specjax.methods.heads.calibration import calibration_error, fit_temperature
from specjax.methods.heads.examined import Examined
from specjax.models.features import check_features

_LEAST_GAIN, _LEAST_ERRORS = 0.02, 4.0
"""The minimum gain of overlap that makes a finding, absolute and in standard errors."""
_NEAR_CHANCE = 0.1
"""The least fraction of the way from chance to 1 that a drafter trained for the target reaches."""
_NEARLY = 0.8
"""The least share of the gain by the best draft vocabulary that the trained one has."""
_LEAST_SHORTFALL = 0.05
"""The minimum mean number of tokens by which rounds accept fewer than predicted, for a finding."""
_LEAST_MISCALIBRATION = 0.1
"""The minimum calibration error of a confidence head that makes a finding."""


class Share(NamedTuple):
    """A mean or a share of `count` observations, with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        """Return the number and its interval."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Measured:
    """Acceptance by position in the draft; None if it cannot be measured.

    `overlap` is sum_x min(p, q) after every true prefix, and `agreement` the share of those
    prefixes after which the likeliest tokens of p and q are equal. `decoded` is the share of the
    draft tokens that decoding tested and accepted, and `predicted` what teacher forcing predicts
    for the same ones (`rounds.Rounds`). `chance` is the overlap of a draft without context.
    """

    overlap: tuple[Share, ...] | None
    agreement: tuple[Share, ...] | None
    predicted: tuple[Share | None, ...] | None
    decoded: tuple[Share | None, ...]
    acceptance_length: float | None
    chance: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`: acceptance, and findings with the most explanatory one first.

    `tried` has each change and the drafter's overlap with it. `examined` is False for drafters
    without features or a head, which have nothing to change. `str()` is a table.
    """

    drafter: str
    target: str
    measured: Measured
    findings: tuple[Finding, ...]
    tried: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    examined: bool = True

    def __str__(self) -> str:
        """Return acceptance by position as a table, followed by the findings."""
        measured = self.measured
        lines = [f"{self.drafter} for {self.target}: acceptance by position in the draft"]
        lines += _table(measured)
        if measured.acceptance_length is not None:
            lines.append(f"acceptance length, decoded: {measured.acceptance_length:.2f}")
        if measured.chance is not None:
            lines.append(f"a draft without context would overlap by {measured.chance:.2f}")
        for number, finding in enumerate(self.findings, 1):
            lines += [f"{number}. {finding.fault}: {finding.evidence}", f"   {finding.remedy}"]
        lines += [f"note: {note}" for note in self.notes]
        if not self.examined:
            lines.append(f"{self.drafter} reads no features and has no head: nothing to examine")
        elif not self.findings:
            lines.append(f"nothing found ({len(self.tried)} changes tried)")
        return "\n".join(lines)


def diagnose(
    target: Model,
    drafter: LoadedDrafter,
    prompts: Prompts,
    *,
    sampling: SamplingParams = SamplingParams(max_new_tokens=64),  # noqa: B008 - frozen
    batch_size: int = 8,
    seed: int = 0,
    other_prompts: Mapping[str, Prompts] | None = None,
    in_float32: Callable[[], tuple[Model, LoadedDrafter]] | None = None,
    tell: Callable[[str], Any] = lambda line: None,
) -> Diagnosis:
    """Measure how much of a drafter is accepted, and find what lowers its acceptance.

    The prompts are decoded with chains of the drafter; then it drafts at every position of these
    answers, unchanged and with single changes that would each undo a known fault. Overlaps are
    those under `sampling`, or at temperature 1 if its is 0. `other_prompts` are the same prompts in
    another form, by the setting that gives it ("chat=false"). `in_float32` loads the target and the
    drafter without rounding; it is called at most once. `tell` is called with a line about each
    change. Raises InputError for bad prompts, for sampling parameters that need a processor, for
    drafters that are joined or draft trees, and for block drafters and draft models with the option
    `sliding_window`.
    """
    MODEL_KIND.check("target", target)
    _check_drafter(drafter, target)
    check_unprocessed(sampling)
    prompts = _encoded(target, prompts, "prompts")
    others = {
        name: _encoded(target, other, f"other_prompts[{name!r}]")
        for name, other in (other_prompts or {}).items()
    }
    result = generate(
        target, prompts, drafter=drafter, sampling=sampling, batch_size=batch_size, seed=seed
    )
    if not isinstance(drafter.drafter, Examined):
        measured = Measured(None, None, None, *_decoded(result))
        return Diagnosis(drafter.name, target.name, measured, (), examined=False)
    examination = _Examination(target, drafter, prompts, result, sampling, tell)
    return examination.run(others, in_float32)


@dataclass
class _Examination:
    """One call of `diagnose`: its answers, and the changes measured on them so far."""

    target: Model
    loaded: LoadedDrafter
    prompts: Sequence[Sequence[int]]
    result: Generation
    sampling: SamplingParams
    tell: Callable[[str], Any]
    tried: list[tuple[str, float]] = field(default_factory=list)

    def run(
        self,
        others: Mapping[str, Sequence[Sequence[int]]],
        in_float32: Callable[[], tuple[Model, LoadedDrafter]] | None,
    ) -> Diagnosis:
        """Measure the drafter and every change, and return the result.

        `others` are the prompts in other forms by setting; `in_float32` is that of `diagnose`.
        """
        drafter = self.loaded.drafter
        answers = self.read(self.target, self.prompts)
        if not answers.is_label.any():
            raise InputError("prompts: no answer has a token to examine; give other prompts")
        reading = _reading(self.loaded, answers)
        before = score(reading, answers, self.compared_at)
        rounds = read_rounds(self.result, before, self.acceptance(before))
        measured = self.measured(before, answers, rounds)
        changes = (
            *faults.changes(reading, answers, self.target),
            *self.of_templates(others),
            *self.of_dtype(answers, in_float32),
        )
        gains = self.explaining(changes, before)
        for best in self.explaining(faults.of_other_tokens(reading, answers, self.target), before):
            # A known mistake that explains about as much has the better remedy.
            least = _NEARLY * (best.after - best.before)
            maps = [one for one in gains if one.fault == faults.VOCABULARY]
            gains += [] if any(one.after - one.before >= least for one in maps) else [best]
        gains.sort(key=lambda finding: finding.before - finding.after)
        findings = _ranked(gains, measured, before)
        if not findings:
            others_found = (_shortfall(rounds), self.of_confidence(reading, answers, before))
            findings = tuple(one for one in others_found if one is not None)
        return Diagnosis(
            self.loaded.name,
            self.target.name,
            measured,
            findings,
            tuple(self.tried),
            (*weight_notes(drafter, self.loaded.params), *self.of_tokenizer()),
        )

    def of_tokenizer(self) -> Iterator[str]:
        """Yield how much of the answers a draft model with another tokenizer can draft."""
        params = self.loaded.params
        if not (isinstance(params, dict) and "to_draft" in params):
            return
        common = np.asarray(params["draft_ids"])
        share = np.isin(np.concatenate(self.result.token_ids), common).mean()
        yield (
            f"another tokenizer: {len(common)} of the target's {self.target.config.vocab_size} "
            f"tokens can be drafted, {share:.1%} of those in the answers"
        )

    @property
    def compared_at(self) -> SamplingParams:
        """The parameters of the distributions that are compared: temperature 1 for greedy ones."""
        return self.sampling if self.sampling.temperature else SamplingParams(temperature=1.0)

    def acceptance(self, scores: Scores) -> np.ndarray:
        """Return the probability [B, A, K] that decoding accepts each draft token."""
        if not self.sampling.temperature:
            return scores.agrees.astype(np.float32)
        return scores.overlap if self.loaded.drafter.sampled else scores.likeliest

    def read(self, target: Model, prompts: Sequence[Sequence[int]]) -> Answers:
        """Return a target's distributions and features over the answers after given prompts."""
        names = faults.readable_features(self.loaded.drafter, target.config.num_layers)
        return read_answers(target, prompts, self.result.token_ids, names, self.compared_at)

    def of_templates(self, others: Mapping[str, Sequence[Sequence[int]]]) -> list[Change]:
        """Return a change for each other form of the prompts, followed by the same answers."""

        def make(prompts: Sequence[Sequence[int]]) -> tuple[Reading, Answers]:
            answers = self.read(self.target, prompts)
            return _reading(self.loaded, answers), answers

        return [
            Change(
                faults.TEMPLATE,
                f"the same answers after prompts with {name}",
                f"{name}, or a head that was trained on the prompts as they are",
                lambda prompts=prompts: make(prompts),
            )
            for name, prompts in others.items()
        ]

    def of_dtype(
        self, answers: Answers, in_float32: Callable[[], tuple[Model, LoadedDrafter]] | None
    ) -> list[Change]:
        """Return the changes to float32: of the drafter alone, and of drafter and target."""
        if in_float32 is None:
            return []
        loaded: list[tuple[Model, LoadedDrafter]] = []

        def make(*, both: bool) -> tuple[Reading, Answers]:
            loaded[:] = loaded or [in_float32()]
            target, drafter = loaded[0]
            read = self.read(target, self.prompts) if both else answers
            return _reading(drafter, read), read

        return [
            Change(
                faults.DTYPE,
                "the drafter in float32",
                "drafter.weights=float, dtype=float32",
                lambda: make(both=False),
            ),
            Change(
                faults.DTYPE,
                "target and drafter in float32",
                "weights=float, drafter.weights=float, dtype=float32",
                lambda: make(both=True),
            ),
        ]

    def explaining(self, changes: Iterable[Change], before: Scores) -> list[Finding]:
        """Measure changes; return the findings of `explains`."""
        found = (self.explains(change, before) for change in changes)
        return [finding for finding in found if finding is not None]

    def explains(self, change: Change, before: Scores) -> Finding | None:
        """Measure a change; return a finding if it raises the overlap significantly, else None.

        `before` are the scores of the unchanged drafter.
        """
        after = score(*change.make(), self.compared_at)
        # Drafts may have another length.
        length = min(before.tested.shape[2], after.tested.shape[2])
        before, after = before.first(length), after.first(length)
        tested = before.tested & after.tested
        both = tested.any(axis=2)
        differences = _per_label(after.overlap - before.overlap, tested)[both]
        gain, error = differences.mean(), differences.std() / np.sqrt(max(len(differences), 1))
        old, new = (float(scores.overlap[tested].mean()) for scores in (before, after))
        self.tried.append((f"{change.fault}: {change.what}", new))
        self.tell(f"{change.fault}: {change.what}: {old:.3f} -> {new:.3f}")
        if not (gain >= _LEAST_GAIN and gain >= _LEAST_ERRORS * error):
            return None
        evidence = f"{change.what} raises the overlap from {old:.2f} to {new:.2f} (+-{error:.2f})"
        return Finding(change.fault, evidence, change.remedy, old, new, float(error))

    def of_confidence(self, reading: Reading, answers: Answers, scores: Scores) -> Finding | None:
        """Return a finding if a confidence head's estimates are far from the true acceptance.

        `scores` are those of the unchanged drafter. The head was trained at temperature 1; the
        result is None under any other parameters.
        """
        drafter = reading.drafter
        if not drafter.has_confidence:
            return None
        if warp_arguments(self.compared_at) != warp_arguments(SamplingParams(temperature=1.0)):
            return None
        logits, accepted = confidence(reading, answers)[scores.tested], scores.values
        temperature = fit_temperature(logits, accepted)
        before, after = (
            calibration_error(each, accepted) for each in (logits, logits / temperature)
        )
        self.tell(f"{faults.CONFIDENCE}: calibration error {before:.3f}")
        if before < _LEAST_MISCALIBRATION:
            return None
        return Finding(
            faults.CONFIDENCE,
            f"estimated and true acceptance differ by {before:.2f} on average, and by {after:.2f} "
            f"with the estimate's logit divided by {temperature:.2f}",
            f"divide the weights and the bias of the confidence head by {temperature:.2f}, as "
            "train.block does after its last step, or leave draft_p_min out",
            before,
            after,
        )

    def measured(self, scores: Scores, answers: Answers, rounds: Rounds) -> Measured:
        """Return acceptance by position, from the teacher-forced scores and from decoding."""
        tested, steps = scores.tested, range(scores.tested.shape[2])
        in_rounds = [rounds.tested[:, i] for i in steps]
        return Measured(
            tuple(_mean(scores.overlap[..., i][tested[..., i]]) for i in steps),
            tuple(_share(scores.agrees[..., i][tested[..., i]]) for i in steps),
            tuple(_mean(rounds.predicted[in_rounds[i], i]) for i in steps),
            tuple(_share(rounds.accepted[in_rounds[i], i]) for i in steps),
            metrics.acceptance_length(self.result.accepted),
            chance=answers.chance,
        )


def _check_drafter(drafter: LoadedDrafter, target: Model) -> None:
    """Raise InputError for drafters that are joined, draft trees, or draft nothing."""
    if not isinstance(drafter, LoadedDrafter):
        raise InputError("drafter: give a LoadedDrafter, as make_drafter returns it")
    if isinstance(drafter.drafter, Turns | Merged):
        raise InputError(f"drafter={drafter.name!r}: joined drafters; examine them one by one")
    if drafter.drafter.branches:
        raise InputError(f"drafter={drafter.name!r}: drafts a tree; examine its chain, tree=None")
    if drafter.drafter.num_speculative_tokens < 1:
        raise InputError("num_speculative_tokens=0: nothing is drafted; use at least 1")
    if isinstance(drafter.drafter, Examined):
        check_features(drafter.drafter.features, target.config.num_layers)
        _check_window(drafter.drafter)
        _check_fc(drafter, target)


def _check_window(drafter: Examined) -> None:
    """Raise InputError for a window that a pass over true tokens does not have."""
    if not drafter.applies_window and drafter.sliding_window is not None:
        raise InputError(
            f"drafter.sliding_window={drafter.sliding_window}: examine the drafter without it"
        )


def _check_fc(loaded: LoadedDrafter, target: Model) -> None:
    """Raise InputError unless the `fc` of a head with taps reads as many numbers as they give."""
    drafter = loaded.drafter
    if not drafter.fuses_taps:
        return
    taps, width = len(drafter.features), target.config.hidden_size
    if (inputs := loaded.params["fc"]["kernel"].shape[0]) != taps * width:
        raise InputError(
            f"taps={drafter.features}: {taps} features of width {width}, and the head's fc reads "
            f"{inputs} numbers; use the taps and the target that it was trained with"
        )


def _encoded(target: Model, prompts: Prompts, name: str) -> list[list[int]]:
    """Return the token ids of prompts; errors call them `name`."""
    return [
        encode_prompt(target, prompt, f"{name}[{number}]")
        for number, prompt in enumerate(as_prompts(prompts))
    ]


def _reading(loaded: LoadedDrafter, answers: Answers) -> Reading:
    """Return a drafter with the features that it reads of the answers."""
    features = {name: answers.features[name] for name in loaded.drafter.features}
    return Reading(loaded.drafter, loaded.params, features)


def _ranked(found: Sequence[Finding], measured: Measured, before: Scores) -> tuple[Finding, ...]:
    """Return the findings that explain at least half as much as the first, one for each fault.

    `found` is sorted by decreasing gain. If the first draft token stays near chance with every
    change, the only finding is that the drafter was made for another target.
    """
    best = found[0].after if found else float(before.values.mean())
    first, limit = measured.overlap[0].value, measured.chance + _NEAR_CHANCE * (1 - measured.chance)
    if first < limit and best < limit:
        evidence = (
            f"the first draft token overlaps by {first:.2f}, and a draft without context by "
            f"{measured.chance:.2f}; no single change raises it"
        )
        remedy = "drafter.path: a head that was trained for this target's weights, or train one"
        return (Finding(faults.TARGET, evidence, remedy, float(before.values.mean())),)
    kept: dict[str, Finding] = {}
    for finding in found:
        if finding.after - finding.before >= (found[0].after - found[0].before) / 2:
            kept.setdefault(finding.fault, finding)
    return tuple(kept.values())


def _shortfall(rounds: Rounds) -> Finding | None:
    """Return a finding if rounds accept fewer tokens than teacher forcing predicts for them.

    The result is None if the difference is small, or as large as its standard errors.
    """
    count, shortfall = len(rounds.tested), rounds.shortfall
    if not count or (gap := float(shortfall.mean())) < _LEAST_SHORTFALL:
        return None
    # The mean is 0 in a loop without faults, so the spread is the one around 0.
    error = float(np.sqrt(np.square(shortfall).mean() / count))
    if gap < _LEAST_ERRORS * error:
        return None
    accepted, predicted = (
        float(np.where(rounds.tested, each, 0).sum()) / count
        for each in (rounds.accepted, rounds.predicted)
    )
    return Finding(
        faults.DECODING,
        f"{accepted:.2f} draft tokens per round are accepted, where teacher forcing predicts "
        f"{predicted:.2f} for the same {count} rounds (+-{error:.2f})",
        "in a drafter of your own, check what observe keeps (specjax.testing.check_drafter)",
        predicted,
        accepted,
        error,
    )


def _per_label(values: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """Return each label's mean [B, A] over the draft positions marked in `tested` [B, A, K]."""
    return np.where(tested, values, 0).sum(axis=2) / np.maximum(tested.sum(axis=2), 1)


def _decoded(result: Generation) -> tuple[tuple[Share | None, ...], float | None]:
    """Return the acceptance in decoding, by position given earlier ones, and its length."""
    counts = (result.drafted, result.accepted, result.longest_path)
    values = metrics.cond_acceptance_at_pos(*counts)
    tested = [
        int(((result.accepted >= i) & (result.drafted > i)).sum()) for i in range(len(values))
    ]
    shares = tuple(
        None if value is None else _wilson(value, count)
        for value, count in zip(values, tested, strict=True)
    )
    return shares, metrics.acceptance_length(result.accepted)


def _mean(values: np.ndarray) -> Share | None:
    """Return the mean of values in [0, 1] with a normal interval; None without values."""
    if not len(values):
        return None
    mean, error = float(values.mean()), 1.96 * float(values.std() / np.sqrt(len(values)))
    return Share(mean, max(mean - error, 0.0), min(mean + error, 1.0), len(values))


def _share(hits: np.ndarray) -> Share | None:
    """Return the share of true values with Wilson's interval; None without values."""
    return None if not len(hits) else _wilson(float(hits.mean()), len(hits))


def _wilson(value: float, count: int, z: float = 1.96) -> Share:
    """Return the share `value` of `count` observations with Wilson's interval at `z` errors."""
    middle = (value + z * z / (2 * count)) / (1 + z * z / count)
    spread = z / (1 + z * z / count)
    spread *= np.sqrt(value * (1 - value) / count + z * z / (4 * count * count))
    # Where the share is 0 or 1, rounding leaves its end of the interval.
    low, high = max(0.0, float(middle - spread)), min(1.0, float(middle + spread))
    return Share(value, low, high, count)


def _table(measured: Measured) -> list[str]:
    """Return the lines of the table of acceptance by position."""
    rows: dict[str, Sequence[Share | None] | None] = {
        "teacher-forced, sum min(p, q)": measured.overlap,
        "teacher-forced, greedy": measured.agreement,
        "decoded": measured.decoded,
        "  predicted by teacher forcing": measured.predicted,
    }
    cells = {
        name: ["-" if share is None else str(share) for share in shares]
        for name, shares in rows.items()
        if shares is not None
    }
    width = max(map(len, cells))
    count = max(map(len, cells.values()))
    head = " " * width + "".join(f"  {number:<17}" for number in range(1, count + 1))
    body = [
        f"{name:<{width}}" + "".join(f"  {cell:<17}" for cell in row) for name, row in cells.items()
    ]
    return [line.rstrip() for line in (head, *body)]
