"""Hypothesis strategies: values of JSON that files do not expect, and documents changed by them."""

import copy

from hypothesis import strategies as st

TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
NUMBERS = st.sampled_from(
    [
        0,
        1,
        -1,
        2**31 - 1,
        2**31,
        2**32,
        2**40,
        2**53 + 1,
        2**63,
        2**64,
        10**400,
        1e308,
        5e-324,
        -0.0,
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | NUMBERS
    | st.sampled_from(["llama3", "linear", "longrope", "factor", "rope_type", "\ud800", "a\nb"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed(draw, content, changes=3):
    """A document in which a few values, at any depth, are replaced, removed, renamed or doubled."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, changes))):
        content = _change(draw, content)
    return content


def _change(draw, node):
    if not isinstance(node, dict | list) or not node or draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    what = draw(st.sampled_from(["inside"] * 6 + ["remove", "double"]))
    if what == "inside":
        node[key] = _change(draw, node[key])
    elif isinstance(node, list):
        part = [] if what == "remove" else [node[key]] * 2
        node[key : key + 1] = part
    elif what == "remove":
        del node[key]
    else:
        node[draw(TEXTS)] = copy.deepcopy(node[key])
    return node
