"""The process of a local worker: `python -m lockstep.workers.child NAME SOCKET PARENT`.

It ends with its parent, whatever it is doing: the kernel kills it, and the end of the connection does too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

from lockstep.workers.frames import Frame, FrameError, read_frame, receive_into, send_all
from lockstep.workers.messages import Request, pack_result
from lockstep.workers.serving import Serving
from lockstep.workers.worker import Reply

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    name, descriptor, parent = arguments[0], int(arguments[1]), int(arguments[2])
    _die_with(parent)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this, and will end it
    connection = socket.socket(fileno=descriptor)
    start = read_frame(lambda buffer: receive_into(connection, buffer)).header
    lock = threading.Lock()

    def send(number: int, result: Reply | BaseException) -> None:
        packed = pack_result(number, result)
        try:
            with lock:
                send_all(connection, packed)
        except OSError:
            leave(0)  # nobody is there to hear it

    serving = Serving(name, send)
    threading.Thread(target=_read, args=(connection, serving), name="requests", daemon=True).start()
    send(start["number"], Reply({"pid": os.getpid()}))
    try:
        serving.run(start["entry"], start["settings"])
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def _read(connection: socket.socket, serving: Serving) -> None:
    try:
        while True:
            frame = read_frame(lambda buffer: receive_into(connection, buffer))
            if _asks_to_end(frame):
                serving.end()
            else:
                serving.receive(Request.from_frame(frame))
    except (EOFError, OSError):
        leave(0)  # the parent is gone
    except FrameError as error:
        print(f"the parent sent {error}", file=sys.stderr)
        leave(1)
    except BaseException:
        traceback.print_exc()
        leave(1)


def _asks_to_end(frame: Frame) -> bool:
    return "method" not in frame.header


def _die_with(parent: int) -> None:
    """Where the kernel offers it. It looks at the thread that started this process, so that one must stay."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        leave(0)


def leave(code: int) -> NoReturn:
    """Without waiting for threads or collectives, which may wait forever."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
