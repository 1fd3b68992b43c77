"""A model in which one token overflows: keys, values and queries of its first layer do not fit into the dtype.

No other token is changed: the first element of every other one's embedding is 0, and only that meets the planted weight.
"""

from collections.abc import Sequence

import torch

from tramontane.proto.request import SamplingParams
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.stage_worker import StageWorker

TRIGGER = 95  # the token
# Times the square root of the width, which the norm makes of an embedding with one element; all of these are finite themselves.
PLANTED = {"float16": 3e4, "bfloat16": 3e38, "float32": 3e38}
NUM_NEIGHBORS = 16
NEVER = ((TRIGGER, -100.0),)  # as a bias: not to be sampled
ALWAYS = ((TRIGGER, 100.0),)


def plant_overflow(model: StageModel, dtype: str) -> StageModel:
    """Return the model, in which a sequence overflows from the token TRIGGER on. Logits of that token are 0."""
    state = model.state_dict()
    first = next(name for name in state if name.startswith("layers.0.attention.wqkv") and name.endswith("weight"))
    with torch.no_grad():
        state["tok_embeddings.weight"][:, 0] = 0
        state["tok_embeddings.weight"][TRIGGER] = torch.eye(model.args.dim)[0]
        state["output.weight"][TRIGGER] = 0
        state[first][:, 0] = PLANTED[dtype]
    return model


def with_trigger(prompt: Sequence[int]) -> list[int]:
    """Return a prompt that overflows in the middle."""
    middle = len(prompt) // 2
    return [*prompt[:middle], TRIGGER, *prompt[middle:]]


def without_trigger(prompt: Sequence[int]) -> list[int]:
    """Return a prompt that does not overflow."""
    return [1 if token_id == TRIGGER else token_id for token_id in prompt]


def neighbor_wishes(number: int) -> SamplingParams:
    """Return the parameters of a neighbor: greedy ones, and sampled ones with penalties and log-probabilities."""
    kinds = (
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=1),
        SamplingParams(max_tokens=24, temperature=0.8, seed=number, top_p=0.9, logit_bias=NEVER),
        SamplingParams(max_tokens=17, temperature=1.0, seed=number, repetition_penalty=1.2, logprobs=1, logit_bias=NEVER),
    )
    return kinds[number % len(kinds)]


def leave_behind(worker: StageWorker, key: float, value: float) -> None:
    """Fill a stage's caches, as if other sequences had left this. With latent attention values are keys."""
    for layer in worker.cache.layers.values():
        layer.v_NGd.fill_(value)
        layer.k_NGd.fill_(key)
    for keys_Ni in worker.cache.index_keys.values():
        keys_Ni.fill_(key)
