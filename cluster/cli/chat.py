"""``tramontane chat``: a conversation with a model, from lines of input to answers on standard
output.
"""

import asyncio
import json
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from io import UnsupportedOperation
from typing import IO, Annotated, Any, TextIO

import typer

from tramontane.cluster.common.signals import Interrupts
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.engine_keys import DEMO_MODEL, ExpertKeys, PipelineKeys, RunKeys
from tramontane.cluster.console.display import Display, sanitize
from tramontane.cluster.console.options import (
    SAMPLING,
    Temperature,
    TopK,
    TopP,
    flags_of,
    load_config,
    option,
    with_options,
)
from tramontane.cluster.console.prompts import sampling_params, text_model_args
from tramontane.cluster.console.run_summary import cache_note
from tramontane.cluster.console.terminal import TerminalInput, print_errors_at_once, without_echo
from tramontane.cluster.pipeline.engine import Engine, open_engine
from tramontane.proto.errors import RequestError, did_you_mean
from tramontane.proto.request import FinishReason, Request, SamplingParams, sequence_error
from tramontane.router.tokenization.chat import ChatMessage, Conversation
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.reasoning_parser import ReasoningParser, Split, is_open_after
from tramontane.router.tokenization.tokenizer import Tokenizer

HELP = (
    "Ctrl-D or /exit ends the conversation, Ctrl-C an answer; /reset forgets the conversation so"
    " far; /help shows this line"
)
COMMANDS = ("/exit", "/reset", "/help")
COMMAND = re.compile(r"/[\w?-]*(\s|$)")  # /usr/bin is not a command
DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"
DEMO_NOTE = "the demo model was trained on plays: it continues in their tone, but cannot converse"


@with_options(*flags_of(PipelineKeys, ExpertKeys, RunKeys))
def chat(
    context: typer.Context,
    system: Annotated[str | None, option("--system", help="System message.")] = None,
    max_tokens: Annotated[
        int, option("--max-tokens", help="New tokens per answer.", panel=SAMPLING)
    ] = 1024,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
) -> None:
    """Hold a conversation: each line of standard input is a message; a terminal has history and
    editing.
    """
    with load_config(context) as settings:
        sampling = sampling_params(max_tokens, temperature, top_p, top_k, settings.seed)
        display = Display(live=False)
        in_terminal = (
            _is_terminal(sys.stdin) and _is_terminal(sys.stdout) and not settings.json_output
        )
        messages = TerminalInput() if in_terminal else lines_of_stdin()
        try:
            asyncio.run(run_chat(settings, system, sampling, messages, display))
        finally:
            display.stop()


def _is_terminal(stream: TextIO | None) -> bool:
    """Return True for a terminal; a closed stream is None."""
    return stream is not None and stream.isatty()


@dataclass(slots=True)
class ChatReply:
    """One answer, which grows; Ctrl-C ends it with the text so far. ``thought``: None if the
    model's format has none.
    """

    text: str = ""
    thought: str | None = None
    num_tokens: int = 0
    num_cached: int = 0  # tokens of the prompt
    finish: FinishReason = FinishReason.ABORT


async def run_chat(
    config: EngineConfig,
    system: str | None,
    sampling: SamplingParams,
    messages: AsyncIterator[str],
    display: Display,
) -> None:
    """Answer until there are no more messages.

    Raises UserError if the model does not support conversations. If the messages do not come from a
    terminal, an error in one of them ends the command.
    """
    interrupts = Interrupts()
    with without_echo() if isinstance(messages, TerminalInput) else nullcontext():
        args = text_model_args(config)
        display.report("reading the tokenizer")
        tokenizer = require_tokenizer(config.model, args.vocab_size)
        prompt = load_chat_template(config.model, tokenizer)
        head = (ChatMessage("system", system),) if system else ()
        # a template that refuses every message does so before anything starts
        prompt.encode((*head, ChatMessage("user", "?")))
        config = config.single_pipeline().sized_for(1)  # one conversation, of any length
        async with open_engine(config, display.report, show_loading=display.loading) as engine:
            display.stop()
            display.note_in_terminal(cache_note(engine.plan))
            if isinstance(messages, TerminalInput):
                display.note(HELP)
            if config.model == DEMO_MODEL:
                display.note(DEMO_NOTE)
            conversation = Conversation(
                prompt, engine.plan.max_model_len, sampling.max_tokens, head
            )
            ctrl_c = interrupts if isinstance(messages, TerminalInput) else None
            session = _Chat(
                engine,
                tokenizer,
                sampling,
                conversation,
                ctrl_c,
                display,
                as_json=config.json_output,
            )
            with print_errors_at_once():
                await _converse(session, messages, display)


async def _converse(session: "_Chat", messages: AsyncIterator[str], display: Display) -> None:
    async for line in messages:
        if line.rstrip() == "/exit":
            break
        try:
            await session.handle_line(line)
        except RequestError as error:
            if not isinstance(messages, TerminalInput):
                raise
            display.note(str(error))


