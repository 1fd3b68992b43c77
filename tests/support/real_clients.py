"""Programs of AutoGen's users and commands of guidellm, run in environments of their own against a
server.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from client_environment import AUTOGEN, GUIDELLM, client_python

AUTOGEN_PROGRAM = """
import asyncio, sys
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

CAN = {"vision": False, "function_calling": False, "json_output": True, "structured_output": True}
INFO = CAN | {"family": "unknown"}

async def main(url):
    client = OpenAIChatCompletionClient(
        model="demo", base_url=url + "/v1", api_key="none", model_info=INFO,
        include_name_in_message=True, max_tokens=8, max_retries=0,
    )
    agents = [
        AssistantAgent("poet", model_client=client, system_message="Write."),
        AssistantAgent(
            "critic", model_client=client, system_message="Judge.", model_client_stream=True
        ),
    ]
    team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(5))
    result = await team.run(task="What news from Rome?")
    print(len(result.messages), [message.source for message in result.messages])
    await client.close()

asyncio.run(main(sys.argv[1]))
"""


def run_autogen(url: str) -> str:
    """Let two agents talk, one of them with a stream; return how many messages there were, and of
    whom.
    """
    python = client_python(AUTOGEN)
    result = subprocess.run(
        [str(python), "-c", AUTOGEN_PROGRAM, url],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


def run_guidellm(url: str, folder: Path, endpoint: str, num_requests: int) -> dict[str, Any]:
    """Benchmark a server with two requests at a time; return guidellm's totals of requests."""
    python = client_python(GUIDELLM)
    prompts = [
        {"prompt": f"What news {number}?", "output_tokens_count": 8}
        for number in range(num_requests)
    ]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8"
    )
    report = folder / "report.json"
    command = [
        *(str(python.parent / "guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},request_format={endpoint}"),
        *(
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            f"kind=max_requests,count={num_requests}",
        ),
        *(
            "--data",
            f"kind=json_file,path={folder / 'prompts.jsonl'}",
            "--output",
            f"kind=json,path={report}",
        ),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    totals: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0][
        "metrics"
    ]["request_totals"]
    return totals
