"""What is written as YAML is read as the same data by a reader that is not ours."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.yaml_text import YamlValue, format_yaml

WORDS = ["y", "No", "null", "~", "true", "1", "1e3", "0x1", "1:20", "=", "- a", "a: b", "a #b", ""]
TEXTS = st.text(max_size=12) | st.sampled_from(WORDS)
DATA: st.SearchStrategy[YamlValue] = st.recursive(
    TEXTS | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
def test_what_is_written_is_read(value: YamlValue) -> None:
    assert yaml.safe_load(format_yaml(value)) == value


@pytest.mark.parametrize("value", [{}, [], {"a": {}, "b": []}, [[[1], []], {"a": [{"b": "c"}]}]])
def test_empty_and_nested_blocks(value: YamlValue) -> None:
    assert yaml.safe_load(format_yaml(value)) == value


def test_it_reads_well() -> None:
    value: YamlValue = {"spec": {"names": ["a", "b c"], "is": True, "of": [{"x": 1, "y": "2"}]}}
    assert format_yaml(value) == (
        'spec:\n  names:\n    - a\n    - "b c"\n  is: true\n  of:\n    - x: 1\n      "y": "2"\n'
    )
