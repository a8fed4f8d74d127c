"""Who may share KV with whom: equal tokens match only within one namespace."""

from dataclasses import dataclass
from typing import TypeAlias

from raykv.errors import RequestError

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
        ValueError: a field is of another type, or a multimodal offset is negative.
    """

    tenant: str = ""
    lora: str = ""
    weights_version: int = 0
    multimodal: MultimodalItems = ()

    def __post_init__(self) -> None:
        for name, kind in (("tenant", str), ("lora", str), ("weights_version", int)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(  # noqa: TRY004 - one error for bad fields
                    f"namespace: {name} is {value!r}, but must be of {kind}"
                )
        if not self.multimodal:
            return
        for item in self.multimodal:
            if not _is_item(item):
                raise ValueError(
                    f"namespace: multimodal item {item!r} must be a pair of a token offset >= 0 "
                    "and a content hash (str, bytes or int)"
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


def _is_item(item: object) -> bool:
    match item:
        case (int() as offset, str() | bytes() | int()):
            return offset >= 0
    return False


def require_namespace(value: object) -> Namespace:
    """The value, if it is a namespace.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(value, Namespace):
        raise RequestError(
            f"namespace is {value!r} ({type(value).__name__}), but must be a raykv.Namespace, such "
            "as Namespace(tenant='x')"
        )
    return value


DEFAULT = Namespace()
