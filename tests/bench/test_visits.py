"""Recorded and made-up prompts: what a trace says of them holds, what it leaves open is filled."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raykv.bench import visits
from raykv.bench.visits import TRACE_BLOCK
from raykv.errors import ConfigError


def trace(tmp_path, *rows, keys=("hash_ids", "input_length", "output_length")):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return path


def chats(tmp_path, *conversations):
    path = tmp_path / "chats.json"
    values = {
        str(number): {"messages": [[{"text": text}] for text in texts]}
        for number, texts in enumerate(conversations)
    }
    path.write_text(json.dumps(values))
    return path


def common(first, second):
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def text(tokens):
    return bytes(tokens.astype(np.uint8)).decode()


def check_continues(found):
    for visit in found:
        assert visit.prompt.dtype == visit.reply.dtype == np.int32
        if visit.after >= 0:
            before = np.concatenate((found[visit.after].prompt, found[visit.after].reply))
            assert len(visit.prompt) > len(before)
            assert common(visit.prompt, before) == len(before)


# -- traces ----------------------------------------------------------------------------------------


def test_equal_ids_are_equal_blocks_and_lengths_are_the_traces(tmp_path):
    found = visits.load_trace(
        trace(tmp_path, ([0, 1, 2], 1500, 7), ([0, 1, 3], 1300, 0), ([4], 20, 9))
    )
    assert [(len(visit.prompt), len(visit.reply)) for visit in found] == [
        (1500, 7),
        (1300, 0),
        (20, 9),
    ]
    first, second, other = (visit.prompt for visit in found)
    assert 2 * TRACE_BLOCK <= common(first, second) < 3 * TRACE_BLOCK
    assert common(first, other) == 0


def test_prompts_part_inside_of_the_block_at_a_place_of_its_own(tmp_path):
    rows = [([10 * k, 10 * k + each], 1024, 0) for k in range(40) for each in (1, 2, 3)]
    found = visits.load_trace(trace(tmp_path, *rows))
    places = []
    for one, two, three in zip(found[::3], found[1::3], found[2::3], strict=True):
        places.append(common(one.prompt, two.prompt))
        assert common(two.prompt, three.prompt) == common(one.prompt, three.prompt) == places[-1]
    assert all(TRACE_BLOCK <= place < 2 * TRACE_BLOCK for place in places)
    assert len(set(places)) > 30
    assert min(places) < 600
    assert max(places) > 950


def test_a_prompt_that_goes_on_where_an_earlier_one_ended_holds_its_reply(tmp_path):
    found = visits.load_trace(
        trace(
            tmp_path,
            ([0, 1, 2], 1100, 100),
            ([0, 1, 3, 4], 1600, 50),  # goes on from the first
            ([0, 1, 5], 1199, 5),  # too short for that
            ([0, 1, 3, 4, 6], 2200, 0),  # the second's last block, but full here, and its reply
        )
    )
    assert [visit.after for visit in found] == [-1, 0, -1, 1]
    check_continues(found)


def test_a_common_first_block_is_no_continuation(tmp_path):
    found = visits.load_trace(trace(tmp_path, ([0, 1], 600, 10), ([0, 2], 900, 10)))
    assert [visit.after for visit in found] == [-1, -1]


def test_so_many_are_read(tmp_path):
    rows = [([number], 100, 1) for number in range(5)]
    assert len(visits.load_trace(trace(tmp_path, *rows), 3)) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (([1], 513, 1), "1 hash_ids for input_length 513"),
        (([1, 2], 512, 1), "2 hash_ids for input_length 512"),
        (([], 0, 1), "0 hash_ids"),
        (([-1], 5, 1), "out of range"),
        (([1], 5, 1 << 20), "out of range"),
        ((["x"], 5, 1), "ValueError"),
        ((None, 5, 1), "TypeError"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        visits.load_trace(trace(tmp_path, ([0], 5, 1), row))


def test_a_missing_key_or_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match="KeyError: 'output_length'"):
        visits.load_trace(trace(tmp_path, ([0], 5), keys=("hash_ids", "input_length")))
    with pytest.raises(ConfigError, match="cannot be read"):
        visits.load_trace(tmp_path / "no such")
    with pytest.raises(ConfigError, match="cannot be read"):
        visits.load_chats(tmp_path / "no such")


# -- chats -----------------------------------------------------------------------------------------


def test_every_second_turn_is_generated_from_all_text_before(tmp_path):
    found = visits.load_chats(chats(tmp_path, ["a", "bé", "c", "d", "e"], ["alone"]))
    assert [(text(visit.prompt), text(visit.reply), visit.after) for visit in found] == [
        ("a\n", "bé\n", -1),
        ("a\nbé\nc\n", "d\n", 0),
    ]


def test_conversations_take_turns_and_make_room(tmp_path):
    path = chats(tmp_path, ["a"] * 6, ["b"] * 2, ["c"] * 4, ["d"] * 2)
    found = visits.load_chats(path, num_active=2)
    assert "".join(text(visit.prompt)[0] for visit in found) == "abacacd"
    check_continues(found)
    assert "d" not in {text(visit.prompt)[0] for visit in visits.load_chats(path, 3)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no requests"),
        (b"\xff\xfe", "no UTF-8 text"),
        (b'{"hash_ids": [Infinity], "input_length": 5, "output_length": 1}', "line 1: .*Overflow"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        visits.load_trace(path)


def test_chats_without_a_reply_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no conversation with a reply"):
        visits.load_chats(chats(tmp_path, ["a"]))


@pytest.mark.parametrize("content", ["[]", '{"x": {}}', '{"x": {"messages": [[{}], [{}]]}}', "{"])
def test_other_json_is_refused(tmp_path, content):
    path = tmp_path / "chats.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="expected an object of conversations"):
        visits.load_chats(path)


def test_made_up_conversations_are_the_same_every_time():
    found, again = visits.make_up(8, 3), visits.make_up(8, 3)
    assert len(found) == len(again) > 8
    assert all(
        np.array_equal(one.prompt, two.prompt) for one, two in zip(found, again, strict=True)
    )
    check_continues(found)
    assert {visit.after >= 0 for visit in found} == {True, False}
