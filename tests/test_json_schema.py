"""Patterns of JSON Schemas: each text that they match is valid, and usual texts are matched."""

import itertools
import json
import random
import re
from decimal import Decimal

import jsonschema
import pytest
from bad_input import refused
from json_schemas import (
    INTEGER,
    NULL,
    NUMBER,
    SCHEMAS,
    STRING,
    any_of,
    array,
    closed,
    number,
    one_of,
    open_object,
    ref,
    whole,
)
from json_schemas import text as string

from specjax.grammars import json_numbers
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
        case "ANY":
            return rng.choice("ab.")
        case "IN":
            ranges = [inner if str(kind) == "RANGE" else (inner, inner) for kind, inner in value]
            low, high = rng.choice(ranges)
            return chr(
                rng.randint(low, min(high, 0x7E) if low < 0x7E and rng.random() < 0.8 else high)
            )
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


# Texts as people and models write them, which patterns must match.
TEXTS = {
    "anything": ["1", "null", '{"a": [1, "b"]}', "[[], {}]", "-0.5e-3", '"\\n"'],
    "string": ['""', '"Grüße 😀"', '"a \\"b\\" \\\\ \\/ \\n"'],
    "integer": ["0", "-7", "123456789012345"],
    "number": ["0", "-1.50", "3e8", "1.5E-7", "-0"],
    "array": ["[]", '[1, "a", [null], {"b": 1}]'],
    "object": ["{}", '{"a": 1, "b": {"c": 1}}'],
    "list-of-types": ['"a"', "null"],
    "no-type-but-bounds": ["2", "3.5", '"abc"'],
    "no-type-but-required": ['{"a": {"b": [1]}}'],
    "enum-of-kinds": ['"a"', "1", "2.5", "null", "true", '[1, {"b": "c"}]', '{"d": []}'],
    "enum-of-special-texts": ['"a.b"', '"(c)"', r'"d\"e"', r'"f\\g"', r'"h\ni"', '"é|ß"', '"/"'],
    "enum-of-controls": [r'"\u0000"', r'"\u001f"', '"\x7f"', '"😀"', '""'],
    "enum-with-bounds": ["1", "5", "10"],
    "const-object": ['{"a": [1, 2], "b": {"c": null}}'],
    "exact-length": ['"ab"', r'"\n\""', '"😀é"'],
    "pattern-search": ['"ab"', '"xxaby"', r'"\"ab\\"'],
    "pattern-at-start": ['"ab"', '"abc"'],
    "pattern-alternatives": ['"a"', '"bc"', '"xdy"'],
    "pattern-group-at-ends": ['"acd"', '"xxbcdyy"', '"ace"', '"bce"'],
    "pattern-categories": ['"1a_- x"'],
    "pattern-negated": ['"ann.lee@example.org"', '"å@ö.se"'],
    "pattern-quotes": [r'"\"\\/\t"'],
    "pattern-with-length": ['"abc"', '"a_b_c_d9"'],
    "phone": ['"+4915123456789"'],
    "semantic-version": ['"1.0.12"'],
    "color": ['"#fff"', '"#00FF7f"'],
    "date": ['"2026-11-29"', '"2024-02-29"', '"2000-02-29"', '"1999-12-31"', '"2025-04-30"'],
    "time": ['"23:59:59Z"', '"07:30:00.125+02:00"'],
    "date-time": ['"2026-11-29T18:00:00Z"', '"2026-11-29T18:00:00.5-05:00"'],
    "duration": ['"P3Y6M4DT12H30M5S"', '"PT15M"', '"P2W"', '"P1D"'],
    "email": ['"jane.doe+news@mail.example-site.org"'],
    "uuid": ['"123e4567-e89b-12d3-a456-426614174000"'],
    "ipv4": ['"192.168.0.1"', '"255.255.255.255"', '"0.0.0.0"'],
    "ipv6": ['"2001:db8::ff00:42:8329"', '"::1"', '"fe80:0:0:0:1:2:3:4"'],
    "hostname": ['"www.example.com"', '"localhost"'],
    "uri": ['"https://example.com/a/b?x=1&y=2#top"', '"http://localhost:8080/"'],
    "age": ["0", "9", "42", "150"],
    "int64": ["-9223372036854775808", "9223372036854775807", "0"],
    "tens": ["0", "10", "-120"],
    "fives-from-zero": ["0", "5", "125"],
    "sevens": ["0", "7", "98"],
    "probability": ["0", "1", "0.5", "1.0", "0.12345"],
    "latitude": ["-90", "90.0", "48.1371", "-0.5", "0"],
    "positive": ["0.001", "1", "12.50"],
    "between": ["0.101", "0.2", "0.2499"],
    "cents": ["0", "19.99", "5.5", "100.00"],
    "halves": ["-2", "-1.5", "0", "4.5", "5"],
    "integers": ["[]", "[1]", "[1, -2, 3]"],
    "exactly-three": ["[1, 2.5, -3]"],
    "matrix": ["[[1, 2]]", "[[1, 2], [3, 4], [5, 6]]"],
    "first-items-and-more": ['["a"]', '["a", 1]', '["a", 1, true, false]'],
    "unique-days": ['["mon"]', '["tue", "mon", "wed"]'],
    "unique-two": ['[2, "a"]', '["a", 1]'],
    "three-optional": [
        "{}",
        '{"a": 1}',
        '{"c": null}',
        '{"a": 1, "c": null}',
        '{"b": "", "c": null}',
    ],
    "required-between": ['{"c": null}', '{"a": null, "c": null, "e": null}'],
    "special-keys": [r'{"a\"b": null, "c\\d": null, "e.f*": null, "ü": null, "": null}'],
    "map-of-integers": ["{}", '{"a": 1, "b c": 2, "ü": 3}'],
    "others-than-listed": ['{"id": "x", "i": null, "idx": 3}', '{"ident": 1, "j": 2}', "{}"],
    "at-most-one": ["{}", '{"a": ""}', '{"b": null}'],
    "any-of-required": ['{"a": null}', '{"b": null}', '{"a": null, "b": null}'],
    "one-of-tagged": ['{"kind": "circle", "radius": 1.5}', '{"kind": "ray", "length": 2}'],
    "one-of-beside-properties": ['{"kind": "a"}', '{"kind": "b", "size": 3}'],
    "all-of-records": ['{"a": 5, "b": "x"}'],
    "all-of-bounds": ["0", "19"],
    "all-of-enums": ["3"],
    "tree": ['{"value": 1}', '{"value": 1, "children": [{"value": 2, "children": []}]}'],
    "linked-list": ["null", '{"next": {"next": null}}'],
    "binary-tree": ['{"v": 1, "l": {"v": 2}, "r": {"v": 3, "r": {"v": 4}}}'],
    "expression": ['{"op": "+", "of": [1, {"op": "*", "of": [2, 3]}]}'],
    "nested-lists": ["1", "[1, [2, []]]"],
    "one-of-recursion": ['"a"', '["a", ["b"]]'],
    "get-weather": [
        '{"name": "get_weather", "arguments": {"city": "Köln"}}',
        '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}',
    ],
    "no-arguments": ['{"name": "now", "arguments": {}}'],
    "boolean": ["true", "false"],
    "slug": ['"how-to-bake-2"'],
    "port": ["1", "80", "65535"],
    "points": ['[{"x": 1, "y": -2.5}, {"x": 0, "y": 0}]'],
    "geo-point": ['{"type": "Point", "coordinates": [13.4, 52.5]}'],
    "chess-move": ['{"move": "e7e8q"}'],
    "error": ['{"error": {"code": 404, "message": "not found"}}'],
    "settings": ["{}", '{"size": 12}', '{"theme": "dark", "sync": true}'],
    "word-counts": ['{"the": 12, "a": 3}'],
    "person": ['{"name": "Ada", "age": 36}', '{"name": "Ada"}'],
    "recipe": [
        '{"name": "Soup", "servings": 4, "ingredients": [{"item": "leek", "amount": 0.5, '
        '"unit": "kg"}], "steps": ["Cut.", "Boil."]}'
    ],
    "resume": [
        '{"name": "B. Ng", "contact": {"email": "b@ng.org"}, "jobs": '
        '[{"company": "X", "from": "2020-01-31"}], "skills": ["Go", "C"]}'
    ],
    "sensor": ['{"id": "s", "celsius": -12.5, "at": "2026-01-01T00:00:00Z", "ok": true}'],
}
# Texts that are invalid, or laid out otherwise.
OTHERS = {
    "string": ['"a', '"\t"', '"\\x"', "a"],
    "integer": ["01", "+1", "1.0", "1e2", "-0"],
    "number": [".5", "1.", "NaN", "--1"],
    "enum-of-true-and-one": ["True", "1.0"],
    "exact-length": ['"a"', '"abc"', r'"\n"'],
    "pattern-alternatives": ['"ab"', '"xbc"', '"aa"'],
    "date": ['"2025-02-29"', '"1900-02-29"', '"2025-04-31"', '"2025-13-01"'],
    "ipv4": ['"256.1.1.1"', '"01.1.1.1"'],
    "int64": ["9223372036854775808", "-9223372036854775809"],
    "between": ["0.1", "0.10", "0.25", "0.250"],
    "three-optional": ['{, "b": ""}', '{"a": 1, }', '{"b": "", "a": 1}', '{"a": 1 "b": ""}'],
    "others-than-listed": ['{"id": 3}', '{"idle": 1}', '{"i": 1}', '{"id": "x", "idle": 4}'],
    "unique-days": ["[]", '["mon", "mon"]'],
    "one-of-tagged": ['{"kind": "circle", "side": 1}'],
    "all-of-closed": ['{"a": 1, "b": null}'],
}


