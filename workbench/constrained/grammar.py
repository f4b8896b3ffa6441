"""Compile a `response_format` to a grammar over a model's tokens, with llguidance.

A grammar is compiled twice: over the vocabulary, for masks, and over bytes and control tokens, for completions
(closing.py). The vocabulary comes from our own Tokenizer, so that text which looks like a control token stays text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from workbench.constrained.closing import EndSearch, NodeBudget
from workbench.constrained.json_schema import (
    WHERE,
    carried_out,
    check_keywords,
    describe_path,
    locate_fault,
    name_keyword,
    subschemas,
)
from workbench.constrained.json_text import DigitMasks
from workbench.constrained.shortest_match import shortest_match
from workbench.constrained.spelling import BYTES, Speller
from workbench.errors import WorkbenchError
from workbench.prompt.answers import control_tokens
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat, check_json

END = b"<|end of the grammar|>"  # a token only of the compiler: allowed where the answer is complete
NODES_AT_A_TIME = 50
SEARCHED_NODES = 3000  # states visited by the completion search before admission: about 0.1 s
MAX_COMPILE_SECONDS = 1.0  # seconds of processor time
TOOK_TOO_LONG = f"response_format: not compiled within {MAX_COMPILE_SECONDS:g} s of processor time; make it smaller"
PLAIN = '%llguidance {"no_forcing": true}\n'  # allow every legal token, not only the usual tokenization
FORMAT_PATTERNS = {"email": "a@a.aa", "uri": "a:", "ipv6": "::"}
NOT_CARRIED_OUT = ("max_tokens", "stop", "temperature", "capture")  # unsupported attributes of Lark rules
LIMITS = LLParserLimits(max_items_in_row=20_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


class CompilerVocabulary:
    """A vocabulary in the form that llguidance takes: the bytes of each token, and the control tokens."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], controls: Sequence[int], encode: Callable[[str], list[int]]):
        self.tokens = [*tokens, END]
        self.special_token_ids = [*controls, len(tokens)]
        self.eos_token_id = len(tokens)
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, with its matchers in the start state; a request works on copies.

    `shortest` has the symbols of the shortest answer found.
    """

    response_format: ResponseFormat
    vocabulary: GrammarVocabulary
    tokens: LLMatcher
    symbols: LLMatcher
    shortest: tuple[int, ...]
    hints: tuple[tuple[int, ...], ...]


class GrammarVocabulary:
    """A tokenizer's vocabulary, ready to compile grammars for. Building it takes 0.1 s for 4,096 tokens."""

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.byte_rule is None:
            raise WorkbenchError(
                "response_format: this tokenizer's text of a token depends on the tokens around it; a grammar needs "
                "a byte-level or sentencepiece tokenizer"
            )
        named = control_tokens(tokenizer)
        controls = sorted(named.values())
        self.size = tokenizer.vocab_size
        self.token_bytes = [tokenizer.token_bytes(id) for id in range(self.size)]
        name_of = {id: lark_name(name).encode() for name, id in named.items()}
        names = [name_of[id] for id in controls]
        over_tokens = [name_of.get(id, each) for id, each in enumerate(self.token_bytes)]
        self.digits = DigitMasks(self.token_bytes, controls)
        self.symbol_of = {id: BYTES + place for place, id in enumerate(controls)}
        self.end_symbol = BYTES + len(controls)
        self.over_tokens = LLTokenizer(TokenizerWrapper(CompilerVocabulary(over_tokens, controls, tokenizer.encode)))
        alphabet = [bytes([each]) for each in range(BYTES)] + names
        by_byte = CompilerVocabulary(alphabet, range(BYTES, self.end_symbol), lambda text: list(text.encode()))
        self.over_symbols = LLTokenizer(TokenizerWrapper(by_byte), slices=[])
        spelt = {each: id for id, each in enumerate(self.token_bytes) if each and id not in self.symbol_of}
        self.speller = Speller(spelt, {symbol: id for id, symbol in self.symbol_of.items()})

    def symbols(self, token: int) -> list[int]:
        """Return the symbols of a token: its bytes, or one symbol for a control token."""
        control = self.symbol_of.get(token)
        return list(self.token_bytes[token]) if control is None else [control]

    def compile(self, form: ResponseFormat) -> Grammar:
        """Compile a grammar, with its first mask and a completion. It may take MAX_COMPILE_SECONDS, and a single part
        may exceed them: do not call it in a runner's thread.

        Raises:
            WorkbenchError: names the fault and its path in the schema; a labelled schema is named by its label.
        """
        try:
            return self._compile(form)
        except WorkbenchError as error:
            if not (isinstance(form, Lark) and form.labels):
                raise
            if form.loose and (loosened := self._loosened(form)) != form.lark:
                return self.compile(form.model_copy(update={"lark": loosened, "loose": ()}))
            raise WorkbenchError(self._labelled(form, str(error))) from None

    def _loosened(self, form: Lark) -> str:
        """Return a grammar in which each loose schema that cannot be compiled alone admits every object, or every
        value.
        """
        deadline, lark = _Deadline(), form.lark
        for place, label, schema in reversed([*_schemas(form)]):
            if label not in form.loose or deadline.is_over:
                continue
            try:
                self._compile(JSONSchema(json_schema=schema, max_whitespace=form.max_whitespace))
            except WorkbenchError:
                end = json.JSONDecoder().raw_decode(lark, place)[1]
                every = {"type": "object"} if isinstance(schema, dict) and schema.get("type") == "object" else {}
                lark = lark[:place] + json.dumps(every) + lark[end:]
        return lark

    def _labelled(self, form: Lark, error: str) -> str:
        """Return the error of the first labelled schema that fails alone, otherwise the error of the whole grammar."""
        deadline = _Deadline()
        for _, label, schema in _schemas(form):
            if deadline.is_over:
                break
            try:
                self._compile(JSONSchema(json_schema=schema, max_whitespace=form.max_whitespace))
            except WorkbenchError as alone:
                return label + str(alone).removeprefix(WHERE).removeprefix("response_format")
        return re.sub(r"^response_format(\.lark)?", "tools", error)

    def _compile(self, form: ResponseFormat) -> Grammar:
        deadline = _Deadline()
        if isinstance(form, JSONSchema):
            if form.json_schema is False:
                raise WorkbenchError("response_format.json_schema: no answer can meet the schema false")
            check_keywords(form.json_schema)
        elif isinstance(form, Lark):
            _check_lark(form)
        source = lark_of(form)
        deadline.check()
        tokens = LLMatcher(self.over_tokens, source, log_level=0, limits=LIMITS)
        if tokens.is_error():
            raise WorkbenchError(self._describe_error(form, tokens.get_error(), deadline))
        deadline.check()
        symbols = LLMatcher(self.over_symbols, source, log_level=0, limits=LIMITS)
        deadline.check()
        first = np.flatnonzero(np.unpackbits(np.frombuffer(tokens.compute_bitmask(), np.uint8), bitorder="little"))
        if tokens.is_error() or not len(first):  # some faults show at the first mask
            words = error_sentence(tokens.get_error())
            words = words.replace("NoExtensionBias", "no token begins an answer; a rule may need itself")
            raise WorkbenchError(f"{_where(form)}: no answer can meet it: {words}")
        if first[0] == self.size:
            raise WorkbenchError(f"{_where(form)}: it admits only the empty text")
        hints = tuple(map(tuple, hints_of(form)))
        deadline.check()
        search = EndSearch(symbols, self.end_symbol, hints, hints, quotes_end(form), SEARCHED_NODES, 1)
        while not search.run(NodeBudget(NODES_AT_A_TIME)):
            deadline.check()
        if search.way is None:
            raise WorkbenchError(f"{_where(form)}: no end was found: it is too long, or a rule or $ref needs itself")
        return Grammar(form, self, tokens, symbols, search.way, hints)

    def _describe_error(self, form: ResponseFormat, error: str, deadline: _Deadline) -> str:
        where = _where(form)
        if isinstance(form, JSONSchema):

            def compile_error(schema: Any) -> str:
                if deadline.is_over:
                    return ""  # keep the path known so far
                source = lark_of(form.model_copy(update={"json_schema": schema}))
                return error_sentence(LLMatcher(self.over_symbols, source, log_level=0, limits=LIMITS).get_error())

            path = locate_fault(form.json_schema, error_sentence(error), compile_error)
            return f"{describe_path(path)}: {name_keyword(form.json_schema, path, error_sentence(error))}"
        return f"{where}: {error_sentence(error)}"


