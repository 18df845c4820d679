"""The shape of the tree: layers, homes of the heavy packages, sizes, habits (docs: README, `The tree`)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for top in ("asyppo_async", "fleet", "trainer")
    for path in (ROOT / top).rglob("*.py")
    if "_pb2" not in path.name
)

# Lowest first; a module imports from its own layer or below. `fleet` and `trainer` never meet.
LAYERS = [
    {"errors", "types", "concurrency"},
    {"config", "metrics", "logs"},
    {"algorithms", "tasks"},
    {"rpc", "weights", "fingerprint"},
    {"fleet", "trainer"},
]
HOMES = {
    "vllm": ("fleet/engine/",),
    "deepspeed": ("trainer/worker/backend/",),
    "zmq": ("trainer/worker/",),
    "peft": ("trainer/worker/lora_layers.py",),
    "grpc": ("asyppo_async/rpc/", "fleet/", "trainer/coordinator/membership.py"),
    "grpc_health": ("asyppo_async/rpc/", "fleet/"),
    "prometheus_client": ("fleet/",),
    "ray": (),
    "flash_attn": (),
}
TORCH_FREE = (
    "asyppo_async/types.py",
    "asyppo_async/concurrency.py",
    "asyppo_async/errors.py",
    "asyppo_async/logs.py",
    "asyppo_async/metrics.py",
    "asyppo_async/config/",
    "asyppo_async/rpc/",
    "asyppo_async/fingerprint.py",
)
LAZY_IMPORTS = (
    "trainer/cli.py",
    "trainer/critic_cli.py",
    "fleet/cli.py",
    "fleet/serve.py",
    "trainer/worker/backend/",
)
MAX_LINES = 300
MAX_FUNCTION_LINES = 60


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import, line {node.lineno}"
            yield node, node.module or ""


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] != "asyppo_async":
        return relative.parts[0]
    return relative.parts[1].removesuffix(".py")


def layer_of(part: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_keep_to_the_layers(path: Path) -> None:
    tree = ast.parse(path.read_text())
    part = part_of(path)
    for _, module in imports(tree):
        assert module.split(".")[0] not in ("fleet", "trainer", "proto"), (
            f"{module}: import asyppo_async.{module}"
        )
        if not module.startswith("asyppo_async."):
            continue
        target = module.split(".")[1]
        own, other = layer_of(part), layer_of(target)
        assert other is not None, f"{module} has no layer"
        assert own is None or target == part or other <= own, f"{part} imports {module} from a higher layer"
        assert {part, target} != {"fleet", "trainer"}, f"{part} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_heavy_packages_stay_in_their_homes(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for _, module in imports(tree):
        top = module.split(".")[0]
        if top in HOMES:
            assert name_of(path).startswith(HOMES[top]) if HOMES[top] else False, f"{top} has no place here"
        if top in ("torch", "transformers"):
            assert not name_of(path).startswith(TORCH_FREE), f"{name_of(path)} must stay free of {top}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, f"{text.count(chr(10))} lines"
    assert text.isascii()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_habits_are_kept(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"global, line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except, line {node.lineno}"
            assert getattr(node.type, "id", "") != "BaseException" or any(
                isinstance(inner, ast.Raise) for inner in ast.walk(node)
            ), f"BaseException swallowed, line {node.lineno}"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("create_task", "ensure_future"):
            owner = getattr(getattr(node.func, "value", None), "id", "")
            assert owner not in ("asyncio", "loop"), f"task outside a TaskGroup, line {node.lineno}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not name_of(path).startswith(
            LAZY_IMPORTS
        ):
            lazy = [module for _, module in imports(node) if module.startswith("asyppo_async")]
            assert not lazy, f"{node.name} imports {lazy} when called"


def test_modules_have_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        relative = path.relative_to(ROOT).with_suffix("")
        parts = relative.parts if relative.parts[0] == "asyppo_async" else ("asyppo_async", *relative.parts)
        module = ".".join(parts).removesuffix(".__init__")
        graph[module] = {
            target for _, target in imports(ast.parse(path.read_text())) if target.startswith("asyppo_async.")
        }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in graph.get(module, ()):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())
