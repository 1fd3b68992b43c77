"""Messages of the service Inference, to and from what ``completions`` takes and gives."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ParameterError
from tramontane.proto.request import FinishReason
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.served_model import ServedModel

OF_THE_PROMPT = ("text", "token_ids")
FINISH_REASONS = {reason.value: f"FINISH_REASON_{reason.name}" for reason in FinishReason}


def parse_generate(request: pb.GenerateRequest) -> CompletionRequest:
    """Judged as the same parameters over HTTP are. Raises ParameterError."""
    return _parsed(request, return_token_ids=True)


def parse_score(request: pb.ScoreRequest) -> CompletionRequest:
    """The prompt given back with its log-probabilities, and nothing after it."""
    return _parsed(request, **{"logprobs": 0} if not request.HasField("logprobs") else {}, echo=True, max_tokens=0)


def _parsed(request: pb.GenerateRequest | pb.ScoreRequest, **more: object) -> CompletionRequest:
    """A field that is not set is a parameter that is not given; the rest has the parameter's name."""
    given: dict[str, Any] = {field.name: value for field, value in request.ListFields() if field.name not in OF_THE_PROMPT}
    which = request.WhichOneof("prompt")
    if which is None:
        raise ParameterError("text or token_ids: one of them must be given", "prompt")
    given["prompt"] = request.text if which == "text" else list(request.token_ids.ids)
    if "stop" in given:
        given["stop"] = list(given["stop"])
    if "logit_bias" in given:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in given["logit_bias"].items()}
    if "response_format" in given:
        given["response_format"] = _value(given["response_format"], "response_format")
    return parse_completion(json.dumps(given | more).encode())


def _value(text: str, name: str) -> Any:  # noqa: ANN401 - any JSON, which is judged later
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ParameterError(f"{name} must be JSON, as a text", name) from None


def to_generate_response(changes: Iterable[Mapping[str, Any]]) -> pb.GenerateResponse:
    """From what ``Completion.stream`` yields."""
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


def token_logprobs(told: Mapping[str, Any] | None) -> list[pb.TokenLogprob]:
    """From OpenAI's object of a completion: ``tokens``, ``token_logprobs`` and ``top_logprobs`` are lists of one length."""
    if told is None:
        return []
    tops = told.get("top_logprobs") or [None] * len(told["tokens"])
    columns = zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    return [
        pb.TokenLogprob(
            token=token, logprob=logprob, top=[pb.TopLogprob(token=other, logprob=its) for other, its in (top or {}).items()]
        )
        for token, logprob, top in columns
    ]


def to_score_response(whole: Mapping[str, Any]) -> pb.ScoreResponse:
    """From what ``Completion.run`` returns for ``parse_score``."""
    return pb.ScoreResponse(tokens=token_logprobs(whole["choices"][0]["logprobs"]), usage=pb.Usage(**whole["usage"]))


def to_models_response(model: ServedModel) -> pb.ModelsResponse:
    about = pb.Model(id=model.name, max_model_len=model.max_model_len, vocab_size=model.vocab_size)
    return pb.ModelsResponse(models=[about])
