"""What a request that is well-formed may still not ask of the model that is served."""

from collections.abc import Sequence

from tramontane.router.openai_schema import ParameterError

MAX_EXPERT_IDS = 2**19  # that one request may ask for: 2 MiB on their way from a router, which is half of what a message may have
MAX_PROMPT_LOGPROBS = 2**17  # likewise 2 MiB: they all come with a prompt's first token
MAX_LOGPROBS_IN_ALL = 2**19  # of one request's answer, which may be kept whole: some 20 MB of JSON


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """``num_layers``: 0 for a model without experts."""
    if layers and not num_layers:
        raise ParameterError("return_experts: this model has no experts", "return_experts")
    if wrong := [layer for layer in layers if layer >= num_layers]:
        raise ParameterError(
            f"return_experts: there is no layer {wrong[0]}; this model has layers 0 to {num_layers - 1}", "return_experts"
        )


def check_num_experts(num_layers: int, num_tokens: int, experts_per_token: int) -> None:
    """``num_layers`` asked for, of as many tokens as there may be."""
    num_ids = num_tokens * num_layers * experts_per_token
    if num_ids > MAX_EXPERT_IDS:
        raise ParameterError(
            f"return_experts: {num_layers} layers of up to {num_tokens} tokens are {num_ids} experts; "
            f"one request may ask for at most {MAX_EXPERT_IDS}, so ask for fewer layers or tokens",
            "return_experts",
        )


def check_logit_bias(token_ids: Sequence[int], vocab_size: int) -> None:
    if wrong := [token_id for token_id in token_ids if token_id >= vocab_size]:
        raise ParameterError(f"logit_bias: token id {wrong[0]} is outside the model's vocabulary of {vocab_size}", "logit_bias")


def check_num_logprobs(name: str, num_tokens: int, num_top: int, most: int) -> None:
    """``num_tokens``: as many as there may be, of all choices. ``name``: of the parameter that asks for them."""
    num_logprobs = num_tokens * (num_top + 1)
    if num_logprobs > most:
        raise ParameterError(
            f"{name}: of up to {num_tokens} tokens, with {num_top} others for each, these are {num_logprobs}; "
            f"one request may ask for at most {most}, so ask for fewer, or for fewer tokens",
            name,
        )
