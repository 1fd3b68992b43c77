"""The memory that ``tramontane generate --local`` takes, at its peak, for a short answer of a model
with many positions.
"""

import json
import subprocess
import sys
from pathlib import Path

from model_135m import MODEL_135M
from tiny_models import write_tokenizer

from tramontane.workers.weights.config_writer import to_hf_config

MAX_BYTES = 1.3e9
# At its end it says what it held at most. The kernel's figure for the parent would have the memory
# of the parent in it.
RUN = """
import atexit, sys
from pathlib import Path
from tramontane.cluster.cli.main import main
atexit.register(lambda: print(Path("/proc/self/status").read_text(), file=sys.stderr))
main()
"""


def test_a_short_answer_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """Places for 64 sequences of 8,192 positions are 12 GB, of which three tokens fill next to
    nothing.
    """
    folder = write_tokenizer(tmp_path, 300)
    (folder / "config.json").write_text(json.dumps(to_hf_config(MODEL_135M)))
    words = [
        "generate",
        "--local",
        "--model",
        str(folder),
        "--load-format",
        "dummy",
        "--threads-per-stage",
        "1",
    ]
    words += ["--max-tokens", "3", "--json", "The"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)["completions"][0]["token_ids"]) == 3
    peak = int(done.stderr.partition("VmHWM:")[2].split()[0]) * 1024
    assert 2 * MODEL_135M.num_parameters < peak <= MAX_BYTES
