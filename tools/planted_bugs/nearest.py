"""Find the test files nearest to a module: by the imports between them, then by how little else they import."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path

from tools.structure import imports

READ = ("workbench", "compiled_kernels", "tests")
FRONT = "workbench"  # its front imports every room: what is reached by it alone is not near


class NearestTests:
    """The test files of the tree `root`, and what they import."""

    def __init__(self, root: Path):
        self.root = root
        files = {}
        for path in sorted(each for package in READ for each in (root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._files, self._graph = files, imports(files)
        self._importers: defaultdict[str, set[str]] = defaultdict(set)
        for name, others in self._graph.items():
            for other in others:
                self._importers[other].add(name)
            if name.endswith(".api"):  # an operator's backends, which are loaded by their names
                for other in files:
                    if other.rpartition(".")[0] == name.rpartition(".")[0]:
                        self._importers[other].add(name)

    def nearest(self, file: str, most: int, first: Iterable[str] = ()) -> list[str]:
        """Return `first` and then up to `most` test files, the nearest to `file` first."""
        name = ".".join(Path(file).with_suffix("").parts)
        distance, queue = {name: 0}, deque([name])
        while queue:
            here = queue.popleft()
            for importer in self._importers[here] - distance.keys() - {FRONT}:
                distance[importer] = distance[here] + 1
                queue.append(importer)
        tests = [each for each in distance if each.startswith("tests.") and ".test_" in each]
        tests.sort(key=lambda each: (distance[each], self._num_reached(each), each))
        near = [self._files[each].relative_to(self.root).as_posix() for each in tests[:most]]
        return list(dict.fromkeys((*first, *near)))

    def _num_reached(self, name: str) -> int:
        reached, left = {name}, [name]
        while left:
            new = self._graph[left.pop()] - reached
            reached |= new
            left += new
        return len(reached)
