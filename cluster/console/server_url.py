"""Where a server is, as ``--url`` says, and whether it lets us in."""

from typing import Any

import httpx

from tramontane.proto.errors import ConfigError


def base_url(url: str) -> httpx.URL:
    """With or without the /v1 that OpenAI's clients want at the end. Raises ConfigError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}; it must begin with http:// or https://")
    try:
        return httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url is {url!r}: {error}") from error


def answer_of(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own
    """Of a server that is there and lets us in, whatever it answers. Raises ConfigError."""
    try:
        answer = client.request(method, path, **options)
    except httpx.HTTPError as error:
        raise ConfigError(f"--url {client.base_url} does not answer: {str(error) or type(error).__name__}") from error
    check_allowed(client, answer)
    return answer


def check_allowed(client: httpx.Client | httpx.AsyncClient, answer: httpx.Response) -> None:
    """Raises ConfigError if the server wants another key, or one at all."""
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        was_sent = "authorization" in answer.request.headers
        wish = "wants another API key than this" if was_sent else "wants an API key"
        raise ConfigError(f"--url {client.base_url} {wish}; give --api-key-file or --api-key")
