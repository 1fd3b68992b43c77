"""The requests that programs send (``make agents``), without the programs' texts.

A description, and a text of more than ``MAX_CHARS`` characters, is written as its length, "<text of
12000>", and read as a filler of that length. Dates, ids and what names a machine are replaced.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("agent_bodies.json")
MAX_CHARS = 60
WORDS = "The quick brown fox jumps over the lazy dog. "
FILLER = re.compile(r"<text of (\d+)>")
# what differs between machines and days, and what stands for it
REPLACED = (
    (re.compile(r"\b20\d\d-\d\d-\d\d(T[\d:.]+Z?)?"), "2000-01-01"),
    (re.compile(r"(\b|(?<=_))[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "0" * 36),
    (re.compile(r"(\b|(?<=_))[0-9a-f]{16,}(\b|(?=_))"), "0" * 16),
    (re.compile(r"\b(ses|prj|msg|prt)_\w{12,}"), r"\1_0"),
)
OF_MACHINE = frozenset(("os", "os_version", "arch", "platform", "terminal_emulator", "timezone"))
DESCRIPTIONS = frozenset(("description", "title"))
TIMES = range(1_577_836_800_000, 4_102_444_800_000)  # milliseconds of the years 2020 to 2099


@dataclass(frozen=True)
class AgentBody:
    """A request. ``client``: the program with its version; ``agent``: the first word of its header
    User-Agent; ``warning``: the header Warning of the answer, which names what had no effect.
    """

    client: str
    agent: str
    path: str
    body: dict[str, Any]
    warning: str = ""


def without_texts(value: Any) -> Any:  # any JSON
    """Return a value with short texts only."""
    if isinstance(value, dict):
        return {
            name: "unknown"
            if name in OF_MACHINE
            else f"<text of {len(each)}>"
            if name in DESCRIPTIONS and isinstance(each, str) and not FILLER.fullmatch(each)
            else without_texts(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [without_texts(each) for each in value]
    if isinstance(value, int) and value in TIMES:
        return TIMES.start
    return _short(value) if isinstance(value, str) else value


def _short(text: str) -> str:
    if text[:1] in ("{", "["):  # the arguments of a call
        try:
            return json.dumps(without_texts(json.loads(text)))
        except ValueError:
            pass
    for pattern, stands_for in REPLACED:
        text = pattern.sub(stands_for, text)
    return text if len(text) <= MAX_CHARS or text[:2] == "#/" else f"<text of {len(text)}>"


def with_texts(value: Any) -> Any:  # any JSON
    """Return a value with a filler for each text that was left out."""
    if isinstance(value, dict):
        return {name: with_texts(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_texts(each) for each in value]
    if isinstance(value, str) and (found := FILLER.fullmatch(value)):
        length = int(found[1])
        return (WORDS * (length // len(WORDS) + 1))[:length]
    return value


def written(bodies: Iterable[AgentBody]) -> str:
    """Return the file's text: a line for each body, each body of a program once."""
    lines = dict.fromkeys(
        json.dumps(
            {
                "client": each.client,
                "agent": each.agent,
                "path": each.path,
                "warning": each.warning,
                "body": without_texts(each.body),
            },
            ensure_ascii=False,
        )
        for each in bodies
    )
    return "[\n" + ",\n".join(lines) + "\n]\n"


def read_bodies() -> Iterator[AgentBody]:
    """Yield the requests of the file."""
    for each in json.loads(PATH.read_text(encoding="utf-8")):
        yield AgentBody(**each | {"body": with_texts(each["body"])})
