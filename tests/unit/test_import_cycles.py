"""What files import: never themselves by way of others, and Keras where their name says so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The files of ours that a file imports; ``from a import b`` may import ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for one in node.names:
                inner = f"{node.module}.{one.name}"
                yield inner if inner in known else str(node.module)


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """A way from a file to itself; empty if there is none."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := search(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := search(name, []))), [])


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_file_imports_itself() -> None:
    known = modules()
    graph = {name: {*imports_of(path, known)} - {name} for name, path in known.items()}
    assert cycle_in(graph) == []


def test_only_tests_of_keras_import_it() -> None:
    """Scripts of hosts import what they share with tests, and Keras takes seconds."""
    files = (Path(__file__).parents[1] / "parity").glob("*.py")
    others = {path: path.read_text() for path in files if "keras" not in path.name}
    assert others
    assert [
        path.name
        for path, text in others.items()
        for node in ast.parse(text).body
        if isinstance(node, ast.Import) and "keras" in [one.name for one in node.names]
    ] == []
