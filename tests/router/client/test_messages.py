"""Arguments of the client that are wrong: an error of our own says what they may be, before
anything is sent.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tramontane.client import Client
from tramontane.proto.errors import ConfigError

WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "source": (
        lambda c: c.submit_job(5),
        "source is 5; it must be JSON Lines as bytes, or the path of a file",
    ),
    "source, a list": (
        lambda c: c.submit_job([{}]),
        "source is [{}]; it must be JSON Lines as bytes, or the path of a file",
    ),
    "url as a path": (
        lambda c: c.submit_job("http://a/b"),
        "; JSON Lines are given as bytes, and a URL as url=...",
    ),
    "text as a path": (
        lambda c: c.submit_job('{"custom_id": "a"}'),
        "; JSON Lines are given as bytes, and a URL as url=...",
    ),
    "a path of no file": (lambda c: c.submit_job("a\0b"), "cannot be read: embedded null byte"),
    "options": (
        lambda c: c.submit_job(b"{}", {"endpoint": "a"}),
        "options is {'endpoint': 'a'}; it must be a JobOptions",
    ),
    "url": (lambda c: c.submit_job(url=5), "url is 5; it must be a text"),
    "request_key": (
        lambda c: c.submit_job(b"{}", request_key=5),
        "request_key is 5; it must be a text",
    ),
    "job id": (lambda c: c.get_job(5), "job_id is 5; it must be a text"),
    "cancelled": (lambda c: c.cancel(5), "job_id is 5; it must be a text"),
    "watched": (lambda c: next(c.watch_job(5)), "job_id is 5; it must be a text"),
    "offset": (lambda c: next(c.results("a", "b")), "offset is 'b'; it must be a whole number"),
    "limit": (lambda c: c.list_jobs(limit="x"), "limit is 'x'; it must be a whole number"),
    "timeout of a call": (
        lambda c: c.get_job("a", timeout_s="b"),
        "timeout_s is 'b'; it must be a number of seconds, or None",
    ),
    "timeout of a stream": (
        lambda c: next(c.generate("a", timeout_s="b")),
        "timeout_s is 'b'; it must be a number of seconds",
    ),
    "no prompt": (
        lambda c: next(c.generate(None)),
        "the prompt must be a text, or token ids, which are whole numbers",
    ),
    "temperature": (
        lambda c: next(c.generate("a", temperature="b")),
        "temperature is 'b'; it must be a number",
    ),
    "stop": (
        lambda c: next(c.generate("a", stop=5)),
        "stop is 5; it must be a list; each item is a text",
    ),
    "ignore_eos": (
        lambda c: next(c.generate("a", ignore_eos="b")),
        "ignore_eos is 'b'; it must be true or false",
    ),
    "logit_bias": (
        lambda c: next(c.generate("a", logit_bias=5)),
        "logit_bias is 5; it must be a mapping",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_the_callers_own_error(name: str) -> None:
    call, expected = WRONG[name]
    with Client("127.0.0.1:1") as client, pytest.raises(ConfigError) as failure:
        call(client)
    assert expected in str(failure.value)
