"""``/v1/completions`` without HTTP: from a parsed request to the ``Generation`` that answers it."""

from dataclasses import replace

from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.detokenizer import completion_grammar, make_detokenizer
from tramontane.router.openai.formatter import CompletionFormatter
from tramontane.router.openai.generation import (
    COMPLETION_LOGPROBS,
    Generation,
    GenerationRequest,
    LogprobsFormat,
)
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import (
    ServedModel,
    cut_prompts,
    ignores_eos,
    kept_prompt_tokens,
    tokenize_prompts,
    validate_answer_size,
    validate_request,
)


async def prepare_completion(
    model: ServedModel,
    request: CompletionRequest,
    arrived_at: float,
    resume_state: ResumeState | None = None,
) -> CompletionFormatter:
    """Validate and tokenize. Raises RequestError for requests that can never run."""
    return CompletionFormatter(await prepare_text(model, request, arrived_at, resume_state))


async def prepare_text(
    model: ServedModel,
    request: CompletionRequest,
    arrived_at: float,
    resume_state: ResumeState | None = None,
    kind: tuple[str, str] = ("cmpl", "text_completion"),
    logprobs_format: LogprobsFormat = COMPLETION_LOGPROBS,
) -> Generation:
    """Return the generation of plain text. ``kind``: see ``Generation``."""
    validate_request(model, request)
    prompts = request.prompt
    if (num_kept := kept_prompt_tokens(model, request)) is not None:
        prompts = await cut_prompts(model, prompts, num_kept)
    prompt_ids = await tokenize_prompts(model, prompts, request.suffix)
    validate_answer_size(model, request, [len(ids) for ids in prompt_ids])
    grammar = await completion_grammar(model.tokenizer, request)
    texts = [make_detokenizer(model.tokenizer, request) for _ in range(request.num_sequences)]
    generation = GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        n=request.n,
        sampling=replace(
            # routers always generate a token
            request.to_sampling_params(max(request.max_tokens, 1)),
            return_experts=request.return_experts,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs_count,
            grammar=grammar,
            ignore_eos=ignores_eos(model, request),
        ),
        seed=request.given_seed,
        scores_only=not request.max_tokens,
        echoed=prompts if request.echo else (),
        prompt_logprobs=request.prompt_logprobs,
        returns_token_ids=request.return_token_ids,
        includes_usage=request.includes_usage,
        counts_in_chunks=request.counts_in_chunks,
        logprobs_format=logprobs_format,
        cache_salt=request.cache_salt or "",
    )
    return Generation(model, generation, texts, arrived_at, resume_state or ResumeState(), kind)
