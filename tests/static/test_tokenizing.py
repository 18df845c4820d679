"""Invariant 1 over the sources: text becomes ids in one place, where prompts are made."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITES_IDS = {"asyppo_async/tasks/prompting.py"}


@pytest.mark.report("P30")
def test_text_when_it_becomes_ids_then_only_as_a_prompt() -> None:
    found = set()
    for top in ("asyppo_async", "trainer", "fleet"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and is_tokenizing(node):
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == WRITES_IDS


def is_tokenizing(call: ast.Call) -> bool:
    """`tokenizer(...)`, or a method of one that returns ids."""
    name = getattr(call.func, "id", None) or getattr(call.func, "attr", "")
    owner = getattr(getattr(call.func, "value", None), "id", "") or getattr(
        getattr(call.func, "value", None), "attr", ""
    )
    called = name in ("tokenizer", "_tokenizer")
    return called or (
        "tokenizer" in owner and name in ("encode", "encode_plus", "batch_encode_plus", "tokenize")
    )
