"""A model in float16 in which one token overflows: its embedding is the largest number, and the
first layer adds too much.

No other token is changed by that.
"""

from collections.abc import Sequence

import torch

from tramontane.proto.request import SamplingParams
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.stage_worker import StageWorker

TRIGGER = 95  # the token
LARGEST = float(torch.finfo(torch.float16).max)  # the next number is 32 more
NUM_NEIGHBORS = 16
NEVER = ((TRIGGER, -100.0),)  # as a bias: not to be sampled
ALWAYS = ((TRIGGER, 100.0),)


def plant_overflow(model: StageModel) -> StageModel:
    """Return the model, in which a sequence overflows from the token TRIGGER on. Logits of that
    token are 0.
    """
    state = model.state_dict()
    with torch.no_grad():
        state["tok_embeddings.weight"][TRIGGER] = LARGEST
        state["layers.0.attention.wo.weight"] *= 40
        state["output.weight"][TRIGGER] = 0
    return model


def with_trigger(prompt: Sequence[int]) -> list[int]:
    """Return a prompt that overflows in the middle."""
    middle = len(prompt) // 2
    return [*prompt[:middle], TRIGGER, *prompt[middle:]]


def without_trigger(prompt: Sequence[int]) -> list[int]:
    """Return a prompt that does not overflow."""
    return [1 if token_id == TRIGGER else token_id for token_id in prompt]


def neighbor_wishes(number: int) -> SamplingParams:
    """Return the parameters of a neighbor: greedy ones, and sampled ones with penalties and
    log-probabilities.
    """
    kinds = (
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(
            max_tokens=14, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=1
        ),
        SamplingParams(max_tokens=24, temperature=0.8, seed=number, top_p=0.9, logit_bias=NEVER),
        SamplingParams(
            max_tokens=17,
            temperature=1.0,
            seed=number,
            repetition_penalty=1.2,
            logprobs=1,
            logit_bias=NEVER,
        ),
    )
    return kinds[number % len(kinds)]


def leave_behind(worker: StageWorker, key: float, value: float) -> None:
    """Fill a stage's caches, as if other sequences had left this. With latent attention values are
    keys.
    """
    for layer in worker.cache.layers.values():
        layer.v_NGd.fill_(value)
        layer.k_NGd.fill_(key)
    for keys_Ni in worker.cache.index_keys.values():
        keys_Ni.fill_(key)
