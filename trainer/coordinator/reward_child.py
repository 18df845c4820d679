"""The process in which a task scores responses: `python -m ...reward_child SOCKET_FD PARENT_PID MEMORY_BYTES`.

It reads frames from a socket pair: first the specs of the tasks, then one response at a time, and answers each with one
frame. A frame is a length of 4 bytes, big-endian, and that many bytes of JSON. Nothing here or in `tasks` imports
torch, so that a child starts in a fraction of a second and costs little memory.
"""

import ctypes
import dataclasses
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import TypedDict, cast

from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import JsonValue, Task, TaskSpec
from asyppo_async.tasks.registry import create_task
from asyppo_async.types import Prompt

LENGTH = struct.Struct(">I")
MAX_ERROR_CHARACTERS = 2000
_PR_SET_PDEATHSIG = 1


class _SpecFields(TypedDict):
    name: str
    seed: int
    system_prompt: str
    params: dict[str, JsonValue]
    label: str
    prompt_template: str
    chat_template: str


def frame(document: JsonValue) -> bytes:
    """A document as it is sent, either way."""
    body = json.dumps(document).encode()
    return LENGTH.pack(len(body)) + body


def specs_document(specs: Sequence[TaskSpec]) -> JsonValue:
    """What `serve` builds the tasks from."""
    return {
        "tasks": [
            cast(JsonValue, {**dataclasses.asdict(spec), "params": dict(spec.params)}) for spec in specs
        ]
    }


def score_document(prompt: Prompt, text: str) -> JsonValue:
    """What the child is asked for one response."""
    document = dataclasses.asdict(prompt)
    document["token_ids"] = list(prompt.token_ids)
    return {"prompt": document, "text": text}


def main() -> int:
    die_with_parent(int(sys.argv[2]))
    bound_memory(int(sys.argv[3]))
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


def bound_memory(num_bytes: int) -> None:
    """Have allocations beyond so many bytes fail here, instead of filling the machine; 0: no bound.

    Where the machine is full all the same, the kernel takes this process before the run's others.
    """
    if num_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def serve(connection: socket.socket) -> None:
    """Answer frames until the parent closes its end.

    Raises:
        EOFError: the parent closed its end.
    """
    specs = [TaskSpec(**fields) for fields in cast(list[_SpecFields], receive(connection)["tasks"])]
    try:
        tasks = {spec.known_as: create_task(spec, scoring=True) for spec in specs}
    except TaskError as error:
        connection.sendall(frame({"error": str(error)}))
        return
    connection.sendall(frame({"ready": True}))
    while True:
        connection.sendall(frame(answer(tasks, receive(connection))))


def answer(tasks: Mapping[str, Task], request: dict[str, JsonValue]) -> JsonValue:
    """The score as a number, or why there is none. The prompt says which of several tasks scores it.

    `spent`: what filled the memory may still be held, so the next response needs another process.
    """
    fields = cast(dict[str, JsonValue], request["prompt"])
    prompt = Prompt(
        id=str(fields["id"]),
        task=str(fields["task"]),
        text=str(fields["text"]),
        token_ids=tuple(cast(list[int], fields["token_ids"])),
        answer=str(fields["answer"]),
    )
    task = next(iter(tasks.values())) if len(tasks) == 1 else tasks[prompt.task]
    try:
        value: object = task.score(prompt, str(request["text"]))
        if isinstance(value, bool) or not isinstance(value, Real):
            return {"error": f"the task's score must be a number, got {type(value).__name__}: {value!r:.200}"}
        return {"value": float(value)}
    except MemoryError:
        return {"error": "MemoryError: the task needs more than task.reward_memory_gib allows", "spent": True}
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
