"""An API server that listens on a port of this machine, for official clients. Its model is
scripted.
"""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvicorn
from openai import OpenAI
from pydantic import SecretStr
from scripted_token_source import FINGERPRINT, SAID, ScriptedSource, http_app_for
from tokenizer_files import SENTENCEPIECE

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

KEY = "sk-contract"
CONTEXT = 512
TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])  # whose format has tools
CALLS = 5  # [TOOL_CALLS]
# of the tool ``weather``
TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
}
CALLED = '[{"name": "weather", "arguments": {"town": "Arles"}}]'


def ids_of(text: str) -> tuple[int, ...]:
    """Return the token ids of a text within an answer."""
    return TOKENIZER.encode(text)[1:]


@dataclass
class ListeningServer:
    """A server; what it says may change between requests."""

    url: str
    source: ScriptedSource

    def says(self, *token_ids: int) -> None:
        """Let every answer have these tokens."""
        self.source.token_ids = token_ids

    def calls(self, before: str, calls: str) -> None:
        """Let every answer be a text and calls of tools."""
        self.says(*(ids_of(before) if before else ()), CALLS, *ids_of(calls))

    def reset(self) -> None:
        """Let it say what it says at first, and forget all requests."""
        self.says(*ids_of(SAID))
        self.source.failure, self.source.fails_at = None, 0
        self.source.requests.clear()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of the prompts of all requests."""
        return [spec.prompt_ids for specs in self.source.requested for spec in specs]


@pytest.fixture(scope="module")
def listening() -> Iterator[ListeningServer]:
    """Run a server for the tests of a module."""
    source = ScriptedSource(fingerprints=(FINGERPRINT,))
    model = ServedModel("tiny", TOKENIZER, CONTEXT, 16, TOKENIZER.vocab_size)
    chat = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
    app = http_app_for(source, model, chat=chat, keys=ApiKeys([SecretStr(KEY)])).app()
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield ListeningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", source)
        server.should_exit = True
        thread.join()


@pytest.fixture
def server(listening: ListeningServer) -> ListeningServer:
    """Return the server, which answers what it always answers."""
    listening.reset()
    return listening


@pytest.fixture
def client(server: ListeningServer) -> Iterator[OpenAI]:
    """Return OpenAI's own client of the server."""
    with OpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=0) as made:
        yield made
