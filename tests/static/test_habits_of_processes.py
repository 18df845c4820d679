"""What must not be in the sources: forks, pickles, loops beside the program's own, masks by pad id, newer stubs."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for top in ("asyppo_async", "fleet", "trainer")
    for path in (ROOT / top).rglob("*.py")
    if "_pb2" not in path.name
)
LOOP_MAKERS = (
    "asyncio.run",
    "asyncio.Runner",
    "asyncio.new_event_loop",
    "uvloop.run",
    "uvloop.new_event_loop",
)
ENTRY_POINTS = ("fleet/cli.py", "trainer/cli.py", "trainer/critic_cli.py")
"""A process has one event loop, made where the program begins."""


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.relative_to(ROOT).as_posix(), node


def called(node: ast.AST) -> str:
    """The dotted name of what a node calls, as written; empty for other nodes."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


@pytest.mark.report("P73")
def test_sources_when_searched_then_nobody_forks() -> None:
    """A fork under a running gRPC or CUDA dead-locks; children are spawned."""
    forks = [
        (name, node.lineno)
        for name, node in nodes()
        if isinstance(node, ast.Call)
        and (
            called(node) in ("os.fork", "pty.fork", "multiprocessing.Process", "multiprocessing.Pool")
            or ("get_context" in called(node) and ast.unparse(node).count("'spawn'") == 0)
            or any(keyword.arg == "preexec_fn" for keyword in node.keywords)
            or (called(node).endswith("ProcessPoolExecutor") and "mp_context" not in ast.unparse(node))
        )
    ]
    assert forks == []


@pytest.mark.report("P82")
def test_sources_when_searched_then_no_pickle_is_read_or_sent() -> None:
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    found = []
    for name, node in nodes():
        if isinstance(node, ast.Import):
            found += [(name, alias.name) for alias in node.names if alias.name.split(".")[0] in banned]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in banned:
            names = [alias.name for alias in node.names]
            # Its errors may be caught; what is read is bounded elsewhere.
            found += [(name, f"{node.module}.{each}") for each in names if not each.endswith("Error")]
        if called(node).endswith(("send_object", "broadcast_object_list", "all_gather_object", "recv_pyobj")):
            found.append((name, called(node)))
        if called(node) == "torch.load" and "weights_only=True" not in ast.unparse(node):
            found.append((name, ast.unparse(node)))
        if called(node) == "np.load" and "allow_pickle=True" in ast.unparse(node):
            found.append((name, ast.unparse(node)))
    assert found == []


@pytest.mark.report("P74")
def test_sources_when_searched_then_loops_are_made_at_the_programs_beginning_only() -> None:
    """Two event loops in one process would read each other's gRPC events."""
    loops = {name for name, node in nodes() if called(node) in LOOP_MAKERS}
    assert loops <= set(ENTRY_POINTS)


@pytest.mark.report("P33")
def test_sources_when_searched_then_nothing_is_compared_with_a_pad_id() -> None:
    """Where pad and end-of-text are one id, a mask by comparison erases the true end; masks come from lengths."""
    pads = re.compile(r"\bpad(ding)?_?(token)?_?id\b")
    compared = [
        (name, ast.unparse(node))
        for name, node in nodes()
        if (isinstance(node, ast.Compare) or called(node).endswith((".eq", ".ne", "np.isin", "torch.isin")))
        and pads.search(ast.unparse(node))
    ]
    assert compared == []


@pytest.mark.report("P77")
def test_stubs_when_made_then_by_tools_no_newer_than_the_oldest_runtime_that_is_allowed() -> None:
    stub = (ROOT / "asyppo_async/rpc/v1/fleet_pb2.py").read_text()
    made_with = tuple(map(int, re.search(r"Protobuf Python Version: (\d+)\.(\d+)", stub).groups()))
    services = (ROOT / "asyppo_async/rpc/v1/fleet_pb2_grpc.py").read_text()
    grpc_made_with = tuple(map(int, re.search(r"GRPC_GENERATED_VERSION = '(\d+)\.(\d+)", services).groups()))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = (re.match(r"([\w-]+)[^>]*>=([\d.]+)", each) for each in dependencies)
    lowest = {floor[1]: tuple(map(int, floor[2].split(".")[:2])) for floor in floors if floor}
    assert made_with <= lowest["protobuf"] and grpc_made_with <= lowest["grpcio"]
    for name in ("protobuf", "grpcio"):
        installed = tuple(map(int, metadata.version(name).split(".")[:2]))
        assert lowest[name] <= installed
