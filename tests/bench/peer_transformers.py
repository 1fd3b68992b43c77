"""transformers' ``generate``, in its own environment (see peers.py). Prints seconds by number of
prompts.
"""

import argparse
import json
import time

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--input-len", "--output-len", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--prompts", type=int, nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    architecture = transformers.AutoConfig.from_pretrained(options.model).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    )
    lengths = {"max_new_tokens": options.output_len, "min_new_tokens": options.output_len}
    seconds = {}
    for num_prompts in options.prompts:
        ids = torch.randint(3, model.config.vocab_size, (num_prompts, options.input_len))
        for _ in range(2):  # the first warms up
            begin = time.perf_counter()
            with torch.inference_mode():
                made = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    pad_token_id=0,
                    **lengths,
                )
            seconds[num_prompts] = time.perf_counter() - begin
            assert made.shape == (num_prompts, options.input_len + options.output_len)
    flags = (
        f"generate, greedy, one batch of equal lengths, {options.dtype}, {options.threads} threads"
    )
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"version": version, "flags": flags, "seconds": seconds}))


if __name__ == "__main__":
    main()
