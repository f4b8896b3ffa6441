"""`tokenizer.model` as a tokenizer: ids and texts are those of the sentencepiece package."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt.hard_strings import HARD, TEXTS, TRAINING
from tests.prompt.vocabularies import PIECE_KINDS, trained_pieces
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.sentencepiece_model import NORMAL, SentencePieces, read_model_file
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tokenization.tokenizer_files import read_tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="the yardstick: pip install sentencepiece")

DEFINED = HARD + ["a<|mark|>b", "x\n\n\n\ny", "f(x)(x) ", "<ctrl>", "<|mark|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


def both(kind: str, folder: Path) -> tuple[Any, Tokenizer]:
    path = folder / f"{kind}.model"
    if not path.exists():
        path.write_bytes(trained_pieces(kind))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained_pieces(kind))
    return theirs, Tokenizer(read_model_file(path).tokenizer())


def assert_equal(theirs: Any, ours: Tokenizer, text: str) -> None:
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", PIECE_KINDS)
def test_hard_strings(folder: Path, kind: str) -> None:
    theirs, ours = both(kind, folder)
    assert ours.vocab_size == theirs.get_piece_size()
    assert all(ours.id_to_token(id) == theirs.id_to_piece(id) for id in range(ours.vocab_size))
    for text in DEFINED:
        assert_equal(theirs, ours, text)


@pytest.mark.parametrize("kind", ["bpe as Llama", "bpe with defined symbols", "unigram"])
def test_any_text(folder: Path, kind: str) -> None:
    theirs, ours = both(kind, folder)

    @settings(max_examples=tries(150), deadline=None)
    @given(TEXTS)
    def law(text: str) -> None:
        assert_equal(theirs, ours, text)

    law()


def test_of_equal_scores_the_longest_left_piece_goes_first() -> None:
    pieces = SentencePieces(["_", "___", "__"], [0.0] * 3, [NORMAL] * 3)
    assert pieces.merges({"_": 0, "___": 1, "__": 2}) == [("__", "_"), ("_", "_"), ("_", "__")]


def test_the_begin_token_goes_before_a_text_and_controls_are_not_read(folder: Path) -> None:
    theirs, ours = both("bpe with defined symbols", folder)
    assert ours.bos_token_ids == (theirs.bos_id(),)
    control = theirs.piece_to_id("<ctrl>")
    assert control not in ours.encode("a<ctrl>") and control in ours.encode("a<ctrl>", special=True)
    assert ours.special_token_ids["</s>"] == theirs.eos_id()


def test_mistrals_own_models(tmp_path: Path) -> None:
    package = pytest.importorskip("mistral_common", reason="real vocabularies: pip install mistral-common")
    data = Path(package.__file__).parent / "data"
    for name in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"):
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(data / name))
        (tmp_path / "tokenizer.model").write_bytes((data / name).read_bytes())
        ours = read_tokenizer(tmp_path)
        assert ours is not None
        for text in [*HARD, *("x" + " " * count for count in range(70))]:
            assert_equal(theirs, ours, text)


def test_the_config_says_whether_the_begin_token_goes_before_a_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained_pieces("bpe as Llama"))
    for config, right in (("{}", (1,)), ('{"add_bos_token": true}', (1,)), ('{"add_bos_token": false}', ())):
        (tmp_path / "tokenizer_config.json").write_text(config)
        ours = read_tokenizer(tmp_path)
        assert ours is not None and ours.bos_token_ids == right, config
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": "no"}')
    with pytest.raises(WorkbenchError, match="add_bos_token is 'no'; it must be true or false"):
        read_tokenizer(tmp_path)


def test_added_tokens_of_the_config(folder: Path, tmp_path: Path) -> None:
    theirs, _ = both("bpe as Llama", folder)
    (tmp_path / "tokenizer.model").write_bytes(trained_pieces("bpe as Llama"))
    added = '{"content": "<|user|>", "special": true}'
    config = '{"added_tokens_decoder": {"0": {"content": "<unk>", "special": true}, "%d": ' + added + "}}"
    (tmp_path / "tokenizer_config.json").write_text(config % theirs.get_piece_size())
    ours = read_tokenizer(tmp_path)
    assert ours is not None and ours.special_token_ids["<|user|>"] == theirs.get_piece_size()
    (tmp_path / "tokenizer_config.json").write_text(config % 9999)
    with pytest.raises(WorkbenchError, match="gives '<|user|>' id 9999"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(WorkbenchError, match="no table of tokens"):
        read_tokenizer(tmp_path)


@settings(max_examples=tries(200), deadline=None)
@given(data=st.data())
def test_damaged_files_are_one_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.model"
    good = trained_pieces("bpe as Llama")
    start, length = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 20))
    path.write_bytes(good[:start] + data.draw(st.binary(max_size=12)) + good[start + length :])
    try:
        pieces = read_model_file(path)
    except WorkbenchError as error:
        assert str(path) in str(error)
    else:
        assert len(pieces.pieces) == len(pieces.scores) == len(pieces.kinds)


def test_what_is_not_carried_out(tmp_path: Path) -> None:
    for changes, message in (
        ({"model_type": "word"}, "model_type is 3"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix is 1"),
    ):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINING), model_writer=model, vocab_size=90, hard_vocab_limit=False,
            character_coverage=0.98, minloglevel=2, **changes,
        )  # fmt: skip
        (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
        with pytest.raises(WorkbenchError, match=message):
            read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # tiktoken's ranks, as Llama 3 has them
    with pytest.raises(WorkbenchError, match="no sentencepiece model"):
        read_tokenizer(tmp_path)
