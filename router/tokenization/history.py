"""Repair of conversations before a chat template writes them: a client cannot take back what is
deep in its history, so a history is repaired and not refused.

A conversation that the format can write as it is stays as it is. ``RULES`` has all repairs in
their order; each is a function from messages to messages that needs nothing but the format.
"""

import hashlib
import json
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tramontane.router.tokenization.chat import ChatMessage, Role, ToolCall

ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
MISTRAL_ID = re.compile(rf"[a-zA-Z0-9]{{{ID_LENGTH}}}")
INTERRUPTED = "interrupted"  # the result of a call that the history does not answer


@dataclass(frozen=True, slots=True)
class HistoryFormat:
    """What a chat format can write. ``thinking_roles``: whose messages may have thoughts."""

    thinking_roles: frozenset[Role] = frozenset()
    has_tools: bool = True
    has_mistral_ids: bool = True  # ids of calls are nine letters and digits


def derived_id(seed: str) -> str:
    """Return nine letters and digits, the same for the same seed."""
    digest = hashlib.sha256(seed.encode()).digest()
    return "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in digest[:ID_LENGTH])


def mistral_id(call_id: str) -> str:
    """Return a call's id as Mistral's formats write it: "call_1" becomes "2Nv4vsnUJ"."""
    return call_id if MISTRAL_ID.fullmatch(call_id) else derived_id(call_id)


def parsed_arguments(arguments: str) -> Any:  # any JSON
    """Return the arguments of a call, or their text where it is not JSON (cut, or too deep)."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
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
        replace(message, parts=()) if message.role not in form.thinking_roles else message
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
    joined: list[ChatMessage] = []
    for message in messages:
        if joined and message.role == "assistant" and message.tool_calls and joined[-1].tool_calls:
            last = joined.pop()
            calls = last.tool_calls + message.tool_calls
            joined.append(replace(_joined([last, message]), tool_calls=calls))
        else:
            joined.append(message)
    return joined


def pair_results(messages: list[ChatMessage], _: HistoryFormat) -> list[ChatMessage]:
    """Put the results of an answer's calls right after it, one for each call.

    A result belongs to the call of its id; one without an id to the call of its name, else to the
    first call that has none yet. A call without a result gets ``INTERRUPTED``, and a result
    without a call becomes a text of the user.
    """
    paired: list[ChatMessage] = []
    waiting: list[tuple[str, ToolCall]] = []  # calls without a result, by the client's ids
    end = num_calls = 0  # where the next result goes; calls so far
    for message in messages:
        if message.role == "tool":
            found = _find_call(waiting, message)
            if found is None:
                paired += [_as_text(message)] if message.content else []
                continue
            waiting.remove(found)
            paired.insert(end, replace(message, tool_call_id=found[1].id))
            end += 1
            continue
        if message.role == "assistant":
            paired[end:end] = _interrupted(waiting)
            calls = _distinct_calls(message.tool_calls, num_calls)
            num_calls += len(calls)
            waiting = [(call.id, own) for call, own in zip(message.tool_calls, calls, strict=True)]
            message = replace(message, tool_calls=calls)
        paired.append(message)
        end = len(paired) if message.role == "assistant" else end
    paired[end:end] = _interrupted(waiting)
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


def continue_last_answer(messages: list[ChatMessage], _: HistoryFormat) -> list[ChatMessage]:
    """Let the model continue a last message of the assistant, and no other message."""
    last = len(messages) - 1
    return [
        replace(message, is_prefix=index == last and message.role == "assistant")
        for index, message in enumerate(messages)
    ]


Rule = Callable[[list[ChatMessage], HistoryFormat], list[ChatMessage]]
RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            leave_out_thoughts,
            write_calls_as_text,
            leave_out_empty_answers,
            join_calls,
            pair_results,
            shorten_ids,
            continue_last_answer,
        )
    }
)


def _find_call(
    waiting: Sequence[tuple[str, ToolCall]], result: ChatMessage
) -> tuple[str, ToolCall] | None:
    """Return the call of a result among those without one, None if there is none."""
    if result.tool_call_id:
        return next((each for each in waiting if each[0] == result.tool_call_id), None)
    named = (each for each in waiting if each[1].name == result.name)
    return next(named, waiting[0] if waiting and not result.name else None)


def _distinct_calls(calls: Sequence[ToolCall], num_before: int) -> tuple[ToolCall, ...]:
    """Return the calls of one message with distinct ids. An id that is missing or not the first
    is derived from the number of the call in the conversation, so that it stays the same when the
    conversation grows: the second of two calls "a" after five others becomes "a-6".
    """
    made: list[ToolCall] = []
    for number, call in enumerate(calls, start=num_before):
        is_own = call.id not in ("", "null", *(earlier.id for earlier in made))
        made.append(call if is_own else replace(call, id=f"{call.id}-{number}"))
    return tuple(made)


def _interrupted(waiting: Sequence[tuple[str, ToolCall]]) -> list[ChatMessage]:
    return [
        ChatMessage("tool", INTERRUPTED, tool_call_id=call.id, name=call.name)
        for _, call in waiting
    ]


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
    first, then the user and the assistant in turns, and Mistral's ids.
    """
    system = [message for message in messages if message.role == "system"]
    made = [] if not system else [_joined(system)]
    for message in messages:
        if message.role == "system":
            continue
        if message.role == "assistant" and len(made) == bool(system):
            made.append(ChatMessage("user", ""))
        last = made[-1] if made else None
        can_join = last is not None and last.role == message.role != "tool" and not last.tool_calls
        made.append(_joined([made.pop(), message]) if can_join else message)
    return shorten_ids(made, HistoryFormat())


def system_in_user_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return alternating messages with the system message before the first text of the user."""
    first, *others = alternate_roles(messages)
    if first.role != "system":
        return [first, *others]
    user = others.pop(0) if others and others[0].role == "user" else ChatMessage("user", "")
    return [_joined([replace(user, content=first.content), user]), *others]


def _joined(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Return messages of one role as the last of them, with the texts and thoughts of all."""
    last = messages[-1]
    parts = [part for message in messages for part in message.parts or (message.content,) if part]
    has_thoughts = any(message.parts for message in messages)
    return replace(
        last,
        content="\n\n".join(message.content for message in messages if message.content),
        parts=tuple(parts) if has_thoughts else (),
    )
