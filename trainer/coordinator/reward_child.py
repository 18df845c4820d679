"""The process in which a task scores responses: `python -m ...reward_child SOCKET_FD PARENT_PID`.

It reads frames from a socket pair: first the task's spec, then one response at a time, and answers each with one
frame. A frame is a length of 4 bytes, big-endian, and that many bytes of JSON. Nothing here or in `tasks` imports
torch, so that a child starts in a fraction of a second and costs little memory.
"""

import ctypes
import dataclasses
import json
import os
import signal
import socket
import struct
import sys
from numbers import Real
from typing import cast

from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import JsonValue, Task, TaskSpec
from asyppo_async.tasks.registry import create_task
from asyppo_async.types import Prompt

LENGTH = struct.Struct(">I")
MAX_ERROR_CHARACTERS = 2000
_PR_SET_PDEATHSIG = 1


def frame(document: JsonValue) -> bytes:
    """A document as it is sent, either way."""
    body = json.dumps(document).encode()
    return LENGTH.pack(len(body)) + body


def spec_document(spec: TaskSpec) -> JsonValue:
    """What `main` builds the task from."""
    return {
        "name": spec.name,
        "seed": spec.seed,
        "system_prompt": spec.system_prompt,
        "params": dict(spec.params),
    }


def score_document(prompt: Prompt, text: str) -> JsonValue:
    """What the child is asked for one response."""
    document = dataclasses.asdict(prompt)
    document["token_ids"] = list(prompt.token_ids)
    return {"prompt": document, "text": text}


def main() -> int:
    die_with_parent(int(sys.argv[2]))
    # Ctrl-C reaches the whole process group, but when a score is given up is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (EOFError, ConnectionError):
            return 0
    return 0


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit("the parent was gone before the child asked to die with it")


def serve(connection: socket.socket) -> None:
    """Answer frames until the parent closes its end.

    Raises:
        EOFError: the parent closed its end.
    """
    fields = receive(connection)
    spec = TaskSpec(
        name=str(fields["name"]),
        seed=int(cast(int, fields["seed"])),
        system_prompt=str(fields["system_prompt"]),
        params=cast(dict[str, JsonValue], fields["params"]),
    )
    try:
        task = create_task(spec)
    except TaskError as error:
        connection.sendall(frame({"error": str(error)}))
        return
    connection.sendall(frame({"ready": True}))
    while True:
        connection.sendall(frame(answer(task, receive(connection))))


def answer(task: Task, request: dict[str, JsonValue]) -> JsonValue:
    """The score as a number, or why there is none."""
    fields = cast(dict[str, JsonValue], request["prompt"])
    prompt = Prompt(
        id=str(fields["id"]),
        task=str(fields["task"]),
        text=str(fields["text"]),
        token_ids=tuple(cast(list[int], fields["token_ids"])),
        answer=str(fields["answer"]),
    )
    try:
        value: object = task.score(prompt, str(request["text"]))
        if isinstance(value, bool) or not isinstance(value, Real):
            return {"error": f"the task's score must be a number, got {type(value).__name__}: {value!r:.200}"}
        return {"value": float(value)}
    except Exception as error:  # a task is foreign code: whatever it raises is a failed score, with its words
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}


def receive(connection: socket.socket) -> dict[str, JsonValue]:
    """One frame.

    Raises:
        EOFError: the parent closed its end.
    """
    (num_bytes,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size))
    return cast(dict[str, JsonValue], json.loads(receive_exactly(connection, num_bytes)))


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """
    Raises:
        EOFError: the parent closed its end.
    """
    received = bytearray()
    while len(received) < num_bytes:
        part = connection.recv(min(num_bytes - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


if __name__ == "__main__":
    sys.exit(main())
