"""Repair of conversations before a chat template writes them: a client cannot take back what is
deep in its history, so a history is repaired and not refused.

A conversation that the format can write as it is stays as it is. ``RULES`` has all repairs in
their order; each is a function from messages to messages that needs nothing but the format.
"""

import hashlib
import json
import re
import string
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tramontane.router.tokenization.chat import ChatMessage, Role, ToolCall

ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
MISTRAL_ID = re.compile(rf"[a-zA-Z0-9]{{{ID_LENGTH}}}")
NO_IDS = ("", "null")  # what clients send for an id that they do not have
INTERRUPTED = "interrupted"  # the result of a call, or an answer, that the history does not have
MAX_DEPTH = 64  # of the JSON of a call or a result: templates and mistral-common are recursive
MAX_DIGITS = 4300  # of a whole number, for Python's parser


@dataclass(frozen=True, slots=True)
class HistoryFormat:
    """What a chat format can write. ``thinking_roles``: whose messages may have thoughts."""

    thinking_roles: frozenset[Role] = frozenset()
    has_tools: bool = True
    has_mistral_ids: bool = True  # ids of calls are nine letters and digits
    parses_results: bool = False  # the result of a call is written as a JSON value
    system_first: bool = False  # system messages go before the first text of the user


def derived_id(seed: str) -> str:
    """Return nine letters and digits, the same for the same seed."""
    digest = hashlib.sha256(seed.encode()).digest()
    return "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in digest[:ID_LENGTH])


def mistral_id(call_id: str) -> str:
    """Return a call's id as Mistral's formats write it: "call_1" becomes "2zXTUoItE"."""
    return call_id if MISTRAL_ID.fullmatch(call_id) else derived_id(call_id)


