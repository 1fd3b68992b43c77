"""The memory that ``tramontane generate --local`` takes, at its peak, for a short answer of a model with many positions."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_models import write_tokenizer

from tramontane.proto.hf_config import to_hf_config
from tramontane.proto.model_args import ModelArgs

LAYERS = 30
MODEL = ModelArgs(  # of 135 million parameters: SmolLM2's geometry
    dim=576,
    n_layers=LAYERS,
    head_dim=64,
    hidden_dim=1536,
    n_heads=9,
    n_kv_heads=3,
    norm_eps=1e-5,
    vocab_size=49152,
    rope_theta=1e5,
    max_seq_len=8192,
    windows=(None,) * LAYERS,
    tied_embeddings=True,
    dtype="bfloat16",
)
MAX_BYTES = 1.3e9
RUN = "from tramontane.cluster.cli.main import main; main()"


def test_a_short_answer_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """Places for 64 sequences of 8,192 positions are 12 GB, of which three tokens fill next to nothing."""
    folder = write_tokenizer(tmp_path, 300)
    (folder / "config.json").write_text(json.dumps(to_hf_config(MODEL)))
    words = ["generate", "--local", "--model", str(folder), "--load-format", "dummy", "--threads-per-stage", "1"]
    words += ["--max-tokens", "3", "--json", "The"]
    with subprocess.Popen([sys.executable, "-c", RUN, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert len(answer["completions"][0]["token_ids"]) == 3
    peak = usage.ru_maxrss * 1024
    assert 2 * MODEL.num_parameters < peak <= MAX_BYTES
