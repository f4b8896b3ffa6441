"""Figures of claims on text and tokens: round trips, counts and speed; the contents and the order of a prompt."""

from __future__ import annotations

import math
import time
from itertools import islice
from random import Random
from statistics import median

from workbench.claims.break_even import RooflineMachine

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


def reading() -> dict[str, float]:
    """Return the share of texts that come back from the demo's tokenizer, and the bits a byte of code in another
    tokenizer's ids over those in its own. The other is the bytes', whose ids are all entries of the demo's too."""
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

    own_bits, other_bits = bits(own.encode(CODE)), bits(other.encode(CODE))
    return {
        "come_back_share": sum(own.decode(own.encode(text)) == text for text in texts) / len(texts),
        "bits_times": other_bits / own_bits,
        "bits_per_byte": own_bits,
        "bits_per_byte_other": other_bits,
        "unknown_ids": sum(i >= other.vocab_size for i in own.encode(CODE)) / len(own.encode(CODE)),
    }


def counting() -> dict[str, float]:
    """Return characters and words a token of English by the demo's tokenizer (4,096 entries, learned from Python),
    characters a token of code over those of English, and tokens a word of other languages over English, at least."""
    from workbench.engine.loaded_model import BUNDLED_MODELS
    from workbench.prompt.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(BUNDLED_MODELS["demo"])
    assert tokenizer is not None
    texts = {**ARTICLE, "code": CODE}
    tokens = {name: len(tokenizer.encode(text)) for name, text in texts.items()}
    characters = {name: len(text) / tokens[name] for name, text in texts.items()}
    words = {name: len(text.split()) / tokens[name] for name, text in texts.items()}
    others = {f"tokens a word, {name}": words["English"] / words[name] for name in ARTICLE if name != "English"}
    return {
        "characters_per_token": characters["English"],
        "words_per_token": words["English"],
        "code_characters_times": characters["code"] / characters["English"],
        "least_tokens_times_elsewhere": min(others.values()),
        **others,
    }


def tokenizer_speed(quick: bool, model: str = "demo") -> dict[str, float]:
    """Return tokens a second of the tokenizer in one thread, and its time over the prefill's of the same tokens: of the
    demo model here and of Llama 3.1 8B on an H100 by the roofline, and the larger of the two."""
    from workbench.engine.load import load
    from workbench.request import Request, SamplingParameters
    from workbench.trace.events import Stepped

    runner = load(model, pages=32)
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
    rate, prefill = median(rates), median(prefills[1:])
    shares = {"share_of_prefill": prefill / rate, "share_of_h100_prefill": 1000 / sheet.prefill(1000) / rate}
    return {"tokens_per_s": rate, "largest_share": max(shares.values()), **shares}


def turns() -> dict[str, float]:
    """Return, for next turns of Mooncake's conversations (a fitted generator), the median tokens before the message and
    the message's share of the prompt. Recorded traffic says nothing of tool schemas and of the order of a prompt's
    parts."""
    from workbench.simulate.generators import mooncake_conversations

    before, share, last = [], [], {}
    for turn in islice(mooncake_conversations(Random(0)), 12_000):
        old = last.get(turn.session)
        if old is not None and turn.prompt_tokens > (stood := old.prompt_tokens + old.output_tokens):
            before.append(stood)
            share.append(1 - stood / turn.prompt_tokens)
        last[turn.session] = turn
    return {"message_share": median(share), "order_is_seen": 0, "tokens_before": median(before), "turns": len(before)}


def orders() -> dict[str, float]:
    """Return the share of prompt tokens found in the prefix index with the static part first, how much larger that is
    than with the dynamic part first, and than three times that."""
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
    first, last = found["static first"], found["dynamic first"]
    return {"hits_static_first": first, "more_hits": first - last, "more_than_three_times": first - 3 * last}


def too_long() -> dict[str, float]:
    """Return whether a prompt longer than the context is refused, or loses its oldest tokens and is answered, as was
    asked; and the tokens that come, of 40, after a prompt that leaves room for 10."""
    from workbench.engine.load import load
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters

    ends = {}
    for overflow in ("refuse", "cut_oldest"):
        runner = load("shape:tiny", backend="eager", overflow=overflow)
        context = runner.model.spec.max_position_embeddings
        sampling = SamplingParameters(temperature=0, max_tokens=40, ignore_eos=True)
        long = Request("long", tuple(i % 257 for i in range(context + 50)), sampling)
        near = Request("near", tuple(i % 257 for i in range(context - 10)), sampling)
        ends[overflow] = generate(runner, [long, near])
    cut, near_end = ends["cut_oldest"]["long"], ends["cut_oldest"]["near"]
    return {
        "refused": str(ends["refuse"]["long"].reason) == "refused",
        "cut_and_answered": str(cut.reason) == "length" and len(cut.token_ids) == 40,
        "ends_by_length": str(near_end.reason) == "length",
        "tokens_near_the_end": len(near_end.token_ids),
    }
