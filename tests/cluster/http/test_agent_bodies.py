"""What agents and clients' libraries send is answered in every chat format with tools, and nothing
of it is refused. ``agent_bodies.json`` has the requests, recorded by ``make agents --record``.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from agent_bodies import FILLER, MAX_CHARS, PATH, AgentBody, read_bodies, with_texts, without_texts
from agent_programs import PROGRAMS
from agent_real_server import STALLED_S, problem_of, unanswered
from agent_server import ANSWER, FORMATS, agent_app, results_of
from scripted_token_source import client_for

from tramontane.router.openai.chat_request import AssistantToolCall
from tramontane.router.tokenization.chat import ToolCall

BODIES = list(read_bodies())
CLIENTS = [f"{program.name} {program.version}" for program in PROGRAMS]
MAX_FILE_BYTES = 400_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def _answers(version: str, folder: Path, bodies: list[AgentBody]) -> list[tuple[int, str, str]]:
    """Return the status, the header Warning and the text of the answer to each body."""
    _, app = agent_app(version, folder)

    async def scenario() -> list[tuple[int, str, str]]:
        answers = []
        async with client_for(app) as client:
            for sent in bodies:
                headers = {"user-agent": sent.agent}
                answer = await client.post(sent.path, json=sent.body, headers=headers)
                warning = answer.headers.get("warning", "")
                answers.append((answer.status_code, warning, answer.text))
        return answers

    return asyncio.run(scenario())


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_program_sends_is_answered(client: str, version: str, folder: Path) -> None:
    bodies = [sent for sent in BODIES if sent.client == client]
    for sent, (status, warning, text) in zip(
        bodies, _answers(version, folder, bodies), strict=True
    ):
        assert status == 200, text
        assert warning == sent.warning
        if sent.body.get("stream"):
            data = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            events = [json.loads(each) for each in data]
            assert events
            assert not any(event.get("error") for event in events)


def test_every_program_has_sent_a_result_of_a_tool() -> None:
    assert {sent.client for sent in BODIES} == set(CLIENTS)
    assert {sent.client for sent in BODIES if results_of(sent.path, sent.body)} == set(CLIENTS)


def test_no_text_of_a_program_is_in_the_file() -> None:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for each in value.values() for text in texts(each)]
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
        return [value] if isinstance(value, str) else []

    written = PATH.read_text(encoding="utf-8")
    assert len(written.encode()) < MAX_FILE_BYTES
    kept = [text for each in json.loads(written) for text in texts(each["body"])]
    long = [text for text in kept if len(text) > MAX_CHARS]
    # the arguments of calls are JSON, whose own texts are short
    assert all(json.loads(text) is not None for text in long)
    assert not any(len(text) > MAX_CHARS for each in long for text in texts(json.loads(each)))
    for place in ("/tmp", "/home", "/root/", "/work/", "localhost", "127.0.0.1"):
        assert place not in written.replace("/agents/work/", "")


def test_a_long_text_becomes_a_filler_of_its_length() -> None:
    sent = {"a": ["x" * 61, "short", '{"b": "' + "y" * 100 + '"}'], "c": 1, "os": "linux"}
    kept = without_texts(sent)
    assert kept == {
        "a": ["<text of 61>", "short", '{"b": "<text of 100>"}'],
        "c": 1,
        "os": "unknown",
    }
    assert FILLER.fullmatch(kept["a"][0])
    assert len(with_texts(kept)["a"][0]) == 61


def test_the_server_of_the_programs_refuses_tokens_that_the_grammar_forbids(folder: Path) -> None:
    source, app = agent_app("v13", folder)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "Hello!"}], "tools": [tool]}

    async def scenario(text: str) -> str:
        source.script = (
            lambda _: (  # type: ignore[method-assign]
                source.format.calls,
                *source.tokenizer.encode(text)[1:],
            )
        )
        async with client_for(app) as client:
            return (await client.post("/v1/chat/completions", json=body)).text

    assert "the grammar cannot be followed" in asyncio.run(scenario("g"))
    assert "not a whole answer" in asyncio.run(scenario("f"))
    del source.script
    assert ANSWER in asyncio.run(scenario_without_script(app, body))


async def scenario_without_script(app: object, body: dict[str, object]) -> str:
    async with client_for(app) as client:  # type: ignore[arg-type]
        return (await client.post("/v1/chat/completions", json=body)).text


def test_an_answer_without_its_end_is_not_whole(folder: Path) -> None:
    """What ``make agents --real`` looks for, in answers of each API, whole and as streams."""
    kinds = {(sent.path, bool(sent.body.get("stream"))): sent for sent in BODIES}
    assert len(kinds) == 7
    _, recorder = agent_app("v13", folder)

    async def scenario() -> None:
        async with client_for(recorder) as client:
            for sent in kinds.values():
                await client.post(sent.path, json=sent.body)
            await client.post("/v1/chat/completions", json={"messages": 1})

    asyncio.run(scenario())
    *answered, refused = recorder.exchanges
    assert unanswered(answered) == ""
    for each in answered:
        cut = replace(each, answer=each.answer[:-20])
        assert problem_of(cut)
        assert problem_of(replace(each, broken="ReadError")) == "the answer broke off: ReadError"
        assert problem_of(replace(each, is_whole=False)) == ""
        left = replace(each, is_whole=False, last_at=each.last_at - 2 * STALLED_S)
        assert problem_of(left).startswith("no part of an answer")
    assert unanswered([*answered, refused]).startswith("refused: 400")
    assert unanswered([replace(answered[0], is_whole=False)])
    assert unanswered([])


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize(
    "call", [{"type": "custom", "custom": {"name": "f", "input": "a b"}}, {"type": "custom"}, {}]
)
def test_a_call_of_another_kind_in_the_history_is_answered(
    call: dict[str, object], version: str, folder: Path
) -> None:
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "tool_calls": [{"id": "abcdefghi", **call}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "done"},
    ]
    sent = AgentBody("", "", "/v1/chat/completions", {"messages": messages})
    [(status, _, text)] = _answers(version, folder, [sent])
    assert status == 200, text


def test_a_call_of_a_custom_tool_is_one_of_a_function_with_one_argument() -> None:
    sent = {"id": "a", "type": "custom", "custom": {"name": "f", "input": 'a "b"'}}
    call = AssistantToolCall.model_validate(sent).call()
    assert call == ToolCall("a", "f", '{"input":"a \\"b\\""}')
