"""Regular expressions of JSON's strings: of a length, of a format, of keys that are not listed."""

from __future__ import annotations

from specjax.grammars.characters import Ranges, both, others
from specjax.grammars.expressions import either, literal, optional, repeat

_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]
_TOLD_APART = 16  # characters of a key: expressions in expressions are compiled by recursion


def _class_char(code: int) -> str:
    char = chr(code)
    if char in r"\]^-[":
        return f"\\{char}"
    if 0x20 <= code < 0x7F:
        return char
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def char_text(ranges: Ranges, slash: str = "") -> str | None:
    """Return the expression of one character of a set, as JSON writes it; None if it has none.

    Control characters without a short escape are written only where the set has no others. `slash`
    is `"/"` if a slash may be escaped, too.
    """
    plain = both(ranges, _PLAIN)
    texts = []
    if plain:
        ends = [(_class_char(first), _class_char(last)) for first, last in plain]
        inside = "".join(a if a == b else f"{a}-{b}" for a, b in ends)
        one = len(plain) == 1 and plain[0][0] == plain[0][1]
        texts.append(literal(chr(plain[0][0])) if one else f"[{inside}]")
    short = [char for code, char in _SHORT.items() if both(ranges, [(code, code)])]
    if short:
        inside = "".join(short).replace("\\", "\\\\") + slash
        texts.append(rf"\\[{inside}]")
    if not texts:
        codes = [code for code in range(0x20) if both(ranges, [(code, code)])]
        texts = [rf"\\u{code:04x}" for code in codes]
    return either(texts) if texts else None


ANY = char_text([(0, 0x10FFFF)])
_WITH_SLASH = char_text([(0, 0x10FFFF)], "/")
STRING = f'"{repeat(_WITH_SLASH, 0, None)}"'
KEY = f'"{repeat(ANY, 0, None)}"'


def string_text(least: int, most: int | None) -> str:
    """Return the expression of strings, with quotation marks, of a number of characters."""
    return f'"{repeat(_WITH_SLASH, least, most)}"'


def other_key(keys: list[str]) -> str:
    """Return the expression of strings, with quotation marks, that are none of `keys`.

    Of keys that begin like one of `keys` in 16 characters only shorter ones are written.
    """
    return f'"{_other_text(keys, 0)}"' if keys else KEY


def _other_text(keys: list[str], done: int) -> str:
    following: dict[str, list[str]] = {}
    for key in keys:
        if key[done:]:
            following.setdefault(key[done], []).append(key)
    other = char_text(others([(ord(char), ord(char)) for char in following]))
    texts = [f"{other}{repeat(ANY, 0, None)}"]
    if done < _TOLD_APART:
        for char, those in following.items():
            if first := char_text([(ord(char), ord(char))]):
                texts.append(first + _other_text(those, done + 1))
    ends = any(len(key) == done for key in keys)
    return either(texts) if ends else optional(either(texts))


def _format_texts() -> dict[str, str]:
    day = "0[1-9]|1[0-9]|2[0-8]"
    days = [
        f"(?:0[13578]|1[02])-(?:{day}|29|3[01])",
        f"(?:0[469]|11)-(?:{day}|29|30)",
        f"02-(?:{day})",
    ]
    # Years 1000 to 9999: divisible by 4, by 100 only if by 400.
    leap = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
    date = f"(?:[1-9][0-9]{{3}}-{either(days)}|{leap}-02-29)"
    clock = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
    time = rf"{clock}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{clock})"
    count = "(?:0|[1-9][0-9]{0,4})"
    # Units only go down, and leave none out.
    day, second = f"{count}D", f"{count}S"
    month_on = f"{count}M{optional(day)}"
    days = f"(?:{count}Y{optional(month_on)}|{month_on}|{day})"
    minute_on = f"{count}M{optional(second)}"
    times = f"T(?:{count}H{optional(minute_on)}|{minute_on}|{second})"
    label = "[A-Za-z][A-Za-z0-9]{0,19}(?:-[A-Za-z0-9]{1,20}){0,2}"
    host = rf"{label}(?:\.{label}){{0,2}}"
    local = "[A-Za-z0-9_+-]{1,20}"
    octet = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    group = "[0-9a-fA-F]{1,4}"
    shortened = [f"(?:{group}:){{{size}}}(?::{group}){{1,{7 - size}}}" for size in range(1, 7)]
    ipv6 = either([f"(?:{group}:){{7}}{group}", *shortened, f"::(?:{group}:){{0,5}}{group}"])
    path = "[A-Za-z0-9._~-]*"
    digits = "[0-9a-fA-F]"
    return {
        "date": date,
        "time": time,
        "date-time": f"{date}T{time}",
        "duration": f"P(?:{days}{optional(times)}|{times}|{count}W)",
        "email": rf"{local}(?:\.{local}){{0,2}}@{label}(?:\.{label}){{1,2}}",
        "hostname": host,
        "ipv4": rf"{octet}(?:\.{octet}){{3}}",
        "ipv6": ipv6,
        "uuid": f"{digits}{{8}}(?:-{digits}{{4}}){{3}}-{digits}{{12}}",
        "uri": rf"(?:https?|ftp)://{host}(?::[1-9][0-9]{{0,3}})?(?:/{path})*"
        rf"(?:\?[A-Za-z0-9=&._~-]*)?(?:#{path})?",
    }


FORMATS = _format_texts()
"""The expressions of strings, without quotation marks, of each `format` that is supported."""
