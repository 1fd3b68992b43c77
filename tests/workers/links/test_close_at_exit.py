"""A process that ends right after it has closed a channel: the thread that releases memory is not
in torch then.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"
# Python ends a thread that is not the main one when it returns from native code during exit. Out of
# a function of torch that releases the interpreter's lock, this calls std::terminate.
PROGRAM = """
import socket, sys, threading
from concurrent.futures import ThreadPoolExecutor

import torch
from host_ipc import HostEvent, HostIpc
from tramontane.workers.links import ipc_channel
from tramontane.workers.links.control_socket import ControlSocket
from tramontane.workers.links.tcp_channel import TcpListener, connect

entered, matrix_KK = threading.Event(), torch.ones(128, 128)
ipc_channel.EXIT_TIMEOUT_S = 90.0

def multiply(_event):
    entered.set()
    for _ in range(3000):  # many returns from native code
        torch.mm(matrix_KK, matrix_KK)
    return True

setattr(HostEvent, sys.argv[1], multiply)
listener = TcpListener("127.0.0.1")
with ThreadPoolExecutor(1) as thread:
    accepted = thread.submit(listener.accept_connection)
    peer = connect(listener.address)
    sender = ipc_channel.IpcSender(ControlSocket(accepted.result()), HostIpc())
sender.make_events()
peer.close()
sender.close()
entered.wait()
"""


@pytest.mark.parametrize("method", ["query", "close"])
def test_the_thread_that_closes_is_waited_for(method: str) -> None:
    """It first asks the GPU, and frees its own events once the other end, here one without any, is
    gone.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, method]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
