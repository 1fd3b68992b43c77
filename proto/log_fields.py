"""What a line of the log says beside its message: for ``extra=``. As JSON these are fields of their own."""

import re
from collections.abc import Iterable

REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID_PATTERN = re.compile(rb"[!-~]{1,128}")  # what may go into headers and logs


def request_fields(request_id: str, **more: object) -> dict[str, object]:
    """Of a line about one request. One without an id was not made by a client."""
    return {"request_id": request_id, **more} if request_id else more


def requests_fields(request_ids: Iterable[str]) -> dict[str, list[str]]:
    """Of a line about several requests, of which each is named once."""
    named = list(dict.fromkeys(filter(None, request_ids)))
    return {"request_ids": named} if named else {}


def format_request_ids(request_ids: Iterable[str], most: int = 8) -> str:
    """For people: ``a, b and 3 more``, or nothing where nobody has a name."""
    ids = list(dict.fromkeys(filter(None, request_ids)))
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more
