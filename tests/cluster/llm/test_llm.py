"""``tramontane.llm``: what a program gets of a pipeline of its own, in this process and over
Ray.
"""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import thinking_tekken

from tramontane.cluster.cli import main as cli
from tramontane.cluster.config.engine_keys import DEMO_MODEL
from tramontane.cluster.llm.inputs import PromptEncoder
from tramontane.llm import LLM, EngineConfig, FinishReason, SamplingParams
from tramontane.proto import request
from tramontane.proto.errors import CheckpointError, ConfigError, PipelineError, RequestError
from tramontane.router.tokenization.loader import require_tokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat, ReasoningParser

GREEDY = SamplingParams(max_tokens=12, temperature=0)
PROMPTS = ["ROMEO:", "To be, or not to be"]
MESSAGE = '{"role": "user", "content": "..."} with a role of system, user, assistant'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(local=True, stages=2, dtype="float32", progress=False) as opened:
        yield opened


def test_texts_are_those_of_the_command(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        "--local",
        "--stages",
        "1",
        "--dtype",
        "float32",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
    ]
    monkeypatch.setattr(sys, "argv", ["tramontane", "generate", *flags, *PROMPTS])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    outputs = llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().out == "\n".join(
        f"{output.prompt}{output.outputs[0].text}\n" for output in outputs
    )


def test_results_have_the_shape_of_vllms(llm: LLM) -> None:
    one, two = llm.generate(PROMPTS, GREEDY)
    assert [one.prompt, two.prompt] == PROMPTS
    assert len(one.outputs) == 1
    assert one.outputs[0].index == 0
    assert len(one.outputs[0].token_ids) == 12
    assert one.outputs[0].finish_reason is FinishReason.LENGTH
    [from_ids] = llm.generate(list(one.prompt_token_ids), GREEDY)
    assert (from_ids.prompt, from_ids.outputs) == (None, one.outputs)
    assert llm.generate("ROMEO:", GREEDY) == [one]
    assert llm.generate([], GREEDY) == []


def test_a_prompt_that_came_before_is_cached_but_for_its_last_page(llm: LLM) -> None:
    """In whole pages of 16 tokens, of which the last token is computed anyway."""
    prompt = (
        "Now is the winter of our discontent made glorious summer by this sun of York; and all the"
        " clouds"
    )
    first, again = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    num_prompt = len(first.prompt_token_ids)
    assert num_prompt > 2 * 16
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (num_prompt - 1) // 16 * 16)
    assert again == first, "how much of it was computed is no part of an output"
    [longer] = llm.generate([*first.prompt_token_ids[:20], 5], replace(GREEDY, n=3))
    assert longer.num_cached_tokens == 16, "of several completions that of the first one"
    [scored] = llm.generate(prompt, replace(GREEDY, prompt_logprobs=0))
    assert scored.num_cached_tokens == 0


def test_several_completions_of_a_prompt_differ_and_are_the_same_again(llm: LLM) -> None:
    sampling = SamplingParams(n=4, max_tokens=8, temperature=1.0, seed=3)
    [output] = llm.generate("ROMEO:", sampling)
    assert [each.index for each in output.outputs] == [0, 1, 2, 3]
    assert len({each.token_ids for each in output.outputs}) > 1
    assert llm.generate("ROMEO:", sampling) == [output]
    with pytest.warns(DeprecationWarning, match=r"SamplingParams\(n=...\)"):
        assert llm.generate("ROMEO:", replace(sampling, n=1), n=4) == [output]
    messages = [{"role": "user", "content": "Who are you?"}]
    [answer] = llm.chat(messages, sampling)
    assert len(answer.outputs) == 4
    with pytest.warns(DeprecationWarning, match="the argument n"):
        assert llm.chat(messages, replace(sampling, n=1), n=4) == [answer]


def test_a_completion_ends_before_a_stop_string(llm: LLM) -> None:
    """As vLLM's: the text ends before the string, the tokens with the one that completed it, and
    the log-probabilities too.
    """
    sampling = SamplingParams(max_tokens=40, temperature=0, logprobs=0)
    [whole] = llm.generate("ROMEO:", sampling)
    text, token_ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[10:14]
    for given in (stop, [stop], ["never", stop]):
        [output] = llm.generate("ROMEO:", replace(sampling, stop=given))
        [completion] = output.outputs
        assert completion.text == text[: text.index(stop)]
        assert completion.finish_reason is FinishReason.STOP
        assert 0 < len(completion.token_ids) < len(token_ids)
        assert completion.token_ids == token_ids[: len(completion.token_ids)]
        assert completion.logprobs == whole.outputs[0].logprobs[: len(completion.token_ids)]
    [late] = llm.generate("ROMEO:", replace(sampling, stop=stop, min_tokens=len(token_ids)))
    assert late.outputs[0].text == text


