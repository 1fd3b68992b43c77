"""The installed browser without a window, and a local server for it."""

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from playwright.sync_api import Browser, expect, sync_playwright
from starlette.types import ASGIApp

TIMEOUT_MS = 60_000  # long, because the machine may be busy
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser is installed: none of {', '.join(PROGRAMS)}")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to start otherwise
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=program, args=[*as_root, "--disable-gpu"]
        )
        yield running
        running.close()


class LocalServer:
    """An application on a local port, in a thread. It can be stopped, and started again on the same
    port.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._socket = self._listen(0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @staticmethod
    def _listen(port: int) -> socket.socket:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("127.0.0.1", port))
        opened.listen()
        return opened

    def start(self) -> None:
        config = uvicorn.Config(
            self._app, log_config=None, lifespan="off", timeout_graceful_shutdown=1, ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def start_again(self) -> None:
        self._socket = self._listen(self.port)
        self.start()
