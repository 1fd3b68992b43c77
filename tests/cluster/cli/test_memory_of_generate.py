"""The memory that ``tramontane generate --local`` takes, at its peak, for a short answer of a model with many positions."""

import json
import os
import subprocess
import sys
from pathlib import Path

from model_135m import MODEL_135M
from tiny_models import write_tokenizer

from tramontane.workers.weights.config_writer import to_hf_config

MAX_BYTES = 1.3e9
RUN = "from tramontane.cluster.cli.main import main; main()"


def test_a_short_answer_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """Places for 64 sequences of 8,192 positions are 12 GB, of which three tokens fill next to nothing."""
    folder = write_tokenizer(tmp_path, 300)
    (folder / "config.json").write_text(json.dumps(to_hf_config(MODEL_135M)))
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
    assert 2 * MODEL_135M.num_parameters < peak <= MAX_BYTES
