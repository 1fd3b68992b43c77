"""Streams as the official clients' libraries type them: every event is validated against the model
of its type.
"""

import json
from collections.abc import Iterator
from typing import Any, get_args

from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel


def _by_type(union: Any) -> dict[str, type[BaseModel]]:
    while not isinstance(kinds := get_args(union)[0], type):
        union = kinds
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(union)}


MODELS: dict[str, dict[str, type[BaseModel]]] = {
    "/v1/responses": _by_type(ResponseStreamEvent),
    "/v1/messages": _by_type(RawMessageStreamEvent),
}


def parse_events(path: str, text: str) -> list[dict[str, Any]]:
    """Return the events of a stream. Fails for one that the client of that API could not read."""
    return list(_validated(path, text))


def _validated(path: str, text: str) -> Iterator[dict[str, Any]]:
    assert text.endswith("\n\n")
    for written in text.split("\n\n")[:-1]:
        head, _, data = written.partition("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        assert data.startswith("data: ")
        if path == "/v1/messages" and event["type"] == "error":
            assert event["error"].keys() == {"type", "message"}
        else:
            MODELS[path][event["type"]].model_validate(event)
        yield event


def texts_of(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the sum of the deltas of every item or block, by its index."""
    texts: dict[int, str] = {}
    for event in events:
        index = event.get("output_index", event.get("index", 0))
        delta = event.get("delta", "")
        if event["type"].endswith(".delta"):
            texts[index] = texts.get(index, "") + delta
        elif event["type"] == "content_block_delta":
            [added] = [value for name, value in delta.items() if name != "type"]
            texts[index] = texts.get(index, "") + added
    return texts
