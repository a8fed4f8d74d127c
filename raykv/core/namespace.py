"""Who may share KV with whom: equal tokens match only within one namespace."""

from dataclasses import dataclass
from typing import TypeAlias

ContentHash: TypeAlias = str | bytes | int
MultimodalItems: TypeAlias = tuple[tuple[int, ContentHash], ...]
RootKey: TypeAlias = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides its tokens that the KV of a prompt depends on.

    Attributes:
        tenant: isolates users from each other (and from timing attacks on the shared cache).
        lora: name of the adapter that computes the KV.
        weights_version: version of the weights that compute the KV.
        multimodal: ``((token_offset, content_hash), ...)``: item ``content_hash`` fills
            placeholder tokens from ``token_offset`` on; it tells apart the block that holds that
            token and all later ones.

    Each field keeps its own place in the key, so tenant "x" is never LoRA "x" (vLLM 44701).

    Raises:
        ValueError: a multimodal offset is negative or a content hash is no str, bytes or int.
    """

    tenant: str = ""
    lora: str = ""
    weights_version: int = 0
    multimodal: MultimodalItems = ()

    def __post_init__(self) -> None:
        if not self.multimodal:
            return
        for offset, content in self.multimodal:
            if offset < 0 or type(content) not in {str, bytes, int}:
                raise ValueError(
                    f"multimodal item ({offset!r}, {content!r}): the offset must be >= 0 tokens "
                    "and the content hash a str, bytes or int"
                )
        # One item may follow another at the same token, so only the offset orders them.
        items = tuple(sorted(self.multimodal, key=lambda item: item[0]))
        object.__setattr__(self, "multimodal", items)

    @property
    def root(self) -> RootKey:
        """What selects a tree of the prefix cache."""
        return (self.tenant, self.lora, self.weights_version)

    def items(self, start: int, stop: int) -> MultimodalItems:
        """The multimodal items that begin in tokens [start, stop)."""
        return tuple(item for item in self.multimodal if start <= item[0] < stop)


DEFAULT = Namespace()
