"""Where a server is, as ``--url`` says."""

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
