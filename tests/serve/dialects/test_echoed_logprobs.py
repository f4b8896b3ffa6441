"""Log-probabilities of echoed prompts: what lm-eval's `local-completions` asks and reads, against the engine's own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import httpx2
import pytest
import torch

import workbench
from tests.patience import limit
from tests.serve.serving import Json
from workbench.engine.runner import Runner
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters
from workbench.serve.server import Server, serve
from workbench.trace.events import Finished

BASE = "def area(width, height):\n    "
CONTINUATIONS = ("return width * height\n", "return width\n", "import café\n", "pass")
SETTINGS = {
    "plain": {"prefix": "off", "max_num_seqs": 1},
    "cached and batched": {"prefix": "radix", "page_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 48},
}


@pytest.fixture(scope="module", params=SETTINGS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    runner = workbench.load("demo", backend="eager", dtype="float32", **SETTINGS[request.param])
    with serve(runner) as found:
        yield found


def runner_of(server: Server) -> Runner:
    runner = server.service.models["demo"].runner
    assert isinstance(runner, Runner)
    return runner


def payload(prompts: Sequence[Sequence[int]]) -> Json:
    """Return the body that lm-eval 0.4.13 sends (`LocalCompletionsAPI._create_payload`)."""
    return {
        "model": "demo", "prompt": [list(each) for each in prompts], "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    }  # fmt: skip


def read_scores(answer: Json, contexts: Sequence[int]) -> list[tuple[float, bool]]:
    """Return sums of log-probabilities and whether each token is the likeliest, as lm-eval reads them
    (`LocalCompletionsAPI.parse_logprobs`): the last entry is that of the one new token."""
    found = []
    for choice, begin in zip(sorted(answer["choices"], key=lambda each: each["index"]), contexts, strict=True):
        values = choice["logprobs"]["token_logprobs"][begin:-1]
        tops = choice["logprobs"]["top_logprobs"][begin:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    return found


def ask(server: Server, body: Json) -> Json:
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=limit(60))
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts_of(server: Server) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return prompts with a beginning in common, and the length of the context of each."""
    tokenizer = runner_of(server).tokenizer
    assert tokenizer is not None
    context = tuple(tokenizer.encode(BASE))
    whole = [(*context, *tokenizer.encode(each)) for each in CONTINUATIONS]
    draw = random.Random(5)
    whole += [(*context, *(draw.randrange(10, tokenizer.vocab_size) for _ in range(20))) for _ in range(3)]
    greedy = context
    for _ in range(4):
        greedy = (*greedy, int(naive.logits(runner_of(server).model, torch.tensor(greedy))[-1].argmax()))
    whole.append(greedy)  # the one continuation that is the model's own
    return whole, [len(context)] * len(whole)


def test_scores_are_those_of_the_model_in_batches_and_one_by_one(server: Server) -> None:
    prompts, contexts = texts_of(server)
    model = runner_of(server).model
    expected = []
    for ids, begin in zip(prompts, contexts, strict=True):
        rows = naive.logits(model, torch.tensor(ids), torch.float64).log_softmax(-1)
        expected.append(sum(rows[place - 1, ids[place]].item() for place in range(begin, len(ids))))
    batched = read_scores(ask(server, payload(prompts)), contexts)
    single = [
        read_scores(ask(server, payload([ids])), [begin])[0] for ids, begin in zip(prompts, contexts, strict=True)
    ]
    for found in (batched, single):
        assert [score for score, _ in found] == pytest.approx(expected, abs=2e-3)
    assert [greedy for _, greedy in batched] == [greedy for _, greedy in single]
    assert batched[-1][1] and not all(greedy for _, greedy in batched)


def test_scores_are_those_of_the_runner_in_process(server: Server) -> None:
    prompts, contexts = texts_of(server)
    sampling = SamplingParameters(max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    for ids, begin in zip(prompts, contexts, strict=True):
        answer = ask(server, payload([ids]))
        events = list(runner_of(server).stream([Request(f"own {len(ids)}", ids, sampling)]))
        (own,) = (event.prompt_logprobs for event in events if isinstance(event, Finished))
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert values[:-1] == [each.logprob for each in own] and values[0] is None
        assert len(values) == len(ids) + 1 and begin < len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_an_entry_when_the_answer_ends_at_once(server: Server, stream: bool) -> None:
    """lm-eval leaves out the last entry as that of the new token: without one it would leave out the prompt's last."""
    runner = runner_of(server)
    tokenizer = runner.tokenizer
    assert tokenizer is not None
    (end,) = runner.model.spec.eos_token_ids
    half = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xe2")
    ids = tokenizer.encode(BASE)
    for token, reason in ((end, "stop"), (half, "length"), (tokenizer.special_token_ids["<|pad|>"], "length")):
        body = payload([ids]) | {"logit_bias": {str(token): 100}, "stream": stream}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=limit(60))
        choices = [each for chunk in chunks_of(answer) for each in chunk["choices"]]
        entries = [place for each in choices for place in (each["logprobs"] or {}).get("token_logprobs", [])]
        tops = [place for each in choices for place in (each["logprobs"] or {}).get("top_logprobs", [])]
        assert len(entries) == len(tops) == len(ids) + 1
        assert entries[0] is None and tops[0] is None
        assert all(isinstance(value, float) for value in entries[1:])
        assert [each["finish_reason"] for each in choices if each["finish_reason"]] == [reason]
        shown = "\N{REPLACEMENT CHARACTER}" if token == half else ""
        assert "".join(each["text"] for each in choices) == BASE + shown


def chunks_of(answer: httpx2.Response) -> list[Json]:
    if "event-stream" not in answer.headers["content-type"]:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
