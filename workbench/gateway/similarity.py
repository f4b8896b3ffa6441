"""Decide whether two questions may share a response: an embedding finds candidates, a second gate compares facts.

A small embedding does not distinguish "enable" from "disable", so a candidate must also agree in numbers, names,
negations, opposites and code, and must not replace one word by another (measured by `experiments/semantic_cache.py`).
In doubt the gate refuses: a miss costs a computation, but a false hit gives a wrong answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:[.,:/]\d+)*%?")
CODE = re.compile(
    r"`[^`]+`|--?[a-zA-Z][\w-]*|\b\w+(?:[._]\w+)+\b|\b\w+\(\)|\b[a-z]+[A-Z]\w*|[\w.]*/[\w./]+|[<>=!]=?|[+*^&|]"
)
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
NEGATIONS = _listed("""
    not no never none nothing neither nor without cannot except unless lack lacks lacking avoid stop prevent refuse fail
    exclude excluding ignore false hardly against dont doesnt didnt isnt arent wasnt werent cant couldnt wont wouldnt
    shouldnt hasnt havent hadnt
""")
NEGATIVE_PREFIXES = ("dis", "un", "non", "in", "im", "ir", "il", "de", "anti", "mis")
PREFIXES = (
    *NEGATIVE_PREFIXES,
    *["en", "em", "re", "pre", "post", "over", "under", "up", "down", "out", "ex", "sub", "super"],
)
# Words that look like negations but are not.
NO_NEGATIONS = _listed("""
    under until union unit units universe university unique united understand understanding into inside index input
    inputs install interest interesting introduce introduction inform information internet international image images
    important impact implement implementation improve import include including indeed individual industry influence
    instance instead integer interface invent invented increase display discuss discussion distance district distribute
    disk dish decide decision default define definition degree delete deliver demand demo density depend deploy depth
    derive describe description design desk detail detect develop developer device devise miss mission mist island issue
    iron irish illustrate initial inch india iran iraq ireland deep deal dear debt debate december
""")
# Pairs and groups of mutually exclusive words.
OPPOSITES = _listed("""
    add/subtract/multiply/divide plus/minus increase/decrease raise/lower grow/shrink open/close start/end begin/finish
    first/last before/after above/below over/under max/min maximum/minimum most/least more/less fewer/more
    largest/smallest biggest/smallest highest/lowest longest/shortest fastest/slowest oldest/youngest newest/oldest
    best/worst big/small large/small high/low long/short fast/slow hot/cold warm/cool good/bad new/old early/late
    left/right north/south east/west up/down in/out inside/outside push/pull buy/sell import/export encrypt/decrypt
    encode/decode compress/decompress read/write send/receive upload/download give/take win/lose love/hate true/false
    on/off yes/no always/never all/none/some even/odd positive/negative legal/illegal input/output source/target
    client/server create/delete insert/remove install/remove mount/unmount lock/unlock accept/reject allow/deny
    grant/revoke show/hide enter/exit arrive/depart lend/borrow teach/learn mother/father son/daughter brother/sister
    king/queen summer/winter spring/autumn morning/evening sunrise/sunset day/night safe/dangerous cheap/expensive
    ascending/descending with/without forward/backward horizontal/vertical public/private local/remote
    synchronous/asynchronous success/failure
""")
POLAR = frozenset(word for group in OPPOSITES for word in group.split("/"))
# Words at the start of sentences that are not names.
COMMON_FIRST = _listed("""
    who what when where why how which whose i is are was were do does did can could will would should may might must
    please tell give show explain describe list name write find compute calculate say help the a an in on at for from to
    of with and or if my we you it there this that add subtract multiply divide enable disable turn switch open close
    start stop create delete remove install make set get use translate summarize compare define convert print sort count
    let whats hows lets
""")
# Words that may differ between questions with the same answer.
GRAMMAR = COMMON_FIRST - POLAR | _listed("""
    am be been being has have had having me us them they he she his her its your our their these those so as by about
    than then also just really actually exactly much many some any want need like know wonder could should shall ought
    way ways step steps mean means meaning please thanks hello hi hey work works doing done look looks
