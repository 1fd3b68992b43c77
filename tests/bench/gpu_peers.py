"""Other systems with the same geometry and random weights, in the same run: rows of gpu_rows.py."""

import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from gpu_speed import PREFILL_BUDGET, Figure, Size, Walls
from gpu_stage import MISTRAL_7B, UnavailableError, release_memory, running

TARGETS = {1: 1.5, 32: 3.0}


def against_transformers(size: Size, _wall: Walls) -> Iterator[Figure]:
    """Compare with transformers' ``generate``, greedy, one batch of equal lengths: from the prompts
    to the last token.
    """
    if find_spec("transformers") is None:
        raise UnavailableError("transformers is not installed")
    yield from _against("transformers", size, _transformers_seconds(size))


def against_mistral_inference(size: Size, _wall: Walls) -> Iterator[Figure]:
    """Compare with the Transformer and ``generate`` of Mistral's own program."""
    if find_spec("mistral_inference") is None:
        raise UnavailableError("mistral_inference is not installed")
    yield from _against("mistral-inference", size, _mistral_inference_seconds(size))


def _against(name: str, size: Size, theirs: dict[int, float]) -> Iterator[Figure]:
    input_len, output_len = _lengths(size)
    with running(
        size.model(MISTRAL_7B), size.device, max_num_seqs=32, max_len=size.tokens(1024)
    ) as runner:
        for batch, target in TARGETS.items():
            seconds = []
            for _ in range(4):
                first_tokens_s = runner.prefill(batch, input_len, PREFILL_BUDGET)
                seconds.append(first_tokens_s + sum(runner.decode(output_len - 1).whole))
            ours = statistics.median(seconds[1:])
            detail = (
                f"{ours:.2f} s against {theirs[batch]:.2f} s, {input_len} tokens in,"
                f" {output_len} out"
            )
            yield Figure(
                f"times as fast as {name}, batch {batch}", theirs[batch] / ours, "1", target, detail
            )


def _lengths(size: Size) -> tuple[int, int]:
    return size.tokens(512), size.tokens(64)


def _transformers_seconds(size: Size) -> dict[int, float]:
    import transformers

    transformers.logging.set_verbosity_error()
    args, (input_len, output_len) = size.model(MISTRAL_7B), _lengths(size)
    config = transformers.MistralConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        sliding_window=args.windows[0],
        max_position_embeddings=args.max_seq_len,
    )
    with torch.device(size.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        ).eval()
    ends = {"max_new_tokens": output_len, "eos_token_id": None, "pad_token_id": 0}

    def generate(batch: int) -> None:
        ids = torch.randint(3, args.vocab_size, (batch, input_len), device=size.device)
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ends).cpu()

    return _seconds_of(generate, size.device)


def _mistral_inference_seconds(size: Size) -> dict[int, float]:
    from mistral_inference.args import TransformerArgs
    from mistral_inference.generate import generate as their_generate
    from mistral_inference.transformer import Transformer

    args, (input_len, output_len) = size.model(MISTRAL_7B), _lengths(size)
    names = (
        "dim",
        "n_layers",
        "head_dim",
        "hidden_dim",
        "n_heads",
        "n_kv_heads",
        "norm_eps",
        "vocab_size",
    )
    shape = {name: getattr(args, name) for name in names}
    with torch.device(size.device):
        made: Any = Transformer(
            TransformerArgs(**shape, max_batch_size=max(TARGETS), sliding_window=args.windows[0])
        )
    model = made.to(torch.bfloat16).eval()

    def generate(batch: int) -> None:
        prompts = torch.randint(3, args.vocab_size, (batch, input_len)).tolist()
        their_generate(prompts, model, max_tokens=output_len, temperature=0.0, eos_id=None)

    return _seconds_of(generate, size.device)


def _seconds_of(generate: Callable[[int], None], device: str) -> dict[int, float]:
    """Return the median of three times after one that warms up, as for Tramontane, by batch
    size.
    """
    medians = {}
    for batch in TARGETS:
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            generate(batch)
            seconds.append(time.perf_counter() - began)
        medians[batch] = statistics.median(seconds[1:])
    release_memory(device)
    return medians
