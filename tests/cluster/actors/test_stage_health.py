"""What actors say of themselves, by which hung ones are found, and the threads with which they
load.
"""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from tramontane.cluster.actors import worker_actor
from tramontane.cluster.actors.draft_actor import DraftActor
from tramontane.cluster.actors.stage_actor import HiddenStateTransfers, StageActor
from tramontane.cluster.actors.worker_actor import FailureGuard, report_new_process
from tramontane.proto import wire
from tramontane.proto.errors import PipelineError
from tramontane.proto.step import NO_TOKEN, MicroBatch, StepResult
from tramontane.workers.stage.stage_worker import StageWorker

COMMON = {
    "label": "",
    "_worker": None,
    "_activity": "",
    "_bytes_read": 0,
    "_bytes_loaded": 0,
    "_weight_bytes": 0,
}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        worker_actor.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node")
    )


@pytest.mark.parametrize(("busy_s", "expected"), [(7.5, 7.5), (0.0, 0.0), (None, 0.0)])
def test_a_stage_says_for_how_long_it_computes(busy_s: float | None, expected: float) -> None:
    """Before it is fenced there is nothing that computes."""
    stage = StageActor.__new__(StageActor)
    executor = None if busy_s is None else SimpleNamespace(busy_for_s=busy_s)
    stage.__dict__ |= COMMON | {"_executor": executor, "_loading": threading.Thread()}
    assert stage._health()["busy_for_s"] == expected


def test_a_stage_loads_with_the_threads_that_its_steps_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch counts them for each thread, and compiles again where the number is another one."""
    stage, seen = StageActor.__new__(StageActor), list[int]()
    settings = SimpleNamespace(threads=3, weights=None, device="cpu")
    stage.__dict__ |= COMMON | {"_settings": settings, "_plan": None, "_pieces": None}
    monkeypatch.setattr(StageWorker, "load", lambda *_: seen.append(torch.get_num_threads()))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(stage._load).result()
    assert seen == [3]


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_stage_says_in_which_epoch_it_has_sampled_a_token_last(is_linked: bool) -> None:
    """Steps of nothing but prompts, and rows without a token, are none."""
    stage, outcomes = StageActor.__new__(StageActor), list[StepResult]()
    worker = SimpleNamespace(
        epoch=7,
        device_name="",
        numerics=None,
        request_ids_of=lambda _: [],
        dtype=torch.float32,
    )
    takes = SimpleNamespace(step=lambda *_: outcomes.pop(), busy_for_s=0.0)
    plan = SimpleNamespace(is_first=False, is_last=True)
    stage.__dict__ |= COMMON | {
        **{
            "_worker": worker,
            "_executor": takes,
            "_link": takes,
            "_plan": plan,
            "_failure_guard": FailureGuard("", "cpu"),
        },
        **{
            "_holder": "",
            "_sent": HiddenStateTransfers(0),
            "_sampled_epoch": -1,
            "_loading": threading.Thread(),
        },
    }
    stage._expert_load = lambda: {}  # type: ignore[method-assign]
    loading = threading.Thread(target=lambda: None)
    loading.start()
    stage._loading = loading

    def sampled_epoch(epoch: int, *token_ids: int) -> int:
        outcomes.append(StepResult(epoch, 0, token_ids, ()))
        batch = wire.encode_batch(MicroBatch(epoch, 0, ()))
        assert (
            wire.decode_result(
                stage.linked_step(batch) if is_linked else stage.step(batch, None)
            ).token_ids
            == token_ids
        )
        return stage.health().sampled_epoch

    assert stage.health().sampled_epoch == -1
    assert sampled_epoch(7) == -1
    assert sampled_epoch(7, NO_TOKEN) == -1
    assert sampled_epoch(7, NO_TOKEN, 5) == 7
    assert sampled_epoch(9) == 7
    assert sampled_epoch(9, 5) == 9


FROZEN = """
import gc
from tramontane.cluster.actors.worker_actor import import_torch

before = gc.get_freeze_count()
import_torch()
assert gc.isenabled()
assert gc.get_freeze_count() - before > 100_000
gc.unfreeze()
import_torch()
assert gc.get_freeze_count() == 0, "it was imported before"
"""


def test_no_collection_looks_at_the_objects_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FROZEN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


COMPILES = """
from tramontane.cluster.actors.worker_actor import import_torch

import_torch()
from torch._inductor import config
print(config.compile_threads)
"""


@pytest.mark.parametrize(("setting", "expected"), [(None, "1"), ("3", "3")])
def test_torchs_compiler_starts_no_pool_of_processes_unless_the_user_wants_it(
    setting: str | None, expected: str
) -> None:
    """As torch itself understands it."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"
    }
    if setting is not None:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = setting
    done = subprocess.run(
        [sys.executable, "-c", COMPILES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_a_draft_model_says_for_how_long_it_drafts(fails: bool) -> None:
    actor, seen = DraftActor.__new__(DraftActor), []

    def draft(*_: object) -> list[tuple[int, ...] | None]:
        while not actor._health()["busy_for_s"]:
            pass
        seen.append("busy")
        if fails:
            raise PipelineError("out of memory")
        return []

    own = {
        "_wait_until_loaded": lambda: SimpleNamespace(draft=draft),
        "_settings": SimpleNamespace(threads=1),
    }
    guard = FailureGuard("the draft model", "cpu")
    actor.__dict__ |= (
        COMMON
        | own
        | {"_loading": threading.Thread(), "_failure_guard": guard, "_drafting_since": None}
    )
    assert actor._health()["busy_for_s"] == 0
    with suppress(PipelineError):
        actor.draft([], ())
    assert seen == ["busy"]
    assert actor._health()["busy_for_s"] == 0


@pytest.mark.parametrize(
    ("words", "kills", "said"),
    [
        (None, 0, []),
        (None, 3, []),  # of other processes
        ("It was killed.", 0, ["stage 1 has a new process, because the one before ended: It was"]),
        ("", 0, ["ended: Ray does not know how."]),
        ("It was killed.", 2, ["was killed. Since this container started", "memory was full: 2."]),
    ],
)
def test_a_new_process_says_how_the_one_before_ended(
    words: str | None,
    kills: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = SimpleNamespace(get_actor_id=lambda: "ab")
    monkeypatch.setattr(worker_actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(worker_actor, "end_of_last_process", lambda _: words)
    monkeypatch.setattr(worker_actor, "num_memory_kills", lambda: kills)
    report_new_process("stage 1")
    assert len(caplog.messages) == bool(said)
    assert all(part in caplog.text for part in said)
    assert ("memory was full" in caplog.text) == bool(said and kills)


def test_a_process_loads_also_where_the_end_of_the_one_before_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: str) -> str:
        raise RuntimeError("no answer")

    context = SimpleNamespace(get_actor_id=lambda: "ab")
    monkeypatch.setattr(worker_actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(worker_actor, "end_of_last_process", fails)
    report_new_process("stage 1")
    assert "it is not known why stage 1 has a new process" in caplog.text
    assert "no answer" in caplog.text
