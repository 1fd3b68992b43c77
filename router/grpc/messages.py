"""Messages of the service Inference, to and from requests and results of completions."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ParameterError
from tramontane.proto.request import FinishReason
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.served_model import ServedModel

PROMPT_FIELDS = ("text", "token_ids")
FINISH_REASONS = {reason.value: f"FINISH_REASON_{reason.name}" for reason in FinishReason}


def parse_generate(request: pb.GenerateRequest) -> CompletionRequest:
    """Parse a request with the rules of HTTP. Raises ParameterError."""
    return _parse(request, return_token_ids=True)


def parse_score(request: pb.ScoreRequest) -> CompletionRequest:
    """Parse a request to score a prompt: it is echoed with its log-probabilities, and nothing is generated."""
    return _parse(request, **{"logprobs": 0} if not request.HasField("logprobs") else {}, echo=True, max_tokens=0)


def _parse(request: pb.GenerateRequest | pb.ScoreRequest, **more: object) -> CompletionRequest:
    """Parse fields as the HTTP parameters of the same name; a field that is not set is a parameter that is not given."""
    given: dict[str, Any] = {field.name: value for field, value in request.ListFields() if field.name not in PROMPT_FIELDS}
    which = request.WhichOneof("prompt")
    if which is None:
        raise ParameterError("text or token_ids: one of them must be given", "prompt")
    given["prompt"] = request.text if which == "text" else list(request.token_ids.ids)
    if "stop" in given:
        given["stop"] = list(given["stop"])
    if "logit_bias" in given:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in given["logit_bias"].items()}
    if "response_format" in given:
        given["response_format"] = _parse_json(given["response_format"], "response_format")
    return parse_completion(json.dumps(given | more).encode())


def _parse_json(text: str, name: str) -> Any:  # noqa: ANN401 - any JSON, which is validated later
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ParameterError(f"{name} must be JSON, as a text", name) from None


def to_generate_response(changes: Iterable[Mapping[str, Any]]) -> pb.GenerateResponse:
    """Convert what ``Completion.stream`` yields."""
    return pb.GenerateResponse(
        pieces=[
            pb.Piece(
                index=change["index"],
                text=change["text"],
                token_ids=change["token_ids"],
                logprobs=token_logprobs(change["logprobs"]),
                finish_reason=FINISH_REASONS.get(change["finish_reason"]),
            )
            for change in changes
        ]
    )


def token_logprobs(logprobs: Mapping[str, Any] | None) -> list[pb.TokenLogprob]:
    """Convert OpenAI's object: ``tokens``, ``token_logprobs`` and ``top_logprobs`` are lists of one length."""
    if logprobs is None:
        return []
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    columns = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    return [
        pb.TokenLogprob(
            token=token, logprob=logprob, top=[pb.TopLogprob(token=other, logprob=value) for other, value in (top or {}).items()]
        )
        for token, logprob, top in columns
    ]


def to_score_response(result: Mapping[str, Any]) -> pb.ScoreResponse:
    """Convert what ``Completion.run`` returns for a request of ``parse_score``."""
    return pb.ScoreResponse(tokens=token_logprobs(result["choices"][0]["logprobs"]), usage=pb.Usage(**result["usage"]))


def to_models_response(model: ServedModel) -> pb.ModelsResponse:
    """Describe the served model."""
    description = pb.Model(id=model.name, max_model_len=model.max_model_len, vocab_size=model.vocab_size)
    return pb.ModelsResponse(models=[description])
