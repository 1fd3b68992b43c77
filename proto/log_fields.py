"""Fields of a log record besides its message, for ``extra=``. The JSON format writes them as fields of their own."""

import re
from collections.abc import Iterable

REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID_PATTERN = re.compile(rb"[!-~]{1,128}")  # what may go into headers and logs


def request_fields(request_id: str, **more: object) -> dict[str, object]:
    """Return the fields of a record about one request. An empty id means that no client made the request."""
    return {"request_id": request_id, **more} if request_id else more


def requests_fields(request_ids: Iterable[str]) -> dict[str, list[str]]:
    """Return the fields of a record about several requests, each named once."""
    unique_ids = _unique(request_ids)
    return {"request_ids": unique_ids} if unique_ids else {}


def format_request_ids(request_ids: Iterable[str], max_shown: int = 8) -> str:
    """Format ids for a message: ``a, b and 3 more``; empty if there is no id."""
    unique_ids = _unique(request_ids)
    more = f" and {len(unique_ids) - max_shown} more" if len(unique_ids) > max_shown else ""
    return ", ".join(unique_ids[:max_shown]) + more


def _unique(request_ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, request_ids)))