def test_a_sequence_that_is_stopped_takes_no_more_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, aborted = llm._engine.engine.router.scheduler, list[int]()
    abort = scheduler.abort
    monkeypatch.setattr(scheduler, "abort", lambda seq_id: (aborted.append(seq_id), abort(seq_id)))
    endless = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    text = llm.generate("ROMEO:", replace(endless, max_tokens=20))[0].outputs[0].text
    assert not aborted
    llm.generate("ROMEO:", replace(endless, stop=text[5:8]))
    assert len(aborted) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0; it must be a whole number from 1 to 1024$"),
        ({"n": 1025}, "n is 1025; it must be a whole number from 1 to 1024$"),
        ({"n": 2.5}, "n is 2.5; it must be a whole number"),
        ({"n": True}, "n is True; it must be a whole number"),
        ({"n": "2"}, "n is '2'; it must be a whole number"),
        ({"stop": 3}, "stop: it must be a text or a list of texts"),
        ({"stop": ["x"] * 17}, "stop: there may be at most 16"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": -2}, r"top_k is -2; it must be 0 or -1 \(all tokens\)"),
        ({"temperature": "0"}, "temperature is '0'; it must be a number$"),
        ({"max_tokens": "5"}, "max_tokens is '5'; it must be a whole number$"),
        ({"max_tokens": None}, "max_tokens is None; it must be a whole number$"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number$"),
    ],
)
def test_wrong_sampling_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_a_prompt_may_have_1024_completions() -> None:
    assert SamplingParams(n=1024).n == 1024


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_MODEL / name)
    with LLM(tmp_path, local=True, progress=False) as silent:
        [output] = silent.generate([[1, 2]], GREEDY)
        assert output.outputs[0].text == ""
        with pytest.raises(RequestError, match="stop needs text, and this model has no tokenizer"):
            silent.generate([[1, 2]], replace(GREEDY, stop="x"))
        for call in (
            lambda: silent.generate("ROMEO:"),
            lambda: silent.chat([{"role": "user", "content": "?"}]),
        ):
            with pytest.raises(
                CheckpointError,
                match=r"has no tokenizer: there is none of tekken\.json, tokenizer\.json",
            ):
                call()


def test_equal_prompts_differ_without_a_seed_and_are_the_same_with_one(llm: LLM) -> None:
    unseeded, seeded = (
        SamplingParams(max_tokens=8, temperature=1.0),
        SamplingParams(max_tokens=8, temperature=1.0, seed=0),
    )
    unseeded, seeded = replace(unseeded, n=2), replace(seeded, n=2)
    outputs = llm.generate(["ROMEO:"] * 3, unseeded)
    assert [[each.index for each in output.outputs] for output in outputs] == [[0, 1]] * 3
    texts = [each.token_ids for output in outputs for each in output.outputs]
    assert len(set(texts)) == 6
    assert llm.generate(["ROMEO:"] * 3, unseeded) == outputs
    [alone] = llm.generate("ROMEO:", seeded)
    assert llm.generate(["ROMEO:"] * 3, seeded) == [alone] * 3
    assert [each.token_ids for each in alone.outputs] == texts[:2]


def test_a_conversation_is_encoded_by_the_models_format(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
    ]
    [answer] = llm.chat(messages, GREEDY)
    assert answer.prompt is None
    assert llm.chat([messages, messages], GREEDY) == [answer, answer]
    assert (
        llm.generate([answer.prompt_token_ids], GREEDY)[0].outputs[0].token_ids
        == answer.outputs[0].token_ids
    )


