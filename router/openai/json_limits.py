"""Limits on the elements of a JSON body, checked before objects are built, and a thread that reads
and writes large bodies.

A parser holds Python's interpreter lock until it is done, on any thread: a body of 8 MiB has room
for two million lists, which take seconds. Within these limits a body of 8 MiB takes about 50 ms,
including texts of any length.
"""

import asyncio
import codecs
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from tramontane.proto.errors import ParameterError

T = TypeVar("T")

MAX_ITEMS = 2**19  # of all lists and objects together
MAX_GROUPS = 2**15  # lists and objects
MAX_MEMBERS = 2**15  # of all objects together
MAX_DIGITS = 511  # of a number; the time to parse one grows with the square of its length
LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
DIGITS_TO_ZEROS = bytes(
    ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256)
)
SMALL_BODY = 2**16  # bytes; too few for more elements, and parsed within a few milliseconds
SCAN_BYTES = 2**16  # between two points at which other threads may run
# One thread, so that the event loop competes with at most one parser for the interpreter lock.
BODY_POOL = ThreadPoolExecutor(1, thread_name_prefix="bodies")


class ElementCounts(NamedTuple):
    """Number of commas, of opening brackets and braces, and of colons outside of strings; whether a
    number is too long.
    """

    commas: int
    groups: int
    members: int
    has_long_number: bool = False


def is_utf16(body: bytes) -> bool:
    """Return whether a JSON text is UTF-16: by its byte order mark, or every other byte is zero."""
    return body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (
        len(body) >= 2 and not all(body[:2]) and any(body[:2])
    )


async def run_off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Call ``work``, which reads or writes this number of bytes: directly if it is small, else on
    the thread for large bodies.

    For JSON and gRPC's messages, one at a time; ``served_model.offload_if_large`` is for
    tokenizers.
    """
    if num_bytes <= SMALL_BODY:
        return work()
    return await asyncio.get_running_loop().run_in_executor(BODY_POOL, _without_collector, work)


def _without_collector(work: Callable[[], T]) -> T:
    """Call ``work`` with Python's garbage collector off: it would often stop all threads to examine
    new objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return work()
    finally:
        if was_enabled:
            gc.enable()


def check_elements(body: bytes, what: str = "the body", parameter: str | None = None) -> None:
    """Raise ParameterError if JSON has too many elements. ``what`` names the JSON in the message.
    The JSON is not parsed into objects.
    """
    if len(body) <= SMALL_BODY:
        return
    counts = count_elements(body)
    for number, limit, elements in (
        (counts.groups, MAX_GROUPS, "lists and objects"),
        (counts.members, MAX_MEMBERS, "names in objects"),
        (counts.commas + 1, MAX_ITEMS, "items"),
    ):
        if number > limit:
            raise ParameterError(
                f"{what} has more than {limit} {elements}; send fewer at once", parameter
            )
    if counts.has_long_number:
        raise ParameterError(f"{what} has a number of more than {MAX_DIGITS} digits", parameter)


def count_elements(body: bytes) -> ElementCounts:
    r"""Count the elements of JSON, up to the first piece of 64 KiB in which a bound is exceeded.

    A number is found to be too long if it is too long within a piece, so at the latest if it has
    twice as many digits.

    ``{"a": [1, "2, [3]"], "b\",": 4}`` has 2 commas, 2 groups and 2 members: quotes that are
    escaped do not end a string.
    """
    commas = groups = members = 0
    in_string, carried, has_long_number = False, b"", False
    for start in range(0, len(body), SCAN_BYTES):
        piece = carried + body[start : start + SCAN_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        carried = b"\\" * (num_backslashes % 2)  # it escapes the first byte of the next piece
        unescaped = piece[: len(piece) - len(carried)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = unescaped.split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        commas += outside.count(b",")
        groups += outside.count(b"[") + outside.count(b"{")
        members += outside.count(b":")
        has_long_number = LONG_NUMBER in outside.translate(DIGITS_TO_ZEROS)
        if commas >= MAX_ITEMS or groups > MAX_GROUPS or members > MAX_MEMBERS or has_long_number:
            break
    return ElementCounts(commas, groups, members, has_long_number)
