import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.cli.conversations import Conversation, load_conversations, system_prompt
from raykv.cli.prompts import ChatFormat, Transcript

from .pair_tokenizer import PairTokenizer

texts = st.text(alphabet="then a-tier\n", min_size=1, max_size=12)


def play(chat, turns, answers):
    """All prompts of a conversation whose answers are given as tokens."""
    transcript, prompts = Transcript(chat, Conversation(tuple(turns))), []
    for answer in answers:
        prompts.append(transcript.ask())
        transcript.answer(list(answer))
    return prompts


def assert_prefixes_are_exact(prompts, answers):
    for before, answer, after in zip(prompts, answers, prompts[1:], strict=False):
        known = before + list(answer)
        assert after[: len(known)] == known
        assert len(after) > len(known)


@st.composite
def exchanges(draw, num_tokens):
    turns = draw(st.lists(texts, min_size=1, max_size=4))
    token = st.integers(2, num_tokens - 1)
    answer = st.tuples(st.lists(token, min_size=1, max_size=8), st.booleans())
    answers = draw(st.lists(answer, min_size=len(turns), max_size=len(turns)))
    return turns, [tokens + [0] * ended for tokens, ended in answers]  # 0 ends a turn


@given(exchange=exchanges(num_tokens=100))
def test_each_prompt_goes_on_with_all_tokens_before(exchange):
    turns, answers = exchange
    chat = ChatFormat(PairTokenizer(), "be an otter")
    assert chat.is_exact
    prompts = play(chat, turns, answers)
    assert_prefixes_are_exact(prompts, answers)
    # The text is what the template would have written.
    tokenizer = PairTokenizer()
    messages = [{"role": "system", "content": "be an otter"}]
    for turn, answer, prompt in zip(turns, answers, prompts, strict=True):
        messages.append({"role": "user", "content": turn})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(prompt) == text
        content = tokenizer.decode(answer, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": content})


def test_encoding_anew_would_not_do():
    tokenizer = PairTokenizer()
    answer = [tokenizer.ids["t"], tokenizer.ids["h"]]
    assert tokenizer.encode(tokenizer.decode(answer), add_special_tokens=False) != answer


class Rewriting(PairTokenizer):
    """A template that shortens earlier answers, as some do with reasoning."""

    def apply_chat_template(self, messages, **kwargs):
        short = [
            {**m, "content": m["content"][:1]} if m["role"] == "assistant" else m for m in messages
        ]
        return super().apply_chat_template(short, **kwargs)


def test_a_template_that_changes_answers_is_followed():
    tokenizer = Rewriting()
    chat = ChatFormat(tokenizer, "be an otter")
    assert not chat.is_exact
    answers = [tokenizer.encode("hello", add_special_tokens=False)] * 2
    _, second = play(chat, ["a", "b"], answers)
    assert "assistant\nh<|im_end|>" in tokenizer.decode(second)


class TemplateError(Exception):
    pass


class WithoutSystem(PairTokenizer):
    def apply_chat_template(self, messages, **kwargs):
        if messages[0]["role"] == "system":
            raise TemplateError("system role not supported")
        return super().apply_chat_template(messages, **kwargs)


def test_without_a_system_role_the_first_message_takes_it():
    tokenizer = WithoutSystem()
    chat = ChatFormat(tokenizer, "be an otter")
    answers = [[5, 6], [7, 0]]
    prompts = play(chat, ["hi", "so"], answers)
    assert tokenizer.decode(prompts[0]).startswith("<|im_start|>user\nbe an otter\n\nhi<|im_end|>")
    assert tokenizer.decode(prompts[1]).count("otter") == 1
    assert_prefixes_are_exact(prompts, answers)


def test_most_tokens_is_reached_by_answers_of_full_length(tokenizer):
    chat = ChatFormat(tokenizer, "be an otter")
    turns, answers = ["hi", "so", "then"], [[5] * 4] * 3
    last = play(chat, turns, answers)[-1]
    assert chat.most_tokens(Conversation(tuple(turns)), 4) == len(last) + 4


@pytest.mark.model
def test_the_real_tokenizer(smollm2):
    chat = ChatFormat(smollm2, system_prompt())
    assert chat.is_exact
    assert 300 <= len(chat.opening("")) <= 500
    end = smollm2.convert_tokens_to_ids("<|im_end|>")
    for conversation in load_conversations():
        answers = [[9707, 28, *range(300, 300 + n), *[end] * (n % 2)] for n in range(1, 6)]
        prompts = play(chat, conversation.turns, answers)
        assert_prefixes_are_exact(prompts, answers)
        messages = [{"role": "system", "content": system_prompt()}]
        for turn, answer in zip(conversation.turns, answers, strict=True):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": chat.decode(answer)})
        text = smollm2.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert smollm2.decode(prompts[-1]) == text


@pytest.mark.model
def test_a_tokenizer_without_template(smollm2):
    class Plain:
        chat_template = None

        def __getattr__(self, name):
            return getattr(smollm2, name)

    chat = ChatFormat(Plain(), "be an otter")
    assert chat.is_exact
    answers = [[300, 301], [302]]
    prompts = play(chat, ["hi", "so"], answers)
    assert_prefixes_are_exact(prompts, answers)
    assert smollm2.decode(prompts[0]) == "system:\nbe an otter\nuser:\nhi\nassistant:\n"