def lark_name(control: str) -> str:
    """Return the name of a control token in a Lark grammar: in angle brackets, which are added if the name has none
    (`[TOOL_CALLS]`).
    """
    if re.fullmatch(r"<[^<>\s\[][^<>\s]*>", control):
        return control
    return "<|" + re.sub(r"[<>|]|\s", "_", control) + "|>"


class _Deadline:
    """The limit on this thread's processor time for a compilation."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_COMPILE_SECONDS

    @property
    def is_over(self) -> bool:
        return time.thread_time() > self._end

    def check(self) -> None:
        if self.is_over:
            raise WorkbenchError(TOOK_TOO_LONG)


def lark_of(form: ResponseFormat) -> str:
    """Return the response format `form` as a grammar in llguidance's dialect of Lark."""
    if isinstance(form, Lark):
        return _embed(form)
    if isinstance(form, Choices):
        return PLAIN + "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in form.choices)
    if isinstance(form, Regex):
        return PLAIN + "start: /" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", form.regex).replace("\n", "\\n") + "/"
    schema = {} if form.json_schema is True else form.json_schema
    assert isinstance(schema, dict)
    return PLAIN + "start: %json " + _with_options(schema, form.max_whitespace)


def _with_options(schema: dict[str, Any], max_whitespace: int | None, spaced: bool = False) -> str:
    options: dict[str, object] = {"whitespace_flexible": False}
    if spaced or max_whitespace is None:
        options |= {"item_separator": ", ", "key_separator": ": "}
    elif max_whitespace:
        options = {"whitespace_pattern": rf"[\x20\x0A]{{1,{max_whitespace}}}"}
    return json.dumps({**carried_out(schema), "x-guidance": options})


