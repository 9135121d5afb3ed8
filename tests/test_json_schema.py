"""Patterns of JSON Schemas: each text that they match is valid, and usual texts are matched."""

import json
import random
import re
from decimal import Decimal

import jsonschema
import pytest
from bad_input import refused
from json_schemas import SCHEMAS

from specjax.grammars.json_schema import schema_pattern

BY_NAME = dict(SCHEMAS)
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def drawn(nodes, rng):
    """Return a random text of a parsed expression."""
    return "".join(_drawn(str(op), value, rng) for op, value in nodes)


def _drawn(op, value, rng):
    match op:
        case "LITERAL":
            return chr(value)
        case "IN":
            ranges = [inner if str(kind) == "RANGE" else (inner, inner) for kind, inner in value]
            low, high = rng.choice(ranges)
            return chr(rng.randint(low, min(high, 0x7E) if low < 0x7E and rng.random() < 0.8 else high))
        case "BRANCH":
            return drawn(rng.choice(value[1]), rng)
        case "SUBPATTERN":
            assert value[1:3] == (0, 0)
            return drawn(value[3], rng)
        case "MAX_REPEAT":
            least, most, inner = value
            count = min(most, rng.choice([least, least, least + 1, least + 2, least + 15]))
            return "".join(drawn(inner, rng) for _ in range(count))
    raise AssertionError(op)


def validator(schema):
    """Return a function that returns whether a text is JSON that is valid under the schema."""
    exact = '"multipleOf"' in json.dumps(schema)
    # Multiples of decimals are exact only in decimals.
    options = {"parse_float": Decimal} if exact else {}
    if exact:
        schema = json.loads(json.dumps(schema), **options)
    check = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return lambda text: check.is_valid(json.loads(text, **options))


def draws(pattern, count, seed=0):
    rng = random.Random(seed)
    tree = re._parser.parse(pattern)
    return [drawn(tree, rng) for _ in range(count)]


def test_there_are_enough_schemas():
    assert len(BY_NAME) == len(SCHEMAS) >= 200


@pytest.mark.parametrize(("name", "schema"), SCHEMAS, ids=BY_NAME)
def test_texts_are_valid(name, schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    pattern = schema_pattern(schema)
    compiled = re.compile(pattern)
    valid = validator(schema)
    for text in draws(pattern, 40):
        assert compiled.fullmatch(text)
        assert valid(text), text
