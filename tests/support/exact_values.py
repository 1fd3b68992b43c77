"""Token ids and log-probabilities of an answer, to be compared bit for bit."""

from tramontane.proto.request import RequestOutput, SamplingParams

SAMPLING = SamplingParams(
    max_tokens=12,
    temperature=0.8,
    top_p=0.9,
    seed=3,
    logprobs=4,
    prompt_logprobs=2,
    frequency_penalty=0.3,
)
Values = tuple[tuple[int, ...], dict[int, object]]


def exact_values(answer: RequestOutput) -> Values:
    """Return the token ids, and the log-probabilities by position."""
    found = {}
    for each in answer.logprobs:
        found |= {
            each.start + i: (each.logprobs[i], each.top[i]) for i in range(len(each.logprobs))
        }
    return tuple(event.token_id for event in answer.events), found
