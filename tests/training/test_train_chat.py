"""The recipe of demo-chat: texts packed end to end do not meet, only replies are learned, and a run goes on exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from tests.thorough import tries
from tools.training import demo_model, train_chat
from tools.training.demo_model import Learner
from tools.training.train_chat import ChatRecipe, Packed, Texts, Training, train
from workbench.prompt.own_template import ASSISTANT, THINK, TURN

TINY = {
    **demo_model.COMMON, "vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
RECIPE = ChatRecipe(tokens=700, code=64)


@pytest.fixture(autouse=True)
def little_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code = np.arange(1_000, dtype=np.uint16) % 3_000 + 300
    monkeypatch.setattr(train_chat, "_encoded_code", lambda tokenizer, cache: code)
    monkeypatch.setattr(train_chat, "EVALUATED", 2)


@settings(max_examples=tries(15))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 9))
def test_a_text_has_the_states_that_it_has_alone(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = Learner(TINY, seed, torch.float32)
    for parameter in model.parameters():  # blocks begin as the identity: give them something to do
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    ids = torch.randint(300, (1, sum(lengths)), generator=generator)
    with torch.no_grad():
        packed = model.hidden_states(ids, lengths).split(lengths, dim=1)
        for text, states in zip(ids.split(lengths, dim=1), packed, strict=True):
            torch.testing.assert_close(states, model.hidden_states(text), rtol=1e-4, atol=1e-4)


@given(st.data())
def test_positions_that_predict_a_learned_token_of_their_own_text(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    learned = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    firsts = {0, *np.cumsum(lengths)}
    found = Packed(torch.zeros(len(learned), dtype=torch.long), torch.tensor(learned), lengths).predicting().tolist()
    assert found == [place - 1 for place, learns in enumerate(learned) if learns and place not in firsts]


def test_a_step_has_whole_texts_and_is_the_same_whenever_it_is_drawn(tmp_path: Path) -> None:
    tokenizer = train_chat.chat_tokenizer(train_chat.TARGET / "tokenizer.json")
    texts = Texts(tokenizer, RECIPE, tmp_path)
    turn = tokenizer.token_to_id(TURN)
    openings = {tokenizer.token_to_id(name) for name in (ASSISTANT, THINK)}
    for step in range(6):
        packed = texts.step(step)
        assert torch.equal(packed.ids, texts.step(step).ids)
        assert len(packed.ids) == sum(packed.lengths) <= RECIPE.tokens and packed.lengths[0] == RECIPE.code
        for text in packed.ids.split(packed.lengths)[1:]:
            assert text[0] == tokenizer.token_to_id("<|begin|>") and text[-1] == turn
        before = packed.ids[packed.predicting()[RECIPE.code - 1 :]]
        assert openings & set(before.tolist()) and turn not in before.tolist()


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    rates = [RECIPE.rate(share / 1000) for share in range(1001)]
    top = rates.index(1.0)
    assert 0 < rates[0] < rates[top - 1] and rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True) and rates[-1] == 0


def test_an_interrupted_run_ends_where_a_whole_one_does_and_its_folder_loads(tmp_path: Path) -> None:
    def training(name: str) -> Training:
        (tmp_path / name).mkdir(exist_ok=True)
        return Training(RECIPE, tmp_path / name, "cpu", torch.float32)

    whole, broken = training("whole"), training("broken")
    for made in (whole, broken):
        made.resume()
    for _ in range(4):
        whole.step(0.2)
    for _ in range(2):
        broken.step(0.2)
    broken.save()
    again = training("broken")
    again.resume()
    assert (again.steps, again.tokens) == (2, broken.tokens)
    for _ in range(2):
        again.step(0.2)
    assert again.tokens == whole.tokens
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    again.export(tmp_path / "out")
    runner = workbench.load(str(tmp_path / "out"), backend="eager", dtype="float32")
    ids = torch.arange(20, 60)
    with torch.no_grad():
        wanted = again.model(ids[None])[0]
    assert runner.tokenizer is not None and runner.tokenizer.encode("json.dumps(123)")[-2:] != []
    torch.testing.assert_close(runner.model.logits(ids), wanted, rtol=0, atol=0.15)  # weights were rounded to bfloat16


def test_a_run_ends_at_its_tokens_and_reports(tmp_path: Path) -> None:
    made = Training(RECIPE, tmp_path, "cpu", torch.float32)
    train(made, hours=2, tokens=1_500, checkpoint_minutes=60)
    lines = (tmp_path / "curve.jsonl").read_text().splitlines()
    assert 1_500 <= made.tokens < 1_500 + RECIPE.tokens and len(lines) == 2
    assert (tmp_path / "latest" / "chat_template.jinja").exists()
