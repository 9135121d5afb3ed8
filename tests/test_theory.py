import dataclasses
import inspect

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import theory
from specjax.errors import InputError

SMOLLM2_135M = theory.ModelShape(30, 576, 1536, 9, 3, 64, 49152, tie_word_embeddings=True)
LLAMA_3_8B = theory.ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_3_1B = theory.ModelShape(16, 2048, 8192, 32, 8, 64, 128256, tie_word_embeddings=True)

probabilities = st.floats(0.0, 1.0)
lengths = st.integers(0, 12)
costs = st.floats(0.0, 2.0)
conventions = st.sampled_from(["per_step", "per_draft"])


LEVIATHAN_TABLE_1 = [
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
]
"""alpha, gamma and the speed-up with drafts that cost nothing (2211.17192)."""


@pytest.mark.parametrize(("alpha", "k", "published"), LEVIATHAN_TABLE_1)
def test_the_published_table_of_speed_ups(alpha, k, published):
    assert round(theory.speedup(alpha, k, 0.0), 2) == published


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(0.8, 5, 3.69), (0.9, 8, 6.13), (0.7, 4, 2.77)])
def test_expected_tokens_counts_the_bonus_once(alpha, k, tokens):
    assert round(theory.expected_tokens(alpha, k), 2) == tokens


@settings(deadline=None)
@given(st.floats(0.0, 0.999), lengths)
def test_expected_tokens_is_the_closed_form(alpha, k):
    closed = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert theory.expected_tokens(alpha, k) == pytest.approx(closed, rel=1e-10)


def test_expected_tokens_at_the_ends():
    assert theory.expected_tokens(1.0, 7) == 8.0
    assert theory.expected_tokens(0.0, 7) == 1.0
    assert theory.expected_tokens(0.5, 0) == 1.0
    # The quotient has lost all digits here; 1 + k stays 1 + k.
    assert theory.expected_tokens(1.0 - 1e-16, 7) == pytest.approx(8.0, rel=1e-14)


def test_acceptance_from_tv_is_the_overlap():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    tv = 0.5 * np.abs(p - q).sum()
    assert theory.acceptance_from_tv(tv) == pytest.approx(np.minimum(p, q).sum())


@settings(deadline=None)
@given(probabilities, probabilities, lengths, costs, conventions)
def test_speedup_grows_with_alpha_and_falls_with_cost(alpha, other, k, c, convention):
    low, high = sorted((alpha, other))
    gain = theory.speedup(low, k, c, convention=convention)
    assert gain <= theory.speedup(high, k, c, convention=convention)
    assert gain >= theory.speedup(low, k, c + 0.1, convention=convention)
    assert gain >= theory.speedup(low, k, c, convention=convention, verify_cost=1.2)
    assert theory.expected_tokens(low, k) <= theory.expected_tokens(low, k + 1)


def test_speedup_in_both_conventions():
    tokens = theory.expected_tokens(0.8, 4)
    assert theory.speedup(0.8, 4, 0.05) == pytest.approx(tokens / 1.2)
    assert theory.speedup(0.8, 4, 0.2, convention="per_draft") == pytest.approx(tokens / 1.2)
    assert theory.speedup(0.8, 4, 0.05, verify_cost=1.3) == pytest.approx(tokens / 1.5)
    assert theory.speedup(0.8, 0, 0.5, convention="per_draft") == 1.0


