"""Writes docs/api.md: every public name with its signature and docstring.

    python tools/api_reference.py            # write it
    python tools/api_reference.py --check    # exit status 1 if it is out of date

Public names are those in ``__all__`` of the packages. griffe reads signatures and docstrings from
the sources, not from loaded objects, so the page depends neither on the version of Python nor on
the installed extras.
"""

import argparse
import ast
import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"

# Packages of public names beside ``lockstep`` itself.
PACKAGES = ("data", "callbacks", "checkpoint", "plan")

HEAD = """\
# API reference

<!-- Written by `make api-docs` from the docstrings: change those. -->

Everything that is public. `import lockstep` is enough for the names of `lockstep` itself and of
`lockstep.data`; other modules are imported by name.
"""

WIDTH = 88  # longest signature on one line


def main() -> int:
    """Write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes docs/api.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="only check whether it is up to date")
    check = parser.parse_args().check
    page = Reference(load_package()).page()
    if not check:
        PAGE.write_text(page)
        return 0
    there = PAGE.read_text() if PAGE.exists() else ""
    diff = difflib.unified_diff(
        there.splitlines(), page.splitlines(), "docs/api.md", "the docstrings", lineterm=""
    )
    print("\n".join(diff))
    return int(there != page)


def load_package(root: Path = ROOT) -> griffe.Module:
    """Lockstep's sources."""
    package = griffe.load(
        "lockstep", search_paths=[root], docstring_parser="google", try_relative_path=False
    )
    assert isinstance(package, griffe.Module)
    return package


class Reference:
    """Renders the page.

    Args:
        package: Lockstep's sources.
    """

    def __init__(self, package: griffe.Module) -> None:
        self._package = package
        names = {name: self._home(home) for name, home in _homes(package).items()}
        self._sections: dict[str, dict[str, Any]] = {"lockstep": names}
        for name in PACKAGES:
            if name in package.members:
                module = package[name]
                members = {each: _target(module[each]) for each in module.exports or ()}
                self._sections[f"lockstep.{name}"] = members
        self._anchors = {
            member.path: anchor(f"{section}.{name}")
            for section, members in self._sections.items()
            for name, member in members.items()
            if not member.is_module
        }

    def page(self) -> str:
        """The page as Markdown."""
        parts = [HEAD, *self._contents()]
        for section, members in self._sections.items():
            parts.append(f"\n## {_heading(section)}\n")
            for name, member in sorted(members.items(), key=lambda item: item[0].lower()):
                if not member.is_module:  # modules have sections of their own
                    parts.append("\n".join(self._entry(f"{section}.{name}", member)))
        parts.append(f"\n## {_heading('lockstep.errors')}\n")
        parts.append(prose(self._package["errors"].docstring.value))
        text = "\n".join(parts)
        return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"

    def _home(self, home: tuple[str, str]) -> Any:
        module, attribute = home
        path = ".".join([*module.split(".")[1:], *([attribute] if attribute else [])])
        return _target(self._package[path])

    def _contents(self) -> Iterator[str]:
        for section, members in self._sections.items():
            links = [
                f"[{name}](#{anchor(f'{section}.{name}')})"
                for name, member in sorted(members.items(), key=lambda item: item[0].lower())
                if not member.is_module
            ]
            yield f"- [{section}](#{anchor(_heading(section))}): {', '.join(links)}"
        yield f"- [lockstep.errors](#{anchor(_heading('lockstep.errors'))})"

    def _entry(self, title: str, member: Any) -> Iterator[str]:
        yield f"### {title}\n"
        if member.is_function:
            yield from self._function(member, title)
        elif member.is_class:
            yield from self._class(member, title)
        else:
            yield from documentation(member)

    def _function(self, function: griffe.Function, name: str) -> Iterator[str]:
        if any("contextmanager" in str(each.value) for each in function.decorators):
            call = signature(name, function.parameters, None, self._package)
            yield code(f"with {call}: ...")
        else:
            yield code(signature(name, function.parameters, function.returns, self._package))
        yield from documentation(function)

    def _class(self, kind: griffe.Class, title: str) -> Iterator[str]:
        bases = [each for each in kind.mro() if each.path in self._anchors]
        if "__init__" in kind.members or kind.parameters:
            yield code(signature(title, kind.parameters, None, self._package))
        if bases:
            links = (f"[{base.name}](#{self._anchors[base.path]})" for base in bases)
            yield f"A {', a '.join(links)}.\n"
        yield from documentation(kind)
        for member in self._documented(kind):
            yield f"#### {kind.name}.{member.name}\n"
            if member.is_function:
                yield from self._function(member, _called(kind, member))
            else:
                yield f"Property: `{member.annotation}`\n"
                yield from documentation(member)
        yield from self._inherited(kind, bases)

    def _documented(self, kind: griffe.Class) -> list[Any]:
        """A class's members, and those of its private bases, which have no section of their own."""
        hidden = [base for base in kind.mro() if base.path not in self._anchors]
        owners = [*reversed(hidden), kind]
        return list({member.name: member for own in owners for member in _members(own)}.values())

    def _inherited(self, kind: griffe.Class, bases: Sequence[griffe.Class]) -> Iterator[str]:
        own = {member.name for member in _members(kind)}
        links = [
            f"[{member.name}](#{anchor(f'{base.name}.{member.name}')})"
            for base in bases
            for member in _members(base)
            if member.name not in own
        ]
        if links:
            yield f"From {bases[0].name}: {', '.join(links)}.\n"


