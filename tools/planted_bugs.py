"""Plant bugs, one at a time, in a copy of the tree, and report the test of the short suite that catches each.

    python -m tools.planted_bugs          # for each bug the tests of what it breaks
    python -m tools.planted_bugs --whole  # the whole suite, up to its first failure
    python -m tools.planted_bugs draft    # those bugs with this word in their description

It takes minutes. `tests/test_planted_bugs.py` holds that every bug still applies.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Hypothesis would take minutes to make an example that fails a small one.
UNSHRUNK = """
from hypothesis import Phase

settings.register_profile("unshrunk", settings.get_profile("workbench"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
"""


@dataclass(frozen=True)
class PlantedBug:
    """An edit of `file`, whose text `old` occurs once; `tests` are the files of the suite that cover it."""

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Replace the old text in the tree `root`; ValueError if it does not occur exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


BUGS = (
    PlantedBug(
        "cache: a sliding window frees a page one token early",
        "workbench/kv_cache/pages.py",
        "-((self.sliding_window - 1 - position)",
        "-((self.sliding_window - 2 - position)",
        ("tests/kv_cache/test_cache_groups.py",),
    ),
    PlantedBug(
        "cache: a prefix is shared between tenants",
        "workbench/kv_cache/radix_tree.py",
        "node = self.roots.get(salt)",
        "node = next(iter(self.roots.values()), None)",
        ("tests/kv_cache/test_prefix.py", "tests/engine/test_reuse.py"),
    ),
    PlantedBug(
        "cache: a copied page has the keys, not the values",
        "workbench/kv_cache/store.py",
        "for tensor in self.page_tensors(group):\n            tensor[torch.tensor(targets)]",
        "for tensor in self.page_tensors(group)[::2]:\n            tensor[torch.tensor(targets)]",
        ("tests/engine/test_parallel_samples.py", "tests/engine/test_beam_search.py"),
    ),
    PlantedBug(
        "cache: quantized codes are rounded down",
        "compiled_kernels/quantized_attention/quantize.py",
        "codes.nan_to_num(0.0).round()",
        "codes.nan_to_num(0.0)",
        ("tests/kernels/test_quantized_pages.py", "tests/kv_cache/test_quantized.py"),
    ),
    PlantedBug(
        "engine: pages of rejected draft tokens are freed only where one was accepted",
        "workbench/scheduler/scheduler.py",
        "if span.draft_token_ids:\n                    self.kv",
        "if accepted:\n                    self.kv",
        ("tests/engine/test_speculation.py",),
    ),
    PlantedBug(
        "engine: after a rejected draft, the next token is drawn as if there had been none",
        "workbench/sampling/verify.py",
        "left = (p - q.to(p.dtype)).clamp_min(0)",
        "left = p.clone()",
        ("tests/sampling/test_verify.py",),
    ),
    PlantedBug(
        "engine: samples of one prompt share their seed",
        "workbench/engine/inputs.py",
        "(asked.seed + number) % 2**63",
        "asked.seed % 2**63",
        ("tests/engine/test_parallel_samples.py",),
    ),
    PlantedBug(
        "engine: after drafts that a grammar checked, its state is one token ahead",
        "workbench/sampling/answer.py",
        "if consumed:\n            self._tokens.rollback(consumed)",
        "if consumed > 1:\n            self._tokens.rollback(consumed - 1)",
        ("tests/engine/test_structured_output.py",),
    ),
    PlantedBug(
        "kernels: the compiled step rotates heads the wrong way",
        "compiled_kernels/decode_step/rotary.py",
        '((first, second, "arith.subf"), (second, first, "arith.addf"))',
        '((first, second, "arith.addf"), (second, first, "arith.subf"))',
        ("tests/engine/test_mlir_step.py",),
    ),
    PlantedBug(
        "kernels: attention in MLIR forgets to rescale its total when a higher score comes",
        "compiled_kernels/paged_attention/mlir_softmax.py",
        'f"arith.mulf {total}, {factor} : f32"',
        'f"arith.mulf {total}, {total} : f32"',
        ("tests/kernels/test_agreement.py",),
    ),
    PlantedBug(
        "kernels: the Triton norm divides by its padded width",
        "compiled_kernels/rms_norm/triton.py",
        "axis=0) / width + eps",
        "axis=0) / WIDTH + eps",
        ("tests/kernels/test_triton.py",),
    ),
    PlantedBug(
        "prompt: a control token that a person spells is read as the template's",
        "workbench/prompt/template_encoding.py",
        "            forged = True",
        "            forged = False",
        ("tests/prompt/test_chat.py",),
    ),
    PlantedBug(
        "prompt: a control token in a name of an argument is read as the template's",
        "workbench/prompt/traced.py",
        "else Traced(str(k), origin): traced",
        "else Traced(str(k), TEMPLATE): traced",
        ("tests/prompt/test_apply_chat_template.py",),
    ),
)


def copy_tree(folder: Path) -> None:
    """Copy the files that git tracks into `folder`."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(["tar", "--null", "-T", "-", "-c"], cwd=ROOT, input=names, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)


def first_failure(bug: PlantedBug | None, tests: tuple[str, ...]) -> str | None:
    """Run `tests` on a copy of the tree with the bug, or without one; return the first test that fails."""
    with tempfile.TemporaryDirectory(prefix="workbench-bug-") as place:
        copy_tree(Path(place))
        with (Path(place) / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(UNSHRUNK)
        if bug is not None:
            bug.apply(Path(place))
        environment = os.environ | {"PYTHONPATH": place, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", *tests],
            cwd=place, env=environment, capture_output=True, text=True,
        )  # fmt: skip
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode and found is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return found and found[1]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("word", nargs="?", default="", help="only bugs with this word in their description")
    parser.add_argument("--whole", action="store_true", help="run the whole suite for each, in three processes")
    asked = parser.parse_args(words)
    bugs = [bug for bug in BUGS if asked.word in bug.breaks]
    files = tuple(dict.fromkeys(test for bug in bugs for test in bug.tests))
    wrong = first_failure(None, files)
    print(f"{'no bug':75s} {wrong or 'nothing fails'}", flush=True)
    missed = 0
    for bug in bugs:
        caught = first_failure(bug, ("-n", "3") if asked.whole else bug.tests)
        missed += caught is None
        print(f"{bug.breaks:75s} {caught or 'NOT CAUGHT'}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} bugs are caught")
    return int(bool(missed or wrong))


if __name__ == "__main__":
    sys.exit(main())
