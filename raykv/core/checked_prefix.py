"""What a prefix hash stands for, to tell equal hashes of different tokens apart."""

from dataclasses import dataclass, field

from .namespace import DEFAULT, Namespace

_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPrefix:
    """A prefix itself: its tokens, and whose it is.

    Compare two with ``equals``; ``==`` would compare the snapshots, of which only a part counts.

    Attributes:
        tokens: int32 tokens as bytes, at least those of the prefix: all checkpoints of a sequence
            share one snapshot.
        num_tokens: the prefix's length.
        namespace: whose state it is.

    Raises:
        ValueError: the snapshot is shorter than the prefix.
    """

    tokens: bytes = field(repr=False)
    num_tokens: int
    namespace: Namespace = DEFAULT

    def __post_init__(self) -> None:
        if not 0 <= self.num_tokens <= len(self.tokens) // _BYTES_PER_TOKEN:
            raise ValueError(
                f"a prefix of {self.num_tokens} tokens does not fit a snapshot of "
                f"{len(self.tokens)} bytes: pass {_BYTES_PER_TOKEN} bytes for each token"
            )

    def equals(self, other: "CheckedPrefix") -> bool:
        """Whether both stand for the same state: same length, namespace, images and tokens."""
        if self.num_tokens != other.num_tokens:
            return False
        mine, others = self.namespace, other.namespace
        if mine is not others and (
            mine.root != others.root
            or mine.items(0, self.num_tokens) != others.items(0, self.num_tokens)
        ):
            return False
        # One memcmp, without a copy of either.
        prefix = memoryview(other.tokens)[: self.num_tokens * _BYTES_PER_TOKEN]
        return self.tokens.startswith(prefix)


def same_prefix(known: CheckedPrefix | None, asked: CheckedPrefix | None) -> bool:
    """Whether what is known of a hash is what is asked for; None asks for no check.

    What was saved without its prefix cannot be checked, so it never is what a check asks for.
    """
    return asked is None or (known is not None and known.equals(asked))
