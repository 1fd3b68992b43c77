"""The elements of a body are counted without parsing it, and large bodies are parsed in a thread of
their own.
"""

import asyncio
import gc
import json
import threading
from typing import Any

import pytest
from event_loops import in_event_loop
from hypothesis import example, given
from hypothesis import strategies as st

from tramontane.proto.errors import ParameterError
from tramontane.router.openai import json_limits
from tramontane.router.openai.json_limits import (
    MAX_DIGITS,
    MAX_GROUPS,
    MAX_ITEMS,
    MAX_MEMBERS,
    SMALL_BODY,
    ElementCounts,
    check_elements,
    count_elements,
    run_off_loop,
)

AWKWARD = st.text('\\"[]{},:a\u00e9\n', max_size=12)
JSON = st.recursive(
    st.none() | st.integers() | AWKWARD,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(AWKWARD, inner, max_size=5),
    max_leaves=20,
)


def _counts(value: Any) -> ElementCounts:
    """Count in the parsed objects."""
    if not isinstance(value, list | dict):
        return ElementCounts(0, 0, 0)
    inner = [_counts(each) for each in (value if isinstance(value, list) else value.values())]
    commas, groups, members, _ = (
        (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0, 0)
    )
    return ElementCounts(
        commas + max(len(value) - 1, 0), groups + 1, members + len(value) * isinstance(value, dict)
    )


@given(value=JSON, piece=st.integers(1, 9), ascii_only=st.booleans())
@example(value={"a": [1, "2, [3]"], 'b",': 4}, piece=4, ascii_only=True)
@example(value=["\\", '\\"[', "\\\\"], piece=1, ascii_only=True)
def test_elements_are_counted_as_a_parser_finds_them_however_the_body_is_cut(
    value: Any, piece: int, ascii_only: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_limits, "SCAN_BYTES", piece)
        assert count_elements(body) == _counts(value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "[" + "1," * MAX_ITEMS + "1]",
            f"the body has more than {MAX_ITEMS} items; send fewer at once",
        ),
        (
            "[" + "[]," * MAX_GROUPS + "[]]",
            f"the body has more than {MAX_GROUPS} lists and objects; send fewer at once",
        ),
        (
            '{"":1,' + '"":1,' * MAX_MEMBERS + '"":1}',
            f"the body has more than {MAX_MEMBERS} names in objects; send fewer at once",
        ),
    ],
    ids=["items", "lists", "members"],
)
def test_a_body_with_too_many_elements_is_refused_with_the_bound(body: str, message: str) -> None:
    with pytest.raises(ParameterError) as refused:
        check_elements(body.encode())
    assert str(refused.value) == message
    check_elements(json.dumps(body).encode())  # in a text nothing counts


@pytest.mark.parametrize("start", [0, 1, SMALL_BODY - 100, SMALL_BODY, 3 * SMALL_BODY - 7])
def test_a_number_with_too_many_digits_is_refused_wherever_it_is(start: int) -> None:
    def body(num_digits: int, quote: str = "") -> bytes:
        return f"[{' ' * start}{quote}{'7' * num_digits}{quote},1.5]{' ' * SMALL_BODY}".encode()

    check_elements(body(MAX_DIGITS))
    check_elements(body(2**12, quote='"'))
    with pytest.raises(
        ParameterError, match=f"^the body has a number of more than {MAX_DIGITS} digits$"
    ):
        check_elements(body(2 * MAX_DIGITS + 2))


def test_a_body_may_have_as_many_elements_as_the_bounds_say() -> None:
    check_elements(("[" + "1," * (MAX_ITEMS - 1) + "1]").encode())
    check_elements(("[" + "[]," * (MAX_GROUPS - 2) + "[]]").encode())
    check_elements(("{" + '"":1,' * (MAX_MEMBERS - 1) + '"":1}').encode())


def test_counting_ends_where_a_bound_is_exceeded() -> None:
    """The rest may be megabytes, and invalid."""
    body = b"[" * (MAX_GROUPS + 1)
    counts = count_elements(body + b"[" * 2**23)
    assert MAX_GROUPS < counts.groups <= 2 * json_limits.SCAN_BYTES


@in_event_loop
async def test_a_small_body_is_parsed_by_the_event_loop_and_a_large_one_in_its_thread() -> None:
    here = threading.get_ident()
    assert await run_off_loop(SMALL_BODY, threading.get_ident) == here
    threads = set(
        await asyncio.gather(*(run_off_loop(SMALL_BODY + 1, threading.get_ident) for _ in range(9)))
    )
    assert len(threads) == 1
    assert here not in threads


@pytest.mark.parametrize("num_bytes", [SMALL_BODY, SMALL_BODY + 1])
def test_large_work_runs_elsewhere_and_without_the_collector(num_bytes: int) -> None:
    def work(fails: bool) -> bool:
        assert (threading.get_ident() != loop_thread) == (num_bytes > SMALL_BODY)
        if fails:
            raise ValueError("planted")
        return gc.isenabled()

    loop_thread = threading.get_ident()
    assert asyncio.run(run_off_loop(num_bytes, lambda: work(fails=False))) == (
        num_bytes == SMALL_BODY
    )
    assert gc.isenabled()
    with pytest.raises(ValueError, match="planted"):
        asyncio.run(run_off_loop(num_bytes, lambda: work(fails=True)))
    assert gc.isenabled()