def parsed_arguments(arguments: str) -> Any:  # any JSON
    """Return the arguments of a call, or their text where it is not JSON, such as cut JSON."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def repair_history(messages: Sequence[ChatMessage], form: HistoryFormat) -> list[ChatMessage]:
    """Return the messages as a chat template of this format can write them; at least one."""
    repaired = list(messages)
    for rule in RULES.values():
        repaired = rule(repaired, form)
    return repaired or [ChatMessage("user", "")]


def leave_out_thoughts(messages: list[ChatMessage], form: HistoryFormat) -> list[ChatMessage]:
    """Leave out the thoughts of a message whose role has none in the format; its texts stay."""
    return [
        replace(message, parts=())
        if message.parts and message.role not in form.thinking_roles
        else message
        for message in messages
    ]


def quote_odd_json(messages: list[ChatMessage], form: HistoryFormat) -> list[ChatMessage]:
    """Write JSON that cannot be read and written again as a JSON text: what is nested too deeply,
    has a number of thousands of digits, or half of a surrogate pair.
    """
    return [
        replace(message, content=_quoted(message.content))
        if message.role == "tool" and form.parses_results
        else replace(
            message,
            tool_calls=tuple(
                replace(call, arguments=_quoted(call.arguments)) for call in message.tool_calls
            ),
        )
        if message.tool_calls
        else message
        for message in messages
    ]


def write_calls_as_text(messages: list[ChatMessage], form: HistoryFormat) -> list[ChatMessage]:
    """Write calls and results as texts of the assistant and the user if the format has no tools."""
    if form.has_tools:
        return messages
    return [_as_text(message) for message in messages]


def leave_out_empty_answers(messages: list[ChatMessage], _: HistoryFormat) -> list[ChatMessage]:
    """Leave out messages of the assistant without text, thoughts and calls."""
    return [
        message
        for message in messages
        if message.role != "assistant" or message.content or message.parts or message.tool_calls
    ]


def join_calls(messages: list[ChatMessage], _: HistoryFormat) -> list[ChatMessage]:
    """Join messages of the assistant with calls that follow one another: their results come
    together.
    """
    runs: list[list[ChatMessage]] = []
    for message in messages:
        if message.tool_calls and runs and runs[-1][-1].tool_calls:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run) if len(run) > 1 else run[0] for run in runs]


def pair_results(messages: list[ChatMessage], form: HistoryFormat) -> list[ChatMessage]:
    """Put the results of an answer's calls right after it, one for each call.

    A result belongs to the call of its id; one without an id, or of calls without ids, to the call
    of its name, else to the first call that has no result yet. A call without a result gets
    ``INTERRUPTED``, and a result without a call becomes a text of the user.
    """
    paired: list[ChatMessage] = []
    waiting = _OpenCalls((), ())
    end = num_calls = 0  # where the next result goes; calls so far
    for message in messages:
        if message.role == "tool":
            call = waiting.take(message)
            if call is None:
                paired += [_as_text(message)] if message.content else []
                continue
            paired.insert(end, replace(message, tool_call_id=call.id))
            end += 1
        elif message.tool_calls:
            paired[end:end] = waiting.interrupted()
            written = mistral_id if form.has_mistral_ids else str
            calls = _distinct_calls(message.tool_calls, num_calls, written)
            num_calls += len(calls)
            waiting = _OpenCalls(message.tool_calls, calls)
            paired.append(replace(message, tool_calls=calls))
            end = len(paired)
        else:
            paired.append(message)
    paired[end:end] = waiting.interrupted()
    return paired


def shorten_ids(messages: list[ChatMessage], form: HistoryFormat) -> list[ChatMessage]:
    """Write the ids of calls and results as nine letters and digits if the format has these."""
    if not form.has_mistral_ids:
        return messages
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=mistral_id(call.id)) for call in message.tool_calls),
            tool_call_id=mistral_id(message.tool_call_id) if message.tool_call_id else "",
        )
        if message.tool_calls or message.tool_call_id
        else message
        for message in messages
    ]


def keep_later_system_in_place(
    messages: list[ChatMessage], form: HistoryFormat
) -> list[ChatMessage]:
    """Turn system messages after an answer into messages of the user if the format would write
    them before it: a conversation that ends with one would end with an answer.
    """
    return _with_later_system_as_user(messages) if form.system_first else messages


def continue_last_answer(messages: list[ChatMessage], _: HistoryFormat) -> list[ChatMessage]:
    """Let the model continue a last message of the assistant, and no other message."""
    last = len(messages) - 1
    continues = [
        index == last and message.role == "assistant" for index, message in enumerate(messages)
    ]
    return [
        message if message.is_prefix == is_prefix else replace(message, is_prefix=is_prefix)
        for message, is_prefix in zip(messages, continues, strict=True)
    ]


Rule = Callable[[list[ChatMessage], HistoryFormat], list[ChatMessage]]
RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            leave_out_thoughts,
            leave_out_empty_answers,
            quote_odd_json,
            join_calls,
            pair_results,
            write_calls_as_text,
            keep_later_system_in_place,
            shorten_ids,
            continue_last_answer,
        )
    }
)


class _OpenCalls:
    """The calls of an answer that have no result yet. ``given``: as the client has them; ``calls``:
    the same ones with distinct ids.
    """

    def __init__(self, given: Sequence[ToolCall], calls: Sequence[ToolCall]) -> None:
        self._calls = dict(enumerate(calls))
        self._numbers: dict[tuple[str, ...], deque[int]] = defaultdict(deque)  # by what names them
        for number, call in enumerate(given):
            has_id = call.id not in NO_IDS
            names = [("id", call.id)] if has_id else [("no id",), ("no id", call.name)]
            for key in (*names, ("any",), ("any", call.name)):
                self._numbers[key].append(number)

    def take(self, result: ChatMessage) -> ToolCall | None:
        """Return the call of a result, which then has one; None if there is none."""
        kind = "any"
        if result.tool_call_id not in NO_IDS:
            if (call := self._next("id", result.tool_call_id)) is not None:
                return call
            kind = "no id"
        return self._next(kind, result.name) if result.name else self._next(kind)

    def interrupted(self) -> list[ChatMessage]:
        """Return results for all calls that have none."""
        return [
            ChatMessage("tool", INTERRUPTED, tool_call_id=call.id, name=call.name)
            for call in self._calls.values()
        ]

    def _next(self, *key: str) -> ToolCall | None:
        numbers = self._numbers.get(key, deque())
        while numbers:
            if (call := self._calls.pop(numbers.popleft(), None)) is not None:
                return call
        return None


def _distinct_calls(
    calls: Sequence[ToolCall], num_before: int, written: Callable[[str], str]
) -> tuple[ToolCall, ...]:
    """Return the calls of one message with ids that are distinct as they are ``written``. An id
    that is missing or not the first is derived from the number of the call in the conversation, so
    that it stays the same when the conversation grows: the second of two calls "a" after five
    others becomes "a-6".
    """
    made: list[ToolCall] = []
    taken = set[str]()
    for number, call in enumerate(calls, start=num_before):
        own_id = call.id
        while own_id in NO_IDS or written(own_id) in taken:
            own_id += f"-{number}"
        made.append(call if own_id == call.id else replace(call, id=own_id))
        taken.add(written(own_id))
    return tuple(made)


def _quoted(text: str) -> str:
    """Return a text as a JSON text if it is JSON that cannot be read and written again."""
    is_suspicious = (
        len(text) > MAX_DIGITS or text.count("[") + text.count("{") > MAX_DEPTH or "\\u" in text
    )
    return json.dumps(text, ensure_ascii=False) if is_suspicious and _is_odd(text) else text


def _is_odd(text: str) -> bool:
    try:
        level = [value := json.loads(text)]
        for _ in range(MAX_DEPTH):
            level = [child for part in level for child in _children(part)]
        if any(map(_children, level)):
            return True
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        return True
    return False


def _children(value: Any) -> list[Any]:  # any JSON
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _as_text(message: ChatMessage) -> ChatMessage:
    """Return a message with its calls as JSON after its text, and a result as a text of the
    user.
    """
    if message.role == "tool":
        of = f" of {message.name}" if message.name else ""
        return ChatMessage("user", f"Result of a tool call{of}:\n{message.content}")
    if not message.tool_calls:
        return message
    calls = [
        {"name": call.name, "arguments": parsed_arguments(call.arguments)}
        for call in message.tool_calls
    ]
    written = json.dumps(calls, ensure_ascii=False)
    return replace(
        message,
        content="\n".join(filter(None, (message.content, written))),
        parts=(*message.parts, written) if message.parts else (),
        tool_calls=(),
    )


# Further repairs for templates in Jinja, which say only by an error what they do not write.


def alternate_roles(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages as the strictest templates take them: one system message, which is the
    first, then the user and the assistant in turns, where an answer follows the results of calls;
    Mistral's ids; and arguments that are objects.
    """
    messages = _with_later_system_as_user(messages)
    system = [message for message in messages if message.role == "system"]
    made = [] if not system else [_joined(system)]
    for message in messages:
        if message.role == "system":
            continue
        last = made[-1] if len(made) > bool(system) else None
        if last is None and message.role == "assistant":
            made.append(ChatMessage("user", ""))
        elif last is not None and last.role == "tool" and message.role == "user":
            made.append(ChatMessage("assistant", INTERRUPTED))
        if last is not None and last.role == message.role != "tool" and not last.tool_calls:
            message = _joined([made.pop(), message])
        made.append(_with_objects(message) if message.tool_calls else message)
    return shorten_ids(made, HistoryFormat())


