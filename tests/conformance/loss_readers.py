"""Who reads a counter of loss: the source of the package, and what a value of it can be, from `ast` alone.

A bag is every class that a value can be of. It comes from annotations, constructors and what functions return;
containers are what they hold and a branch is both of its arms, so a bag may be too wide and is never wider than the
names allow.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

Bag: TypeAlias = frozenset[str]
Scope: TypeAlias = "dict[str, Bag]"
NOTHING: Final[Bag] = frozenset()
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_BINDING: Final = (
    ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem,
)  # fmt: skip
"""Of what `iter_bound` knows what it binds."""
_ROUNDS: Final = 4
"""An attribute of an attribute of an attribute is known after so many."""


@dataclass(slots=True)
class Class:
    """One class; ``holds`` is what its attributes and the answers of its methods can be."""

    key: str
    module: str
    node: ast.ClassDef
    holds: dict[str, Bag] = field(default_factory=dict)

    @property
    def is_protocol(self) -> bool:
        """Whether it says only what others have."""
        return any("Protocol" in ast.unparse(base) for base in self.node.bases)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expression stands: its module, the names it sees, the class and the function around it."""

    module: str
    scope: Scope
    owner: str = ""
    function: ast.AST | None = None
    name: str = ""


@dataclass(slots=True)
class Source:
    """Modules by their dotted names, parsed; ``places`` is every node of theirs with where it stands."""

    trees: dict[str, ast.Module]
    classes: dict[str, Class] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    places: list[tuple[Place, ast.AST]] = field(default_factory=list)
    _entered: list[tuple[Place, Place]] = field(default_factory=list)
    _names: dict[tuple[str, str], Bag | None] = field(default_factory=dict)
    _imports: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    _values: dict[tuple[str, str], ast.expr] = field(default_factory=dict)
    _functions: dict[tuple[str, str], ast.expr | None] = field(default_factory=dict)
    _wholes: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module, tree in self.trees.items():
            nodes: list[ast.AST] = [tree]
            for node in nodes:
                children = list(ast.iter_child_nodes(node))
                self.parents.update(dict.fromkeys(children, node))
                self._note(module, node)
                nodes += children
        for module, tree in self.trees.items():
            self._walk(tree, Place(module, {}))
        bound: dict[ast.AST | None, list[ast.AST]] = defaultdict(list)
        taught = []
        for place, node in self.places:
            if isinstance(node, _BINDING):
                bound[place.function].append(node)
            if isinstance(node, (*FUNCTIONS, *_BINDING)) and place.owner in self.classes:
                taught.append((place, node))
        for _ in range(_ROUNDS):
            for inner, outer in self._entered:
                self._bind(inner, outer, bound[inner.function])
            for place, node in taught:
                self._learn(place, node)

    def _note(self, module: str, node: ast.AST) -> None:
        """What a name of the module stands for."""
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                self._imports[module, one.asname or one.name] = (node.module, one.name)
        elif isinstance(node, ast.ClassDef):
            key = f"{module}.{node.name}"
            self.classes[key] = Class(key, module, node)
        elif isinstance(node, FUNCTIONS) and isinstance(self.parents.get(node), ast.Module):
            self._functions[module, node.name] = node.returns
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            self.parents.get(node), ast.Module
        ):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and node.value is not None:
                    self._values[module, target.id] = node.value

    # ── What a value can be ─────────────────────────────────────────────────

    def of_name(self, module: str, name: str, depth: int = 6) -> Bag | None:
        """What a name of a module is; None when nobody of ours says."""
        if (module, name) not in self._names:
            self._names[module, name] = self._find_name(module, name, depth)
        return self._names[module, name]

    def _find_name(self, module: str, name: str, depth: int) -> Bag | None:
        if f"{module}.{name}" in self.classes:
            return frozenset((f"{module}.{name}",))
        if not depth:
            return None
        if (module, name) in self._imports:
            return self.of_name(*self._imports[module, name], depth - 1)
        if (module, name) in self._functions:
            return self.of_annotation(module, self._functions[module, name], depth - 1)
        if (module, name) in self._values:
            return self.of_annotation(module, self._values[module, name], depth - 1)
        return None

    def of_annotation(self, module: str, node: ast.AST | None, depth: int = 6) -> Bag:
        """Every class that it names."""
        found: set[str] = set()
        for one in ast.walk(node) if node is not None else ():
            if isinstance(one, ast.Name):
                found |= self.of_name(module, one.id, depth) or NOTHING
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                found |= self.of_name(module, one.value, depth) or NOTHING
        return frozenset(found)

    def find(self, key: str, name: str) -> str | None:
        """The class, of this one and what it is made from, that declares an attribute."""
        one = self.classes[key]
        if name in one.holds:
            return key
        for base in one.node.bases:
            for parent in self.of_annotation(one.module, base):
                found = self.find(parent, name) if parent != key else None
                if found is not None:
                    return found
        return None

    def owners(self, bag: Bag, name: str) -> Bag:
        """Who declares an attribute of such a value; for a protocol everybody who has all of it."""
        wide = {one for key in bag for one in (key, *self._who_has_all(key))}
        return frozenset(found for key in wide if (found := self.find(key, name)) is not None)

    def _who_has_all(self, key: str) -> list[str]:
        if key not in self._wholes:
            wanted, is_protocol = set(self.classes[key].holds), self.classes[key].is_protocol
            others = self.classes.values() if is_protocol and wanted else ()
            found = [one.key for one in others if wanted <= set(one.holds) and not one.is_protocol]
            if not wanted:
                return []
            self._wholes[key] = found
        return self._wholes[key]

    def of(self, node: ast.AST | None, place: Place) -> Bag:
        """What an expression can be."""
        if isinstance(node, ast.Name):
            if node.id in place.scope:
                return place.scope[node.id]
            return self.of_name(place.module, node.id) or NOTHING
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node, place)
        if isinstance(node, ast.Call):
            return self._of_call(node, place)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.Compare) or node is None:
            return NOTHING
        parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        if isinstance(node, ast.Subscript):
            parts = [node.value]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.DictComp):
            parts = [node.key, node.value]
        return NOTHING.union(*(self.of(one, place) for one in parts))

    def _of_attribute(self, node: ast.Attribute, place: Place) -> Bag:
        bag = self.of(node.value, place)
        held = [self.classes[key].holds[node.attr] for key in self.owners(bag, node.attr)]
        return NOTHING.union(*held) if held else bag

    def _of_call(self, node: ast.Call, place: Place) -> Bag:
        bag = self.of(node.func, place)
        is_known = (
            not isinstance(node.func, ast.Name)
            or node.func.id in place.scope
            or self.of_name(place.module, node.func.id) is not None
        )
        given = (*node.args, *(one.value for one in node.keywords))
        return bag if bag or is_known else NOTHING.union(*(self.of(one, place) for one in given))

    # ── Where what is ───────────────────────────────────────────────────────

    def _walk(self, node: ast.AST, place: Place) -> None:
        for child in ast.iter_child_nodes(node):
            self.places.append((place, child))
            self._walk(child, self._enter(child, place))

    def _enter(self, node: ast.AST, place: Place) -> Place:
        if isinstance(node, ast.ClassDef):
            return Place(place.module, place.scope, f"{place.module}.{node.name}")
        if not isinstance(node, FUNCTIONS):
            return place
        inner = Place(place.module, {}, place.owner, node, node.name)
        self._entered.append((inner, place))
        return inner

    def _bind(self, inner: Place, outer: Place, statements: Iterable[ast.AST]) -> None:
        """What the names of a function with these statements can be, as far as attributes are known by now."""
        node = inner.function
        assert isinstance(node, FUNCTIONS)
        inner.scope.update(outer.scope)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for one in arguments:
            inner.scope[one.arg] = self.of_annotation(inner.module, one.annotation)
        is_method = isinstance(self.parents.get(node), ast.ClassDef)
        is_static = any(is_name(one, "staticmethod") for one in node.decorator_list)
        if is_method and arguments and not is_static:
            inner.scope[arguments[0].arg] = frozenset((inner.owner,))
        for statement in statements:
            for target, bag in self._bindings(statement, inner):
                inner.scope[target] = inner.scope.get(target, NOTHING) | bag

    def _bindings(self, node: ast.AST, place: Place) -> Iterator[tuple[str, Bag]]:
        """Names that a statement binds."""
        for target, value, annotation in iter_bound(node):
            bag = self.of(value, place) | self.of_annotation(place.module, annotation)
            for one in ast.walk(target):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    yield one.id, bag

    def _learn(self, place: Place, node: ast.AST) -> None:
        """What attributes of the class around hold."""
        holds = self.classes[place.owner].holds
        is_body = isinstance(self.parents.get(node), ast.ClassDef)
        if isinstance(node, FUNCTIONS) and is_body:
            holds[node.name] = self.of_annotation(place.module, node.returns)
        for target, value, annotation in iter_bound(node):
            bag = self.of(value, place) | self.of_annotation(place.module, annotation)
            for one in ast.walk(target):
                if is_body and isinstance(one, ast.Name):
                    name = one.id
                elif isinstance(one, ast.Attribute) and is_name(one.value, "self"):
                    name = one.attr
                else:
                    continue
                holds[name] = holds.get(name, NOTHING) | bag


def is_name(node: ast.AST, name: str) -> bool:
    """Whether an expression is this name."""
    return isinstance(node, ast.Name) and node.id == name


def iter_own(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function and in no function or class inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield child
            yield from iter_own(child)


def iter_bound(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr | None, ast.expr | None]]:
    """Targets of a statement, what they are set to and what they are said to be."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value, None
    elif isinstance(node, ast.AnnAssign):
        yield node.target, node.value, node.annotation
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value, None
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter, None
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr, None


def read_package(folder: Path, name: str) -> Mapping[str, str]:
    """The text of every module of a package, by dotted name."""
    texts = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [name, *path.relative_to(folder).with_suffix("").parts]
        texts[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return texts
