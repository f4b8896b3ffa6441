"""Claims on text and tokens: round trips, counts and speed; the contents and the order of a prompt."""

from __future__ import annotations

import math
import time
from itertools import islice
from random import Random
from statistics import median

from workbench.claims.break_even import RooflineMachine
from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    MeasurementEvidence,
    Ruling,
)

ENGINE = "this engine (any machine)"
# The first article of the Universal Declaration of Human Rights: the same sentences in each language.
ARTICLE = {
    "English": (
        "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience "
        "and should act towards one another in a spirit of brotherhood."
    ),
    "German": (
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt "
        "und sollen einander im Geist der Brüderlichkeit begegnen."
    ),
    "French": (
        "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
        "conscience et doivent agir les uns envers les autres dans un esprit de fraternité."
    ),
    "Finnish": (
        "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan. Heille on annettu järki ja "
        "omatunto, ja heidän on toimittava toisiaan kohtaan veljeyden hengessä."
    ),
}
CODE = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file without their ends."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]


class Counter:
    def __init__(self, start=0):
        self.value = start

    def increment(self, step=1):
        self.value += step
        return self.value
'''


def reading() -> EvidenceNumbers:
    """Return round trips through the demo's tokenizer, and bits a byte of code in its own ids and in another
    tokenizer's.

    The other tokenizer is the bytes', whose ids are all entries of the demo's vocabulary too.
    """
    import torch

    from workbench.engine.load import load
    from workbench.engine.loaded_model import DEMO_FOLDER
    from workbench.oracle.naive import logits
    from workbench.prompt.tokenization.tokenizer import Tokenizer

    runner = load("demo", dtype="float32", backend="eager", pages=1)
    own, other = runner.tokenizer, Tokenizer.from_folder(DEMO_FOLDER / "bytes")
    assert own is not None and other is not None
    texts = [*ARTICLE.values(), CODE, "\u65e5\u672c\u8a9e \U0001f642 \x00"]

    def bits(ids: list[int]) -> float:
        with torch.no_grad():
            rows = logits(runner.model, torch.tensor(ids), torch.float32)[:-1].log_softmax(-1)
        nats = -rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum().item()
        return nats / math.log(2) / len(CODE.encode())

    strangers = own.decode(i for i in other.encode(CODE) if i < own.vocab_size)
    return {
        "texts": len(texts),
        "same_again": sum(own.decode(own.encode(text)) == text for text in texts),
        "unknown_ids": sum(i >= other.vocab_size for i in own.encode(CODE)) / len(own.encode(CODE)),
        "bits_a_byte": bits(own.encode(CODE)),
        "bits_a_byte_other": bits(other.encode(CODE)),
        "read_by_own": strangers == CODE,
    }


def roundtrip(found: EvidenceNumbers) -> Ruling:
    """Every text comes back, and the model needs at least twice the bits a byte for another tokenizer's ids of the same
    text: holds; every text, but the ids do not matter so much: with limits; else refuted."""
    times = found["bits_a_byte_other"] / found["bits_a_byte"]
    all_back = found["same_again"] == found["texts"]
    return Ruling(
        "refuted" if not all_back else "holds" if times >= 2 else "holds-with-limits",
        f"{found['same_again']} of {found['texts']} texts come back; {found['bits_a_byte']:.2f} bits a byte of code in "
        f"its own ids, {found['bits_a_byte_other']:.2f} in another tokenizer's, which does not know "
        f"{found['unknown_ids']:.0%} of its own",
        f"the wrong ids cost {times:.1f} times the bits",
        {"bits a byte, own ids": found["bits_a_byte"], "bits a byte, another's": found["bits_a_byte_other"]},
    )


def counting() -> EvidenceNumbers:
    from workbench.engine.loaded_model import BUNDLED_MODELS
    from workbench.prompt.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(BUNDLED_MODELS["demo"])
    assert tokenizer is not None
    found = {}
    for name, text in {**ARTICLE, "code": CODE}.items():
        tokens = len(tokenizer.encode(text))
        found[name] = {"characters": len(text) / tokens, "words": len(text.split()) / tokens}
    return found


def ratio(found: EvidenceNumbers) -> Ruling:
    """English has 3.5 to 4.5 characters and 0.65 to 0.85 words a token, every other language takes at least 1.2 times
    the tokens a word, and code has as many characters a token as English: holds; the other languages alone: with
    limits; else refuted."""
    english, code = found["English"], found["code"]
    others = {name: english["words"] / one["words"] for name, one in found.items() if name not in ("English", "code")}
    dearer = min(others.values()) >= 1.2
    near = 3.5 <= english["characters"] <= 4.5 and 0.65 <= english["words"] <= 0.85
    efficient = code["characters"] >= english["characters"]
    return Ruling(
        "refuted" if not dearer else "holds" if near and efficient else "holds-with-limits",
        f"English {english['characters']:.2f} characters and {english['words']:.2f} words a token, code "
        f"{code['characters']:.2f} characters; tokens a word against English: "
        + ", ".join(f"{name} {times:.1f} times" for name, times in others.items()),
        f"English is {'' if near else 'not '}near 4 characters and 0.75 words, code {'' if efficient else 'not '}as "
        "efficient, with the demo's tokenizer: 4,096 entries that were learned from Python",
        {"characters a token, English": english["characters"], "words a token, English": english["words"],
         "characters a token, code": code["characters"]},
    )  # fmt: skip


def speed(quick: bool) -> EvidenceNumbers:
    """Return tokens a second of the tokenizer in one thread, of the demo model's prefill, and of an H100's by the
    roofline.
    """
    from workbench.engine.load import load
    from workbench.request import Request, SamplingParameters
    from workbench.trace.events import Stepped

    runner = load("demo", pages=32)
    assert runner.tokenizer is not None
    text = (CODE + ARTICLE["English"] + "\n") * (20 if quick else 200)
    rates, prefills = [], []
    for turn in range(3 if quick else 9):
        began = time.perf_counter()
        ids = runner.tokenizer.encode(text)
        rates.append(len(ids) / (time.perf_counter() - began))
        request = Request(str(turn), tuple(ids[:512]), SamplingParameters(temperature=0, max_tokens=1))
        steps = [event for event in runner.stream([request]) if isinstance(event, Stepped)]
        prefills.append(512 / sum(step.wall_seconds for step in steps))
    sheet = RooflineMachine.build("llama-3.1-8b", "h100")
    return {
        "tokens_per_s": median(rates),
        "prefill_tokens_per_s": median(prefills[1:]),
        "h100_prefill_tokens_per_s": 1000 / sheet.prefill(1000),
    }


def cheap(found: EvidenceNumbers) -> Ruling:
    """At least a million tokens a second, and at most 1% of the prefill's time for the same tokens, here and of Llama
    3.1 8B on an H100 by the roofline: holds; at most 10% in both: with limits; else refuted."""
    rate = found["tokens_per_s"]
    shares = found["prefill_tokens_per_s"] / rate, found["h100_prefill_tokens_per_s"] / rate
    holds = rate >= 1e6 and max(shares) <= 0.01
    return Ruling(
        "holds" if holds else "holds-with-limits" if max(shares) <= 0.1 else "refuted",
        f"{rate:,.0f} tokens/s in one thread; {shares[0]:.1%} of the demo model's prefill of the same tokens here, "
        f"{shares[1]:.1%} of Llama 3.1 8B's on an H100 by the roofline",
        f"one thread gives {rate / 1e6:.1f} million tokens/s, which a quick accelerator's prefill comes near",
        {"tokens a second": rate, "share of the demo's prefill": shares[0], "share of an H100's prefill": shares[1]},
    )  # fmt: skip


def turns() -> EvidenceNumbers:
    """Return, for next turns of Mooncake's conversations (a fitted generator), the tokens before the message and new
    ones.
    """
    from workbench.simulate.generators import mooncake_conversations

    before, share, last = [], [], {}
    for turn in islice(mooncake_conversations(Random(0)), 12_000):
        old = last.get(turn.session)
        if old is not None and turn.prompt_tokens > (stood := old.prompt_tokens + old.output_tokens):
            before.append(stood)
            share.append(1 - stood / turn.prompt_tokens)
        last[turn.session] = turn
    return {"turns": len(before), "before_p50": median(before), "message_share_p50": median(share)}


def assembly(found: EvidenceNumbers) -> Ruling:
    """In the median of next turns the user adds at most half of the prompt: with limits (recorded traffic
    says nothing of schemas and order); more: refuted. It cannot hold without limits."""
    small = found["message_share_p50"] <= 0.5
    return Ruling(
        "holds-with-limits" if small else "refuted",
        f"{found['turns']:,} next turns of conversations: {found['before_p50']:,.0f} tokens stand before the "
        f"message, which is {found['message_share_p50']:.1%} of the prompt, in the median",
        "as Mooncake's conversations show it: no coding agent, and the order is each template's choice",
        {"tokens before the message, median": found["before_p50"], "the message's share": found["message_share_p50"]},
    )  # fmt: skip


def orders() -> EvidenceNumbers:
    """Return the share of prompt tokens found in the prefix index, for a static and a dynamic part in either order."""
    from workbench.engine.load import load
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters
    from workbench.trace.recorder import Recorder

    static, own, count = list(range(160)), 32, 6
    found = {}
    for order in ("static first", "dynamic first"):
        recorder = Recorder()
        runner = load("shape:tiny", backend="eager", prefix="radix", page_size=16, pages=64, listener=recorder.record)
        for number in range(count):
            dynamic = [(200 + 7 * number + at) % 257 for at in range(own)]
            ids = static + dynamic if order == "static first" else dynamic + static
            generate(runner, [Request(str(number), tuple(ids), SamplingParameters(temperature=0, max_tokens=1))])
        cached = sum(row["cached_tokens"] for row in recorder.requests())
        found[order] = cached / (count * (len(static) + own))
    return found


def static_first(found: EvidenceNumbers) -> Ruling:
    """Of the prompts' tokens at least three times the share, and half at least, comes from the cache with what is
    static first: holds; more than the other way round: with limits; else refuted."""
    first, last = found["static first"], found["dynamic first"]
    return Ruling(
        "holds" if first >= max(0.5, 3 * last) else "holds-with-limits" if first > last else "refuted",
        f"{first:.0%} of prompt tokens from the cache with the static part first, {last:.0%} with it last",
        "by less than three times",
        {"hits, static first": first, "hits, dynamic first": last},
    )


def too_long() -> EvidenceNumbers:
    """Return the ends of a prompt longer than the context under both overflow settings, and of one whose output is too
    long.
    """
    from workbench.engine.load import load
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters

    found: dict[str, object] = {}
    for overflow in ("refuse", "cut_oldest"):
        runner = load("shape:tiny", backend="eager", overflow=overflow)
        context = runner.model.spec.max_position_embeddings
        sampling = SamplingParameters(temperature=0, max_tokens=40, ignore_eos=True)
        long = Request("long", tuple(i % 257 for i in range(context + 50)), sampling)
        near = Request("near", tuple(i % 257 for i in range(context - 10)), sampling)
        ends = generate(runner, [long, near])
        found |= {"context": context, overflow: str(ends["long"].reason), "near": str(ends["near"].reason)}
        found |= {f"{overflow}_tokens": len(ends["long"].token_ids), "near_tokens": len(ends["near"].token_ids)}
    return found


def capped(found: EvidenceNumbers) -> Ruling:
    """A prompt beyond the context is refused, or loses its oldest tokens and is answered, as was asked; and no output
    goes past the context: holds; else refuted."""
    right = found["refuse"] == "refused" and found["cut_oldest"] == "length" and found["cut_oldest_tokens"] == 40
    right = right and found["near"] == "length" and found["near_tokens"] <= 10
    return Ruling(
        "holds" if right else "refuted",
        f"50 tokens more than the context of {found['context']}: {found['refuse']}, or with the oldest cut answered by "
        f"{found['cut_oldest_tokens']}; 10 less, and 40 asked: {found['near_tokens']} come",
    )


READ = {"texts": 6, "same_again": 6, "bits_a_byte": 1.0, "bits_a_byte_other": 4.0, "unknown_ids": 0.9}
ENGLISH, GERMAN, EASY = ({"characters": c, "words": w} for c, w in ((4.0, 0.75), (3.0, 0.5), (4.0, 0.3)))
RATES = {"prefill_tokens_per_s": 5e4, "h100_prefill_tokens_per_s": 7e4}
CUT = {"context": 256, "refuse": "refused", "refuse_tokens": 0, "cut_oldest": "length", "cut_oldest_tokens": 40,
       "near": "length", "near_tokens": 10}  # fmt: skip

CLAIMS = (
    Claim(
        id="tok-roundtrip",
        says="Text becomes ids by a merge table fixed at training; with another tokenizer a model receives garbage",
        sources=(
            ClaimSource("B", "without figures"),
            ClaimSource("C", "without figures"),
            ClaimSource("D", "without figures"),
        ),
        trials=(
            ClaimTrial(
                CalculationEvidence(reading, ENGINE),
                roundtrip,
                examples={
                    "holds": READ,
                    "holds-with-limits": READ | {"bits_a_byte_other": 1.5},
                    "refuted": READ | {"same_again": 5},
                },
            ),
        ),
    ),
    Claim(
        id="tok-ratio",
        says="English has about 4 characters or 0.75 words a token; code is token-efficient; other languages need more",
        sources=(ClaimSource("B", "4 characters, 0.75 words (of GPT-4o's tokenizer, which is o200k, not cl100k)"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(counting, "the demo's tokenizer (any machine)"),
                ratio,
                examples={
                    "holds": {"English": ENGLISH, "German": GERMAN, "code": EASY},
                    "holds-with-limits": {"English": GERMAN, "German": EASY, "code": EASY},
                    "refuted": {"English": ENGLISH, "German": ENGLISH, "code": EASY},
                },
            ),  # fmt: skip
        ),
    ),
    Claim(
        id="tok-cheap",
        says="Tokenization runs on the CPU at millions of tokens a second and is negligible next to the forward pass",
        sources=(ClaimSource("C", "millions of tokens a second"), ClaimSource("D", "negligible")),
        trials=(
            ClaimTrial(
                MeasurementEvidence("tokenizer_speed", speed),
                cheap,
                examples={
                    "holds": RATES | {"tokens_per_s": 1e7},
                    "holds-with-limits": RATES | {"tokens_per_s": 9e5},
                    "refuted": RATES | {"tokens_per_s": 1e5},
                },
            ),
        ),
    ),
    Claim(
        id="prompt-assembly",
        says="A model sees system prompt, tools, history, roles, then the message, which is the smallest part",
        sources=(ClaimSource("D", "5,000 to 50,000 tokens before the user speaks, for a coding agent"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(turns, "recorded traffic (fitted)"),
                assembly,
                examples={
                    "holds-with-limits": {"turns": 10, "before_p50": 10_000, "message_share_p50": 0.02},
                    "refuted": {"turns": 10, "before_p50": 100, "message_share_p50": 0.9},
                },
                impossible={
                    "holds": "recorded traffic says nothing of tool schemas and of the order of a prompt's parts"
                },
            ),
        ),
    ),
    Claim(
        id="prompt-static-first",
        says="Static content first and dynamic content last maximises prefix-cache hits",
        sources=(ClaimSource("B", "without figures"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(orders, ENGINE),
                static_first,
                examples={
                    "holds": {"static first": 0.8, "dynamic first": 0.0},
                    "holds-with-limits": {"static first": 0.4, "dynamic first": 0.2},
                    "refuted": {"static first": 0.2, "dynamic first": 0.2},
                },
            ),
        ),
    ),
    Claim(
        id="ctx-truncate",
        says="Prompt and output end at the context window; what exceeds it is refused, or the oldest tokens are cut",
        sources=(ClaimSource("C", "without figures"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(too_long, ENGINE),
                capped,
                examples={"holds": CUT, "refuted": CUT | {"refuse": "length", "near_tokens": 40}},
                impossible={"holds-with-limits": "what exceeds the context is refused or cut as asked, or it is not"},
            ),  # fmt: skip
        ),
    ),
)
