from __future__ import annotations

import pickle

import numpy as np
import pytest

from raykv.engine.params import (
    EngineLimits,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
    TokenOutput,
)
from raykv.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", "16"),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", -0.5),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_p", "1"),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("seed", "x"),
        ("stop", ("",)),
        ("stop", (5,)),
        ("stop", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.5,)),
        ("stop_token_ids", None),
        ("logprobs", -1),
        ("logprobs", 1.5),
        ("logprobs", None),
        ("n", 0),
        ("n", 1.5),
        ("n", "2"),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1, "temperature": 0, "top_p": 1, "seed": 0, "logprobs": 0, "n": 1},
        {"temperature": 1e-300, "top_p": 1e-9, "seed": 2**63 - 1, "n": 1000},
        {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "seed": np.int32(4)},
        {"stop": ("a", "\n\n"), "stop_token_ids": (0, 7), "logprobs": 20},
    ],
)
def test_good_values_are_kept(values):
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == value


def test_stops_may_come_as_lists_or_one_string():
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]) == SamplingParams(
        stop=("a", "b"), stop_token_ids=(3,)
    )
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop_token_ids=[np.int64(3)]).stop_token_ids == (3,)


def request(tokens, **params):
    if not isinstance(tokens, np.ndarray):
        tokens = np.array(tokens, np.int32)
    return GenerationRequest("the-name", tokens, SamplingParams(**params))


LIMITS = EngineLimits(vocab_size=100, max_model_len=8)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request([]), ["empty"]),
        (request(range(8)), ["8 tokens", "room for 8", "max_model_len"]),
        (request(range(50)), ["50 tokens", "room for 8"]),
        (request([0, 100]), ["token id 100", "0..99"]),
        (request([5, -1, 200]), ["token id -1", "0..99"]),
        (request(np.array([1.0, 2.0])), ["integers", "float64"]),
        (request(np.array([[1, 2]], np.int32)), ["one row", "(1, 2)"]),
        (request(np.array([2**40])), ["int32"]),
        (request(np.array([True])), ["integers"]),
        (request([1], stop=("x",)), ["stop strings", "stop_token_ids"]),
    ],
)
def test_limits_refuse_what_can_never_be_served(bad, words):
    with pytest.raises(RequestError) as caught:
        LIMITS.check(bad)
    for word in ["the-name", *words]:
        assert word in str(caught.value)


def test_limits_let_the_largest_prompt_and_any_max_tokens_pass():
    LIMITS.check(request([0, 99, *range(5)], max_tokens=1_000_000))
    LIMITS.check(request(np.array([5, 6], np.int64)))
    EngineLimits(100, 8, has_detokenizer=True).check(request([1], stop=("x",)))


def test_only_the_last_delta_is_last():
    assert not TokenDelta("x", (1,)).is_last
    assert TokenDelta("x", output=TokenOutput("x", ())).is_last
    assert TokenDelta("x", error=RequestError("no")).is_last


def test_messages_cross_process_borders():
    asked = request([1, 2], stop=("x",), seed=3)
    copy = pickle.loads(pickle.dumps(asked))  # noqa: S301
    assert copy.params == asked.params
    assert copy.token_ids.tolist() == [1, 2]
    assert copy.request_id == "the-name"
