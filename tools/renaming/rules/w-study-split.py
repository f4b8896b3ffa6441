"""Cut the one import circle of measure/: runner_for, the requests' loop and torch's threads leave study/run.py.

    python w-study-split.py ROOT      in the root of a checkout, after all renames and BEFORE the moves; may be run once

study/run.py -> study/runner_for.py   (runner_for; to be moved to workbench/experiment/runner.py)
             -> study/rounds.py       (run_requests/play, _tokens, torch_threads/threads; to be moved to workbench/measure/rounds.py, with closed_loop.py before it)
Importers inside workbench/study name the new homes; run.py imports what it uses, so others and monkeypatches of run's names go on working.
"""
import ast, pathlib, re, sys

root = pathlib.Path(sys.argv[1]); study = root / "workbench/study"
run = study / "run.py"; text = run.read_text(); tree = ast.parse(text); lines = text.splitlines(keepends=True)
HOMES = {"runner_for": {"runner_for"}, "rounds": {"play", "run_requests", "_tokens", "threads", "torch_threads"}}
DOCS = {"runner_for": '"""Build the runner that an experiment describes."""\n', "rounds": '"""Run requests to their ends, with a progress bar and a fixed number of threads."""\n'}
found, cut = {home: [] for home in HOMES}, []
for node in tree.body:
    for home, names in HOMES.items():
        if isinstance(node, ast.FunctionDef) and node.name in names:
            begin = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            found[home].append((node.name, "".join(lines[begin : node.end_lineno])))
            cut.append((begin, node.end_lineno))
imports = [(n, "".join(lines[n.lineno - 1 : n.end_lineno])) for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]

def wanted(code: str) -> str:
    used = {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)}
    out = []
    for node, source in imports:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        names = [a for a in node.names if (a.asname or a.name).split(".")[0] in used]
        if names:
            said = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in names)
            out.append(f"from {node.module} import {said}\n" if isinstance(node, ast.ImportFrom) else f"import {said}\n")
    return "".join(out)

for home, parts in found.items():
    code = "\n\n".join(source for _, source in parts)
    need = wanted(code)
    groups = [[l for l in need.splitlines(True) if not re.match(r"(from|import) (torch|workbench|compiled_kernels)", l)],
              [l for l in need.splitlines(True) if re.match(r"(from|import) torch", l)],
              [l for l in need.splitlines(True) if re.match(r"from (workbench|compiled_kernels)", l)]]
    body = "\n".join("".join(g) for g in groups if g)
    (study / f"{home}.py").write_text(DOCS[home] + "\nfrom __future__ import annotations\n\n" + body + "\n\n" + code)
for begin, end in sorted(cut, reverse=True):
    while end < len(lines) and not lines[end].strip():
        end += 1
    lines[begin:end] = []
rest = "".join(lines).rstrip() + "\n"
used = {n.id for n in ast.walk(ast.parse(rest)) if isinstance(n, ast.Name)}
names = {home: sorted({n for n, _ in parts if n in used}) for home, parts in found.items()}
anchor = re.search(r"^from workbench\.study\.\w+ import", rest, re.M).start()
new = "".join(f"from workbench.study.{home} import {', '.join(ns)}\n" for home, ns in names.items() if ns)
rest = rest[:anchor] + new + rest[anchor:]
run.write_text(rest)
where = {n: home for home, parts in found.items() for n, _ in parts}
for path in study.glob("*.py"):
    if path == run or path.stem in HOMES:
        continue
    source = path.read_text()
    def change(match):
        asked = [a.strip() for a in match[1].split(",")]
        if not all(a in where for a in asked):
            return match[0]
        homes = {}
        for a in asked:
            homes.setdefault(where[a], []).append(a)
        return "\n".join(f"from workbench.study.{h} import {', '.join(ns)}" for h, ns in sorted(homes.items()))
    changed = re.sub(r"from workbench\.study\.run import ([\w, ]+)$", change, source, flags=re.M)
    if changed != source:
        path.write_text(changed)
test = root / "tests/study/test_run.py"  # patches names of the module that held all of it
source = test.read_text()
if "rounds_module" not in source:
    source = source.replace("import workbench.measure.run as run_module\n", "import workbench.measure.rounds as rounds_module\nimport workbench.measure.run as run_module\nimport workbench.experiment.runner as runner_module\n")
    test.write_text(source.replace('run_module, "load"', 'runner_module, "load"').replace("run_module.torch", "rounds_module.torch"))
