"""What a line of a job's input may say, and what it asks for."""

import pytest

from raykv import SamplingParams
from raykv.cli.job_input import encode, params_of, read_lines
from raykv.errors import RequestError

from .json_lines import write

DEFAULTS = {"max_tokens": 4, "temperature": 0.0, "seed": None}


def test_a_line_without_id_is_called_by_its_number_and_blank_lines_count(tmp_path):
    path = write(
        tmp_path / "in", {"prompt": "a"}, "", {"id": "x", "token_ids": [1]}, {"prompt": "b"}
    )
    assert [(line.id, line.number, line.error) for line in read_lines(path)] == [
        (1, 1, None), ("x", 3, None), (4, 4, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "line_id", "words"),
    [
        ("{", 1, ["not valid JSON"]),
        ("[" * 100_000, 1, ["not valid JSON"]),
        ("[1]", 1, ["no object", '"prompt"']),
        ({"id": None, "prompt": "a"}, 1, ["id is None"]),
        ({"id": True, "prompt": "a"}, 1, ["id is True"]),
        ({"id": "\ud800", "prompt": "a"}, 1, ["id is '\\ud800'"]),
        ({"id": "x"}, "x", ["no prompt", '"messages"']),
        ({"id": "x", "prompt": "a", "token_ids": [1]}, "x", ["prompt and token_ids"]),
        ({"prompt": "a", "max_token": 3}, 1, ["'max_token'", "did you mean max_tokens?"]),
        ({"prompt": "a", "n": 2}, 1, ["'n'", "known: max_tokens"]),
    ],
)
def test_a_bad_line_says_why(tmp_path, line, line_id, words):
    [found] = read_lines(write(tmp_path / "in", line))
    assert found.id == line_id
    assert all(word in found.error for word in words), found.error


def test_a_line_that_is_not_utf_8(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n')
    first, second = read_lines(path)
    assert first.error is None, "a byte order mark is none of its business"
    assert "utf-8" in second.error


def test_an_id_is_used_once_and_7_is_not_the_text_7(tmp_path):
    path = write(tmp_path / "in", *({"id": i, "prompt": "a"} for i in (7, "7", 7)), {"prompt": "b"})
    errors = [line.error for line in read_lines(path)]
    assert errors[:2] == [None, None]
    assert "in use by line 1" in errors[2]
    assert errors[3] is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"token_ids": "abc"}, "token_ids must"),
        ({"token_ids": [1, "a"]}, "token_ids must"),
        ({"token_ids": [[1]]}, "token_ids must"),
        ({"prompt": ["a"]}, "prompt is a list"),
        ({"messages": "hello"}, "messages must"),
        ({"messages": []}, "messages must"),
        ({"messages": [{"role": "user"}]}, "chat template refuses .*KeyError: 'content'"),
    ],
)
def test_what_is_no_prompt_is_refused(entry, message, tokenizer):
    with pytest.raises(RequestError, match=message):
        encode(entry, lambda: tokenizer)


def test_messages_need_a_chat_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        encode({"messages": [{"role": "user", "content": "a"}]}, lambda: tokenizer)


def test_text_and_messages_become_tokens(tokenizer):
    assert tokenizer.decode(encode({"prompt": "the end"}, lambda: tokenizer)) == "the end"
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.decode(encode({"messages": messages}, lambda: tokenizer))
    assert text.endswith("<|im_start|>assistant\n")


def test_a_lines_options_win_over_the_jobs(tmp_path):
    path = write(tmp_path / "in", {"prompt": "a", "max_tokens": 9, "stop": ["x"]}, {"prompt": "b"})
    first, second = (params_of(line, DEFAULTS) for line in read_lines(path))
    assert first == SamplingParams(max_tokens=9, stop=("x",))
    assert second == SamplingParams(max_tokens=4)


def test_each_line_draws_its_own_samples_out_of_the_jobs_seed(tmp_path):
    lines = ({"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 5})
    path = write(tmp_path / "in", *lines)

    def seeds(seed):
        return [params_of(line, DEFAULTS | {"seed": seed}).seed for line in read_lines(path)]

    first, second, own = seeds(1)
    assert own == 5
    assert first != second
    assert seeds(1) == [first, second, 5]
    assert seeds(2)[0] != first
    assert seeds(None) == [None, None, 5]
