"""Carry out rules on a checkout: python rename.py WORKTREE PYTHON RULES..."""
import collections, fnmatch, pathlib, re, sys, time, json
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import lsp, rules as R

def renames(root, python, rules, log):
    s = lsp.Server(root, python)
    s.open("workbench/__init__.py"); time.sleep(20)   # the server lists the workspace's files before it can find uses in all
    edits = collections.defaultdict(dict)
    for n, (kind, left, new, place) in enumerate(rules):
        if kind != "rename": continue
        path, symbol = left; t = time.time()
        try:
            line, col = lsp.find(root, path, symbol)
            ch = s.rename(path, line, col, new)
        except Exception as e:
            print(f"{place}: {path} {symbol}: {e!r}", file=log, flush=True); continue
        count = 0
        for f, es in ch.items():
            for e in es:
                a, b = e["range"]["start"], e["range"]["end"]; key = (a["line"], a["character"], b["line"], b["character"]); count += 1
                have = edits[f].get(key)
                if have is not None and have != e["newText"]: print(f"{place}: {f}:{key[0]+1}: {have} or {e['newText']}", file=log)
                edits[f].setdefault(key, e["newText"])
        print(f"{n}/{len(rules)} {path} {symbol} -> {new}: {count} in {len(ch)} files, {time.time()-t:.1f} s", file=log, flush=True)
    for f, es in edits.items():
        lsp.apply({f: [{"range": {"start": {"line": k[0], "character": k[1]}, "end": {"line": k[2], "character": k[3]}}, "newText": v} for k, v in es.items()]})
    return edits

SKIP = {".git", ".venv", ".hypothesis", "__pycache__", ".ruff_cache", ".pytest_cache", "runs"}
def tree(root):
    for p in root.rglob("*"):
        rel = p.relative_to(root)
        if p.is_file() and not (set(rel.parts) & SKIP) and p.suffix in {".py", ".md", ".yaml", ".yml", ".json", ".js", ".css", ".toml", ".txt", ".ipynb", ".html", ""}: yield rel

def words(root, rules, log):
    files = list(tree(root))
    for kind, left, new, place in rules:
        if kind != "word": continue
        globs, old = left; count = 0
        rx = re.compile(rf"(?<![\w-]){re.escape(old)}(?![\w-])")
        for rel in files:
            if any(fnmatch.fnmatch(str(rel), g) for g in globs.split(",")):
                p = root / rel
                try: t = p.read_text()
                except UnicodeDecodeError: continue
                u, n = rx.subn(new, t)
                if n: p.write_text(u); count += n
        print(f"word {old} -> {new}: {count}", file=log)

def keys(root, rules, log):
    ks = {left[0]: new for kind, left, new, _ in rules if kind == "key"}
    if not ks: return
    alt = "|".join(map(re.escape, sorted(ks, key=len, reverse=True)))
    quoted = re.compile(rf"""(?<=["'`])({alt})(?=["'`])""")
    dotted = re.compile(rf"(?<=[\w\]]\.)({alt})(?=[=.\s\"'`,)\]:])|(?<![\w./-])({alt})(?=\.[a-z_]+[=\"'`])")
    yaml = re.compile(rf"^(\s*(?:- )?)({alt})(?=:(?:\s|$))", re.M)
    flow = re.compile(rf"(?<=[{{,] )({alt})(?=: )|(?<={{)({alt})(?=: )")
    pick = lambda m: ks[next(g for g in m.groups() if g is not None)]
    for rel in tree(root):
        p = root / rel
        try: t = p.read_text()
        except UnicodeDecodeError: continue
        u = quoted.sub(pick, t)
        if p.suffix in {".yaml", ".yml"} or p.suffix == ".py" or p.suffix == ".md":
            if p.suffix != ".py": u = yaml.sub(lambda m: m[1] + ks[m[2]], u); u = flow.sub(pick, u)
        if p.suffix in {".md", ".yaml", ".json"}: u = dotted.sub(pick, u)
        elif p.suffix == ".py":  # dotted paths inside string literals only
            u = re.sub(r"(\"[^\"\n]*\"|'[^'\n]*')", lambda s: dotted.sub(pick, s[0]), u)
        if u != t: p.write_text(u)
    print("keys", ks, file=log)

def main(root, python, files):
    root = pathlib.Path(root).resolve(); rules = R.read(files); log = sys.stdout
    renames(root, python, rules, log); keys(root, rules, log); words(root, rules, log)
if __name__ == "__main__": main(sys.argv[1], sys.argv[2], sys.argv[3:])
