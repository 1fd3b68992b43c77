"""Whole servers on one GPU, over Ray and HTTP: when they are ready, their tokens, their speed under
load, and faults.

    python tests/bench/gpu_server.py PART [--device cuda] [--small] [--json FILE]

Parts of ``gpu.py``, which gives each a process and a limit: ``serve-`` and the name. Models have
random weights, equal in every process (seeded by the names of tensors), so tokens can be compared
between servers and after restarts; those of the first server lie in a file below the folder of
temporary files, which a small run has next to FILE. Parts with a server end with status 1 if a
request failed, or if tokens differ that have to be equal. ``--small --device cpu`` tries a part on
a CPU, as ``--small`` alone does where there is no GPU; a real model is not served there, and the
status is 2.
"""

import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import psutil
from bench_parts import gpu_parser
from gpu_server_load import (
    GREEDY,
    SAMPLED,
    TEMPORARY,
    TRAMONTANE,
    Load,
    Prompt,
    Report,
    Sampling,
    Trace,
    after_fault,
    compared,
    gpu_memory,
    load_row,
    random_prompts,
    run_streams,
    serving,
    stage_pids,
)
from targets import exit_status

from tramontane.workers.device.probe import num_visible_gpus

TABLE_LINES = 50  # of a profile, in a report
STREAMS = (1, 16, 64, 128)
SHARED = ("--stages", "2", "--stages-per-gpu", "2", "--step-timeout", "15")
DIRECT = (*SHARED, "--link", "direct")


# A server


def model_flags(report: Report, name: str = "mistral-7b-v0.1", seqs: int = 128) -> tuple[str, ...]:
    """Return the flags of a model with random weights."""
    if report.small:
        return (
            "--model",
            str(checkpoint(report, name)),
            "--max-num-seqs",
            "16",
            "--threads-per-stage",
            "1",
        )
    dummy = ("--model", name, "--load-format", "dummy", "--max-num-seqs", str(seqs))
    return (*dummy, "--max-num-batched-tokens", "4096", "--max-model-len", "8192")


def checkpoint(report: Report, name: str, is_small: bool = False) -> Path:
    """Return the folder of a random checkpoint, small in a small run too, which is written where it
    is missing.
    """
    scale = "small" if is_small or report.small else "full"
    folder = report.folder / f"gpu_server_{name}_{scale}"
    if not folder.exists():
        subprocess.run(
            [*TRAMONTANE, "make-random", "--like", name, "--scale", scale, "--out", str(folder)],
            check=True,
        )
    return folder


# Its load


def load(
    report: Report,
    what: str,
    streams: int,
    shape: tuple[int, int] = (1024, 128),
    seed: int = 0,
    **more: Sampling,
) -> None:
    """Add a row: clients that begin at once, with prompts and answers of these numbers of
    tokens.
    """
    length, new_tokens = (32, 16) if report.small else shape
    done = Load(streams, length, new_tokens, more.get("sampling", GREEDY), seed)
    work = report.prompts(streams, length, 1000 * streams + seed)
    began = time.monotonic()
    traces = run_streams(report.url, work, new_tokens, done.sampling)
    row = load_row(done, traces, time.monotonic() - began)
    report.check(what, row["failed"], **row)


def loads(
    report: Report, sizes: Sequence[int] = STREAMS, what: str = "load", **more: Sampling
) -> None:
    for size in (1, 4) if report.small else sizes:
        load(report, what, size, **more)


def cached_loads(report: Report) -> None:
    """The same cached prompts twice, greedy and sampled, so that nothing but the sampling
    differs.
    """
    size = report.of_size(64, 4)
    load(report, "load, cached prompts", size)
    load(report, "load, cached prompts, sampled", size, sampling=SAMPLED)


