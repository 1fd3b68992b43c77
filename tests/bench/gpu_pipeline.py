"""Stages that share one GPU, over Ray and either link, by ``tramontane bench``: rows of
gpu_rows.py.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gpu_speed import Figure, Size, Walls
from gpu_stage import MISTRAL_7B, UnavailableError, release_memory

from tramontane.workers.weights.config_writer import to_hf_config

BATCH, STAGES, TARGET = 64, 4, 0.8
BENCH = "from tramontane.cluster.cli.__main__ import main; main()"


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
            shared = _tokens_per_s(
                size,
                folder,
                flags + (["--stages-per-gpu", str(STAGES)] if size.device == "cuda" else []),
            )
            detail = f"{shared:.0f} tokens/s against {alone:.0f} of one stage"
            yield Figure(
                f"{STAGES} stages on one GPU, {link}, batch {BATCH}",
                shared / alone,
                "1",
                TARGET,
                detail,
            )


def _tokens_per_s(size: Size, folder: str, flags: list[str]) -> float:
    work = {
        "--num-prompts": BATCH,
        "--input-len": size.tokens(1024),
        "--output-len": size.tokens(128),
        "--max-num-seqs": BATCH,
    }
    command = [
        sys.executable,
        "-c",
        BENCH,
        "bench",
        "--model",
        folder,
        "--load-format",
        "dummy",
        "--json",
        *flags,
    ]
    command += [str(part) for flag, value in work.items() for part in (flag, value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    if done.returncode:
        raise RuntimeError(
            done.stderr.strip().splitlines()[-1]
            if done.stderr.strip()
            else "tramontane bench failed"
        )
    return float(json.loads(done.stdout)["output_throughput"])
