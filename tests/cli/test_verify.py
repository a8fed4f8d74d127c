import numpy as np
import pytest

from raykv.cli.verify import TIE_LOGITS, Pair, compare, first_difference, is_near_tie

PROMPT = [1, 2, 3]


def logits(**values):
    """Ten logits, all 0 but those given as t4=1.5."""
    row = np.zeros(10, np.float32)
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


def never(tokens):
    pytest.fail(f"logits were asked for after {tokens}, but nothing differs")


@pytest.mark.parametrize(
    ("expected", "actual", "place"),
    [
        ([], [], None),
        ([4, 5], [4, 5], None),
        ([4, 5], [4, 6], 1),
        ([4, 5], [4], 1),
        ([4], [4, 5], 1),
        ([4], [], 0),
    ],
)
def test_first_difference(expected, actual, place):
    assert first_difference(expected, actual) == place


def test_equal_answers():
    verdict = compare([Pair("a", PROMPT, [4, 5], (4, 5))] * 3, never)
    assert verdict.is_equal
    assert (verdict.num_pairs, verdict.num_near_ties, verdict.differences) == (3, 0, ())


def test_a_flipped_token_is_found():
    def logits_of(tokens):
        assert tokens == [*PROMPT, 4]
        return logits(t5=2.0, t6=1.0)

    pairs = [Pair("good", PROMPT, [4, 5, 7], [4, 5, 7]), Pair("bad", PROMPT, [4, 5, 7], [4, 6, 7])]
    verdict = compare(pairs, logits_of)
    assert not verdict.is_equal
    assert (verdict.num_pairs, verdict.num_near_ties) == (2, 0)
    assert verdict.differences == (
        "bad: token 1 is 6, expected 5; their logits lie 1 apart",
    )  # fmt: skip


def test_a_near_tie_is_counted_and_what_follows_it_passed_by():
    pair = Pair("a", PROMPT, [4, 5, 7, 8], [4, 6, 9, 9])
    verdict = compare([pair], lambda _: logits(t5=2.0, t6=2.0 - 0.9 * TIE_LOGITS))
    assert verdict.is_equal
    assert verdict.num_near_ties == 1


@pytest.mark.parametrize(
    "row",
    [
        logits(t5=2.0, t6=2.0 - 2 * TIE_LOGITS),  # too far apart
        logits(t5=2.0, t6=2.0, t7=3.0),  # close, but neither is the best
        logits(t5=2.0, t6=1.0, t7=2.0),  # the tie is another token's
    ],
)
def test_what_is_no_near_tie(row):
    assert not is_near_tie(row, 5, 6)
    assert not compare([Pair("a", PROMPT, [5], [6])], lambda _: row).is_equal


@pytest.mark.parametrize("actual", [[4], [4, 5, 6], []])
def test_an_answer_that_ends_elsewhere_is_a_difference(actual):
    verdict = compare([Pair("a", PROMPT, [4, 5], actual)], lambda _: logits(t4=1, t5=1))
    assert not verdict.is_equal
    assert f"2 tokens expected, {len(actual)} produced" in verdict.differences[0]
