"""Messages of the service Inference, to and from requests and results of completions."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ParameterError
from tramontane.proto.request import MAX_BIASES, MAX_STOP_TOKENS, FinishReason
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.json_limits import MAX_ITEMS, check_elements
from tramontane.router.openai.sampling_values import MAX_STOPS
from tramontane.router.openai.served_model import ServedModel

PROMPT_FIELDS = ("text", "token_ids")
FINISH_REASONS = {reason.value: f"FINISH_REASON_{reason.name}" for reason in FinishReason}
# of an answer to Score; protobuf holds Python's interpreter lock while it serializes a message
PIECE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SerializedMessage:
    """A message that is serialized already, because gRPC and Ray Serve would do so on their event
    loops.
    """

    data: bytes = b""

    def SerializeToString(self) -> bytes:
        """Return the bytes of the message."""
        return self.data


def parse_generate(request: pb.GenerateRequest) -> CompletionRequest:
    """Parse a request with the rules of HTTP. Raises ParameterError."""
    return _parse(request, return_token_ids=True, stream=True)


def parse_score(request: pb.ScoreRequest) -> CompletionRequest:
    """Parse a request to score a prompt: it is echoed with its log-probabilities, and no tokens are
    generated.
    """
    return _parse(
        request,
        **{"logprobs": 0} if not request.HasField("logprobs") else {},
        echo=True,
        max_tokens=0,
    )


def _parse(request: pb.GenerateRequest | pb.ScoreRequest, **more: object) -> CompletionRequest:
    """Parse fields as the HTTP parameters of the same name; a field that is not set is a parameter
    that is not given.
    """
    given: dict[str, Any] = {
        field.name: value
        for field, value in request.ListFields()
        if field.name not in PROMPT_FIELDS
    }
    which = request.WhichOneof("prompt")
    if which is None:
        raise ParameterError("text or token_ids: one of them must be given", "prompt")
    given["prompt"] = (
        request.text if which == "text" else _bounded(request.token_ids.ids, MAX_ITEMS, "prompt")
    )
    if "stop" in given:
        given["stop"] = _bounded(given["stop"], MAX_STOPS, "stop")
    if "stop_token_ids" in given:
        given["stop_token_ids"] = _bounded(
            given["stop_token_ids"], MAX_STOP_TOKENS, "stop_token_ids"
        )
    if "logit_bias" in given:
        biases = given["logit_bias"]
        given["logit_bias"] = {
            str(token_id): biases[token_id]
            for token_id in _bounded(biases, MAX_BIASES, "logit_bias")
        }
    schema = given.pop("response_format", None)
    text = json.dumps(given | more)
    if schema is not None:
        _check_json(schema, "response_format")
        text = f'{text[:-1]}, "response_format": {schema}}}'
    return parse_completion(text.encode())


def _bounded(items: Collection[Any], limit: int, name: str) -> list[Any]:
    """Return a list of the items, which is not made if they are too many. Raises ParameterError."""
    if len(items) > limit:
        raise ParameterError(f"{name} has {len(items)} items; it may have at most {limit}", name)
    return list(items)


def _check_json(text: str, name: str) -> None:
    """Raise ParameterError unless a text is JSON within the bounds of a body."""
    check_elements(text.encode(), name, name)
    try:
        from_json(text)
    except ValueError:
        raise ParameterError(f"{name} must be JSON, as a text", name) from None


def to_generate_response(changes: Iterable[Mapping[str, Any]]) -> pb.GenerateResponse:
    """Convert the changes yielded by ``Generation.stream``."""
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
    """Convert OpenAI's object: ``tokens``, ``token_logprobs`` and ``top_logprobs`` are lists of one
    length.
    """
    if logprobs is None:
        return []
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    columns = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    return [
        pb.TokenLogprob(
            token=token,
            logprob=logprob,
            top=[pb.TopLogprob(token=other, logprob=value) for other, value in (top or {}).items()],
        )
        for token, logprob, top in columns
    ]


def to_score_response(result: Mapping[str, Any]) -> SerializedMessage:
    """Convert the result of ``CompletionFormatter.run`` for a request of ``parse_score``, and free
    it as ``encode_and_free`` does.

    Each piece is a separate ScoreResponse: protobuf merges consecutive messages, so that their
    tokens are one list.
    """
    logprobs = result["choices"].pop()["logprobs"]
    pieces = [pb.ScoreResponse(usage=pb.Usage(**result["usage"])).SerializeToString()]
    for start in range(0, len(logprobs["tokens"]), PIECE_TOKENS):
        piece = {
            name: column and column[start : start + PIECE_TOKENS]
            for name, column in logprobs.items()
        }
        pieces.append(pb.ScoreResponse(tokens=token_logprobs(piece)).SerializeToString())
    return SerializedMessage(b"".join(pieces))


def to_models_response(model: ServedModel) -> pb.ModelsResponse:
    """Describe the served model."""
    description = pb.Model(
        id=model.name, max_model_len=model.max_model_len, vocab_size=model.vocab_size
    )
    return pb.ModelsResponse(models=[description])
