from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.engine.params import SamplingParams
from raykv.engine.sampler import log_probs, sample, top

VOCAB = 50


def logits_of(seed=0, scale=2.0, vocab=VOCAB):
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def probabilities(logits, temperature=1.0, top_p=1.0):
    """Plainly: softmax, then the fewest likeliest tokens that have ``top_p`` together."""
    weights = np.exp(logits.astype(np.float64) / temperature - logits.max() / temperature)
    values = weights / weights.sum()
    kept, total = np.zeros(len(values)), 0.0
    for token in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        kept[token] = values[token]
        total += values[token]
        if total >= top_p:
            break
    return kept / kept.sum()


def draws(logits, params, count, seed=3, sample_index=0):
    return [sample(logits, params, seed, sample_index, position) for position in range(count)]


def test_temperature_0_takes_the_likeliest_and_of_ties_the_first():
    logits = logits_of()
    assert sample(logits, SamplingParams(), 0, 0, 0) == logits.argmax()
    logits[[7, 9, 30]] = logits.max() + 1
    assert draws(logits, SamplingParams(), 20) == [7] * 20


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_draws_follow_the_distribution(temperature, top_p):
    logits, count = logits_of(1), 20_000
    params = SamplingParams(temperature=temperature, top_p=top_p)
    wanted = probabilities(logits, temperature, top_p)
    seen = np.bincount(draws(logits, params, count), minlength=VOCAB)
    assert not seen[wanted == 0].any(), "a token outside the nucleus"
    often = wanted * count >= 5
    chi_square = ((seen - wanted * count)[often] ** 2 / (wanted * count)[often]).sum()
    freedom = int(often.sum()) - 1
    # Wide: a right sampler passes for all but one seed in a million; a wrong temperature never.
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom) + 15
    wrong = probabilities(logits, temperature * 1.3, top_p)
    chi_wrong = ((seen - wrong * count)[often] ** 2 / np.maximum(wrong * count, 1e-9)[often]).sum()
    assert freedom == 0 or chi_wrong > freedom + 5 * np.sqrt(2 * freedom) + 15


@pytest.mark.parametrize("vary", ["seed", "sample_index"])
def test_draws_of_other_seeds_and_samples_are_independent(vary):
    logits = np.zeros(VOCAB, np.float32)
    params = SamplingParams(temperature=1)
    rows = [draws(logits, params, 400, **{vary: value}) for value in (0, 1, 2, 2**40)]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            same = sum(a == b for a, b in zip(row, other, strict=True))
            assert same < 30, "8 of 400 are expected"
    # Nor are neighbours along one row equal more often than by chance.
    assert sum(a == b for a, b in zip(rows[0], rows[0][1:], strict=False)) < 30


def test_a_draw_depends_on_seed_sample_and_position_only():
    logits, params = logits_of(2), SamplingParams(temperature=1.0, top_p=0.95)
    places = [(seed, index, position) for seed in (0, 9) for index in (0, 2) for position in (5, 6)]
    first = {place: sample(logits, params, *place) for place in places}
    for place in reversed(places):
        np.random.default_rng(1).random(3)
        assert sample(logits.copy(), params, *place) == first[place]
    assert sample(logits, params, 2**63 - 1, 1000, 2**31) in range(VOCAB)
    assert len(set(first.values())) > 1


def test_these_draws_never_change():
    """Seeded outputs are a promise over versions, too."""
    logits = np.linspace(-2, 2, VOCAB).astype(np.float32)
    plain = SamplingParams(temperature=1.0)
    assert draws(logits, plain, 10) == PLAIN
    assert draws(logits, SamplingParams(temperature=1.0, top_p=0.5), 10) == NUCLEUS


PLAIN = [49, 46, 36, 49, 49, 47, 37, 41, 41, 45]
NUCLEUS = [49, 48, 44, 49, 49, 48, 44, 46, 46, 47]


def test_rounding_that_swaps_near_ties_moves_no_draw():
    logits = np.zeros(VOCAB, np.float32)
    noisy = logits + np.float32(1e-6) * logits_of(3)
    params = SamplingParams(temperature=1)
    assert draws(logits, params, 200) == draws(noisy, params, 200)


def test_top_p_edges():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3])).astype(np.float32)

    def tokens(top_p, logits=logits):
        return set(draws(logits, SamplingParams(temperature=1, top_p=top_p), 500))

    assert tokens(1e-9) == {1}
    assert tokens(0.39) == {1}
    assert tokens(0.41) == {1, 3}
    assert tokens(0.69) == {1, 3}
    assert tokens(0.71) == {1, 2, 3}
    assert tokens(0.91) == tokens(1 - 1e-12) == tokens(1) == {0, 1, 2, 3}
    # Of equally likely tokens at the edge, the lower ids stay.
    assert tokens(0.6, np.zeros(4, np.float32)) == {0, 1, 2}
    assert tokens(0.5, np.zeros(4, np.float32)) == {0, 1}
    assert tokens(0.9, np.zeros(1, np.float32)) == {0}


def test_tokens_that_are_ruled_out_never_come():
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[4, 40]] = 1.0
    for top_p in (1.0, 0.9):
        params = SamplingParams(temperature=1, top_p=top_p)
        assert set(draws(logits, params, 200)) == {4, 40}


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = logits_of(4)
    params = SamplingParams(temperature=temperature)
    assert set(draws(logits, params, 50)) == {int(logits.argmax())}


def test_a_huge_temperature_is_uniform():
    params = SamplingParams(temperature=1e300)
    assert len(set(draws(logits_of(5), params, 1000))) == VOCAB


@given(
    seed=st.integers(0, 2**32),
    scale=st.floats(0, 30),
    temperature=st.floats(0.01, 10),
    top_p=st.floats(1e-6, 1),
    steps=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_no_draw_falls_outside_the_nucleus(seed, scale, temperature, top_p, steps):
    logits = np.round(logits_of(seed, scale) * steps) / np.float32(steps)  # with many ties
    wanted = probabilities(logits, temperature, min(top_p + 1e-9, 1.0))
    params = SamplingParams(temperature=temperature, top_p=top_p)
    assert all(wanted[token] > 0 for token in draws(logits, params, 20, seed=seed))


@given(seed=st.integers(0, 2**32), scale=st.floats(0, 1e4), vocab=st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_log_probs_sum_to_one_and_keep_differences(seed, scale, vocab):
    logits = logits_of(seed, scale, vocab)
    values = log_probs(logits)
    assert values.dtype == np.float64
    assert abs(np.exp(values).sum() - 1) < 1e-9
    assert (values <= 0).all()
    differences = logits.astype(np.float64) - float(logits[0])
    np.testing.assert_allclose(values - values[0], differences, rtol=1e-9, atol=1e-9)


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    count=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_top_lists_the_largest_first_and_ties_by_index(values, count):
    array = np.array(values, np.float64)
    wanted = sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))[:count]
    assert top(array, count) == tuple((index, float(value)) for index, value in wanted)
