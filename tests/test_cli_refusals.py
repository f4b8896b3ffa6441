"""An error of any command is one line on stderr and exit code 2; options that do not go together are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command_line import cli, refused
from tests.offline.batches import line, written
from workbench.lab import start

EXPERIMENT = "question: q\nworkload: {kind: random}\n"
BATCH = [line(name, prompt="def f(", max_tokens=4, temperature=0) for name in "ab"]
REFUSALS = [
    ("generate '' --set backend=eager", "the prompt is empty"),
    ("generate x --model demmo", "no model 'demmo'"),
    ("generate x --set backend=egaer", "unknown backend 'egaer'; did you mean 'eager'?; known here: auto, eager"),
    ("generate x --set model.dtype=int7", "model.dtype: Input should be 'auto', 'float32'"),
    ("generate x --temperature nan", "sampling: temperature: "),
    ("generate x --max-tokens -1", "max_tokens: Input should be greater than or equal to 1"),
    ("generate x --set sampling.stop=[\\'\\']", "a stop string must not be empty"),
    ("generate x --tempreature 1", "No such option: --tempreature"),
    ("generate", "Missing argument"),
    ("generate x --max-tokens many", "Invalid value for '--max-tokens'"),
    ("generate x --set speculate=drafts", "speculate.kind: 'drafts' is unknown; did you mean 'draft'?"),
    ("generate x --set sampling=3", "--set sampling=3: is a group of settings; write sampling.KEY=VALUE"),
    ("generate x --set workload.kind=random", "no setting 'workload'"),
    ("agent x --set limits.round=3 --set backend=eager", "limits: round: unknown key; did you mean 'rounds'"),
    ("genrate x", "No such command 'genrate'"),
    ("run nowhere.yaml", "nowhere.yaml: cannot read the experiment"),
    ("run small.yaml --set sampling", "write it as path=value"),
    ("run small.yaml --set backend=egaer", "unknown backend"),
    ("run small.yaml --out small.yaml", "output folder small.yaml: cannot be written"),
    ("inspect nowhere", "run nowhere: no such folder"),
    ("inspect .", "this is no run folder"),
    ("reproduce nowhere", "run nowhere: no such folder"),
    ("batch none.jsonl out.jsonl", "batch none.jsonl: cannot be read"),
    ("batch in.jsonl in.jsonl --model demo-draft", "must go to another file"),
    ("batch in.jsonl no/out.jsonl --model demo-draft", "output no/out.jsonl: cannot be written"),
    ("batch in.jsonl out.jsonl --set cache.page=3", "cache.page: unknown key"),
    ("batch in.jsonl out.jsonl --model unknown", "no model 'unknown'"),
    ("batch in.jsonl out.jsonl --set backend=fast", "fast"),
    ("batch in.jsonl old.jsonl --model demo-draft", "line 1: answers another batch"),
    ("capacity azur", "did you mean 'azure'?"),
    ("capacity azure --share 0", "share 0, seconds 60: share must be in (0, 1]"),
    ("capacity azure --seconds -1", "seconds -1: share must be in (0, 1] and"),
    ("capacity azure --users 0", "0 users"),
    ("capacity azure --users 5 --peak 0.5", "a peak of at least 1"),
    ("capacity azure --per-hour 2", "--per-hour 2: must be 0 or more, and needs --users"),
    ("capacity azure --set measure.slo.tpot=0.001 --seconds 2", "even a single request misses the SLO"),
    ("chat a --tool no.such:thing", "--tool no.such:thing: cannot be imported"),
    ("chat a --tool json:dump5", "json has no 'dump5'"),
    ("chat a --set backend=eager --model shape:tiny --tool tests.test_cli_chat:double", "this model has no tokenizer"),
    ("chat a --schema bad.json", "bad.json: is not JSON"),
    ("chat a --schema none.json", "cannot be read"),
    ("model check nowhere", "no model 'nowhere'"),
    ("claims --verdict refused", "did you mean 'refuted'"),
    ("cost article-b", "no such table; did you mean"),
    ("cost --set trace=azure --set days=2", "days: is given by the trace"),
    ("cost --set trace=none.csv", "trace none.csv: cannot be read"),
    ("cost --per-hour 2", "and --tokens-per-s or --run"),
    ("cost --per-hour 2 --tokens-per-s 2 --set days=2", "not to a machine's tokens"),
    ("cost --tokens-per-s 2", "give --per-hour"),
    ("cost --per-hour 2 --tokens-per-s 0", "a rate above 0"),
    ("cost --per-hour 2 --run nowhere", "run nowhere: no such folder"),
    ("cost --set arrivals=sometimes", "arrivals: Input should be 'even' or 'poisson'"),
    ("cost --set requests=0", "requests: Input should be greater than or equal to 1"),
    ("kernels show rms_nrom", "unknown operator 'rms_nrom'; did you mean 'rms_norm'?"),
    ("kernels show rms_norm --backend egaer", "unknown backend 'egaer'; did you mean 'eager'?"),
    ("kernels show rms_norm --backend eager --stage sorce", "did you mean 'source'?"),
    ("kernels show rms_norm --case 1x57", "unknown case of rms_norm '1x57'"),
    ("kernels check --operator rotery", "did you mean 'rotary'?"),
    ("kernels ahead --target arch64", "unknown target 'arch64'; did you mean 'aarch64'?"),
    ("kernels bench --backend mlri", "did you mean 'mlir'?"),
    ("kernels bench --operator rotary --case 1x1", "unknown timed case '1x1'"),
    ("kernels show decode_step --case a", "--case: has no effect: decode_step has a --model"),
    ("kernels show rms_norm --rows 2", "--rows, --set: have no effect: only decode_step has them"),
    ("kernels show decode_step --backend inductor", "only backend mlir compiles a step as one function"),
    ("kernels show decode_step --backend mlri", "did you mean 'mlir'?"),
    ("kernels show decode_step --set model.weights=int3", "did you mean 'int8'?"),
    ("kernels show decode_step --rows 0", "Invalid value for '--rows'"),
    ("kernels lsit", "No such command 'lsit'"),
    ("bench demo --depth -1", "Invalid value for '--depth'"),
    ("bench demo --batch 0", "Invalid value for '--batch'"),
    ("bench demo --set measure.rounds=0", "measure.rounds: Input should be greater than or equal to 1"),
    ("bench demo --set sampling.temperature=1", "--set sampling.temperature: has no effect on `workbench bench`"),
    ("model memory demo --set parallel.tensor=2", "--set parallel.tensor: has no effect"),
    ("bench demo --depth 100", "depth 100: must be a multiple of 512"),
    ("bench shape:tyni", "no shape 'tyni'"),
    ("bench nowhere", "no model 'nowhere'"),
    ("keys revoke nothing --file keys.json", "has no such key"),
    ("lab --folder nowhere", "no such folder"),
    ("simulate nowhere.csv", "trace 'nowhere.csv': there is no such file; give a file, or azure or mooncake"),
    ("simulate azur", "did you mean 'azure'?"),
    ("simulate azure --set executor.router=best", "executor.router"),
    ("simulate azure --set executor.hardware=b100", "no hardware 'b100'; did you mean"),
    ("simulate azure --load 0", "--load 0.0: must be above 0"),
    ("simulate azure --set cache.page=3", "cache.page"),
    ("simulate azure --model shape:llama-3.1-70b", "set more gpus"),
    ("top ftp://a", "'ftp://a' is not a server's address"),
    ("top http://", "'http://' is not a server's address"),
    ("top 127.0.0.1:none", "'127.0.0.1:none' is not a server's address"),
    ("usage --file usage.sqlite", "there is no such file; name the `accounting.file` of a gateway"),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS, ids=[words for words, _ in REFUSALS])
def test_an_error_is_one_line_and_code_2(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is made or changed."""
    monkeypatch.chdir(tmp_path)
    written(BATCH, Path("in.jsonl"))
    texts = {"bad.json": "{", "small.yaml": EXPERIMENT, "notebooks/01_one.py": "# %%\n"}
    texts |= {"old.jsonl": '{"id": "batch_req_0", "response": {"status_code": 200}}\n'}
    Path("notebooks").mkdir()
    for name, text in texts.items():
        Path(name).write_text(text)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert message in refused(words)
    assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", ["--debug inspect nowhere", "inspect nowhere --debug"])
def test_debug_shows_the_traceback(words: str) -> None:
    ran = cli(words, code=2)
    assert ran.out == "" and ran.err.startswith("Traceback")
    assert "run nowhere: no such folder" in ran.err.splitlines()[-1]


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    assert "pip install 'inference-workbench[lab]'" in refused("lab")
