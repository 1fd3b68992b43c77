"""Rows of gpu_rows.py that compare with something else in the same run: other systems, stages that
share one GPU, and batch invariance.
"""

import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench_parts import answer_of
from gpu_checks import BATCHES, Check, forced_logits, four_layers
from gpu_speed import PREFILL_BUDGET, STEPS, WARM_STEPS, Figure, Size, Walls
from gpu_stage import (
    MISTRAL_7B,
    MIXTRAL_8X7B,
    Runner,
    UnavailableError,
    release_memory,
    running,
)

from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.workers.weights.config_writer import to_hf_config

TARGETS = {1: 1.5, 32: 3.0}  # times as fast as other systems, by batch
BATCH, STAGES, SHARED_TARGET = 64, 4, 0.8
# of 32: the share of every kernel in a step is that of the whole model, but for the head's
COST_LAYERS = 8


# ---- other systems with the same geometry and random weights


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


# ---- stages that share one GPU, over Ray and either link


def stages_on_one_gpu(size: Size, _wall: Walls) -> Iterator[Figure]:
    """Compare the tokens per second of four stages on one GPU with those of one stage, with 64
    requests at once.
    """
    if find_spec("ray") is None:
        raise UnavailableError("Ray is not installed")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(to_hf_config(size.model(MISTRAL_7B))))
        release_memory(size.device)
        alone = _tokens_per_s(size, folder, ["--stages", "1"])
        yield Figure(f"1 stage over Ray, batch {BATCH}", 1.0, "1", None, f"{alone:.0f} tokens/s")
        for link in ("object-store", "direct"):
            flags = ["--stages", str(STAGES), "--link", link]
            flags += ["--stages-per-gpu", str(STAGES)] * (size.device == "cuda")
            shared = _tokens_per_s(size, folder, flags)
            detail = f"{shared:.0f} tokens/s against {alone:.0f} of one stage"
            yield Figure(
                f"{STAGES} stages on one GPU, {link}, batch {BATCH}",
                shared / alone,
                "1",
                SHARED_TARGET,
                detail,
            )


def _tokens_per_s(size: Size, folder: str, flags: list[str]) -> float:
    from serve_process import TRAMONTANE  # its packages are there where Ray is

    work = (
        f"bench --json --model {folder} --load-format dummy --num-prompts {BATCH} --max-num-seqs"
        f" {BATCH} --input-len {size.tokens(1024)} --output-len {size.tokens(128)}"
    )
    answer = answer_of([*TRAMONTANE, *work.split(), *flags], timeout_s=150)
    return float(answer["output_throughput"])


# ---- batch invariance


def invariance_checks(device: str, small: bool) -> Iterator[Check]:
    """Count the kernels that fail their checks, and the steps of a stage in which a sequence has
    other logits in company.

    A stage that differs token by token and in chunks refuses to start, which is an error of this
    group.
    """
    if device != "cpu":  # where they run by the interpreter, in tests
        yield _failing_kernels(device)
    dense = four_layers(small)
    sparse = replace(dense, moe=MoeArgs(8, 2), hidden_dim=dense.hidden_dim // 4)
    for name, args in (("dense", dense), ("experts", sparse)):
        with running(
            args, device, max_num_seqs=max(BATCHES), max_len=512, batch_invariant=True
        ) as runner:
            alone = forced_logits(runner, 1)
            differing = [
                batch
                for batch in BATCHES[1:]
                for pair in zip(alone, forced_logits(runner, batch), strict=True)
                if _differ(*pair)
            ]
        detail = f"batches {sorted(set(differing))}" if differing else ""
        yield Check(
            f"batch invariance, {name}: steps with other logits in company",
            float(len(differing)),
            1.0,
            detail,
        )


def _differ(alone_1V: torch.Tensor, among_SV: torch.Tensor) -> bool:
    return not torch.equal(alone_1V[0], among_SV[0])


def _failing_kernels(device: str) -> Check:
    import attention_checks  # these import Triton
    import product_checks

    failing = []
    for name, check in (product_checks.CHECKS | attention_checks.CHECKS).items():
        try:
            check(device)
        except Exception:
            traceback.print_exc()
            failing.append(name)
    return Check(
        "batch invariance: kernels that are wrong or differ in company",
        float(len(failing)),
        1.0,
        "; ".join(failing),
    )


def invariance_cost(size: Size, _wall: Walls) -> Iterator[Figure]:
    """Compare the speed with ``--batch-invariant`` with that without it, which is 1."""
    for name, args in (("Mistral 7B", MISTRAL_7B), ("Mixtral 8x7B", MIXTRAL_8X7B)):
        seconds = {
            wanted: _measure(size, _some_layers(size, args), wanted) for wanted in (False, True)
        }
        for job, without in seconds[False].items():
            detail = f"{without * 1e3:.2f} ms without, {seconds[True][job] * 1e3:.2f} ms with"
            yield Figure(
                f"--batch-invariant: speed of {name}, {job}, over that without",
                without / seconds[True][job],
                "1",
                None,
                detail,
            )


def _some_layers(size: Size, args: ModelArgs) -> ModelArgs:
    return size.model(replace(args, n_layers=COST_LAYERS, windows=args.windows[:COST_LAYERS]))


def _measure(size: Size, args: ModelArgs, batch_invariant: bool) -> dict[str, float]:
    """Return the seconds of a prompt and of decode steps."""
    seconds = {}
    with running(
        args,
        size.device,
        max_num_seqs=64,
        max_len=size.tokens(9216),
        batch_invariant=batch_invariant,
    ) as runner:
        for batch, context in ((1, 1024), (64, 1024), (1, 8192)):
            runner.prefill(batch, size.tokens(context), PREFILL_BUDGET)
            seconds[f"decode, batch {batch}, context {context}"] = _step_seconds(runner)
        rounds = [runner.prefill(1, size.tokens(2048), PREFILL_BUDGET) for _ in range(3)]
        seconds["prefill of 2048"] = statistics.median(rounds)
    return seconds


def _step_seconds(runner: Runner) -> float:
    runner.decode(WARM_STEPS)
    return statistics.median(runner.decode(min(STEPS, runner.room)).whole)