class _Chat:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        conversation: Conversation,
        interrupts: Interrupts | None,
        display: Display,
        *,
        as_json: bool,
    ) -> None:
        self._engine, self._tokenizer, self._sampling = engine, tokenizer, sampling
        self._conversation = self._empty_conversation = conversation
        self._interrupts, self._display, self._as_json = interrupts, display, as_json
        self._has_answered = False

    async def handle_line(self, line: str) -> None:
        """Run a command, or answer a message. Raises RequestError for an unknown command or a
        message that does not fit.
        """
        match line.rstrip():
            case "/reset":
                self._conversation = self._empty_conversation
                self._display.note("the conversation so far is forgotten")
            case "/help":
                self._display.note(HELP)
            case command if COMMAND.match(line):
                raise RequestError(
                    "there is no command"
                    f" {command[:40]!r}{did_you_mean(command.lower(), COMMANDS)}; commands are"
                    " /exit, /reset and /help; to send such a line as a message, begin it with a"
                    " space"
                )
            case _:
                await self._answer_message(line)

    async def _answer_message(self, line: str) -> None:
        self._tokenizer.check_length(line, self._conversation.context)
        extended, prompt_ids = await asyncio.to_thread(self._conversation.with_question, line)
        if extended.num_dropped > self._conversation.num_dropped:
            self._display.note(
                "the conversation has outgrown the context; its oldest questions and answers are"
                " forgotten"
            )
        answer = ChatReply()
        if self._has_answered and not self._interrupts and not self._as_json:
            print()  # between answers in a pipe; a terminal shows the question there
        self._has_answered = True
        await self._interruptible(self._answer(prompt_ids, answer))
        self._conversation = extended.with_answer(answer.text)
        print(_as_json(prompt_ids, answer) if self._as_json else "", flush=True)
        if answer.finish is FinishReason.LENGTH and answer.num_tokens < self._sampling.max_tokens:
            self._display.note(
                f"the answer ends at the context of {self._conversation.context} positions"
            )

    async def _interruptible(self, work: Coroutine[Any, Any, None]) -> None:
        """Run until it is done; in a terminal, Ctrl-C ends only this work."""
        task = asyncio.create_task(work)
        try:
            with self._interrupts.cancelling_only(task) if self._interrupts else nullcontext():
                await asyncio.wait({task})
        finally:
            task.cancel()
        if not task.cancelled():
            task.result()  # raises the error, if there was one

    async def _answer(self, prompt_ids: tuple[int, ...], answer: ChatReply) -> None:
        tokenizer, form = self._tokenizer, self._conversation.prompt.reasoning_format
        reader: _TextReader | ReasoningParser = _TextReader(tokenizer)
        if form is not None:
            reader = ReasoningParser(
                form, tokenizer, is_open=is_open_after(form, tokenizer, prompt_ids)
            )
            answer.thought = ""
        async with aclosing(
            self._engine.router.generate(Request.of(prompt_ids, self._sampling))
        ) as batches:
            async for batch in batches:
                if batch.events[-1].finish is FinishReason.ERROR:
                    raise sequence_error(batch.events[-1])
                answer.finish = batch.events[-1].finish or answer.finish
                answer.num_tokens += len(batch.events)
                answer.num_cached += batch.num_cached
                for event in batch.events:
                    self._show(reader.push(event.token_id), answer)
                if batch.events[-1].finish:
                    self._show(reader.finish(), answer)

    def _show(self, split: Split, answer: ChatReply) -> None:
        """Add a token's text to an answer and print it; thoughts only in a terminal, dimmed and
        before a blank line.
        """
        in_terminal = self._interrupts is not None
        if split.thought:
            answer.thought = (answer.thought or "") + split.thought
            if in_terminal and not self._as_json:
                print(f"{DIM}{sanitize(split.thought)}{NOT_DIM}", end="", flush=True)
        if split.content:
            after_thought = "\n\n" if in_terminal and answer.thought and not answer.text else ""
            answer.text += split.content
            if not self._as_json:
                print(after_thought + sanitize(split.content), end="", flush=True)


class _TextReader:
    """Turns the tokens of an answer without thoughts into text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = tokenizer.decoder(is_text_start=True)

    def push(self, token_id: int) -> Split:
        return Split(self._decoder.push(token_id), "", ())

    def finish(self) -> Split:
        return Split(self._decoder.finish(), "", ())


def _as_json(prompt_ids: tuple[int, ...], answer: ChatReply) -> str:
    return json.dumps(
        {
            "text": answer.text,
            **({} if answer.thought is None else {"reasoning": answer.thought}),
            "finish_reason": answer.finish.value,
            "prompt_tokens": len(prompt_ids),
            "cached_tokens": answer.num_cached,
            "completion_tokens": answer.num_tokens,
        }
    )


def _own_stdin() -> IO[bytes]:
    """Return a copy of standard input: Python locks its own object at exit, while our thread may
    still be reading.
    """
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except UnsupportedOperation:  # it is not a file
        return sys.stdin.buffer


async def lines_of_stdin() -> AsyncIterator[str]:
    """Yield the nonblank lines as they arrive. A daemon thread reads them, since a blocked read
    cannot be interrupted.
    """
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    wanted = threading.Semaphore()  # one line is read ahead

    def hand_over(line: bytes) -> None:
        wanted.acquire()
        loop.call_soon_threadsafe(lines.put_nowait, line)

    def read() -> None:
        # it cannot be read, or the loop or the input is closed
        with suppress(OSError, RuntimeError, ValueError):
            for line in _own_stdin() if sys.stdin else ():
                hand_over(line)
        with suppress(RuntimeError):
            hand_over(b"")

    threading.Thread(target=read, daemon=True).start()
    number = 0
    while line := await lines.get():
        wanted.release()
        number += 1
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise RequestError(f"line {number} of standard input is not valid UTF-8") from None
        if text.strip():
            yield text