def first_tokens(report: Report) -> None:
    """Add a row: milliseconds to the first token of prompts that come alone, five of each length,
    none seen before.

    They are in their order, because the first of a length may compile a kernel. ``phases_of``:
    where the time was spent, outside of the router (until the answer's end), in its queue, and from
    the first step to the token; and of that the time of the prompt's steps in the stages, which is
    the device's on a GPU.
    """
    row: dict[str, object] = {}
    for length in (4, 32) if report.small else (16, 256, 1024, 4096):
        each = [_phases_ms(report, prompt) for prompt in report.prompts(5, length, 31 + length)]
        row |= {f"of_{length}": [phases.pop("all") for phases in each]}
        row |= {
            f"phases_of_{length}": {name: [phases[name] for phases in each] for name in each[0]}
        }
    report.add("first token, alone, ms", **row)


def _phases_ms(report: Report, prompt: Prompt) -> dict[str, float]:
    """Return where the time to the first token of a prompt was spent, in milliseconds."""
    before = activity(report)
    (trace,) = run_streams(report.url, [prompt], 2)
    if trace.error:
        raise RuntimeError(trace.error)
    batches = activity(report, "?after={name}:{last}".format(**before))["micro_batches"]
    stages_s = sum(
        busy_s
        for batch in batches
        if batch["prefill_tokens"]
        for _, _, busy_s, _ in batch["stages"]
    )
    phases = {"all": trace.times[0]} | {
        name: trace.timings[f"{name}_s"] for name in ("ingress", "queue", "prefill")
    }
    return {
        name: round(1000 * seconds, 1) for name, seconds in (phases | {"stages": stages_s}).items()
    }


def activity(report: Report, query: str = "") -> dict[str, Any]:
    """Return what the only pipeline has done."""
    with urllib.request.urlopen(f"{report.url}/activity{query}") as response:
        (pipeline,) = json.load(response)["pipelines"]
    found: dict[str, Any] = pipeline
    return found


def tokens(report: Report, name: str, must_be_equal: bool = False) -> None:
    """Compare the greedy tokens of 16 prompts with those of the first server that was asked for
    them.
    """
    work = report.prompts(report.of_size(16, 4), report.of_size(200, 24), 7)
    found = [each.ids for each in run_streams(report.url, work, report.of_size(64, 16))]
    if not report.tokens.exists():
        report.tokens.write_text(json.dumps(found))
        report.add("tokens", of=name, reference=True, lengths=sorted({len(ids) for ids in found}))
        return
    row = compared(json.loads(report.tokens.read_text()), found)
    if must_be_equal:
        report.check("tokens", row["texts"] - row["equal"], of=name, **row)
    else:
        report.add("tokens", of=name, **row)


def kill_under_load(
    report: Report, server: psutil.Process, victim: int, must_be_equal: bool = False
) -> None:
    """Kill a stage, by the order of process ids, while 16 streams run, and compare their tokens
    with those without a fault.
    """
    work, new_tokens = (
        report.prompts(report.of_size(16, 4), report.of_size(200, 24), 99),
        report.of_size(500, 120),
    )
    expected = run_streams(report.url, work, new_tokens)
    before, killed_at = stage_pids(server), 0.0

    async def kill(traces: list[Trace]) -> None:
        nonlocal killed_at
        while not all(len(each.ids) >= report.of_size(60, 8) or each.error for each in traces):
            await asyncio.sleep(0.02)
        os.kill(before[victim], signal.SIGKILL)
        killed_at = time.monotonic()

    found = run_streams(report.url, work, new_tokens, GREEDY, kill)
    pauses = sorted(each.longest_gap(killed_at) for each in found)
    row = after_fault(expected, found, new_tokens)
    report.check(
        f"kill -9 of stage process {victim}",
        row["incomplete"] + (row["texts"] - row["equal"] if must_be_equal else 0),
        pause_s=[round(statistics.median(pauses), 2), round(pauses[-1], 2)],
        processes_before=len(before),
        that_survived=len([pid for pid in before if pid in stage_pids(server)]),
        **row,
        gpu=gpu_memory(),
    )