SCALES = {
    "expected_tokens": {"alpha": (0.5, 1.0), "k": (0, 5)},
    "acceptance_from_tv": {"tv": (0.0, 0.3)},
    "speedup": {"alpha": (0.5, 1.0), "k": (0, 5), "c": (0.0, 0.1), "verify_cost": (1.0, 1.4)},
    "optimal_k": {"alpha": (0.5, 0.9), "c": (0.0, 0.1), "max_k": (0, 9), "verify_cost": (1.0, 1.4)},
    "break_even_alpha": {"k": (1, 5), "c": (0.0, 0.1), "verify_cost": (1.0, 1.4)},
    "memory": {
        "batch": (1, 8),
        "capacity": (64, 4096),
        "num_nodes": (0, 7),
        "num_distributions": (0, 3),
        "weight_itemsize": (1, 2),
        "cache_itemsize": (2, 4),
        "logit_itemsize": (2, 4),
        "weight_bits": (6.0, 16.0),
        "draft_weight_bits": (4.5, 9.0),
    },
    "pass_seconds": {
        "tokens": (1, 5),
        "batch": (1, 64),
        "context": (0, 999),
        "itemsize": (2, 4),
        "weight_bits": (6.0, 16.0),
    },
    "roofline": {
        "batch": (1, 64),
        "context": (0, 999),
        "k": (0, 5),
        "alpha": (0.5, 1.0),
        "draft_cost": (0.0, 0.1),
        "itemsize": (2, 4),
        "weight_bits": (6.0, 16.0),
        "draft_weight_bits": (4.5, 9.0),
    },
    "weight_bytes": {
        "tokens": (1, 5),
        "rows": (1, 8),
        "itemsize": (2, 4),
        "weight_bits": (6.0, 16.0),
    },
    "stored_bits": {
        "bits": (4, 8.0),
        "group": (32, 4096),
        "numbers": (1, 2),
        "number_bits": (16, 32),
    },
}
"""Two values of every number that a function takes."""
OTHERS = {
    "speedup": [{"convention": "per_step"}, {"convention": "per_draft"}],
    "optimal_k": [{"convention": "per_step"}, {"convention": "per_draft"}],
    "break_even_alpha": [{"convention": "per_step"}, {"convention": "per_draft"}],
    "memory": [
        {"target": LLAMA_3_8B, "draft": LLAMA_3_1B},
        {"target": LLAMA_3_8B, "draft": LLAMA_3_1B, "weight_bits": None, "draft_weight_bits": None},
    ],
    "pass_seconds": [
        {"shape": LLAMA_3_8B, "chip": "h200"},
        {"shape": LLAMA_3_8B, "chip": "h200", "weight_bits": None},
    ],
    "weight_bytes": [{"shape": LLAMA_3_8B}, {"shape": LLAMA_3_8B, "weight_bits": None}],
    "roofline": [
        {"shape": LLAMA_3_8B, "chip": "h200"},
        {"shape": LLAMA_3_8B, "chip": "h200", "draft_cost": LLAMA_3_1B},
    ],
}
"""Arguments that are no numbers, and such in place of numbers."""
CALLS = [(name, others) for name in SCALES for others in OTHERS.get(name, [{}])]


def test_every_function_and_argument_is_in_the_sweep():
    functions = {name for name in theory.__all__ if inspect.isfunction(getattr(theory, name))}
    assert functions - {"roofline_tree"} == set(SCALES)
    for name, others in CALLS:
        arguments = set(inspect.signature(getattr(theory, name)).parameters)
        assert arguments == set(SCALES[name]) | set(others)


@pytest.mark.parametrize(("name", "others"), CALLS)
def test_every_number_broadcasts(name, others):
    """With an axis for each argument, each entry is the result of scalars, fields included."""
    function = getattr(theory, name)
    numbers = {key: pair for key, pair in SCALES[name].items() if key not in others}
    shape = [2] * len(numbers)
    grids = np.meshgrid(*map(np.array, numbers.values()), indexing="ij", sparse=True)
    table = _fields(function(**dict(zip(numbers, grids, strict=True)), **others))
    table = {key: np.broadcast_to(value, shape) for key, value in table.items()}
    for index in np.ndindex(*shape):
        values = {key: pair[i] for (key, pair), i in zip(numbers.items(), index, strict=True)}
        for field, value in _fields(function(**values, **others)).items():
            assert np.ndim(value) == 0
            np.testing.assert_allclose(
                table[field][index], value, 1e-12, err_msg=f"{field} {values}"
            )


