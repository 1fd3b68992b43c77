"""Variables of chat templates over HTTP: those without effect are named in a header."""

import asyncio
from typing import Any

import pytest
from scripted_token_source import ScriptedSource, client_for, http_app_for

HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        (None, None),
        ({}, None),
        ({"enable_thinking": None, "add_generation_prompt": True}, None),
        (
            {"enable_thinking": False, "a": [1]},
            '299 - "ignored: chat_template_kwargs.enable_thinking, chat_template_kwargs.a"',
        ),
    ],
)
def test_variables_of_mistrals_formats_are_named_as_ignored(
    path: str, variables: dict[str, Any] | None, warning: str | None
) -> None:
    async def scenario() -> None:
        async with client_for(http_app_for(ScriptedSource()).app()) as client:
            plain = await client.post(path, json=HELLO)
            given = await client.post(path, json=HELLO | {"chat_template_kwargs": variables})
        assert plain.status_code == given.status_code == 200, given.text
        assert given.headers.get("warning") == warning
        if path == "/tokenize":
            assert given.json() == plain.json()

    asyncio.run(scenario())