# Parts


def where(report: Report) -> None:
    """What Ray, torch and the planner see of GPUs: if they do not agree, no server will use one."""
    import ray
    import torch
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    from tramontane.cluster.planning.hardware import probe_local

    hardware = probe_local()
    counts = (
        NvidiaGPUAcceleratorManager.get_current_node_num_accelerators(),
        torch.cuda.device_count(),
        len(hardware.gpus),
    )
    report.check(
        "gpus", int(len(set(counts)) > 1), ray=counts[0], torch=counts[1], planner=counts[2]
    )
    report.add("planner", hardware=str(hardware), after_probe=gpu_memory())
    free = {
        f"{path}_mb": psutil.disk_usage(path).free // 2**20 for path in ("/dev/shm", str(TEMPORARY))
    }
    versions = {
        "ray": ray.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    report.add(
        "versions",
        **versions,
        cpus=os.cpu_count(),
        memory_mb=psutil.virtual_memory().available // 2**20,
        **free,
    )


def one(report: Report) -> None:
    with serving(report, *model_flags(report), "--stages", "1"):
        load(report, "warm-up", 2)
        tokens(report, "one stage")
        first_tokens(report)
        loads(report)
        cached_loads(report)
        load(report, "load again, other prompts", report.of_size(64, 4), seed=1)
        load(report, "load as in TensorRT-LLM's tables", report.of_size(128, 4), (128, 128))


def shared(report: Report) -> None:
    """Two stages that share the GPU; each is killed once."""
    with serving(report, *model_flags(report), *DIRECT) as server:
        load(report, "warm-up", 2)
        tokens(report, "two stages")
        loads(report, STREAMS[:3])
        for victim in (0, 1):
            kill_under_load(report, server, victim)
        tokens(report, "two stages after two faults")
        load(report, "load after faults", report.of_size(64, 4), seed=1)


def store(report: Report) -> None:
    """The same with hidden states through Ray's object store."""
    with serving(report, *model_flags(report), *SHARED, "--link", "object-store"):
        load(report, "warm-up", 2)
        tokens(report, "two stages, object store")
        loads(report, (1, 64))


def exact(report: Report) -> None:
    """Batch-invariant: the tokens must be the same bit for bit after a fault, and whatever else is
    computed.
    """
    report.tokens.unlink(missing_ok=True)
    with serving(report, *model_flags(report), *DIRECT, "--batch-invariant") as server:
        tokens(report, "batch-invariant")
        loads(report, (16, 64))
        kill_under_load(report, server, 0, must_be_equal=True)
        tokens(report, "batch-invariant after a fault", must_be_equal=True)
    report.tokens.unlink()


def fp8(report: Report) -> None:
    with serving(report, *model_flags(report), "--stages", "1", "--quantize", "fp8"):
        load(report, "warm-up", 2)
        loads(report)
        load(report, "load as in TensorRT-LLM's tables", report.of_size(128, 4), (1000, 1000))


def mixtral(report: Report) -> None:
    with serving(
        report, *model_flags(report, "mixtral-8x7b", 64), "--stages", "1", "--quantize", "fp8"
    ):
        load(report, "warm-up", 2)
        loads(report, STREAMS[:3])


def speculation(report: Report) -> None:
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    with serving(report, *model_flags(report), "--stages", "1", "--speculative-config", config):
        load(report, "warm-up", 2)
        loads(report, STREAMS[:2])


def profile(report: Report) -> None:
    """Kernels of 20 steps of a served load: of decodes, and, as the next clients come, of prompts
    next to decodes.
    """
    folder = report.folder / "gpu_server_profile"
    shutil.rmtree(folder, ignore_errors=True)
    first, streams = (20, 4) if report.small else (150, 64)
    os.environ["TRAMONTANE_PROFILE"] = f"{folder}:{first}:20"
    try:
        with serving(report, *model_flags(report), "--stages", "1"):
            for seed in range(4):
                load(report, "load while steps are recorded", streams, seed=seed)
    finally:
        del os.environ["TRAMONTANE_PROFILE"]
    report.add("profile", table=(folder / "stage-0.txt").read_text().splitlines()[:TABLE_LINES])


def disk(report: Report) -> None:
    """A checkpoint that is read from a disk: written here, so that the page cache has as much of it
    as fits; and read again.
    """
    name, began = "mistral-7b-v0.1", time.monotonic()
    folder = checkpoint(report, name)
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    report.add(
        "written", seconds=round(time.monotonic() - began, 1), gib=round(num_bytes / 2**30, 3)
    )
    flags = (
        "--max-num-seqs",
        str(report.of_size(128, 16)),
        "--max-model-len",
        str(report.of_size(8192, 512)),
    )
    with serving(report, "--model", str(folder), *flags, "--stages", "1") as server:
        load(report, "warm-up", 2)
        loads(report, (1, 64))
        kill_under_load(report, server, 0)


def correct(report: Report) -> None:
    """Two stages in float32 against transformers on the CPU, token by token, with a small random
    checkpoint.
    """
    import torch
    import transformers

    folder = checkpoint(report, "mistral-7b-v0.1", is_small=True)
    work, new_tokens = random_prompts(8, 48, 3, 900), 32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    greedy: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    expected = []
    for prompt in work:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        expected.append(out[0, len(prompt) :].tolist())
    with serving(
        report,
        "--model",
        str(folder),
        "--dtype",
        "float32",
        *(DIRECT if report.is_on_gpu else ("--stages", "2")),
    ):
        row = compared(expected, [each.ids for each in run_streams(report.url, work, new_tokens)])
    report.check("against transformers", row["texts"] - row["equal"], **row)


def latent(report: Report) -> None:
    """Two layers of Small 4's geometry by themselves: the kernels at a width of 320, how long they
    compile, a step.
    """
    import logging
    from dataclasses import replace

    from gpu_stage import running

    from tramontane.proto.presets import preset, tiny_variant

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    args = preset("mistral-small-4-119b")
    args = replace(tiny_variant(args) if report.small else args, n_layers=2, windows=(None,) * 2)
    began, device = time.monotonic(), "cuda" if report.is_on_gpu else "cpu"
    with running(args, device, max_num_seqs=64, max_len=report.of_size(2048, 256)) as runner:
        seconds = round(time.monotonic() - began, 1)
        report.add(
            "loaded", seconds=seconds, numerics=str(runner.worker.numerics)[:2000], gpu=gpu_memory()
        )
        for batch in STREAMS[:3]:
            prefill_s = runner.prefill(batch, report.of_size(1024, 32), 4096)
            steps = runner.decode(20)
            whole, on_device = (
                round(statistics.median(each) * 1000, 3) for each in (steps.whole, steps.device)
            )
            report.add(
                "latent, 2 layers",
                batch=batch,
                prefill_s=round(prefill_s, 3),
                step_ms=whole,
                device_ms=on_device,
            )


PARTS: dict[str, Callable[[Report], None]] = {
    each.__name__: each
    for each in (
        where,
        one,
        shared,
        exact,
        correct,
        fp8,
        mixtral,
        latent,
        store,
        speculation,
        disk,
        profile,
    )
}


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("part", choices=list(PARTS))
    options = parser.parse_args()
    is_on_gpu = options.device == "cuda"
    # which says what finds a GPU and what does not
    if is_on_gpu and options.part != "where" and not num_visible_gpus():
        if not options.small:
            parser.exit(2, "no GPU is available; --small tries a part on a CPU\n")
        print("no GPU is available: the part runs on the CPU", file=sys.stderr, flush=True)
        is_on_gpu = False
    report = Report(options.json, options.small, is_on_gpu)
    PARTS[options.part](report)
    return exit_status(report.targets)


if __name__ == "__main__":
    sys.exit(main())
