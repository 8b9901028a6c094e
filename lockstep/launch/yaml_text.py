"""Plain data as YAML, for people to read. What is no simple word is quoted."""

import re
from collections.abc import Iterator, Mapping, Sequence

YamlValue = Mapping[str, "YamlValue"] | Sequence["YamlValue"] | str | int | bool

_WORD = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# Words that YAML, of whatever version, reads as something else (yaml.org/type).
_NO_STRINGS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def format_yaml(value: YamlValue) -> str:
    """One document."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: YamlValue) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _entry(f"{_scalar(key)}:", item, indent="  ")
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for item in value:
            # The first line of a nested block stands right behind the dash.
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _entry(key: str, item: YamlValue, *, indent: str) -> Iterator[str]:
    is_block = isinstance(item, Mapping | Sequence) and not isinstance(item, str) and len(item) > 0
    if is_block:
        yield key
        yield from (f"{indent}{line}" for line in _lines(item))
    else:
        yield f"{key} {_scalar(item)}"


def _scalar(value: YamlValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        is_word = _WORD.fullmatch(value) and value.lower() not in _NO_STRINGS
        return value if is_word else _quoted(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _quoted(text: str) -> str:
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08X}"