def _heading(section: str) -> str:
    """A heading with a prefix, since ``lockstep.Plan`` is a class, ``lockstep.plan`` a package."""
    return f"Package {section}"


def _homes(package: griffe.Module) -> dict[str, tuple[str, str]]:
    """Where the public names of ``lockstep`` are defined, by its table for lazy imports."""
    homes: dict[str, tuple[str, str]] = ast.literal_eval(str(package["_HOMES"].value))
    return homes


def _target(member: Any) -> Any:
    return member.final_target if member.is_alias else member


def _members(kind: griffe.Class) -> list[Any]:
    """Public methods and properties with a docstring."""
    return [
        member
        for member in kind.members.values()
        if not member.name.startswith("_")
        and member.docstring is not None
        and (member.is_function or "property" in member.labels)
    ]


def _called(kind: griffe.Class, method: griffe.Function) -> str:
    """The call in a user's code: class methods on the class, others on an instance."""
    is_bound_to_class = {"classmethod", "staticmethod"} & method.labels
    return f"{kind.name if is_bound_to_class else kind.name.lower()}.{method.name}"


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- signatures ----------------------------------------------------------------------------------


def signature(
    name: str, parameters: griffe.Parameters, returns: object, package: griffe.Module
) -> str:
    """A call as in the sources, without ``self``, with the values of defaults."""
    given = list(_shown(parameters, package))
    result = "" if returns is None else f" -> {returns}"
    line = f"{name}({', '.join(given)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in given), f"){result}"])


def _shown(parameters: Iterable[griffe.Parameter], package: griffe.Module) -> Iterator[str]:
    has_star = False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind
        is_rest = kind is griffe.ParameterKind.var_positional
        prefix = "*" if is_rest else "**" if kind is griffe.ParameterKind.var_keyword else ""
        if kind is griffe.ParameterKind.keyword_only and not has_star:
            yield "*"
        has_star = has_star or is_rest or kind is griffe.ParameterKind.keyword_only
        text = f"{prefix}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {str(parameter.annotation).strip(chr(34)).strip(chr(39))}"
        if parameter.default is not None and not prefix:
            text += f" = {_value(parameter.default, package)}"
        yield text


def _value(default: Any, package: griffe.Module) -> str:
    """The value of a default, also if it is a named constant."""
    if isinstance(default, griffe.ExprName) and isinstance(default.canonical_path, str):
        path = default.canonical_path.removeprefix("lockstep.")
        try:
            return str(_target(package[path]).value)
        except (KeyError, AttributeError):
            return str(default)
    return str(default)


# --- docstrings ----------------------------------------------------------------------------------


def documentation(member: Any) -> Iterator[str]:
    """A docstring, section by section."""
    if member.docstring is None:
        return
    for section in member.docstring.parsed:
        match section.kind:
            case griffe.DocstringSectionKind.text:
                yield prose(section.value) + "\n"
            case griffe.DocstringSectionKind.parameters:
                yield from _items("Arguments", ((each.name, each) for each in section.value))
            case griffe.DocstringSectionKind.attributes:
                yield from _items("Attributes", ((each.name, each) for each in section.value))
            case griffe.DocstringSectionKind.raises:
                kinds = (str(each.annotation).strip("()") for each in section.value)
                yield from _items("Raises", zip(kinds, section.value, strict=True))
            case griffe.DocstringSectionKind.returns | griffe.DocstringSectionKind.yields:
                text = " ".join(prose(each.description) for each in section.value)
                yield f"**{section.kind.value.capitalize()}:** {text}\n"
            case other:
                raise ValueError(f"{member.path}: a section of kind {other.value!r} is not known.")


def _items(title: str, items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    yield f"**{title}**\n"
    for label, item in items:
        text = prose(item.description).replace("\n", "\n  ")
        yield f"- `{label}`: {text}"
    yield ""


def prose(text: str) -> str:
    """A docstring's text as Markdown: its code in single backticks, its blocks fenced."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    return re.sub(r"^::\n\n((?:    .*\n|\n)+)", _fenced, text, flags=re.MULTILINE).strip()


def _fenced(match: re.Match[str]) -> str:
    return f"```text\n{textwrap.dedent(match[1]).rstrip()}\n```\n\n"


def code(text: str) -> str:
    """A signature, for GitHub to colour; no ``python`` block, as those are run by the tests."""
    text = re.sub(r"'([^'\"]*)'", r'"\1"', text)  # quoted as in the sources
    return f"```py\n{text}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
