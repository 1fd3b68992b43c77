"""Programs that use clients' libraries: the model calls the program's one tool, which reads a file,
gets the result, and the program prints its answer. Arguments: the server's URL and the file.
"""

from collections.abc import Mapping
from types import MappingProxyType

HEAD = """
import asyncio, json, sys
from pathlib import Path
URL, NOTES = sys.argv[1], sys.argv[2]
ASK = "Read the file " + NOTES + " and tell me what it says."
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"name": "read_notes", "description": "Read a file.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]
def read_notes(path: str) -> str:
    "Read a file."
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:  # random tokens name no file
        return repr(error)
def result_of(arguments):
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return read_notes(**given)
"""

OPENAI_CHAT = """
from openai import OpenAI
client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
assert [model.id for model in client.models.list()] == ["demo"]
for streams in (False, True):
    messages = [{"role": "user", "content": ASK}]
    for _ in range(2):
        if streams:
            with client.chat.completions.stream(
                model="demo", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
            ) as stream:
                completion = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(
                model="demo", messages=messages, tools=TOOLS
            )
        assert completion.usage.total_tokens
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_unset=not streams))
        for call in message.tool_calls or ():
            result = result_of(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)
"""

OPENAI_RESPONSES = """
from openai import OpenAI
client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
for streams in (False, True):
    items = [{"role": "user", "content": ASK}]
    for _ in range(2):
        asked = dict(model="demo", input=items, tools=[{"type": "function"} | TOOL], store=False)
        if streams:
            with client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**asked)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        for item in response.output:
            if item.type == "function_call":
                output = result_of(item.arguments)
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": output}
                )
    print(response.output_text)
"""

ANTHROPIC = """
from anthropic import Anthropic
client = Anthropic(base_url=URL, api_key="none", max_retries=0)
[model] = client.models.list().data
assert (model.id, model.display_name, model.type) == ("demo", "demo", "model")
assert model.created_at.year > 2000 and client.models.retrieve("demo").id == "demo"
TOOLS = [{"name": "read_notes", "description": "Read a file.", "input_schema": SCHEMA}]
for streams in (False, True):
    messages = [{"role": "user", "content": ASK}]
    for _ in range(2):
        asked = dict(model="demo", max_tokens=500, messages=messages, tools=TOOLS)
        assert client.messages.count_tokens(
            model="demo", messages=messages, tools=TOOLS
        ).input_tokens
        if streams:
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": result_of(block.input)}
            for block in message.content if block.type == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    print(*(block.text for block in message.content if block.type == "text"))
"""

MISTRALAI = """
from mistralai.client import Mistral
client = Mistral(server_url=URL, api_key="none")
[card] = client.models.list().data
assert (card.id, card.type, card.capabilities.function_calling) == ("demo", "base", True)
assert client.models.retrieve(model_id="demo").max_context_length
for streams in (False, True):
    messages = [{"role": "user", "content": ASK}]
    for _ in range(2):
        if streams:
            text, calls, usage = "", [], None
            for event in client.chat.stream(model="demo", messages=messages, tools=TOOLS):
                delta = event.data.choices[0].delta
                text += delta.content or ""
                calls += delta.tool_calls or []
                usage = event.data.usage or usage
        else:
            answer = client.chat.complete(model="demo", messages=messages, tools=TOOLS)
            message, usage = answer.choices[0].message, answer.usage
            text, calls = message.content or "", message.tool_calls or []
        assert usage.total_tokens
        messages.append({"role": "assistant", "content": text, "tool_calls": calls or None})
        for call in calls:
            result = result_of(call.function.arguments)
            messages.append(
                {"role": "tool", "name": call.function.name, "tool_call_id": call.id}
                | {"content": result}
            )
    print(text)
"""

PYDANTIC_AI_MISTRAL = """
from pydantic_ai import Agent
from pydantic_ai.models.mistral import MistralModel
from pydantic_ai.providers.mistral import MistralProvider
model = MistralModel("demo", provider=MistralProvider(api_key="none", base_url=URL))
"""
PYDANTIC_AI_OPENAI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("demo", provider=OpenAIProvider(api_key="none", base_url=URL + "/v1"))
"""
PYDANTIC_AI = """
agent = Agent(model, tools=[read_notes], system_prompt="You read files.", retries=0)
print(agent.run_sync(ASK).output)
async def streamed():
    async with agent.run_stream(ASK) as result:
        print(await result.get_output())
asyncio.run(streamed())
"""

LANGCHAIN_OPENAI = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="demo", base_url=URL + "/v1", api_key="none", max_retries=0)
"""
LANGCHAIN_MISTRALAI = """
from langchain_mistralai import ChatMistralAI
model = ChatMistralAI(model="demo", endpoint=URL + "/v1", api_key="none", max_retries=0)
model.client.timeout = model.async_client.timeout = 60
"""
LANGCHAIN = """
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
bound = model.bind_tools([tool(read_notes)])
for streams in (False, True):
    messages = [("system", "You read files."), ("user", ASK)]
    for _ in range(2):
        if streams:
            message = None
            for chunk in bound.stream(messages):
                message = chunk if message is None else message + chunk
        else:
            message = bound.invoke(messages)
        messages.append(message)
        assert not message.invalid_tool_calls, message.invalid_tool_calls
        for call in message.tool_calls:
            messages.append(tool(read_notes).invoke(call))
    print(message.content)
"""

