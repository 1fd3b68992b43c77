"""Fields of vLLM's and Mistral's clients over HTTP: usage in chunks, stop tokens, prefixes,
constraints, FIM.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
from http_fuzz import check_error
from mistral_common.protocol.fim.request import FIMRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from scripted_token_source import SAID, ScriptedSource, client_for, http_app_for
from scripted_token_source import TOKENIZER as DEMO_TOKENIZER
from tokenizer_files import SENTENCEPIECE

from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

PATH = SENTENCEPIECE["v3"]
TOKENIZER = SentencePieceTokenizer(PATH)  # whose format has tools and FIM
MODEL = ServedModel("demo", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
CHAT_FORMAT = MistralChatTemplate.from_sentencepiece(PATH)
COMPLETIONS, CHAT, FIM = "/v1/completions", "/v1/chat/completions", "/v1/fim/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}
SAYS = TOKENIZER.encode(SAID)[1:]


class Answered:
    """An answer with the sequences that were asked for."""

    def __init__(
        self, path: str, body: dict[str, Any], source: ScriptedSource | None = None, **settings: Any
    ) -> None:
        self.source = source or ScriptedSource(SAYS)

        async def scenario() -> tuple[int, str, httpx.Headers]:
            fields: dict[str, Any] = {"model": MODEL, "chat": CHAT_FORMAT} | settings
            async with client_for(http_app_for(self.source, **fields).app()) as client:
                response = await client.post(path, json=body)
                return response.status_code, response.text, response.headers

        self.status, self.text, self.headers = asyncio.run(scenario())

    @property
    def choice(self) -> dict[str, Any]:
        assert self.status == 200, self.text
        choice: dict[str, Any] = json.loads(self.text)["choices"][0]
        return choice

    @property
    def events(self) -> list[dict[str, Any]]:
        assert self.status == 200, self.text
        *events, done = [event.removeprefix("data: ") for event in self.text.split("\n\n") if event]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    @property
    def sampling(self) -> Any:
        return self.source.requested[0][0].sampling


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "a", "max_tokens": 3}), (CHAT, HELLO | {"max_tokens": 3})],
)
def test_every_chunk_has_the_usage_so_far(path: str, body: dict[str, Any]) -> None:
    options = {
        "stream": True,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }
    *chunks, last = Answered(path, body | options).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == ([1, 2, 3] if path == COMPLETIONS else [0, 1, 2, 3])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    without = Answered(
        path, body | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    ).events
    assert [chunk["usage"]["completion_tokens"] for chunk in without] == counts, (
        "and no last chunk without include_usage"
    )


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stop_token_ends_an_answer_without_its_text(path: str, includes: bool) -> None:
    """The source ends by itself with the last token, which is what the scheduler does at a stop
    token.
    """
    body = {"prompt": "a", "max_tokens": 64} if path == COMPLETIONS else HELLO
    answered = Answered(
        path, body | {"stop_token_ids": [SAYS[-1]], "include_stop_str_in_output": includes}
    )
    text = answered.choice["text"] if path == COMPLETIONS else answered.choice["message"]["content"]
    assert text.strip() == (SAID if includes else SAID.removesuffix("."))
    assert answered.choice["finish_reason"] == "stop"
    assert answered.sampling.stop_token_ids == (SAYS[-1],)


@pytest.mark.parametrize(
    ("includes", "text"), [(False, "Good morrow, "), (True, "Good morrow, my")]
)
def test_a_stop_string_may_be_part_of_the_answer(includes: bool, text: str) -> None:
    answered = Answered(CHAT, HELLO | {"stop": "my", "include_stop_str_in_output": includes})
    assert (answered.choice["message"]["content"], answered.choice["finish_reason"]) == (
        text,
        "stop",
    )


def test_a_prefix_is_continued_and_included() -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Good ", "prefix": True}]
    says = ScriptedSource(SAYS[1:])
    answered = Answered(CHAT, {"messages": messages, "n": 2}, says)
    assert answered.choice["message"]["content"] == "Good " + TOKENIZER.decode(SAYS[1:])
    assert TOKENIZER.decode(SAYS[1:]).startswith(" "), (
        "a space that is no longer the beginning of a text"
    )
    expected = (
        MistralTokenizer.from_file(str(PATH))
        .encode_chat_completion(_mistral_request(messages))
        .tokens
    )
    assert list(says.requested[0][0].prompt_ids) == expected
    events = Answered(CHAT, {"messages": messages, "stream": True}, ScriptedSource(SAYS[1:])).events
    assert (
        "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        == answered.choice["message"]["content"]
    )


def test_a_final_message_is_continued_and_not_repeated() -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Good "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert Answered(CHAT, body, ScriptedSource(SAYS[1:])).choice["message"][
        "content"
    ] == TOKENIZER.decode(SAYS[1:])
    begun = [
        Answered(CHAT, given, ScriptedSource(SAYS[1:])).source.requested[0][0].prompt_ids
        for given in (body, {"messages": messages}, body | {"continue_final_message": None})
    ]
    assert begun[0] == begun[1] == begun[2], "a last message of the assistant is always continued"


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"prefix": True},
    ],
)
def test_the_tokens_of_a_conversation_that_is_continued_are_those_of_its_chat(
    fields: dict[str, Any],
) -> None:
    last = {"role": "assistant", "content": "Good "} | {
        name: fields[name] for name in fields if name == "prefix"
    }
    body = {"messages": [*HELLO["messages"], last]} | {
        name: fields[name] for name in fields if name != "prefix"
    }
    counted = Answered("/tokenize", body)
    assert counted.status == 200, counted.text
    chat = Answered(CHAT, body, ScriptedSource(SAYS[1:]))
    assert json.loads(counted.text)["tokens"] == list(chat.source.requested[0][0].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        (HELLO | {"continue_final_message": True}, "continue_final_message"),
        (HELLO | {"add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued_is_not_tokenized(fields: dict[str, Any], parameter: str) -> None:
    refused = Answered("/tokenize", fields)
    assert (refused.status, json.loads(refused.text)["error"]["param"]) == (400, parameter)


def _mistral_request(messages: list[dict[str, Any]]) -> Any:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    return ChatCompletionRequest(model="m", messages=messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_regex": "yes|no"},
        {"structured_outputs": {"regex": "yes|no"}},
        {"guided_json": {"type": "object"}},
        {"guided_json": '{"type": "object"}'},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_constraints_reach_the_last_stage(path: str, fields: dict[str, Any]) -> None:
    answered = Answered(path, ({"prompt": "a"} if path == COMPLETIONS else HELLO) | fields)
    assert answered.status == 200, answered.text
    grammar = answered.sampling.grammar
    is_json = "json" in json.dumps(fields)
    assert ("%json" in grammar) is is_json
    assert ('" "?' in grammar) is (is_json or path == CHAT), (
        "a space before a chat's answer is not part of it"
    )


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def _says(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "body", "media"),
    [
        (CHAT, _says({"type": "image_url", "image_url": {"url": "x"}}), "images"),
        (CHAT, _says({"type": "input_audio"}), "recordings of sound"),
        (CHAT, _says({"type": "document_url", "document_url": "x"}), "files"),
        (CHAT, _says({"type": "video_url", "video_url": {"url": "x"}}), "videos"),
        (CHAT, _says({"type": "video"}), "videos"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "images"),
        (MESSAGES, _says({"type": "image", "source": {"type": "base64"}}), "images"),
        (MESSAGES, _says({"type": "document"}), "documents"),
        (
            MESSAGES + "/count_tokens",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "images",
        ),
    ],
)
def test_what_is_no_text_is_refused_in_the_same_words_by_every_api(
    path: str, body: dict[str, Any], media: str
) -> None:
    answered = Answered(path, body)
    assert answered.status == 400, answered.text
    message = check_error(answered.text.encode(), path=path)["message"]
    assert message.endswith(f": the model serves text only; {media} are not supported"), message


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})])
def test_best_of_is_refused_unless_it_is_one(path: str, body: dict[str, Any]) -> None:
    refused = Answered(path, body | {"best_of": 2})
    assert refused.status == 400, refused.text
    error = check_error(refused.text.encode(), path=path)
    assert error["param"] == "best_of"
    accepted = Answered(path, body | {"best_of": 1})
    assert accepted.status == 200, accepted.text
    assert "warning" not in accepted.headers


OUTPUT = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file"}]}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (RESPONSES, {"input": [OUTPUT]}, "file"),
        (
            MESSAGES,
            _says({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            "image",
        ),
        (
            MESSAGES,
            HELLO | {"max_tokens": 5, "system": [{"type": "search_result"}]},
            "search result",
        ),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": [{"type": "input_audio"}]}]},
            "recording",
        ),
    ],
)
def test_what_is_no_text_and_not_of_the_user_has_a_name(
    path: str, body: dict[str, Any], text: str
) -> None:
    answered = Answered(path, body)
    assert answered.status == 200, answered.text
    assert f"[{text} omitted]" in TOKENIZER.decode(answered.source.requested[0][0].prompt_ids)
    assert "[].type=" in answered.headers["warning"]


def test_other_parts_are_refused_by_their_types() -> None:
    """Where they are what the user has just said."""
    refused = "messages[0].content: parts of the type 'refusal' are not supported, only text is"
    assert refused in Answered(CHAT, _says({"type": "refusal"})).text
    other = {"input": [{"role": "user", "content": [{"type": "reasoning"}]}]}
    assert (
        "input[0].content: parts of the type 'reasoning' are not supported"
        in Answered(RESPONSES, other).text
    )
    text = {"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}
    assert Answered(RESPONSES, text).status == 200
    unknown = Answered(CHAT, _says({"type": "text", "text": "a", "other": 1}))
    assert unknown.headers["warning"] == '299 - "ignored: messages[].content[].other"'


def test_hints_about_caches_change_no_prompt() -> None:
    hinted = {
        "type": "text",
        "text": "a",
        "cache_control": {"type": "ephemeral"},
        "prompt_cache_breakpoint": {"mode": "explicit"},
    }
    prompts = [
        Answered(CHAT, _says(part)).source.requested[0][0].prompt_ids
        for part in ({"type": "text", "text": "a"}, hinted)
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("constraint", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_an_answer_cannot_begin_with_a_prefix_and_follow_a_constraint(
    constraint: dict[str, Any], name: str
) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Good ", "prefix": True}]
    answered = Answered(CHAT, {"messages": messages} | constraint)
    assert answered.status == 400
    assert (
        f"cannot be what {name} requires"
        in check_error(answered.text.encode(), "messages[1].prefix")["message"]
    )
    without = [*HELLO["messages"], {"role": "assistant", "content": "Good "}]
    for body in (
        {"messages": without, "continue_final_message": True},
        {"messages": [*messages[:-1], messages[-1] | {"content": ""}]},
    ):
        assert "cannot be what" not in Answered(CHAT, body | constraint).text


def test_a_choice_of_tools_without_tools_is_refused_unless_it_chooses_nothing() -> None:
    for choice in ("auto", "none"):
        assert Answered(CHAT, HELLO | {"tool_choice": choice}).status == 200
        assert Answered(CHAT, HELLO | {"tool_choice": choice, "guided_choice": ["a"]}).status == 200
    assert Answered(CHAT, HELLO | {"tool_choice": "required"}).status == 400


# FIM

BETWEEN = {"prompt": "def f(a):\n    return", "suffix": "\n\nprint(f(1))"}


def _fim_ids(prompt: str, suffix: str) -> list[int]:
    ids: list[int] = (
        MistralTokenizer.from_file(str(PATH))
        .encode_fim(FIMRequest(prompt=prompt, suffix=suffix))
        .tokens
    )
    return ids


def test_fim_has_mistrals_shape_and_mistral_commons_ids() -> None:
    more = {
        "temperature": 0,
        "top_p": 1,
        "max_tokens": 9,
        "min_tokens": 1,
        "random_seed": 3,
        "stop": ["\n\n"],
        "metadata": {},
    }
    answered = Answered(FIM, BETWEEN | more)
    whole = json.loads(answered.text)
    assert whole["object"] == "chat.completion"
    message = answered.choice["message"]
    assert (message["role"], message["content"]) == ("assistant", TOKENIZER.decode(SAYS)), (
        "with the space before it"
    )
    assert list(answered.source.requested[0][0].prompt_ids) == _fim_ids(**BETWEEN)
    assert (answered.sampling.seed, answered.sampling.min_tokens) == (3, 1)
    events = Answered(FIM, BETWEEN | {"stream": True, "n": 2}).events
    own = [choice for event in events for choice in event["choices"] if choice["index"] == 1]
    assert "".join(choice["delta"].get("content", "") for choice in own) == TOKENIZER.decode(SAYS)
    assert (own[0]["delta"]["role"], own[-1]["finish_reason"]) == ("assistant", "stop")


def test_fim_without_a_suffix_is_mistral_commons_too() -> None:
    assert list(Answered(FIM, {"prompt": "a"}).source.requested[0][0].prompt_ids) == _fim_ids(
        "a", ""
    )


def test_a_suffix_of_a_completion_is_fim() -> None:
    answered = Answered(COMPLETIONS, BETWEEN)
    assert answered.choice["text"] == TOKENIZER.decode(SAYS)
    assert list(answered.source.requested[0][0].prompt_ids) == _fim_ids(**BETWEEN)
    plain = Answered(COMPLETIONS, {"prompt": "a", "suffix": ""})
    assert plain.source.requested[0][0].prompt_ids == TOKENIZER.encode("a")


@pytest.mark.parametrize("path", [COMPLETIONS, FIM])
def test_fim_needs_a_tokenizer_that_knows_it(path: str) -> None:
    demo = ServedModel("demo", DEMO_TOKENIZER, 128, 16, DEMO_TOKENIZER.vocab_size)
    answered = Answered(path, BETWEEN, model=demo)
    assert answered.status == 400
    assert "no tokens for a suffix" in check_error(answered.text.encode(), "suffix")["message"]
    long = Answered(path, BETWEEN | {"suffix": "la " * 600})
    assert (long.status, "positions" in long.text or "too long" in long.text) == (400, True)