def test_thoughts_of_an_answer_are_apart_from_its_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens of the demo model's answer are taken for markers."""
    messages = [{"role": "user", "content": "Who are you?"}]
    [plain] = llm.chat(messages, GREEDY)
    ids = plain.outputs[0].token_ids
    assert plain.outputs[0].reasoning == ""
    begin = 2
    end = next(at for at in range(begin + 3, len(ids)) if ids[at] not in ids[:at])
    form = ReasoningFormat("[THINK]", "[/THINK]", ids[begin], ids[end])
    monkeypatch.setattr(MistralChatTemplate, "reasoning_format", property(lambda _: form))
    [answer] = llm.chat(messages, GREEDY)
    [output] = answer.outputs
    assert output.token_ids == ids
    tokenizer = require_tokenizer(DEMO_MODEL, 10**6)

    def text(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(
            tuple(
                token_id for token_id in token_ids if token_id not in (form.begin_id, form.end_id)
            )
        )

    assert output.reasoning.strip() == text(ids[begin:end]).strip()
    assert output.text.replace(" ", "") == text((*ids[:begin], *ids[end:])).replace(" ", "")
    assert llm.generate([answer.prompt_token_ids], GREEDY)[0].outputs[0].reasoning == "", (
        "a completion is text"
    )
    monkeypatch.undo()
    said = {"role": "assistant", "content": "x"}
    prompts = [
        llm.chat([*messages, each, *messages], GREEDY)[0].prompt_token_ids
        for each in (said, {**said, "reasoning": "y"})
    ]
    assert prompts[0] == prompts[1], "a format without thoughts leaves them out of a history"


def test_an_answer_may_begin_inside_a_thought(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the prompt is taken for the marker that begins a thought, and one of the answer
    for that which ends it.
    """
    messages = [{"role": "user", "content": "Who are you?"}]
    [plain] = llm.chat(messages, GREEDY)
    ids, tokenizer = plain.outputs[0].token_ids, require_tokenizer(DEMO_MODEL, 10**6)
    begin_id = next(
        token_id for token_id in reversed(plain.prompt_token_ids) if tokenizer.bytes_of(token_id)
    )
    end = next(at for at in range(2, len(ids)) if ids[at] not in (*ids[:at], begin_id))
    form = ReasoningFormat("[THINK]", "[/THINK]", begin_id, ids[end])
    monkeypatch.setattr(MistralChatTemplate, "reasoning_format", property(lambda _: form))
    parser = ReasoningParser(form, tokenizer, is_open=True)
    splits = [parser.push(token_id) for token_id in ids] + [parser.finish()]
    [output] = llm.chat(messages, GREEDY)[0].outputs
    assert output.reasoning == "".join(split.thought for split in splits) != ""
    assert output.text == "".join(split.content for split in splits)


def test_the_effort_of_thinking_reaches_the_format(llm: LLM, tmp_path: Path) -> None:
    path, messages = (
        thinking_tekken(tmp_path, "v15", ("none", "high")),
        [{"role": "user", "content": "Who are you?"}],
    )
    prompts = PromptEncoder(path.parent, 512, 10**6)
    ids = [
        prompts.encode_chat(messages, "conversation 1", effort) for effort in (None, "none", "high")
    ]
    assert ids[0] == ids[1] != ids[2]
    with pytest.raises(
        RequestError, match="reasoning_effort is 'high'; this model's format has no such setting"
    ):
        llm.chat(messages, GREEDY, reasoning_effort="high")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 1 is empty"),
        ([[1, 10**6]], "prompt 1 has token id 1000000"),
        ([[-1]], "prompt 1 has token id -1"),
        ([[1] * 5000], "prompt 1 is too long: 5000 tokens"),
        (["\ud800"], "not valid Unicode"),
        ([["a", "b"]], "prompt 1 has 'a', which is no token id"),
        ([[1.5]], "prompt 1 has 1.5, which is no token id"),
    ],
)
def test_what_cannot_be_generated_from_is_refused_by_its_number(
    llm: LLM, prompts: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": "x", "name": "Ann"}],
        [{"role": "user", "content": "x", "reasoning": "y"}],
        [{"role": "assistant", "content": "x", "reasoning": 1}],
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: list[dict[str, str]]) -> None:
    with pytest.raises(RequestError, match="conversation 1"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            5,
            (
                "prompts is 5; it must be a text, a list of token ids, or a list of texts or of"
                " such lists"
            ),
        ),
        (None, "prompts is None; it must be"),
        ({"prompt": "A"}, "prompts is {'prompt': 'A'}; it must be"),
        (b"A", "prompts is b'A'; it must be"),
        (["A", 5], "prompt 2 is 5; it must be a text, or a list of token ids"),
        ([{"prompt": "A"}], "prompt 1 is {'prompt': 'A'}; it must be"),
    ],
)
def test_what_is_no_prompt_is_named(llm: LLM, prompts: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", f"conversation 1 is 'hello'; it must be a list of messages, each {MESSAGE}"),
        (5, "conversation 1 is 5; it must be"),
        (None, "conversation 1 is None; it must be"),
        (
            {"role": "user", "content": "x"},
            "conversation 1 is {'content': 'x', 'role': 'user'}; it must be a list",
        ),
        (["hello"], f"conversation 1 has 'hello'; a message must be {MESSAGE}"),
        ([[{"role": "user", "content": "x"}], 5], "conversation 2 is 5; it must be"),
        (
            [{"role": "user", "content": ["x"]}],
            "conversation 1 has {'content': ['x'], 'role': 'user'}; a message",
        ),
    ],
)
def test_what_is_no_conversation_is_named(
    llm: LLM, messages: list[dict[str, str]], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.chat(messages)


def test_calls_written_for_vllm_work(llm: LLM) -> None:
    """The argument has vLLM's name, and ``top_k=-1`` keeps all tokens."""
    kept = SamplingParams(max_tokens=8, temperature=1.0, top_k=-1)
    assert kept == SamplingParams(max_tokens=8, temperature=1.0)
    outputs = llm.generate(prompts=PROMPTS, sampling_params=kept)
    assert outputs == llm.generate(PROMPTS, replace(kept, top_k=0))
    messages = [{"role": "user", "content": "Who are you?"}]
    assert llm.chat(messages=messages, sampling_params=kept) == llm.chat(messages, kept)


@pytest.mark.parametrize("sampling", [{"n": 2}, {}, 0, [GREEDY], request.SamplingParams()])
def test_what_are_no_sampling_parameters_is_named(llm: LLM, sampling: SamplingParams) -> None:
    for call in (
        lambda: llm.generate("A", sampling),
        lambda: llm.chat([{"role": "user", "content": "A"}], sampling),
    ):
        with pytest.raises(
            RequestError,
            match=r"sampling_params is [{0\[S].*; give a SamplingParams, such as SamplingParams",
        ):
            call()


def test_a_prompt_may_fill_the_context_but_for_one_position() -> None:
    with LLM(local=True, max_model_len=32, progress=False) as small:
        [output] = small.generate([[5] * 31], GREEDY)
        assert len(output.outputs[0].token_ids) == 1
        with pytest.raises(RequestError, match="prompt 1 is too long: 32 tokens"):
            small.generate([[5] * 32], GREEDY)


def test_logprobs_are_those_of_the_tokens(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate("ROMEO:", sampling)
    [completion] = output.outputs
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) - 1
    assert [len(each.top) for each in output.prompt_logprobs] == [1] * len(output.prompt_logprobs)
    for token_id, each in zip(completion.token_ids, completion.logprobs, strict=True):
        assert each.top[0] == (token_id, each.logprob), "greedy: the token is the likeliest"
        assert len(each.top) == 2
    [plain] = llm.generate("ROMEO:", GREEDY)
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs) == ((), ())


def test_a_failure_of_the_pipeline_is_raised_as_it_is(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_requests: object) -> None:
        raise PipelineError("planted")

    monkeypatch.setattr(llm._engine.engine.router, "generate", fail)
    with pytest.raises(PipelineError, match="planted"):
        llm.generate(PROMPTS, GREEDY)


def test_a_completion_whose_grammar_is_none_ends_with_an_error(llm: LLM) -> None:
    [output] = llm.generate("ROMEO:", SamplingParams(max_tokens=4, grammar="this is no grammar"))
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert "as its schema requires" in output.outputs[0].error


def test_a_completion_that_overflows_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    [expected] = llm.generate("ROMEO:", GREEDY)
    last, calls = llm._engine.engine.router.chain.stages[-1].last_stage, itertools.count()  # type: ignore[attr-defined]
    head = last._head
    with monkeypatch.context() as patch:
        patch.setattr(
            last, "_head", lambda hidden_TD: head(hidden_TD) * (math.inf if next(calls) == 4 else 1)
        )
        [output] = llm.generate("ROMEO:", GREEDY)
    [whole], [completion] = expected.outputs, output.outputs
    assert completion.finish_reason is FinishReason.ERROR
    assert "are not finite" in completion.error
    assert completion.token_ids == whole.token_ids[:4]
    assert whole.text.startswith(completion.text)
    assert llm.generate("ROMEO:", GREEDY) == [expected]
    assert whole.error == ""


def test_an_interrupted_call_cancels_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C interrupts a thread that waits for a result."""
    result = Future.result

    def interrupted(future: "Future[object]", timeout: float | None = None) -> object:
        monkeypatch.setattr(Future, "result", result)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 8, SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))
    scheduler = llm._engine.engine.router.scheduler
    while scheduler.measure_load().tokens:  # bounded by pytest's own timeout
        time.sleep(0.01)


def test_of_a_servers_configuration_one_pipeline_is_used() -> None:
    with LLM(config=EngineConfig(local=True, replicas=3, max_replicas=4), progress=False) as one:
        assert one.config.max_pipelines == 1


def test_threads_share_a_pipeline(llm: LLM) -> None:
    expected = {prompt: llm.generate(prompt, GREEDY) for prompt in PROMPTS}
    got: dict[str, object] = {}
    threads = [
        threading.Thread(target=lambda p=prompt: got.update({p: llm.generate(p, GREEDY)}))
        for prompt in PROMPTS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


def test_wrong_configurations_are_user_errors() -> None:
    with pytest.raises(ConfigError, match="stages"):
        LLM(stages=0, progress=False)
    with pytest.raises(ConfigError, match=r"config is {'stages': 2}; it must be an EngineConfig"):
        LLM(config={"stages": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not both"):
        LLM(config=EngineConfig(local=True), stages=2)
    with pytest.raises(ConfigError, match="no_such_key"):
        LLM(no_such_key=1)
    with pytest.raises(ConfigError, match="did you mean stages"):
        LLM(stage=2)
    with pytest.raises(ConfigError, match="replicas is 2, and LLM runs one pipeline"):
        LLM(replicas=2)
    with pytest.raises(ConfigError, match="--link direct"):
        LLM(config=EngineConfig(local=True, link="direct"))


def test_a_pipeline_that_cannot_start_raises_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(Exception, match="stages"):  # the demo model has fewer layers
        LLM(local=True, stages=99, progress=False)
    assert threading.active_count() == before


def test_after_close_there_is_an_error_and_closing_twice_is_harmless() -> None:
    llm = LLM(config=EngineConfig(local=True), progress=False)
    llm.close()
    llm.close()
    with pytest.raises(PipelineError, match="closed"):
        llm.generate("a", GREEDY)


def test_a_program_that_forgets_to_close_ends() -> None:
    program = (
        "from tramontane.llm import LLM, SamplingParams\n"
        "llm = LLM(local=True, progress=False)\n"
        "print(len(llm.generate('ROMEO:', SamplingParams(max_tokens=3))[0].outputs[0].token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.ray
def test_over_ray_the_tokens_are_the_same_and_nothing_stays_behind(llm: LLM) -> None:
    import ray

    with LLM(stages=2, dtype="float32", progress=False) as over_ray:
        assert ray.is_initialized()
        assert over_ray.generate(PROMPTS, GREEDY) == llm.generate(PROMPTS, GREEDY)
    assert not ray.is_initialized()


def test_answers_end_at_the_tokenizers_eos_token(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ChatML fine-tunes: ``tokenizer_config.json`` names another token than ``config.json``.
    In the command, too.
    """
    [whole] = llm.generate("ROMEO:", GREEDY)
    token_ids = whole.outputs[0].token_ids
    end = next(i for i in range(3, 12) if token_ids[i] not in token_ids[:i])
    folder = tmp_path / "fine-tune"
    shutil.copytree(DEMO_MODEL, folder)
    settings = {
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {str(token_ids[end]): {"content": "<|im_end|>"}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(model=folder, local=True, stages=2, dtype="float32", progress=False) as tuned:
        [output] = tuned.generate("ROMEO:", GREEDY)
    assert output.outputs[0].token_ids[:end] == token_ids[:end]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (
        end + 1,
        FinishReason.STOP,
    )
    flags = [
        "--model",
        str(folder),
        "--local",
        "--dtype",
        "float32",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
    ]
    monkeypatch.setattr(sys, "argv", ["tramontane", "generate", *flags, "ROMEO:"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == f"ROMEO:{output.outputs[0].text}\n"
