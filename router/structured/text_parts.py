"""Contents that are a text or a list of parts, in every API: parts that are texts become one text,
and others are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MAX_PARTS = 128
MEDIA: Mapping[str, str] = MappingProxyType(  # by the type of a part or block
    {
        **dict.fromkeys(
            ("image_url", "input_image", "image", "image_pil", "image_embeds"), "images"
        ),
        **dict.fromkeys(("input_audio", "audio_url", "audio"), "recordings of sound"),
        **dict.fromkeys(("video_url", "video"), "videos"),
        **dict.fromkeys(("file", "input_file", "document_url", "container_upload"), "files"),
        "document": "documents",
        "search_result": "search results",
    }
)


def refuse_media(kind: object) -> None:
    """Raise ValueError if what has this type is no text but an image, a file or the like."""
    if isinstance(kind, str) and kind in MEDIA:
        raise ValueError(f"the model serves text only; {MEDIA[kind]} are not supported")


@dataclass(frozen=True, slots=True)
class TextParts:
    """The parts of one API that are texts, by their ``types``. ``ignored``: more fields that they
    may have, without effect.
    """

    types: tuple[str, ...] = ("text",)
    ignored: frozenset[str] = frozenset()

    def join(self, value: Any) -> Any:  # any JSON
        """Return a list of parts as lines of one text, and another value as it is. Raises
        ValueError.
        """
        if not isinstance(value, list):
            return value
        if not value or len(value) > MAX_PARTS:
            raise ValueError(f"a list of parts must have 1 to {MAX_PARTS}")
        return "\n".join(map(self.text_of, value))

    def text_of(self, part: Any) -> str:
        """Return the text of a part. Raises ValueError for another one."""
        kind = part.get("type") if isinstance(part, dict) else None
        refuse_media(kind)
        if not isinstance(kind, str) or kind not in self.types:
            raise ValueError(f"only parts of the type {' or '.join(self.types)} are supported")
        text = part.get("text")
        if not part.keys() <= {"type", "text", *self.ignored} or not isinstance(text, str):
            raise ValueError(f'a part must be as {{"type": "{kind}", "text": "..."}}')
        return text