def test_usual_texts_are_matched():
    assert 3 * len(TEXTS) > len(SCHEMAS)
    for name, texts in TEXTS.items():
        pattern, valid = re.compile(schema_pattern(BY_NAME[name])), validator(BY_NAME[name])
        for text in texts:
            assert valid(text), (name, text)
            assert pattern.fullmatch(text), (name, text)


def test_other_texts_are_not_matched():
    for name, texts in OTHERS.items():
        pattern = re.compile(schema_pattern(BY_NAME[name]))
        assert not [text for text in texts if pattern.fullmatch(text)], name


REFUSED = {
    "not a schema": (3, r"^json_schema=3 must be a schema: an object, true or false$"),
    "set": ({"enum": {1}}, "^json_schema must be a value of JSON: Object of type set"),
    "infinity": ({"minimum": float("inf")}, "^json_schema must be a value of JSON: Out of range"),
    "false": (False, "^json_schema: no value satisfies it: change it$"),
    "multiple": (
        open_object(age=whole(multipleOf=7)),
        r"^json_schema\.properties\.age\.multipleOf=7 is not supported here: use a power of ten, ",
    ),
    "float multiple": (number(multipleOf=0.3), r"json_schema\.multipleOf=0\.3 is not supported"),
    "unknown": ({"lenght": 3}, r"^json_schema\.lenght=3 is not supported: leave it out$"),
    "not": ({"not": {}}, r"json_schema\.not=\{\} is not supported: list what is allowed"),
    "if": ({"if": True, "then": False}, r"json_schema\.if=True is not supported: use anyOf"),
    "nullable": (string(nullable=True), r"\.nullable=True is not supported: use a list of types"),
    "pattern properties": (
        {"patternProperties": {}},
        "patternProperties={} is not supported: list",
    ),
    "contains": (array({}, contains=True), r"\.contains=True is not supported: leave it out"),
    "list of items": ({"items": [True]}, r"items=\[True\] must be a schema; .* use prefixItems$"),
    "type": ({"type": "int"}, "type='int' must be a type or a list of types, of number, string, "),
    "no types": ({"type": []}, r"json_schema\.type=\[\] must be a type"),
    "enum": ({"enum": []}, r"enum=\[\] must be a list of at least one value"),
    "count": (string(minLength=-1), "minLength=-1 must be a whole number from 0 to 65,535"),
    "large count": (
        string(maxLength=10**6),
        "maxLength=1000000 must be a whole number from 0 to 65",
    ),
    "boolean count": (string(minLength=True), "minLength=True must be a whole number"),
    "draft 4": (number(0, exclusiveMinimum=True), "exclusiveMinimum=True must be a number"),
    "bounds": (whole(3, 2), r"^json_schema\.minimum=3 must be at most maximum=2$"),
    "equal bounds": (number(2, exclusiveMaximum=2), "minimum=2 must be below exclusiveMaximum=2"),
    "large bound": (number(high=1.7e308), "maximum=1.7e.308 must be a number of at most 40 digits"),
    "lengths": (string(minLength=3, maxLength=2), "minLength=3 must be at most maxLength=2"),
    "no integer": (whole(1.2, 1.8), "^json_schema: no number is within its bounds: change one"),
    "no number": ({"allOf": [number(3), number(high=2)]}, "no number is within its bounds"),
    "types": ({"allOf": [STRING, INTEGER]}, "no value satisfies all of it: change it"),
    "false property": (
        open_object(["a"], a=False),
        "^json_schema: no value for the required property 'a': json_schema.properties.a: no value",
    ),
    "closed and required": (closed({"a": NULL}, required=["b"]), "the required property 'b'"),
    "enum of other type": ({"type": "string", "enum": [1]}, r"none of its values \[1\] satisfies"),
    "enum beside pattern": (
        {"enum": ["a"], "pattern": "a"},
        r"^json_schema\.pattern='a' beside enum or const: leave it out",
    ),
    "one of": (
        {"oneOf": [INTEGER, NUMBER]},
        r"^json_schema\.oneOf=\[.*\]: it is not certain that no value satisfies two of the "
        "alternatives: use anyOf$",
    ),
    "one of properties": (
        {"oneOf": [open_object(a={"const": 1}), open_object(a={"const": 2})]},
        "it is not certain",
    ),
    "one of equal constants": ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "it is not certain"),
    "recursion": (
        {"$ref": "#/$defs/a", "$defs": {"a": closed({"a": ref("a")})}},
        r"json_schema\.\$defs\.a\.properties\.a\.\$ref='#/\$defs/a': this recursion never ends: "
        "give it an alternative, or make the property optional$",
    ),
    "recursion in place": (
        {"$ref": "#/$defs/a", "$defs": {"a": any_of(NULL, ref("a"))}},
        r"json_schema\.\$defs\.a\.anyOf\[1\]\.\$ref=.* this recursion never ends: a value would",
    ),
    "recursion of the root": ({"$ref": "#"}, "this recursion never ends"),
    "reference": ({"$ref": "#/$defs/b"}, r"\$ref='#/\$defs/b' names no schema in this one: use"),
    "remote reference": ({"$ref": "http://a/b"}, "names no schema in this one"),
    "address": (
        open_object(a={"$id": "urn:b", "$ref": "#/$defs/a"}),
        r"^json_schema\.properties\.a\.\$id='urn:b': leave it out",
    ),
    "look-around": (string(pattern="a(?=b)"), "pattern='a.*' has assert: use no look-around"),
    "reference to a group": (string(pattern=r"(a)\1"), "has groupref: use no look-around"),
    "atomic": (string(pattern="(?>a*)b"), "has atomic group: use no look-around"),
    "anchor inside": (string(pattern="a^b"), "has an anchor inside, or a word boundary: use"),
    "word boundary": (string(pattern=r"\ba"), "has an anchor inside, or a word boundary: use"),
    "flag": (string(pattern="(?i)a"), "has a flag: leave it out"),
    "flag of a group": (string(pattern="(?i:a)b"), "has a flag: leave it out"),
    "invalid pattern": (string(pattern="("), r"pattern='\(' is no regular expression: missing"),
    "class of classes": (string(pattern="[[a]"), "is no regular expression: Possible nested set"),
    "pattern of nothing": (string(pattern=r"^[^\s\S]$"), "matches no text: change it"),
    "deep pattern": (
        string(pattern="(" * 50 + "a" + ")" * 50),
        "more than 40 groups in each other",
    ),
    "pattern and length": (
        string(pattern="a", maxLength=3),
        r"has other lengths than minLength and maxLength: anchor it by \^ and \$ and give",
    ),
    "pattern of two lengths": (string(pattern="^a*b*$", maxLength=3), "has other lengths than"),
    "pattern of words": (string(pattern="^(ab)*$", maxLength=3), "has other lengths than"),
    "pattern too long": (string(pattern="^a{5,}$", maxLength=3), "has other lengths than"),
    "pattern and format": (string(pattern="a", format="date"), "format='date' beside another one"),
    "format": (
        string(format="regex"),
        r"^json_schema\.format='regex' is not supported: use one of da",
    ),
    "format and length": (string(format="date", maxLength=5), "beside minLength or maxLength"),
    "unique": (array(INTEGER, uniqueItems=True), "uniqueItems=True needs items with an enum of at"),
    "unique of many": (array(one_of(*range(6)), uniqueItems=True), "enum of at most 5 values"),
    "unique of few": (array(one_of(1), 2, uniqueItems=True), "minItems=2 is more than there are"),
    "items": (array(False, 1), r"json_schema\.items: no value satisfies it"),
    "too few items": ({"prefixItems": [NULL], "items": False, "minItems": 2}, "items: no value"),
    "map of two": (
        {"additionalProperties": NULL, "minProperties": 2},
        "minProperties=2 is above the number of required properties: leave it out, or name",
    ),
    "two of three": (
        {**open_object(a=NULL, b=NULL, c=NULL), "maxProperties": 2},
        "maxProperties=2 is below the number of properties: leave it out",
    ),
    "fewer than required": (
        closed({"a": NULL, "b": NULL}, maxProperties=1),
        "below required: raise",
    ),
    "one of none": (
        closed({}, minProperties=1),
        "minProperties=1, and there are none: leave it out",
    ),
    "alternatives": (
        {"allOf": [any_of(*[STRING] * 40), any_of(*[STRING] * 40)]},
        r"^json_schema is too large: it has 1,600 combinations .*",
    ),
    "size": (
        {
            "$defs": {"e": one_of(*(f"{i:0100}" for i in range(200)))},
            **open_object(**{f"p{i}": ref("e") for i in range(20)}),
        },
        "too large: it has a pattern of 2[0-9]{2},[0-9]{3} characters or more, and the limit",
    ),
    "work": (
        {
            "$ref": "#/$defs/n0",
            "$defs": {
                f"n{i}": open_object(**{f"p{j}": ref(f"n{j}") for j in range(9)}) for i in range(9)
            },
        },
        "too large: ",
    ),
}


@pytest.mark.parametrize(("schema", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(schema, said):
    refused(lambda: schema_pattern(schema), said)


def test_the_name_in_messages():
    refused(lambda: schema_pattern({"not": {}}, "tools[2]"), r"^tools\[2\]\.not=")


def test_what_is_nested_deeply():
    """Python compiles groups by recursion, and the deepest that is not refused must compile."""
    keys = {"description_of_it": NULL, "description": NULL}
    inside = {
        **open_object(**keys),
        "additionalProperties": string(pattern="(" * 38 + "a|b" + ")" * 38),
    }
    for wrap in (
        lambda inner: open_object(a=inner, b=inner if inner is NULL else NULL, c=NULL),
        lambda inner: closed({"a": inner}),
        lambda inner: {"type": "array", "prefixItems": [inner], "items": False},
    ):
        schema = inside
        for _ in range(30):
            schema = wrap(schema)
        re.compile(schema_pattern(schema))
        for _ in range(10):
            schema = wrap(schema)
        refused(lambda schema=schema: schema_pattern(schema), "nested deeper than 32: nest less")
    for _ in range(3000):
        schema = closed({"a": schema})
    refused(lambda: schema_pattern(schema), "must be a value of JSON: maximum recursion")


@pytest.mark.parametrize("seed", range(8))
def test_integers_are_those_within_the_bounds(seed):
    rng = random.Random(seed)
    for _ in range(20):
        low, high = sorted(rng.randint(-1200, 1200) // rng.choice([1, 10, 100]) for _ in range(2))
        step = rng.choice([1, 1, 1, 10, 100, *([3] if high - low < 500 else [])])
        expected = [
            value for value in range(-1300, 1301) if low <= value <= high and not value % step
        ]
        if expected:
            pattern = re.compile(schema_pattern(whole(low, high, multipleOf=step)))
            found = [value for value in range(-1300, 1301) if pattern.fullmatch(str(value))]
            assert found == expected, (low, high, step)


@pytest.mark.parametrize("seed", range(4))
def test_decimals_are_those_within_the_bounds(seed):
    rng = random.Random(seed)
    for _ in range(8):
        low, high = sorted(
            Decimal(rng.randint(-1100, 1100)).scaleb(-rng.choice([0, 1, 2])) for _ in "ab"
        )
        below, above = rng.choice(["m", "exclusiveM"]), rng.choice(["m", "exclusiveM"])
        bounds = {f"{below}inimum": float(low), f"{above}aximum": float(high)}
        if high - low < 1:
            continue
        pattern = re.compile(schema_pattern({"type": "number", **bounds}))
        for number_ in range(-11_500, 11_501, 7):
            value = Decimal(number_).scaleb(-rng.choice([0, 1, 2, 3]))
            within = (low < value or (low == value and below == "m")) and (
                value < high or (value == high and above == "m")
            )
            assert bool(pattern.fullmatch(str(value))) == within, (bounds, value)
        for edge in (low, high):
            for text_ in (str(edge), f"{edge:.3f}"):
                assert bool(pattern.fullmatch(text_)) == (
                    (below if edge == low else above) == "m"
                ), (bounds, text_)


def members(keys):
    return "{" + ", ".join(f'"{key}": null' for key in keys) + "}"


@pytest.mark.parametrize("required", ["", "a", "c", "f", "bd", "af", "abcdef"])
def test_optional_properties_are_any_subset_in_order(required):
    schema = closed(dict.fromkeys("abcdef", NULL), set("abcdef") - set(required))
    pattern = re.compile(schema_pattern(schema))
    for size in range(7):
        for keys in itertools.combinations("abcdef", size):
            assert bool(pattern.fullmatch(members(keys))) == (set(required) <= set(keys))
    for keys in itertools.permutations("abc"):
        assert not pattern.fullmatch(members(keys)) or keys == tuple("abc") != required


def test_the_size_of_optional_properties_grows_slowly():
    def size(count):
        return len(schema_pattern(open_object(**{f"p{index:03}": NULL for index in range(count)})))

    assert size(200) < 2.4 * size(100)


def invalid(schema, pattern):
    """Return texts of a pattern that are not valid under the schema."""
    valid = validator(schema)

    def parses(text):
        try:
            return valid(text)
        except ValueError:
            return False

    return [text for text in draws(pattern, 200) if not parses(text)]


def commas_before_all(members, free, room):
    return "".join(f"(?:{text}, )?" for text, _ in members[:-1]) + f"(?:{members[-1][0]})?"


BROKEN = {
    "commas before": ("three-optional", "json_schema._members_text", commas_before_all),
    "keys of others": (
        "others-than-listed",
        "json_schema.other_key",
        lambda keys: f'"(?:{"|".join(keys)})"',
    ),
    "a slot too many": (
        "two-to-four",
        "json_schema._list_text",
        lambda item, *_: f"{item}(?:, {item})*",
    ),
    "unescaped": ("pattern-quotes", "json_patterns.char_text", lambda _: r'["\\/\t]'),
    "unescaped key": ("special-keys", "json_schema.literal", lambda text: text),
    "exclusive bounds are within": (
        "between",
        "json_schema.number_text",
        lambda low, high, *more: json_numbers.number_text((low[0], False), (high[0], False), *more),
    ),
    "alternatives are not disjoint": (
        "one-of-integers",
        "json_cases.Cases._disjoint",
        lambda *_: True,
    ),
}


@pytest.mark.parametrize(("name", "where", "broken"), BROKEN.values(), ids=BROKEN)
def test_broken_variants_are_found(name, where, broken, monkeypatch):
    schema = BY_NAME.get(name, {"oneOf": [whole(0), whole(high=9)]})
    if name in BY_NAME:
        assert not invalid(schema, schema_pattern(schema))
    monkeypatch.setattr(f"specjax.grammars.{where}", broken)
    assert invalid(schema, schema_pattern(schema))
