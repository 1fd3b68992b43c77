"""Whole answers, of which clients are told nothing until the end: their proxy hears now and then how far they are."""

import asyncio
from typing import Any

from starlette.types import Message, Send

from tramontane.router.openai.resume_state import ChoiceNews

TELL = "tramontane.tell"  # in the scope that a door's endpoints get, where a proxy relays the answer: a Teller
TOLD = "tramontane.told"  # a message that goes no further than the proxy
TELL_EVERY_S = 1.0  # as much is computed again when a door dies


class Teller:
    """Of one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._news: list[ChoiceNews] = []
        self._parts: list[dict[str, Any]] = []
        self._told_at = asyncio.get_running_loop().time()

    async def __call__(self, news: list[ChoiceNews], parts: list[dict[str, Any]]) -> None:
        """The answer has grown by this."""
        self._news += news
        self._parts += parts
        if asyncio.get_running_loop().time() - self._told_at < TELL_EVERY_S:
            return
        message: Message = {"type": TOLD, "news": self._news, "parts": self._parts}
        self._news, self._parts, self._told_at = [], [], asyncio.get_running_loop().time()
        await self._send(message)
