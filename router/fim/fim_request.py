"""Requests for the text between a prompt and a suffix, with the fields of Mistral's API and the
sampling parameters of others.
"""

from typing import Annotated

from pydantic import Field

from tramontane.proto.errors import ParameterError
from tramontane.router.openai.completion_request import CompletionRequest, Text, parse_body
from tramontane.router.openai.request_fields import SamplingFields
from tramontane.router.structured.request_model import default_if_null


class FimRequest(SamplingFields):
    """Body of ``POST /v1/fim/completions``."""

    model: str | None = None
    prompt: Text
    suffix: Annotated[Text, default_if_null("")] = ""
    max_tokens: int | None = Field(None, ge=1, lt=2**31)

    def as_completion(self, max_model_len: int) -> CompletionRequest:
        """Return the completion with the same answer; without max_tokens as long as the context has
        room for.
        """
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields}
        max_tokens = max_model_len if self.max_tokens is None else self.max_tokens
        return CompletionRequest.model_construct(
            prompt=(self.prompt,), suffix=self.suffix, max_tokens=max_tokens, **shared
        )


def parse_fim(body: bytes) -> FimRequest:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    request = parse_body(FimRequest, body)
    request.check_combinations()
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise ParameterError(
            f"min_tokens is {request.min_tokens}, above max_tokens, {request.max_tokens}",
            "min_tokens",
        )
    return request