@pytest.mark.parametrize(("name", "others"), CALLS)
def test_what_is_no_number_and_shapes_that_do_not_broadcast_name_the_argument(
    name, others, monkeypatch
):
    """For every number of every function: a text, None where there is no default, other shapes."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    function = getattr(theory, name)
    numbers = {key: pair[0] for key, pair in SCALES[name].items() if key not in others}
    for key, value in numbers.items():
        for wrong in ("0.8", "many", [[1], [1, 2]], 1j, True):
            with pytest.raises(InputError, match=rf"^{key}( = .*|: .*): give|^{key}: its rows"):
                function(**{**numbers, key: wrong}, **others)
        for other in numbers.keys() - {key}:
            pair = {key: np.full(2, value), other: np.full(3, numbers[other])}
            message = rf"^({key}|{other}) has shape \([23],\), which does not broadcast with "
            message += rf"({key}|{other}) \([23],\): give shapes such as"
            with pytest.raises(InputError, match=message):
                function(**{**numbers, **pair}, **others)


@pytest.mark.parametrize(
    ("name", "argument", "wrong"),
    [
        ("memory", "target", "llama"),
        ("memory", "draft", 5),
        ("pass_seconds", "shape", None),
        ("pass_seconds", "chip", 5),
        ("roofline", "shape", {}),
        ("roofline", "chip", "h1000"),
    ],
)
def test_what_is_no_model_and_no_chip_names_the_argument(name, argument, wrong, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    others = {**OTHERS[name][0], argument: wrong}
    numbers = {key: pair[0] for key, pair in SCALES[name].items() if key not in others}
    with pytest.raises(InputError, match=f"^{argument} = .*: give a (ModelShape|Chip)"):
        getattr(theory, name)(**numbers, **others)


def test_several_chips_are_one():
    two = theory.CHIPS["h200"].times(2)
    assert two == theory.Chip("2 x h200", 2 * 989e12, 2 * 4.8e12, 2 * 141e9)
    with pytest.raises(InputError, match="num_chips = 0: give a whole number of at least 1"):
        two.times(0)


def _fields(result):
    if not dataclasses.is_dataclass(result):
        return {"": result}
    return {**vars(result), **({"total": result.total} if hasattr(result, "total") else {})}


def test_results_of_scalars_are_pythons_numbers():
    assert type(theory.speedup(0.5, 3, 0.1)) is float
    assert type(theory.optimal_k(0.5, 0.1)) is int
    assert type(theory.roofline(LLAMA_3_8B, "h200", 1, 8, 3, 0.5).fits) is bool


@pytest.mark.parametrize(
    "name",
    ["batch", "context", "candidates", "itemsize", "weight_bits", "draft_weight_bits"],
)
def test_one_tree_takes_no_arrays(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    numbers = {"batch": 1, "context": 8, name: np.array([1, 2])}
    with pytest.raises(InputError, match=rf"{name} = \[1 2\]: give one number"):
        theory.roofline_tree(LLAMA_3_8B, "h200", [[0.5]], **numbers)


@settings(deadline=None)
@given(probabilities, costs, conventions, st.floats(0.5, 2.0))
def test_optimal_k_is_optimal(alpha, c, convention, slope):
    def verify_cost(k):
        return 1.0 + 0.1 * slope * k

    def gain(k):
        return theory.speedup(alpha, k, c, convention=convention, verify_cost=verify_cost(k))

    best = theory.optimal_k(alpha, c, max_k=10, convention=convention, verify_cost=verify_cost)
    assert gain(best) == max(gain(k) for k in range(11))
    assert all(gain(k) < gain(best) for k in range(best))


def test_optimal_k_at_the_ends():
    assert theory.optimal_k(0.9, 0.0, max_k=6) == 6
    assert theory.optimal_k(0.2, 0.3) == 0  # drafting costs more than it brings
    assert theory.optimal_k(0.0, 0.0) == 0
    assert theory.optimal_k(0.5, 0.0, verify_cost=3.0) == 0
    assert theory.optimal_k(0.8, 0.05) == max(range(33), key=lambda k: theory.speedup(0.8, k, 0.05))


@settings(deadline=None)
@given(st.integers(1, 12), st.floats(0.0, 1.0), conventions)
def test_break_even_alpha_breaks_even(k, c, convention):
    alpha = theory.break_even_alpha(k, c, convention=convention)
    assert theory.speedup(alpha, k, c, convention=convention) == pytest.approx(1.0, rel=1e-12)
    if alpha > 1e-6:
        assert theory.speedup(alpha - 1e-6, k, c, convention=convention) < 1.0


def test_break_even_alpha_by_hand():
    assert theory.break_even_alpha(1, 0.3) == pytest.approx(0.3)
    assert theory.break_even_alpha(4, 0.0) == 0.0
    assert theory.break_even_alpha(4, 1.0) == 1.0
    assert theory.break_even_alpha(1, 0.1, verify_cost=1.2) == pytest.approx(0.3)
    with pytest.raises(InputError, match=r"k = 4, c = 1\.5: .* give a cheaper draft"):
        theory.break_even_alpha(4, 1.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.5, 3), r"alpha = 1\.5: give .* at most 1"),
        (lambda: theory.expected_tokens(-0.1, 3), r"alpha = -0\.1: give"),
        (lambda: theory.expected_tokens(float("nan"), 3), r"alpha = nan: give"),
        (lambda: theory.expected_tokens(np.array([0.5, 2.0]), 3), r"alpha = 2: give"),
        (lambda: theory.expected_tokens(0.5, -1), r"k = -1: give a whole number of at least 0"),
        (lambda: theory.acceptance_from_tv(1.1), r"tv = 1\.1: give"),
        (lambda: theory.speedup(0.5, 3, -0.1), r"c = -0\.1: give"),
        (lambda: theory.speedup(0.5, 3, 0.1, verify_cost=0.0), r"verify_cost = 0: .* above 0"),
        (lambda: theory.speedup(0.5, 3, 0.1, convention="both"), r"convention = 'both': give"),
        (lambda: theory.optimal_k(0.5, 0.1, max_k=-1), r"max_k = -1: give"),
        (lambda: theory.ModelShape(0, 8, 8, 2, 1, 4, 8), r"num_layers = 0: give"),
        (lambda: theory.ModelShape(1, 8, 8, 3, 2, 4, 8), r"num_kv_heads = 2: .* num_heads = 3"),
        (lambda: theory.ExpertShape(4, 8, 16), r"per_token = 8: .* num_experts = 4"),
        (
            lambda: theory.ModelShape(2, 8, 8, 2, 1, 4, 8, window=4),
            r"window = 4, num_windowed = 0: give both or neither",
        ),
        (
            lambda: theory.ModelShape(2, 8, 8, 2, 1, 4, 8, window=4, num_windowed=3),
            r"num_windowed = 3: give 0 to the 2 layers",
        ),
        (lambda: theory.Chip("mine", 1e12, 0.0, 1e9), r"bandwidth = 0: give"),
        (lambda: theory.memory(LLAMA_3_8B, batch=0, capacity=8), r"batch = 0: give"),
        (lambda: theory.roofline(LLAMA_3_8B, "h1000", 1, 8, 3, 0.5), r"chip = 'h1000': .*h100-sxm"),
        (lambda: theory.roofline(LLAMA_3_8B, "h200", 1, -8, 3, 0.5), r"context = -8: give"),
        (
            lambda: theory.roofline(LLAMA_3_8B, "h200", 1, 8, 3, 0.5, draft_cost=-1.0),
            r"draft_cost = -1: give",
        ),
    ],
)
def test_bad_input_names_field_value_and_remedy(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_num_params_of_published_models():
    assert SMOLLM2_135M.num_params() == 134_515_008
    assert LLAMA_3_8B.num_params() == 8_030_261_248
    assert LLAMA_3_1B.num_params() == 1_235_814_400


def test_num_params_by_part():
    untied = dataclasses.replace(SMOLLM2_135M, tie_word_embeddings=False)
    assert untied.num_params() - SMOLLM2_135M.num_params() == 49152 * 576
    assert untied.num_read_params() == SMOLLM2_135M.num_params()
    assert SMOLLM2_135M.num_read_params() - SMOLLM2_135M.num_matmul_params() == 61 * 576


MIXTRAL = theory.ModelShape(
    32, 4096, 14336, 32, 8, 128, 32000, experts=theory.ExpertShape(8, 2, 14336)
)
GLM_4_7 = theory.ModelShape(
    92, 5120, 12288, 96, 8, 128, 151552, experts=theory.ExpertShape(160, 8, 1536, 1536, 3)
)


def test_num_params_of_models_with_experts():
    """Mixtral 8x7B by its checkpoint; GLM-4.7 by what is published: 355B with its module, 32B."""
    assert MIXTRAL.num_params() == 46_702_792_704
    assert MIXTRAL.num_matmul_params() == pytest.approx(12.75e9, rel=0.01)
    assert GLM_4_7.num_params() + GLM_4_7.mtp().num_params() == pytest.approx(355e9, rel=0.01)
    assert GLM_4_7.num_matmul_params() == pytest.approx(32e9, rel=0.03)


def test_experts_that_are_read():
    experts = GLM_4_7.experts
    assert experts.distinct(0) == 0
    assert experts.distinct(1) == pytest.approx(8)
    rng = np.random.default_rng(0)
    drawn = [
        len({*np.concatenate([rng.permutation(160)[:8] for _ in range(16)])}) for _ in range(300)
    ]
    assert experts.distinct(16) == pytest.approx(np.mean(drawn), rel=0.01)
    one, all_read = GLM_4_7.num_read_params(1), GLM_4_7.num_read_params(10**6)
    assert one - 2 * 92 * 5120 - 5120 == pytest.approx(GLM_4_7.num_matmul_params())
    assert all_read + 151552 * 5120 == pytest.approx(GLM_4_7.num_params())
    read = GLM_4_7.num_read_params(np.array([1, 4]))
    assert read[0] == one < read[1] < all_read


def test_a_module_by_hand():
    module = LLAMA_3_8B.mtp()
    layer = (LLAMA_3_8B.num_matmul_params() - 4096 * 128256) // 32
    assert module.num_params() == layer + 2 * 4096**2 + 5 * 4096
    assert module.num_read_params() == module.num_params() + 4096 * 128256
    assert GLM_4_7.mtp().experts.num_dense == 0


def test_windows_limit_what_is_read():
    windowed = dataclasses.replace(LLAMA_3_8B, window=1024, num_windowed=24)
    assert windowed.seen_tokens(512) == 512
    assert windowed.seen_tokens(8192) == pytest.approx(0.25 * 8192 + 0.75 * 1024)
    where = dict(tokens=1, batch=64, context=8192)
    full = theory.pass_seconds(LLAMA_3_8B, "h200", **where)
    assert theory.pass_seconds(windowed, "h200", **where) < 0.7 * full


def test_experts_make_verifying_dearer_at_small_batches():
    """Each further token of one row reads experts of its own; many rows read all of them anyway."""

    def ratio(batch):
        where = dict(batch=batch, context=1000)
        passes = [theory.pass_seconds(GLM_4_7, "h200", tokens=tokens, **where) for tokens in (2, 1)]
        return passes[0] / passes[1]

    assert ratio(1) > 1.4
    assert ratio(64) < 1.1


def test_memory_by_hand():
    held = theory.memory(
        SMOLLM2_135M, batch=8, capacity=512, num_nodes=4, weight_itemsize=4, cache_itemsize=4
    )
    assert held.target_weights == 4 * 134_515_008
    assert held.target_cache == 2 * 30 * 3 * 64 * 512 * 8 * 4
    assert held.windows == 2 * 30 * 3 * 64 * 5 * 8 * 4
    assert held.logits == 8 * 5 * 49152 * 4
    assert held.draft_weights == held.draft_cache == 0
    parts = [getattr(held, field.name) for field in dataclasses.fields(held)]
    assert held.total == sum(parts)


def test_memory_of_a_draft_model_and_of_large_batches():
    draft = theory.memory(LLAMA_3_8B, batch=2, capacity=64, num_nodes=3, draft=LLAMA_3_1B)
    plain = theory.memory(LLAMA_3_8B, batch=2, capacity=64)
    assert draft.draft_weights == 2 * LLAMA_3_1B.num_params()
    assert draft.draft_cache == 2 * 16 * 8 * 64 * 64 * 2 * 2
    assert draft.windows == 4 * 2 * 2 * (LLAMA_3_8B.kv_elements() + LLAMA_3_1B.kv_elements())
    assert draft.target_cache == plain.target_cache
    # int32 counts must not overflow: 64 rows of 128k tokens hold a terabyte.
    batch = np.array([1, 64], np.int32)
    held = theory.memory(LLAMA_3_8B, batch=batch, capacity=np.int32(131_072))
    assert held.target_cache[1] == 64 * held.target_cache[0] == 2 * 32 * 8 * 128 * 131_072 * 64 * 2


def test_pass_seconds_at_both_limits():
    chip = theory.Chip("round numbers", flops=1e12, bandwidth=1e9, memory=1e9)
    # One token: every weight is read for 2 FLOPs, far below this chip's 1000 FLOPs a byte.
    alone = theory.pass_seconds(SMOLLM2_135M, chip, tokens=1, batch=1, context=0, itemsize=4)
    cache = 2 * 30 * 3 * 64
    assert alone == pytest.approx((134_515_008 + cache) * 4 / 1e9)
    full = theory.pass_seconds(SMOLLM2_135M, chip, tokens=512, batch=64, context=0)
    attention = 4 * 30 * 9 * 64 * (512 * 513 / 2)
    matmuls = 2 * 512 * SMOLLM2_135M.num_matmul_params()
    assert full == pytest.approx(64 * (matmuls + attention) / 1e12)


@pytest.mark.parametrize("chip", theory.CHIPS)
def test_roofline_at_batch_one_is_the_closed_form(chip):
    result = theory.roofline(SMOLLM2_135M, chip, 1, 128, 4, 0.8, draft_cost=0.05)
    # Both passes read the same weights and cache; the window's own bytes are next to nothing.
    assert result.verify_seconds == pytest.approx(result.plain_seconds, rel=1e-3)
    assert result.speedup == pytest.approx(theory.speedup(0.8, 4, 0.05), rel=1e-3)
    assert result.fits is True


def test_roofline_by_batch_and_context():
    batch, context = np.array([1, 8, 64, 512])[:, None], np.array([128, 4096, 32768])[None]
    table = theory.roofline(LLAMA_3_8B, "h100-sxm", batch, context, 4, 0.8, draft_cost=LLAMA_3_1B)
    assert table.speedup.shape == table.fits.shape == (4, 3)
    # Short contexts run out of spare FLOPs as the batch grows; long ones stay bound by the cache.
    assert table.speedup[0, 0] > 1.5
    assert table.speedup[3, 2] > 1.5 > 1.0 > table.speedup[3, 0]
    assert (np.diff(table.plain_seconds, axis=0) > 0).all()
    assert (np.diff(table.plain_seconds, axis=1) > 0).all()
    np.testing.assert_allclose(
        table.tokens_per_second, table.speedup * table.plain_tokens_per_second
    )
    assert table.fits[0, 0]
    assert not table.fits[3, 2]
    cell = theory.roofline(LLAMA_3_8B, "h100-sxm", 8, 4096, 4, 0.8, draft_cost=LLAMA_3_1B)
    assert cell.speedup == pytest.approx(table.speedup[1, 1])


def test_roofline_without_drafts_is_plain_decoding():
    result = theory.roofline(LLAMA_3_8B, "tpu-v5p", 16, 1024, 0, 0.8, draft_cost=0.1)
    assert result.speedup == 1.0
    assert result.draft_seconds == 0.0
    assert result.tokens_per_second == result.plain_tokens_per_second


def test_bits_by_hand():
    assert theory.stored_bits(4, group=32, numbers=2) == 6
    assert theory.stored_bits(8, group=32) == 9
    assert theory.stored_bits(8, group=32, number_bits=16) == 8.5
    held = theory.memory(LLAMA_3_8B, batch=1, capacity=64, draft=LLAMA_3_8B, draft_weight_bits=6)
    assert held.target_weights == 2 * LLAMA_3_8B.num_params()
    assert held.draft_weights == 6 * LLAMA_3_8B.num_params() // 8
    half = theory.memory(LLAMA_3_8B, batch=1, capacity=64, weight_bits=8.0)
    assert half.target_weights == LLAMA_3_8B.num_params()
    assert type(half.total) is int
    chip = theory.Chip("round numbers", flops=1e15, bandwidth=1e9, memory=1e9)
    where = dict(tokens=1, batch=1, context=0)
    seconds = theory.pass_seconds(SMOLLM2_135M, chip, **where, weight_bits=4, itemsize=4)
    assert seconds == pytest.approx((134_515_008 / 2 + 2 * 30 * 3 * 64 * 4) / 1e9)


def test_fewer_bits_pay_until_arithmetic_limits_a_pass():
    def seconds(bits, batch):
        where = dict(tokens=1, batch=batch, context=0)
        return theory.pass_seconds(LLAMA_3_8B, "h100-sxm", weight_bits=bits, **where)

    assert seconds(16, 1) / seconds(6, 1) == pytest.approx(16 / 6, rel=1e-3)
    assert seconds(16, 100) / seconds(6, 100) > 2
    assert seconds(16, 400) == seconds(6, 400)


def test_a_roofline_with_a_draft_in_fewer_bits():
    """The target's own copy in 6 bits: as dear as 6 / 16 of a pass where bytes are the limit."""
    where = dict(batch=1, context=0, k=4, alpha=0.95)
    table = theory.roofline(LLAMA_3_8B, "h200", draft_cost=LLAMA_3_8B, draft_weight_bits=6, **where)
    assert table.speedup == pytest.approx(theory.speedup(0.95, 4, 6 / 16), rel=1e-3)
    assert table.break_even_alpha == pytest.approx(theory.break_even_alpha(4, 6 / 16), rel=1e-3)
    same = theory.roofline(LLAMA_3_8B, "h200", draft_cost=LLAMA_3_8B, weight_bits=6, **where)
    assert same.break_even_alpha == np.inf
    assert same.speedup < 1