""")
DIRECTIONS = _listed("to into from than toward towards onto")


def facts_differ(one: str, other: str) -> str:
    """Return the reason why two questions may not share a response; empty if they may."""
    theirs = read_facts(other)
    for kind, facts in read_facts(one).items():
        if facts != theirs[kind]:
            return f"{kind}: {', '.join(facts) or 'none'} / {', '.join(theirs[kind]) or 'none'}"
    return _prefixes_differ(one, other) or words_differ(one, other)


def read_facts(text: str) -> dict[str, list[str]]:
    """Return the facts in a question by kind; those of a kind are sorted, with repetitions."""
    plain = CODE.sub(" ", text)
    names, negations, opposites = [], [], []
    for each in WORD.finditer(plain):
        word = each[0].lower().replace("'", "")
        negations += [word] if word in NEGATIONS or _is_negated(word) else []
        opposites += [word] if word in POLAR else []
        begins = _begins_sentence(plain, each.start()) and word in COMMON_FIRST
        names += [word] if each[0][0].isupper() and not begins else []
    numbers = [each.replace(",", "") for each in NUMBER.findall(plain)]
    facts = {"numbers": numbers, "names": names, "negations": negations, "opposites": opposites}
    return {kind: sorted(each) for kind, each in (facts | {"code": CODE.findall(text)}).items()}


def words_differ(one: str, other: str) -> str:
    """Return the words by which one text replaces words of the other; or the words that are in another order, if
    the texts have a direction. Empty if there are none.

    A paraphrase may drop or add words, but replacing a word changes the question.
    """
    first, second = _content(one), _content(other)
    mine, theirs = ([word for word in a if word not in b] for a, b in ((first, second), (second, first)))
    if mine and theirs:
        return f"words: {', '.join(mine)} / {', '.join(theirs)}"
    common = [[word for word in dict.fromkeys(each) if word in first and word in second] for each in (first, second)]
    directed = all(DIRECTIONS & {each.lower() for each in WORD.findall(text)} for text in (one, other))
    return f"order: {', '.join(common[0])} / {', '.join(common[1])}" if directed and common[0] != common[1] else ""


def _content(text: str) -> list[str]:
    """Return the stems of content words."""
    words = (each.lower().replace("'", "") for each in WORD.findall(text))
    return [_without_ending(word) for word in words if word not in GRAMMAR]


def _without_ending(word: str) -> str:
    fitting = (each for each in ("ing", "ed", "es", "s", "e") if word.endswith(each) and len(word) - len(each) >= 3)
    return word.removesuffix(next(fitting, ""))


def _prefixes_differ(one: str, other: str) -> str:
    """Return a pair such as enable / disable: words with the same stem and different prefixes."""
    first, second = ({each.lower() for each in WORD.findall(text)} for text in (one, other))
    stems = {_stem(word): word for word in sorted(first - second) if _stem(word) != word}
    for word in sorted(second - first):
        stem = _stem(word)
        if stem in stems or stem in first or word in stems:
            return f"prefixes: {stems.get(stem) or stems.get(word) or stem} / {word}"
    return ""


def _stem(word: str) -> str:
    fitting = [prefix for prefix in PREFIXES if word.startswith(prefix) and len(word) - len(prefix) >= 3]
    return word[len(max(fitting, key=len)) :] if fitting else word


def _is_negated(word: str) -> bool:
    if word in NO_NEGATIONS or word in NEGATIONS:
        return False
    return any(word.startswith(prefix) and len(word) - len(prefix) >= 4 for prefix in NEGATIVE_PREFIXES)


def _begins_sentence(text: str, position: int) -> bool:
    before = text[:position].rstrip()
    return not before or before[-1] in ".!?:\n\"'("


def unit(vector: Sequence[float]) -> tuple[float, ...]:
    """Normalize a vector to length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum(float(x) * float(x) for x in vector))
    return tuple(float(x) / length if length else 0.0 for x in vector)


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two unit vectors."""
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
