"""Blocks of steps, read from the source: nothing leaves one before its end, and none is in another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fastload"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

STEPS = {"step", "gathering_step"}  # methods of a world
BLOCKS = {"Step", "GatheringStep", "Meeting", "step_of_all"}
COMPOSITE = {  # module and function of context managers with a step around a `yield`
    ("integrations/frameworks.py", "step_of_all"),
}

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_LOOPS = ast.For | ast.AsyncFor | ast.While
_YIELDS = ast.Yield | ast.YieldFrom


def _is_step(node: ast.AST) -> bool:
    if not isinstance(node, ast.With):
        return False
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(
        (isinstance(call.func, ast.Attribute) and call.func.attr in STEPS)
        or (isinstance(call.func, ast.Name) and call.func.id in BLOCKS)
        for call in calls
    )


def _within(nodes: list[ast.stmt], *, in_loop: bool = False) -> Iterator[ast.AST]:
    """Yields what is in a block, but not in functions, and no jump that stays in a loop of the block."""
    todo: list[tuple[ast.AST, bool]] = [(node, in_loop) for node in nodes]
    while todo:
        node, is_looping = todo.pop()
        if isinstance(node, _FUNCTIONS):
            continue
        if not (is_looping and isinstance(node, ast.Break | ast.Continue)):
            yield node
        is_looping = is_looping or isinstance(node, _LOOPS)
        todo += [(child, is_looping) for child in ast.iter_child_nodes(node)]


def _breaches(module: str, source: str) -> Iterator[str]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for block in (node for node in _within(function.body) if isinstance(node, ast.With)):
            if not _is_step(block):
                continue
            for node in _within(block.body):
                where = f"{module}:{getattr(node, 'lineno', block.lineno)} ({function.name})"
                if isinstance(node, ast.Return | ast.Break | ast.Continue):
                    yield f"{where}: leaves the block of a step"
                elif isinstance(node, _YIELDS) and (module, function.name) not in COMPOSITE:
                    yield f"{where}: yields in the block of a step"
                elif _is_step(node):
                    yield f"{where}: a step in the block of another one"


@pytest.mark.parametrize("module", MODULES)
def test_no_block_of_a_step_is_left_before_its_end(module: str) -> None:
    assert list(_breaches(module, (PACKAGE / module).read_text())) == []


@pytest.mark.parametrize(
    "body",
    [
        "return 1",
        "if a:\n   return",
        "yield",
        "a = yield from b",
        "with c:\n   return",
        "for a in b:\n   return",
        "with world.step('b'):\n   pass",
        "with c, world.gathering_step('b') as other:\n   pass",
        "with Step(world, 'b', ''):\n   pass",
        "with Meeting(None, 'b') as meeting:\n   pass",
        "with step_of_all('b'):\n   pass",
    ],
)
def test_a_breach_is_found(body: str) -> None:
    source = f"def f():\n with d, self.world.step('a') as step:\n  {body}"
    assert len(list(_breaches("api.py", source))) == 1


@pytest.mark.parametrize("jump", ["break", "continue"])
def test_a_jump_out_of_the_block_is_found(jump: str) -> None:
    source = f"def f():\n while True:\n  with world.step('a'):\n   if b:\n    {jump}"
    assert len(list(_breaches("api.py", source))) == 1


@pytest.mark.parametrize(
    "body",
    [
        "step.answer([a for a in b])",
        "for a in b:\n   if a:\n    break",
        "def g():\n   return 1",
        "c(lambda: (yield))",
        "with d:\n   raise e",
    ],
)
def test_what_is_allowed_passes(body: str) -> None:
    source = f"def f():\n with self.world.step('a') as step:\n  {body}\n return step.answers"
    assert list(_breaches("api.py", source)) == []
