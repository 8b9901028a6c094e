"""What is written as YAML is read as the same data by a reader that is not ours."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.launchers.kubernetes import as_yaml

WORDS = ["y", "No", "null", "~", "true", "1", "1e3", "0x1", "1:20", "=", "- a", "a: b", "a #b", ""]
TEXTS = st.text(max_size=12) | st.sampled_from([*WORDS, "\x7f\x85\u2028\ufeff\U0001f600"])
DATA: st.SearchStrategy[object] = st.recursive(
    TEXTS | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
def test_what_is_written_is_read(value: object) -> None:
    assert yaml.safe_load(as_yaml(value)) == value
