"""Find the test files nearest to a bug, by the imports between them and its module, and by words that both contain."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from pathlib import Path

from tools.structure import imports

READ = ("workbench", "compiled_kernels", "tests")
FRONT = "workbench"  # its front imports every room: what is reached by it alone is not near
BY_NAME = "kernel_rows("  # of a test that holds every operator, which its rows load by name
STEM = 5  # letters by which words are compared


class NearestTests:
    """The test files of the tree `root`, their imports, and the words that they contain."""

    def __init__(self, root: Path):
        self.root = root
        files = {}
        for path in sorted(each for package in READ for each in (root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._files, self._graph = files, imports(files)
        self._importers: defaultdict[str, set[str]] = defaultdict(set)
        texts = {name: path.read_text(encoding="utf-8") for name, path in files.items() if name.startswith("tests.")}
        tests = [name for name in texts if ".test_" in name]
        by_name = {name for name in tests if BY_NAME in texts[name]}
        for name, others in self._graph.items():
            for other in others:
                self._importers[other].add(name)
            if name.endswith(".api"):  # an operator's backends, which are loaded by their names
                for other in files:
                    if other.rpartition(".")[0] == name.rpartition(".")[0]:
                        self._importers[other] |= {name, *by_name}
        self._words = {name: _stems(f"{name} {texts[name]}") for name in tests}
        self._holders = Counter(chain.from_iterable(self._words.values()))

    def nearest(self, file: str, words: str, most: int, first: Iterable[str] = ()) -> list[str]:
        """Return `first` and then up to `most` test files, nearest first. They are taken by turns from two rankings: by
        the number of imports from the test to `file`, and by rare words that the test has in common with `words` and
        `file`."""
        name = ".".join(Path(file).with_suffix("").parts)
        distance, queue = {name: 0}, deque([name])
        while queue:
            here = queue.popleft()
            for importer in self._importers[here] - distance.keys() - {FRONT}:
                distance[importer] = distance[here] + 1
                queue.append(importer)
        tests = [each for each in distance if each in self._words]
        wanted = _stems(f"{words} {file}")
        by_imports = sorted(tests, key=lambda each: (distance[each], self._num_reached(each), each))
        by_words = sorted(tests, key=lambda each: (-self._likeness(wanted, each), each))
        found = dict.fromkeys(chain.from_iterable(zip_longest(by_imports, by_words)))
        near = [self._files[each].relative_to(self.root).as_posix() for each in list(found)[:most]]
        return list(dict.fromkeys((*first, *near)))

    def _likeness(self, wanted: set[str], test: str) -> float:
        """Return the information of the words that a test shares, by the size of its own vocabulary."""
        words = self._words[test]
        shared = sum(math.log(len(self._words) / self._holders[word]) for word in wanted & words)
        return shared / math.log(len(words) + 1)

    def _num_reached(self, name: str) -> int:
        return sum(1 for _ in self._reached(name))

    def _reached(self, name: str) -> Iterator[str]:
        reached, left = {name}, [name]
        while left:
            new = self._graph[left.pop()] - reached
            reached |= new
            left += new
            yield from new


def _stems(text: str) -> set[str]:
    return {word[:STEM] for word in re.findall(r"[a-z0-9]{3,}", text.lower())}
