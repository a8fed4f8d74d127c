import re

END, START = "<|im_end|>", "<|im_start|>"


class PairTokenizer:
    """Characters and some pairs of them: a text's tokens do not encode to themselves again.

    Its template is ChatML, as SmolLM2's.
    """

    chat_template = "ChatML"
    specials = (END, START)
    pairs = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te")

    def __init__(self):
        characters = ["\n", *map(chr, range(32, 127))]
        self.pieces = [*self.specials, *characters, *self.pairs]
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}
        self.finder = re.compile(
            "|".join(re.escape(p) for p in (*self.specials, *self.pairs)) + "|.", re.DOTALL
        )

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens, "the template writes them"
        return [self.ids.get(piece, self.ids["?"]) for piece in self.finder.findall(text)]

    def decode(self, token_ids, *, skip_special_tokens=False):
        pieces = (self.pieces[token] if token < len(self.pieces) else "?" for token in token_ids)
        return "".join(p for p in pieces if not (skip_special_tokens and p in self.specials))

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        text = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
        return text + f"{START}assistant\n" * add_generation_prompt