def _embed(form: Lark) -> str:
    """Return a Lark grammar with the JSON options inserted in each `%json`."""
    parts, place = [] if "%llguidance" in form.lark else [PLAIN], 0
    for match in re.finditer(r"%json\s*(?=\{)", form.lark):
        schema, end = json.JSONDecoder().raw_decode(form.lark, match.end())
        parts += [form.lark[place : match.end()], _with_options(schema, form.max_whitespace, form.spaced_json)]
        place = end
    return "".join([*parts, form.lark[place:]])


def _check_lark(form: Lark) -> None:
    """Refuse unsupported rule attributes, token ids, and unsupported schema keywords within `%json`."""
    lark = form.lark
    if lark.lstrip().startswith("{"):  # the compiler's own format, in which schemas would go unchecked
        raise WorkbenchError("response_format.lark: is JSON, and no grammar in Lark; begin it with a rule")
    bare = re.sub(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*', '""', lark)
    attribute = re.search(rf"\[\s*(?:[^\]]*,\s*)?({'|'.join(NOT_CARRIED_OUT)})\b", bare)
    if attribute:
        raise WorkbenchError(f"response_format.lark: the attribute {attribute[1]!r} is not supported; leave it out")
    if "<[" in bare:
        raise WorkbenchError("response_format.lark: token ids <[...]> are not supported; name tokens, as <|name|>")
    for place, label, schema in _schemas(form):
        try:
            check_keywords(schema)
        except WorkbenchError as error:
            where = label or f"response_format.lark: character {place}: %json"
            raise WorkbenchError(str(error).replace(WHERE, where, 1)) from None


def _schemas(form: Lark) -> Iterator[tuple[int, str, Any]]:
    """Yield the position, label and value of every `%json` of a grammar (WorkbenchError for invalid JSON)."""
    for match in re.finditer(r"(?:^(\w+): )?%json\s*", form.lark, re.MULTILINE):
        try:
            schema, _ = json.JSONDecoder().raw_decode(form.lark, match.end())
            check_json(schema)
        except (ValueError, RecursionError) as error:
            raise WorkbenchError(f"response_format.lark: character {match.end()}: %json: {error}") from None
        yield match.end(), form.labels.get(match[1] or "", ""), schema


def quotes_end(form: ResponseFormat) -> bool:
    """Return whether free text of the grammar ends with a quote, as in JSON."""
    return isinstance(form, JSONSchema) or (isinstance(form, Lark) and "%json" in form.lark)


def hints_of(form: ResponseFormat) -> list[bytes]:
    """Return texts that a search for a completion tries in free text: for each regular expression, a shortest text that
    it matches.
    """
    if isinstance(form, Regex):
        patterns = [form.regex]
    elif isinstance(form, Lark):
        patterns = re.findall(r"/((?:[^/\\\n]|\\.)+)/", form.lark)
    elif isinstance(form, JSONSchema):
        each = [schema for _, schema in subschemas(form.json_schema) if isinstance(schema, dict)]
        patterns = [schema["pattern"] for schema in each if isinstance(schema.get("pattern"), str)]
        patterns += [key for schema in each for key in schema.get("patternProperties", {})]
        patterns += [FORMAT_PATTERNS[name] for schema in each if (name := schema.get("format")) in FORMAT_PATTERNS]
    else:
        patterns = []
    hints = {text for pattern in patterns if (text := shortest_match(pattern))}
    return [each.encode() for each in sorted(hints, key=lambda text: (len(text), text))]


def _where(form: ResponseFormat) -> str:
    return f"response_format.{form.kind}"


def error_sentence(error: str) -> str:
    """Return the compiler's message, without the quoted source of the grammar and the position in it."""
    error = error.replace("<non-verbose/>", "").split("\n   1 |")[0].split("while processing json-schema:")[0]
    error = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error)
    return " ".join(error.split())[:500] or "its first mask allows no token"
