"""Carry out `rename` rules by asking, for every token that has an old name, where it is defined.

python rename2.py WORKTREE PYTHON [--shard I/N] --out edits.json RULES...   |   python rename2.py WORKTREE PYTHON --apply edits.json...
"""
import ast, collections, io, json, pathlib, re, sys, threading, time, tokenize
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import lsp, rules as R
from urllib.parse import unquote, urlparse

ROOMS = ("workbench", "compiled_kernels", "experiments", "tests", "tools", "notebooks", "benchmarks")
def u16(line, col): return len(line[:col].encode("utf-16-le")) // 2

def bases(root):
    """class key (module, name) -> [base keys], and members"""
    mods = {}
    for r in ROOMS:
        for p in (root / r).rglob("*.py"):
            rel = p.relative_to(root)
            m = ".".join(rel.with_suffix("").parts); m = m[:-9] if m.endswith(".__init__") else m
            try: mods[m] = (rel, ast.parse(p.read_text()))
            except SyntaxError: pass
    names = {}
    for m, (rel, t) in mods.items():
        n = {}
        for x in ast.walk(t):
            if isinstance(x, ast.ImportFrom) and x.module:
                for a in x.names: n[a.asname or a.name] = (x.module, a.name)
        for x in t.body:
            if isinstance(x, ast.ClassDef): n[x.name] = (m, x.name)
        names[m] = n
    sub = collections.defaultdict(list); rels = {}
    for m, (rel, t) in mods.items():
        for x in ast.walk(t):
            if isinstance(x, ast.ClassDef):
                rels[(m, x.name)] = str(rel)
                for b in x.bases:
                    if isinstance(b, ast.Subscript): b = b.value
                    if isinstance(b, ast.Name) and b.id in names[m]: sub[names[m][b.id]].append((m, x.name))
    return sub, rels, {str(rel): m for m, (rel, t) in mods.items()}

def definitions(root, rules, log):
    sub, rels, mod_of = bases(root); defs = {}; 
    def put(path, symbol, new, place, quiet=False):
        try: line, col = lsp.find(root, path, symbol)
        except Exception as e:
            if not quiet: print(f"{place}: {e!r}", file=log)
            return
        key = (path, line, col)
        if key in defs and defs[key] != new: print(f"{place}: {path} {symbol}: {defs[key]} and {new}", file=log); return
        defs[key] = new
    for kind, left, new, place in rules:
        if kind != "rename": continue
        path, symbol = left; put(path, symbol, new, place)
        parts = symbol.split(".")
        if len(parts) >= 2 and path in mod_of:
            todo = list(sub.get((mod_of[path], parts[0]), ())); seen = set()
            while todo:
                k = todo.pop()
                if k in seen: continue
                seen.add(k); todo += sub.get(k, ())
                put(rels[k], ".".join([k[1], *parts[1:]]), new, place, quiet=True)
    return defs

def tokens(text, names):
    lines = text.splitlines(keepends=True)
    try: toks = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError): return
    for t in toks:
        if t.type == tokenize.NAME and t.string in names: yield t.start[0] - 1, u16(lines[t.start[0] - 1], t.start[1]), t.string
        elif t.type == tokenize.STRING and re.match(r"[rRbB]*[fF]", t.string):
            row = t.start[0] - 1
            for i, part in enumerate(t.string.splitlines(keepends=True)):
                off = t.start[1] if i == 0 else 0
                for m in re.finditer(r"[A-Za-z_]\w*", part):
                    if m[0] in names: yield row + i, u16(lines[row + i], off + m.start()), m[0]

def main(argv):
    root, python = pathlib.Path(argv[0]).resolve(), argv[1]; rest = argv[2:]
    if rest[0] == "--apply":
        edits = collections.defaultdict(dict)
        for f in rest[1:]:
            for path, line, col, old, new in json.load(open(f)): edits[path][(line, col)] = (old, new)
        for path, es in edits.items():
            lsp.apply({root / path: [{"range": {"start": {"line": l, "character": c}, "end": {"line": l, "character": c + len(o)}}, "newText": n} for (l, c), (o, n) in es.items()]})
        print(len(edits), "files", sum(map(len, edits.values())), "edits"); return
    shard = (0, 1)
    if rest[0] == "--shard": shard = tuple(map(int, rest[1].split("/"))); rest = rest[2:]
    assert rest[0] == "--out"; out = rest[1]; rules = R.read(rest[2:])
    log = sys.stderr; defs = definitions(root, rules, log)
    names = {}
    for kind, left, new, _ in rules:
        if kind == "rename": names.setdefault(left[1].split(".")[-1], set()).add(new)
    print(len(defs), "definitions", len(names), "names", file=log)
    s = lsp.Server(str(root), python); s.open("workbench/__init__.py"); time.sleep(8)
    edits = []; began = time.time(); asked = 0; none = collections.Counter()
    files = [p.relative_to(root) for r in ROOMS for p in sorted((root / r).rglob("*.py"))]
    for n, rel in enumerate(files):
        if n % shard[1] != shard[0]: continue
        text = (root / rel).read_text(); wanted = list(tokens(text, names))
        if not wanted: continue
        s.open(str(rel)); ids = []
        for line, col, name in wanted:
            s.n += 1; s._send({"id": s.n, "method": "textDocument/definition", "params": {"textDocument": {"uri": s.uri(str(rel))}, "position": {"line": line, "character": col}}}); ids.append(s.n)
        for (line, col, name), i in zip(wanted, ids):
            with s.cv:
                while i not in s.answers: s.cv.wait(600)
                r = s.answers.pop(i).get("result")
            asked += 1
            hits = set()
            if (str(rel), line, col) in defs: hits.add(defs[(str(rel), line, col)])
            for loc in (r if isinstance(r, list) else [r] if r else []):
                u = loc.get("targetUri") or loc["uri"]; rg = loc.get("targetSelectionRange") or loc["range"]
                try: q = str(pathlib.Path(unquote(urlparse(u).path)).relative_to(root))
                except ValueError: continue
                d = defs.get((q, rg["start"]["line"], rg["start"]["character"]))
                if d: hits.add(d)
            if len(hits) == 1: edits.append((str(rel), line, col, name, hits.pop()))
            elif len(hits) > 1: print(f"{rel}:{line+1}: {name} -> {hits}", file=log)
            elif not r: none[name] += 1
        s.close(str(rel))
        if n % 50 == shard[0]: print(f"{n}/{len(files)} {asked} asked {len(edits)} edits {time.time()-began:.0f} s", file=log, flush=True)
    json.dump(edits, open(out, "w"))
    print(asked, "asked", len(edits), "edits", f"{time.time()-began:.0f} s; undefined:", none.most_common(30), file=log)
if __name__ == "__main__": main(sys.argv[1:])