def system_in_user_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return alternating messages with the system message before the first text of the user."""
    first, *others = alternate_roles(messages)
    if first.role != "system":
        return [first, *others]
    user = others.pop(0) if others and others[0].role == "user" else ChatMessage("user", "")
    return [_joined([replace(user, content=first.content), user]), *others]


def all_as_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return alternating texts of the user and the assistant, for a template that has tools and
    does not take these calls or results.
    """
    return system_in_user_text(write_calls_as_text(list(messages), HistoryFormat(has_tools=False)))


def _with_later_system_as_user(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with the user's role for system messages after the first answer."""
    roles = [message.role for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return [
        replace(message, role="user", parts=())
        if number > first and message.role == "system"
        else message
        for number, message in enumerate(messages)
    ]


def _with_objects(message: ChatMessage) -> ChatMessage:
    """Return a message with arguments that are objects: "7" becomes {"arguments": 7}."""
    return replace(
        message,
        tool_calls=tuple(
            call
            if isinstance(parsed := parsed_arguments(call.arguments), dict)
            else replace(call, arguments=json.dumps({"arguments": parsed}, ensure_ascii=False))
            for call in message.tool_calls
        ),
    )


def _joined(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Return messages of one role as the last of them, with the texts, thoughts and calls of
    all.
    """
    last = messages[-1]
    parts = [part for message in messages for part in message.parts or (message.content,) if part]
    has_thoughts = any(message.parts for message in messages)
    return replace(
        last,
        content="\n\n".join(message.content for message in messages if message.content),
        parts=tuple(parts) if has_thoughts else (),
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )
