"""What the sources say of their classes, read and never imported."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Found:
    """One class: where it stands, whether at the top of its module, and how much it holds."""

    name: str
    path: str
    is_public: bool
    n_attributes: int
    n_methods: int


def find_classes(sources: dict[str, str]) -> Iterator[Found]:
    """Every class of these sources, by path."""
    for path, source in sources.items():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                is_public = node in tree.body and not node.name.startswith("_")
                methods = [
                    one
                    for one in node.body
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                yield Found(node.name, path, is_public, len(_attributes(node)), len(methods))


def _attributes(node: ast.ClassDef) -> set[str]:
    """Names that its methods set on ``self``."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def find_shared_names(found: list[Found]) -> dict[str, list[str]]:
    """Names of more than one public class, with the modules."""
    paths = defaultdict(list)
    for one in found:
        if one.is_public:
            paths[one.name].append(one.path)
    return {name: where for name, where in sorted(paths.items()) if len(where) > 1}


def read_sources(root: Path) -> dict[str, str]:
    """The package's modules by their path in it."""
    package = root / "src/ingero"
    return {
        path.relative_to(package).as_posix(): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }
