"""JSON Schemas of the kinds that people write: of keywords, of records, of calls, of trees."""

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
BOOLEAN = {"type": "boolean"}
NULL = {"type": "null"}


def text(**more):
    return {"type": "string", **more}


def whole(low=None, high=None, **more):
    return number(low, high, type="integer", **more)


def number(low=None, high=None, **more):
    bounds = {"minimum": low, "maximum": high}
    found = {key: value for key, value in bounds.items() if value is not None}
    return {"type": "number", **found, **more}


def array(items, least=None, most=None, **more):
    sizes = {"minItems": least, "maxItems": most}
    found = {key: value for key, value in sizes.items() if value is not None}
    return {"type": "array", "items": items, **found, **more}


def closed(properties, optional=(), **more):
    """An object with these properties alone, all of them required but for those in `optional`."""
    required = [key for key in properties if key not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def open_object(required=(), **properties):
    found = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


def one_of(*values):
    return {"enum": list(values)}


def any_of(*schemas):
    return {"anyOf": list(schemas)}


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def call(name, optional=(), **arguments):
    """A call of a function with named arguments."""
    return closed({"name": {"const": name}, "arguments": closed(arguments, optional)})


DATE = text(format="date")
TIME = text(format="date-time")
EMAIL = text(format="email")
UUID = text(format="uuid")
MONEY = number(0, multipleOf=0.01)
ADDRESS = closed({"street": STRING, "city": STRING, "zip": text(pattern="^[0-9]{5}$")})
PERSON = closed({"name": text(minLength=1), "age": whole(0, 150)}, ["age"])
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": closed({"value": INTEGER, "children": array(ref("node"))}, ["children"]),
    },
}

_TYPES = [
    ("anything", True),
    ("empty-schema", {}),
    ("only-annotations", {"title": "T", "description": "d", "default": 3, "examples": [1]}),
    ("string", STRING),
    ("integer", INTEGER),
    ("number", NUMBER),
    ("boolean", BOOLEAN),
    ("null", NULL),
    ("array", {"type": "array"}),
    ("object", {"type": "object"}),
    ("list-of-types", {"type": ["string", "null"]}),
    ("integer-or-number", {"type": ["integer", "number"]}),
    ("all-types", {"type": ["null", "boolean", "integer", "number", "string", "array", "object"]}),
    ("no-type-but-length", {"minLength": 2}),
    ("no-type-but-bounds", {"minimum": 2, "maxLength": 3}),
    ("no-type-but-properties", {"properties": {"a": INTEGER}}),
    ("no-type-but-required", {"required": ["a"]}),
    ("no-type-but-items", {"items": INTEGER}),
    ("keywords-of-other-types", {"type": "integer", "minLength": 3, "items": STRING}),
    ("own-keywords", {"type": "integer", "x-order": 3, "$comment": "c", "deprecated": True}),
    ("with-address", {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:a"}),
]

_VALUES = [
    ("enum-of-strings", one_of("red", "green", "blue")),
    ("enum-of-kinds", one_of("a", 1, 2.5, None, True, [1, {"b": "c"}], {"d": []})),
    ("enum-of-special-texts", one_of("a.b", "(c)", 'd"e', "f\\g", "h\ni", "é|ß", "\u2028", "/")),
    ("enum-of-controls", one_of("\x00", "\x1f", "\x7f", "😀", "")),
    ("enum-with-type", {"type": "string", "enum": ["a", 1, None]}),
    ("enum-of-integers", {"type": "integer", "enum": [1, 2.0, 3]}),
    ("enum-with-bounds", {"enum": [1, 5, 10, 50], "maximum": 10, "type": "integer"}),
    ("enum-with-length", {"enum": ["a", "bb", "ccc"], "minLength": 2}),
    ("enum-of-true-and-one", one_of(True, 1)),
    ("const-text", {"const": "v1"}),
    ("const-number", {"const": -1.5}),
    ("const-null", {"const": None}),
    ("const-object", {"const": {"a": [1, 2], "b": {"c": None}}}),
    ("const-with-type", {"type": "string", "const": "x"}),
    ("const-empty-array", {"const": []}),
    ("enum-of-pairs", {"enum": [[1, 2], [3, 4]], "type": "array", "maxItems": 2}),
]

_STRINGS = [
    ("least-length", text(minLength=3)),
    ("most-length", text(maxLength=4)),
    ("exact-length", text(minLength=2, maxLength=2)),
    ("empty-string", text(maxLength=0)),
    ("length-as-float", text(minLength=1.0, maxLength=2.0)),
    ("pattern-anchored", text(pattern="^[A-Z]{2}-[0-9]+$")),
    ("pattern-search", text(pattern="ab")),
    ("pattern-at-start", text(pattern="^ab")),
    ("pattern-at-end", text(pattern="ab$")),
    ("pattern-alternatives", text(pattern="^a$|^bc$|d")),
    ("pattern-group-at-ends", text(pattern="(^a|b)c(d|e$)")),
    ("pattern-categories", text(pattern=r"^\d\D\w\W\s\S$")),
    ("pattern-dot", text(pattern="^.{3}$")),
    ("pattern-negated", text(pattern=r"^[^\s@]+@[^\s@]+\.[a-z]{2,}$")),
    ("pattern-quotes", text(pattern=r'^["\\/\t]{1,4}$')),
    ("pattern-of-brackets", text(pattern=r"^[\[\]\-^]+$")),
    ("pattern-unicode", text(pattern="^[à-ÿ😀]+$")),
    ("pattern-lazy", text(pattern="^a+?b*?$")),
    ("pattern-named-group", text(pattern="^(?P<year>[0-9]{4})(?:-q[1-4])?$")),
    ("pattern-empty", text(pattern="")),
    ("pattern-only-anchors", text(pattern="^$")),
    ("pattern-with-length", text(pattern="^[a-z][a-z0-9_]*$", minLength=3, maxLength=8)),
    ("pattern-with-idle-length", text(pattern="^[a-z]{2,4}$", minLength=1, maxLength=9)),
    ("pattern-control", text(pattern="^\x01$")),
    ("pattern-not-categories", text(pattern=r"^[^\d]{2}[^\w]{2}[\S]{2}$")),
    ("phone", text(pattern=r"^\+?[1-9]\d{6,14}$")),
    ("semantic-version", text(pattern=r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$")),
    ("color", text(pattern="^#([0-9a-fA-F]{3}){1,2}$")),
    ("slug", text(pattern="^[a-z0-9]+(?:-[a-z0-9]+)*$")),
    ("date", DATE),
    ("time", text(format="time")),
    ("date-time", TIME),
    ("duration", text(format="duration")),
    ("email", EMAIL),
    ("uuid", UUID),
    ("ipv4", text(format="ipv4")),
    ("ipv6", text(format="ipv6")),
    ("hostname", text(format="hostname")),
    ("uri", text(format="uri")),
    ("uuid-with-length", text(format="uuid", maxLength=36)),
]

_NUMBERS = [
    ("from-zero", whole(0)),
    ("up-to-99", whole(high=99)),
    ("negative", whole(high=-1)),
    ("age", whole(0, 150)),
    ("around-zero", whole(-17, 23)),
    ("below-zero", whole(-1234, -99)),
    ("one-value", whole(7, 7)),
    ("byte", whole(0, 255)),
    ("port", whole(1, 65535)),
    ("year", whole(1900, 2099)),
    ("int64", whole(-(2**63), 2**63 - 1)),
    ("exclusive-integer", {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}),
    ("float-bounds-of-integer", whole(0.5, 9.5)),
    ("both-kinds-of-bounds", whole(0, 10, exclusiveMinimum=0, exclusiveMaximum=20)),
    ("large-integer", whole(10**20)),
    ("tens", whole(multipleOf=10)),
    ("hundreds", whole(-500, 100_000, multipleOf=100)),
    ("even", whole(multipleOf=2)),
    ("fives-from-zero", whole(0, multipleOf=5)),
    ("sevens", whole(0, 100, multipleOf=7)),
    ("probability", number(0, 1)),
    ("percent", number(0, 100)),
    ("latitude", number(-90, 90)),
    ("longitude", number(-180, 180)),
    ("positive", number(exclusiveMinimum=0)),
    ("negative-number", number(exclusiveMaximum=0)),
    ("between", number(exclusiveMinimum=0.1, exclusiveMaximum=0.25)),
    ("narrow", number(1.05, 1.0625)),
    ("below-a-decimal", number(high=2.5)),
    ("beyond-int64", number(high=2**63 - 1)),
    ("large-float", number(1e16, 1e20)),
    ("tiny-float", number(1e-12, 1e-3)),
    ("cents", MONEY),
    ("cents-without-bounds", number(multipleOf=0.01)),
    ("whole-number", number(multipleOf=1)),
    ("halves", number(-2, 5, multipleOf=0.5)),
    ("thirds-of-integers", whole(0, 60, multipleOf=1.5)),
    ("temperature", number(-273.15, 1000, multipleOf=0.1)),
]

_ARRAYS = [
    ("integers", array(INTEGER)),
    ("nonempty", array(STRING, 1)),
    ("at-most-two", array(BOOLEAN, most=2)),
    ("two-to-four", array(INTEGER, 2, 4)),
    ("exactly-three", array(NUMBER, 3, 3)),
    ("no-items", array(INTEGER, most=0)),
    ("items-false", array(False)),
    ("items-of-any-kind", array({})),
    ("untyped-sizes", {"minItems": 1, "maxItems": 2}),
    ("matrix", array(array(INTEGER, 2, 2), 1, 3)),
    ("pair", {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2}),
    ("first-items", {"type": "array", "prefixItems": [STRING, INTEGER]}),
    ("first-items-and-more", array(BOOLEAN, 1, prefixItems=[STRING, INTEGER])),
    ("first-items-and-many", array(BOOLEAN, 4, 6, prefixItems=[STRING, INTEGER])),
    ("first-items-cut", array(BOOLEAN, most=1, prefixItems=[STRING, INTEGER])),
    ("first-items-until-false", {"type": "array", "prefixItems": [STRING, False, INTEGER]}),
    ("first-items-and-any", {"type": "array", "prefixItems": [STRING], "minItems": 2}),
    ("unique-single", array(INTEGER, most=1, uniqueItems=True)),
    ("unique-days", array(one_of("mon", "tue", "wed"), 1, uniqueItems=True)),
    ("unique-two", array(one_of(1, 1.0, 2, "a"), 2, 2, uniqueItems=True)),
    ("not-unique", array(INTEGER, uniqueItems=False)),
    ("list-of-people", array(PERSON)),
    ("list-of-unions", array(any_of(STRING, INTEGER, NULL), 1)),
    ("points", array(closed({"x": NUMBER, "y": NUMBER}), 2)),
]

_OBJECTS = [
    ("one-required", closed({"a": INTEGER})),
    ("two-required", closed({"a": INTEGER, "b": STRING})),
    ("one-optional", closed({"a": INTEGER}, ["a"])),
    ("three-optional", open_object(a=INTEGER, b=STRING, c=NULL)),
    ("twenty-optional", open_object(**{f"p{index}": BOOLEAN for index in range(20)})),
    ("required-first", closed({"a": NULL, "b": NULL, "c": NULL}, ["b", "c"])),
    ("required-last", closed({"a": NULL, "b": NULL, "c": NULL}, ["a", "b"])),
    ("required-between", closed(dict.fromkeys("abcde", NULL), list("abde"))),
    ("required-twice-between", closed(dict.fromkeys("abcde", NULL), list("ace"))),
    ("no-properties", {"type": "object", "properties": {}}),
    ("closed-and-empty", {"type": "object", "additionalProperties": False}),
    ("special-keys", closed({'a"b': NULL, "c\\d": NULL, "e.f*": NULL, "ü": NULL, "": NULL})),
    ("forbidden-property", open_object(a=INTEGER, b=False)),
    ("required-but-not-listed", open_object(["b"], a=INTEGER)),
    (
        "required-by-additional",
        {**open_object(["b"], a=INTEGER), "additionalProperties": BOOLEAN},
    ),
    ("map-of-integers", {"type": "object", "additionalProperties": INTEGER}),
    ("map-with-sizes", {"additionalProperties": NUMBER, "minProperties": 1, "maxProperties": 3}),
    ("map-of-lists", {"type": "object", "additionalProperties": array(STRING)}),
    ("map-of-anything", {"type": "object", "additionalProperties": True}),
    (
        "others-than-listed",
        {**open_object(id=STRING, idle=BOOLEAN, i=NULL), "additionalProperties": INTEGER},
    ),
    (
        "others-after-required",
        {**open_object(["a"], a=STRING, b=NULL), "additionalProperties": array(INTEGER)},
    ),
    (
        "others-up-to-four",
        {**open_object(a=STRING, b=NULL), "additionalProperties": INTEGER, "maxProperties": 4},
    ),
    ("at-least-one", {**open_object(a=STRING, b=NULL, c=NULL), "minProperties": 1}),
    ("at-most-one", {**open_object(a=STRING, b=NULL), "maxProperties": 1}),
    ("exactly-one", {**open_object(a=STRING, b=NULL), "maxProperties": 1, "minProperties": 1}),
    ("at-most-the-required", {**open_object(["a"], a=STRING, b=NULL), "maxProperties": 1}),
    ("nested", closed({"a": closed({"b": closed({"c": closed({"d": INTEGER})})})})),
    ("nullable-properties", closed({"a": {"type": ["string", "null"]}, "b": any_of(NULL, NUMBER)})),
]

_COMBINED = [
    ("any-of-types", any_of(STRING, INTEGER)),
    ("any-of-records", any_of(PERSON, ADDRESS)),
    ("any-of-with-false", any_of(False, BOOLEAN)),
    ("any-of-beside-type", {"type": "string", **any_of({"minLength": 5}, {"maxLength": 2})}),
    (
        "any-of-required",
        {**open_object(a=NULL, b=NULL), **any_of(*({"required": [k]} for k in "ab"))},
    ),
    ("any-of-contradicting", {"type": "integer", **any_of({"type": "string"}, {"minimum": 3})}),
    ("any-of-any-of", any_of(any_of(NULL, BOOLEAN), any_of(BOOLEAN, INTEGER))),
    ("one-of-types", {"oneOf": [STRING, INTEGER, NULL]}),
    ("one-of-constants", {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, one_of(1, 2)]}),
    (
        "one-of-tagged",
        {
            "oneOf": [
                closed({"kind": {"const": "circle"}, "radius": NUMBER}),
                closed({"kind": {"const": "square"}, "side": NUMBER}),
                closed({"kind": one_of("line", "ray"), "length": NUMBER}),
            ]
        },
    ),
    ("one-of-closed", {"oneOf": [closed({"a": NULL}), closed({"b": NULL})]}),
    (
        "one-of-beside-properties",
        {
            **open_object(["kind"], kind=STRING, size=INTEGER),
            "oneOf": [
                {"properties": {"kind": {"const": "a"}}},
                {"properties": {"kind": {"const": "b"}}, "required": ["size"]},
            ],
        },
    ),
    ("one-of-nested-tag", {"oneOf": [closed({"t": closed({"k": {"const": k}})}) for k in "ab"]}),
    ("all-of-bounds", {"allOf": [whole(0), whole(high=20), {"exclusiveMaximum": 20}]}),
    ("all-of-lengths", {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}]}),
    (
        "all-of-records",
        {"allOf": [open_object(["a"], a=INTEGER), open_object(["b"], b=STRING, a=whole(5))]},
    ),
    ("all-of-types", {"allOf": [{"type": ["string", "integer"]}, {"type": ["number", "null"]}]}),
    ("all-of-enums", {"allOf": [one_of(1, 2, 3), one_of(2.0, 3, 4), {"minimum": 3}]}),
    ("all-of-items", {"type": "array", "allOf": [{"items": whole(0)}, {"items": whole(high=9)}]}),
    ("all-of-any-of", {"allOf": [any_of(STRING, INTEGER), any_of(INTEGER, NULL)]}),
    ("all-of-closed", {"allOf": [closed({"a": INTEGER}, ["a"]), open_object(a=NUMBER, b=NULL)]}),
    ("all-of-true", {"allOf": [True, {}, BOOLEAN]}),
    ("all-of-patterns", {"allOf": [text(pattern="^a+$"), text(pattern="^a+$", maxLength=3)]}),
]

_REFERENCES = [
    ("reference", {"$ref": "#/$defs/id", "$defs": {"id": whole(1)}}),
    ("reference-to-definitions", {"$ref": "#/definitions/id", "definitions": {"id": UUID}}),
    (
        "reference-in-property",
        {**open_object(["a"], a=ref("p"), b=ref("p")), "$defs": {"p": PERSON}},
    ),
    ("reference-with-siblings", {"$ref": "#/$defs/n", "maximum": 9, "$defs": {"n": whole(0)}}),
    ("reference-to-reference", {"$ref": "#/$defs/a", "$defs": {"a": ref("b"), "b": BOOLEAN}}),
    ("reference-to-property", open_object(["b"], a=whole(1, 5), b={"$ref": "#/properties/a"})),
    ("reference-escaped", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": NULL}}),
    ("tree", TREE),
    ("root-recursion", open_object(["v"], v=INTEGER, next={"$ref": "#"})),
    (
        "linked-list",
        {"$ref": "#/$defs/l", "$defs": {"l": any_of(NULL, closed({"next": ref("l")}))}},
    ),
    (
        "binary-tree",
        {
            "$defs": {"t": closed({"v": INTEGER, "l": ref("t"), "r": ref("t")}, ["l", "r"])},
            "$ref": "#/$defs/t",
        },
    ),
    (
        "expression",
        {
            "$ref": "#/$defs/e",
            "$defs": {
                "e": any_of(NUMBER, closed({"op": one_of("+", "*"), "of": array(ref("e"), 2, 2)}))
            },
        },
    ),
    (
        "mutual-recursion",
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": closed({"b": array(ref("b"))}),
                "b": closed({"a": any_of(ref("a"), NULL)}),
            },
        },
    ),
    ("nested-lists", {"$ref": "#/$defs/l", "$defs": {"l": any_of(INTEGER, array(ref("l")))}}),
    (
        "recursive-map",
        {
            "$ref": "#/$defs/m",
            "$defs": {"m": {"type": "object", "additionalProperties": ref("m")}},
        },
    ),
    (
        "one-of-recursion",
        {"$ref": "#/$defs/f", "$defs": {"f": {"oneOf": [STRING, array(ref("f"), 1)]}}},
    ),
    (
        "comments",
        {"$ref": "#/$defs/c", "$defs": {"c": closed({"t": STRING, "r": array(ref("c"))})}},
    ),
]

_CALLS = [
    ("get-weather", call("get_weather", ["unit"], city=STRING, unit=one_of("C", "F"))),
    ("send-mail", call("send", to=array(EMAIL, 1), subject=text(maxLength=78), body=STRING)),
    ("search", call("search", ["limit"], query=text(minLength=1), limit=whole(1, 50))),
    ("calculate", call("calc", op=one_of("add", "sub"), numbers=array(NUMBER, 2))),
    ("no-arguments", call("now")),
    ("book-flight", call("book", origin=text(pattern="^[A-Z]{3}$"), date=DATE, seats=whole(1, 9))),
    ("set-timer", call("timer", ["label"], seconds=whole(1, 86400), label=STRING)),
    ("query-database", call("query", table=STRING, where=array(STRING), order=one_of("a", "d"))),
    ("translate", call("translate", text=STRING, to=text(pattern="^[a-z]{2}(-[A-Z]{2})?$"))),
    ("resize-image", call("resize", width=whole(1, 4096), height=whole(1, 4096), keep=BOOLEAN)),
    (
        "run-code",
        call("run", ["stdin"], language=one_of("python", "c++"), code=STRING, stdin=STRING),
    ),
    ("calls", array(any_of(call("a", x=INTEGER), call("b", y=STRING), call("now")), 1, 3)),
    ("call-or-answer", any_of(call("look", q=STRING), closed({"answer": STRING}))),
]

_RECORDS = [
    ("person", PERSON),
    ("address", ADDRESS),
    ("user", closed({"id": UUID, "email": EMAIL, "admin": BOOLEAN, "created": TIME}, ["admin"])),
    (
        "product",
        closed({"sku": text(pattern="^[A-Z0-9]{6}$"), "price": MONEY, "tags": array(STRING)}),
    ),
    ("event", closed({"title": STRING, "start": TIME, "end": TIME, "place": ADDRESS}, ["end"])),
    (
        "recipe",
        closed(
            {
                "name": STRING,
                "servings": whole(1, 20),
                "ingredients": array(
                    closed({"item": STRING, "amount": number(exclusiveMinimum=0), "unit": STRING}),
                    1,
                ),
                "steps": array(text(minLength=1), 1),
            }
        ),
    ),
    (
        "resume",
        closed(
            {
                "name": STRING,
                "contact": closed({"email": EMAIL, "site": text(format="uri")}, ["site"]),
                "jobs": array(closed({"company": STRING, "from": DATE, "to": DATE}, ["to"])),
                "skills": array(STRING, most=10),
            },
            ["skills"],
        ),
    ),
    (
        "invoice",
        closed({"number": whole(1), "lines": array(closed({"n": STRING, "sum": NUMBER}), 1)}),
    ),
    (
        "book",
        closed({"title": STRING, "isbn": text(pattern=r"^97[89]-\d{10}$"), "year": whole(1450)}),
    ),
    ("movie-review", closed({"movie": STRING, "stars": whole(1, 5), "spoilers": BOOLEAN})),
    ("geo-point", closed({"type": {"const": "Point"}, "coordinates": array(NUMBER, 2, 3)})),
    (
        "server",
        closed({"host": text(format="hostname"), "ip": text(format="ipv4"), "port": whole(1, 9)}),
    ),
    ("log-line", closed({"at": TIME, "level": one_of("info", "error"), "message": STRING})),
    (
        "page",
        closed({"items": array(PERSON), "next": {"type": ["string", "null"]}, "total": whole(0)}),
    ),
    ("error", closed({"error": closed({"code": whole(400, 599), "message": STRING})})),
    ("settings", open_object(theme=one_of("dark", "light"), size=whole(8, 72), sync=BOOLEAN)),
    (
        "quiz",
        array(closed({"q": STRING, "choices": array(STRING, 4, 4), "answer": whole(0, 3)}), 1),
    ),
    ("sentiment", closed({"label": one_of("good", "bad"), "score": number(0, 1)})),
    ("entities", array(closed({"text": STRING, "kind": one_of("PER", "ORG"), "at": whole(0)}))),
    (
        "reasoning",
        closed({"steps": array(closed({"why": STRING, "so": STRING}), 1), "answer": STRING}),
    ),
    ("chess-move", closed({"move": text(pattern="^[a-h][1-8][a-h][1-8][qrbn]?$")})),
    ("sensor", closed({"id": STRING, "celsius": number(-40, 125), "at": TIME, "ok": BOOLEAN})),
    ("order", {**closed({"lines": array(ref("l"), 1)}), "$defs": {"l": closed({"n": whole(1)})}}),
    ("word-counts", {"type": "object", "additionalProperties": whole(1)}),
]

SCHEMAS = [
    *(*_TYPES, *_VALUES, *_STRINGS, *_NUMBERS, *_ARRAYS, *_OBJECTS),
    *(*_COMBINED, *_REFERENCES, *_CALLS, *_RECORDS),
]
