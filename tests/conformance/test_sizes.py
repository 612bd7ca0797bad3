"""Modules and functions stay small; tests, benchmarks and scripts are divided by subject, too."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE_LINES = 500
FUNCTION_LINES = 60
FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples")


def _modules(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_no_module_is_longer_than_the_limit():
    n_lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in _modules(*FOLDERS)
    }
    over = {name: n for name, n in n_lines.items() if n > MODULE_LINES}
    assert not over, f"split these by subject: {over}"


def test_no_function_is_longer_than_the_limit():
    over = []
    for path in _modules("src"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                is_documented = isinstance(first, ast.Expr) and isinstance(
                    first.value, ast.Constant
                )
                doc = first.end_lineno - first.lineno + 1 if is_documented else 0
                n_lines = node.end_lineno - node.lineno + 1 - doc
                if n_lines > FUNCTION_LINES:
                    over.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {n_lines}")
    assert not over, over