def routed(rng, tokens, repeats):
    """Experts [T, M, K] of a text: each token repeats those of the one before at some rate."""
    chosen = [[rng.permutation(16)[:2] for _ in range(3)]]
    for _ in range(tokens - 1):
        new = [rng.permutation(16)[:2] for _ in range(3)]
        chosen.append(chosen[-1] if rng.random() < repeats else new)
    return np.array(chosen)


def test_the_use_of_experts_by_independent_tokens_is_the_formula():
    rng = np.random.default_rng(0)
    even = theory.ExpertShape(16, 2, 8)
    use = theory.ExpertUse.count([routed(rng, 4000, 0.0) for _ in range(2)], 16, longest=4)
    counted = dataclasses.replace(even, use=use)
    assert use.share.shape == (3, 16, 4)
    for tokens, rows in ((0, 3), (1, 1), (4, 1), (2, 3), (7, 2)):
        expected = even.distinct(tokens, rows)
        assert counted.distinct(tokens, rows) == pytest.approx(expected, rel=0.02), (tokens, rows)
        assert even.distinct(tokens * rows) == pytest.approx(expected)
    table = counted.distinct(np.arange(1, 5)[:, None], np.array([1, 8]))
    assert table.shape == (4, 2)
    assert (np.diff(table, axis=0) > 0).all()
    assert (np.diff(table, axis=1) > 0).all()


