import json

import pytest

from raykv.cli.conversations import load_conversations, parse_conversations, system_prompt
from raykv.errors import ConfigError


def test_those_that_come_with_raykv():
    found = load_conversations()
    assert 16 <= len(found) <= 24
    for conversation in found:
        assert len(conversation.turns) >= 4
        assert all(1 < len(turn) < 400 and turn.isascii() for turn in conversation.turns)
    assert len({conversation.turns for conversation in found}) == len(found)


def test_the_system_prompt_is_of_the_length_that_is_promised():
    assert 250 < len(system_prompt().split()) < 400


def test_both_formats(tmp_path):
    file = tmp_path / "talk.jsonl"
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ignored"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "tw"}, {"type": "text", "text": "o"}],
        },
    ]
    lines = [json.dumps({"turns": ["a", "b\nc"]}), "", json.dumps({"messages": messages, "id": 7})]
    file.write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8")
    first, second = load_conversations(file)
    assert (first.turns, first.source) == (("a", "b\nc"), f"{file}:1")
    assert (second.turns, second.source) == (("one", "two"), f"{file}:3")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a conversation"),
        ("{}", "not a conversation"),
        ('{"turns": ["a"], "messages": []}', "not a conversation"),
        ('{"turns": "hello"}', "no user message"),
        ('{"turns": []}', "no user message"),
        ('{"turns": ["a", 7]}', "user message 1 is 7"),
        ('{"turns": ["a", "  "]}', "user message 1"),
        ('{"messages": {}}', "must be a list"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no user message"),
        ('{"messages": ["a"]}', "message 0 has no role"),
        ('{"messages": [{"role": "user"}]}', "user message 0 is None"),
        ('{"messages": [{"role": "user", "content": [{"image": "x"}]}]}', "user message 0 is None"),
    ],
)
def test_what_is_refused_is_named_with_its_line(line, words):
    with pytest.raises(ConfigError) as caught:
        parse_conversations('{"turns": ["fine"]}\n\n' + line, "talk.jsonl")
    assert str(caught.value).startswith("talk.jsonl:3: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_conversations(tmp_path, content):
    file = tmp_path / "talk.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"talk\.jsonl"):
        load_conversations(file)