LITELLM = """
import litellm
litellm.telemetry = False
for model, base in (("openai/demo", URL + "/v1"), ("mistral/demo", URL + "/v1"),
                    ("anthropic/demo", URL)):
    for streams in (False, True):
        messages = [{"role": "user", "content": ASK}]
        for _ in range(2):
            answer = litellm.completion(
                model=model, api_base=base, api_key="none", messages=messages, tools=TOOLS,
                stream=streams, num_retries=0,
            )
            if streams:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = result_of(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(message.content)
"""

JS_HEAD = """
import { readFileSync } from "node:fs";
const [url, notes] = process.argv.slice(2);
const ask = `Read the file ${notes} and tell me what it says.`;
const schema = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const tool = { name: "read_notes", description: "Read a file.", parameters: schema };
const tools = [{ type: "function", function: tool }];
const resultOf = (given) => {
  try {
    return readFileSync((typeof given === "string" ? JSON.parse(given) : given).path, "utf8");
  } catch (error) {
    return String(error);
  }
};
"""

JS_OPENAI = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
for (const streams of [false, true]) {
  const messages = [{ role: "user", content: ask }];
  let message;
  for (let round = 0; round < 2; round++) {
    const asked = { model: "demo", messages, tools };
    const answer = streams
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
    message = answer.choices[0].message;
    messages.push(message);
    for (const call of message.tool_calls ?? [])
      messages.push({
        role: "tool", tool_call_id: call.id, content: resultOf(call.function.arguments),
      });
  }
  console.log(message.content);
}
for (const streams of [false, true]) {
  const input = [{ role: "user", content: ask }];
  let response;
  for (let round = 0; round < 2; round++) {
    const asked = { model: "demo", input, tools: [{ type: "function", ...tool }], store: false };
    response = streams
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    input.push(...response.output);
    for (const item of response.output)
      if (item.type === "function_call")
        input.push({
          type: "function_call_output", call_id: item.call_id, output: resultOf(item.arguments),
        });
  }
  console.log(response.output_text);
}
"""

JS_MISTRAL = """
import { Mistral } from "@mistralai/mistralai";
const client = new Mistral({ serverURL: url, apiKey: "none" });
const listed = await client.models.list();
if (listed.data[0].id !== "demo" || listed.data[0].type !== "base") throw new Error("models");
for (const streams of [false, true]) {
  const messages = [{ role: "user", content: ask }];
  let text;
  for (let round = 0; round < 2; round++) {
    const asked = { model: "demo", messages, tools };
    let calls = [], usage;
    text = "";
    if (streams) {
      for await (const event of await client.chat.stream(asked)) {
        const delta = event.data.choices[0].delta;
        text += delta.content ?? "";
        calls.push(...(delta.toolCalls ?? []));
        usage = event.data.usage ?? usage;
      }
    } else {
      const answer = await client.chat.complete(asked);
      const message = answer.choices[0].message;
      [text, calls, usage] = [message.content ?? "", message.toolCalls ?? [], answer.usage];
    }
    if (!usage.totalTokens) throw new Error("no usage");
    messages.push({ role: "assistant", content: text, toolCalls: calls });
    for (const call of calls)
      messages.push({
        role: "tool", name: call.function.name, toolCallId: call.id,
        content: resultOf(call.function.arguments),
      });
  }
  console.log(text);
}
"""

JS_AI_COMPATIBLE = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
const provider = createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, apiKey: "none" });
"""
JS_AI_MISTRAL = """
import { createMistral } from "@ai-sdk/mistral";
const provider = createMistral({ baseURL: `${url}/v1`, apiKey: "none" });
"""
JS_AI = """
import { generateText, streamText, tool as defineTool, jsonSchema, stepCountIs } from "ai";
const asked = {
  model: provider("demo"),
  prompt: ask,
  maxRetries: 0,
  stopWhen: stepCountIs(3),
  tools: {
    read_notes: defineTool({
      description: "Read a file.", inputSchema: jsonSchema(schema),
      execute: async (given) => resultOf(given),
    }),
  },
};
console.log((await generateText(asked)).text);
const result = streamText({ ...asked, onError: ({ error }) => { throw error; } });
console.log(await result.text);
"""

PYTHON: Mapping[str, str] = MappingProxyType(
    {
        "openai (chat)": HEAD + OPENAI_CHAT,
        "openai (responses)": HEAD + OPENAI_RESPONSES,
        "anthropic": HEAD + ANTHROPIC,
        "mistralai": HEAD + MISTRALAI,
        "pydantic-ai MistralModel": HEAD + PYDANTIC_AI_MISTRAL + PYDANTIC_AI,
        "pydantic-ai OpenAIChatModel": HEAD + PYDANTIC_AI_OPENAI + PYDANTIC_AI,
        "langchain-openai": HEAD + LANGCHAIN_OPENAI + LANGCHAIN,
        "langchain-mistralai": HEAD + LANGCHAIN_MISTRALAI + LANGCHAIN,
        "LiteLLM": HEAD + LITELLM,
    }
)
JAVASCRIPT: Mapping[str, str] = MappingProxyType(
    {
        "openai (JavaScript)": JS_HEAD + JS_OPENAI,
        "@mistralai/mistralai": JS_HEAD + JS_MISTRAL,
        "ai and @ai-sdk/openai-compatible": JS_HEAD + JS_AI_COMPATIBLE + JS_AI,
        "ai and @ai-sdk/mistral": JS_HEAD + JS_AI_MISTRAL + JS_AI,
    }
)