def test_the_use_of_experts_by_hand():
    """Two runs of two tokens, in one layer of four experts."""
    use = theory.ExpertUse.count([np.array([0, 1, 1])[:, None, None]], 4, longest=2)
    np.testing.assert_allclose(use.share[0], [[0.5, 0.5], [0.5, 1], [0, 0], [0, 0]])
    assert (use.distinct(1), use.distinct(2)) == (1, 1.5)
    assert use.distinct(1, 2) == 1.5  # each of two experts is missed by both rows in a quarter
    assert use.distinct(2, 2) == 1.75
    assert use.distinct(4) == use.distinct(2, 2)


def test_similar_neighbors_make_verifying_cheaper():
    rng = np.random.default_rng(1)
    shape = dataclasses.replace(MIXTRAL, experts=theory.ExpertShape(16, 2, 14336))
    speedups, trees = [], []
    for repeats in (0.0, 0.7):
        use = theory.ExpertUse.count([routed(rng, 3000, repeats)], 16, longest=5)
        counted = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, use=use))
        speedups.append(theory.roofline(counted, "h200", 1, 1000, 4, 0.8).speedup)
        rates = [[0.6, 0.1]] * 4
        tree = theory.roofline_tree(counted, "h200", rates, batch=1, context=1000)
        trees.append(tree.tree.topology.num_nodes)
    plain = theory.roofline(shape, "h200", 1, 1000, 4, 0.8).speedup
    assert speedups[0] == pytest.approx(plain, rel=0.02)
    assert speedups[1] > 1.3 * plain
    assert trees[1] > trees[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: theory.ExpertUse.count([np.zeros((3, 1, 2), int)], 4, longest=4), "none has 4"),
        (lambda: theory.ExpertUse.count([np.full((9, 1, 2), 4)], 4), "experts from 0 to 3"),
        (lambda: theory.ExpertShape(4, 2, 16, use=3), "use = 3: give an ExpertUse"),
        (
            lambda: theory.ExpertShape(8, 2, 16, use=theory.ExpertUse(np.zeros((1, 4, 1)))),
            "use: it counts 4 experts; give one of num_experts = 8",
        ),
    ],
)
def test_the_use_of_experts_is_checked(make, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=message):
        make()
