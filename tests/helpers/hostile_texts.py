"""Texts of YAML and JSON that a reader refuses, by words of the refusal."""

from __future__ import annotations

import itertools

from workbench import files

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n" for last, name in itertools.pairwise("abcdefghijklmnop")
)
MERGED = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{last}'] * 10)}]}}\n" for last, name in itertools.pairwise("abcdefghijkl")
)
LONG_TEXT = f"a: &a {'x' * 1_000_000}\nb: [{', '.join(['*a'] * 10_000)}]\n"
AROUND = "a: &a\n  b: [1, *a]\n"
HEXADECIMAL = "seed: 0x" + "f" * 9000
HOSTILE_YAML = {
    "its aliases written out": (BOMB, LONG_TEXT),
    "more than 250,000 values": (MERGED,),
    "is inside the value that it repeats": (AROUND, "&a [*a]", "&a {b: {c: *a}}"),
    "more than 100 digits": (HEXADECIMAL, "seed: " + "9" * 9000, "x: 1." + "0" * 9000, "x: 1:" + "59:" * 90 + "59"),
    "nested more than 64 deep": ("[" * 100_000, "{a: " * 100_000, "- " * 100_000, "? " * 100_000,
                                 "a: &a " + "[" * 60 + "]" * 60 + "\nb: " + "[" * 60 + "*a" + "]" * 60),
    "quote a value that": ("date: 2026-13-01", "date: 2026-02-30", "x: 2026-01-01T25:00:00", "!!int zz", "!!bool x",
                            "!!timestamp x", "!!float x", "x: 2026-01-01 00:00:00 +99:00"),
    "not YAML": ("a: [", "\x00", "a: b: c", "!!python/object/apply:os.getcwd []", "? [a]\n: b", "--- a\n--- b",
                 "*a", b"\xff", "\ud800", "%YAML 9.9\n--- a", "!!binary \xff", "!<", '"\\x'),
    "is given twice": ("a: 1\nb: 2\n'a': 3", "0x10: a\n16: b", "yes: 1\ntrue: 2", "{a: {b: 1, b: 1}}", "!!set {a, a}"),
    "too long": ("#" * (files.MAX_YAML_BYTES + 1),),
}  # fmt: skip
HOSTILE_JSON = {
    "nested more than 64 deep": ("[" * 100_000, "[" * 65 + "]" * 65, '{"a":' * 100_000, "[" * 900 + "]" * 900),
    "more than 100 digits": ("9" * 101, "[1." + "1" * 9000 + "]", "-" + "9" * 100_000),
    "is given twice": ('{"a": 1, "b": 2, "a": 3}',),
    "not JSON": ("", "{", "nul", '{"a" 1}', b"\xff", "'a'", "\ud800"),
    "too long": (" " * (files.MAX_JSON_BYTES + 1),),
}
