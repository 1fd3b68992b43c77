"""``tramontane chat``: a conversation in the terminal, or with whatever writes lines to standard input."""

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tramontane.cluster.config import DEMO_MODEL, EngineConfig
from tramontane.cluster.display import Display
from tramontane.cluster.launch import Engine, open_engine
from tramontane.proto.errors import RequestError
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.request import FinishReason, SamplingParams, SequenceSpec
from tramontane.router.chat import ChatMessage, ChatPrompt
from tramontane.router.tokenizer import Tokenizer
from tramontane.router.tokenizer_folder import need_tokenizer, open_chat

HELP = "Ctrl-D ends the conversation, Ctrl-C an answer; /reset forgets what was said."


@dataclass(frozen=True, slots=True)
class Answer:
    """``dropped``: messages that were left out of the prompt because the context could not hold them."""

    content: str
    finish: FinishReason
    num_prompt_tokens: int
    num_tokens: int
    dropped: int
