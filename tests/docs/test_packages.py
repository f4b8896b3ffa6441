"""Pictures of packages: their order and their arcs say what the imports are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tools.site.packages import direct, downwards, picture, read_packages
from tools.structure import ROOT, modules

acyclic = st.integers(2, 9).flatmap(
    lambda n: st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] < p[1])).map(
        lambda pairs: {str(a): {str(b) for x, b in pairs if x == a} for a in range(n)}
    )
)


def reached(edges: dict[int, set[int]], start: int) -> set[int]:
    found, todo = set(), [start]
    while todo:
        for other in edges.get(todo.pop(), ()):
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


@given(acyclic)
def test_imports_point_down_and_no_arc_is_spare(edges: dict[str, set[str]]) -> None:
    order = downwards(edges)
    assert sorted(order) == sorted(edges)
    down, up = direct(order, edges)
    assert up == []
    kept = {n: {b for a, b in down if a == n} for n in range(len(order))}
    whole = {n: {order.index(other) for other in edges[name]} for n, name in enumerate(order)}
    for n in range(len(order)):
        assert reached(kept, n) == reached(whole, n)
    for a, b in down:
        assert b not in reached({n: others - {b} if n == a else others for n, others in kept.items()}, a)


@given(acyclic, st.tuples(st.integers(0, 8), st.integers(0, 8)))
def test_a_circle_is_shown_by_an_arc_that_points_up(edges: dict[str, set[str]], pair: tuple[int, int]) -> None:
    low, high = sorted(str(n % len(edges)) for n in pair)
    edges = {name: set(others) for name, others in edges.items()}
    if low == high:
        return
    edges[high].add(low)
    order = downwards(edges)
    down, up = direct(order, edges)
    missing = {(order[a], order[b]) for a, b in up}
    assert missing <= {(a, b) for a in edges for b in edges[a]} and all(a > b for a, b in up)
    assert bool(up) == (
        low in edges and int(high) in reached({int(a): set(map(int, b)) for a, b in edges.items()}, int(high))
    )


def test_packages_are_those_of_the_code() -> None:
    packages = {package.name: package for package in read_packages(ROOT)}
    folders = {f"workbench/{path.parent.name}" for path in (ROOT / "workbench").glob("*/__init__.py")}
    assert set(packages) == folders | {"workbench", "compiled_kernels"}
    shown = {name: set(package.below) for name, package in packages.items()}
    assert {"workbench/scheduler", "workbench/executors", "workbench/trace"} <= shown["workbench/engine"]
    assert not shown["compiled_kernels"], "tensors in, tensors out"
    for name, package in packages.items():
        assert package.nodes and sorted(package.nodes) == sorted(package.edges), name
        if not any(node.endswith("/") for node in package.nodes):
            assert direct(package.nodes, package.edges)[1] == [], name
    every, drawn = list(packages.values()), []
    for package in every:
        every += package.inner
        drawn += [f"{package.name}/{node}" for node in package.nodes if node.endswith(".py")]
    whole = [path.relative_to(ROOT).as_posix() for path in modules().values() if not path.name.startswith("__")]
    assert sorted(drawn) == sorted(whole)


def test_a_picture_has_a_row_a_file_and_names_its_arcs() -> None:
    html = picture(["a.py", "b/"], {"a.py": {"b/"}, "b/": set()}, {"a.py": 'Say "a" & go.'}, {"b/": "#b"})
    assert html.count("<li ") == 2 and html.count("<path ") == 1
    assert 'aria-label="imports among 2 parts: a.py imports b/"' in html
    assert "Say &quot;a&quot; &amp; go." in html and '<a href="#b">' in html


def test_the_front_door_is_left_out(tmp_path: Path) -> None:
    for path, text in {
        "workbench/__init__.py": "from workbench.a import one\n",
        "workbench/errors.py": '"""Say what is wrong. And more."""\n',
        "workbench/a/__init__.py": '"""A package."""\n',
        "workbench/a/one.py": "import workbench.errors\n",
        "workbench/b/__init__.py": "",
        "workbench/b/inner/__init__.py": '"""Inside."""\n',
        "workbench/b/two.py": "from workbench.b.inner import three\nfrom workbench.a import one\n",
        "workbench/b/inner/three.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    packages = {package.name: package for package in read_packages(tmp_path)}
    assert list(packages) == ["workbench/b", "workbench/a", "workbench"]
    assert packages["workbench"].nodes == ["errors.py"]
    assert packages["workbench"].summaries["errors.py"] == "Say what is wrong."
    assert packages["workbench/b"].nodes == ["two.py", "inner/"] and packages["workbench/b"].below == ["workbench/a"]
    assert packages["workbench/b"].summaries["inner/"] == "Inside." and packages["workbench/a"].above == ["workbench/b"]
