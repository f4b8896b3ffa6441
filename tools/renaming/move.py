"""Move and join modules, rewriting absolute imports: python move.py WORKTREE RULES..."""
import ast, collections, pathlib, re, subprocess, sys
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import rules as R

def module(path): 
    m = str(path)[:-3].replace("/", ".")
    return m[: -len(".__init__")] if m.endswith(".__init__") else m

def split(text):
    """Module docstring, imports (source), body (source) of a file."""
    tree = ast.parse(text); lines = text.splitlines(keepends=True); doc = None; imports = []; start = 0; body_from = 0
    for i, n in enumerate(tree.body):
        if i == 0 and isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str):
            doc = "".join(lines[: n.end_lineno]); start = body_from = n.end_lineno; continue
        if isinstance(n, (ast.Import, ast.ImportFrom)) or (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"):
            imports.append((n, "".join(lines[n.lineno - 1 : n.end_lineno]))); body_from = n.end_lineno; continue
        break
    rest = "".join(lines[body_from:])
    return doc, imports, rest, tree

def defined(tree):
    out = set()
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): out.add(n.name)
        elif isinstance(n, ast.Assign): out |= {x.id for t in n.targets for x in ast.walk(t) if isinstance(x, ast.Name)}
        elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name): out.add(n.target.id)
    return out

def main(root, files):
    root = pathlib.Path(root).resolve()
    moves = [(left[0], new) for kind, left, new, _ in R.read(files) if kind == "move"]
    groups = collections.OrderedDict()
    for old, new in moves: groups.setdefault(new, []).append(old)
    sources = {old for old, _ in moves}
    for new, olds in groups.items():
        if (root / new).exists() and new not in sources: olds.insert(0, new)  # joined to what is there
    mods = {module(o): module(n) for n, olds in groups.items() for o in olds if module(o) != module(n)}
    texts = {}
    for new, olds in groups.items():
        if len(olds) == 1: texts[new] = (root / olds[0]).read_text(); continue
        docs, imps, bodies, names = [], [], [], {}
        inner = {module(o) for o in olds}
        for o in olds:
            doc, im, rest, tr = split((root / o).read_text())
            for d in defined(tr):
                if d in names and d not in ("__all__",): print(f"JOIN {new}: {d} in {names[d]} and {o}")
                names[d] = o
            docs.append(doc); bodies.append(rest)
            for n, src in im:
                if isinstance(n, ast.ImportFrom) and n.module in inner and n.level == 0: 
                    al = [f"{a.asname} = {a.name}" for a in n.names if a.asname]
                    if al: print(f"JOIN {new}: alias {al} from {o}")
                    continue
                if isinstance(n, ast.If):
                    keep = [b for b in n.body if not (isinstance(b, ast.ImportFrom) and b.module in inner)]
                    if keep: imps.append("if TYPE_CHECKING:\n" + "".join("    " + ast.unparse(b) + "\n" for b in keep))
                    continue
                imps.append(src)
        future = [i for i in imps if "__future__" in i][:1]; plain = list(dict.fromkeys(i for i in imps if "__future__" not in i))
        plain.sort(key=lambda i: i.startswith("if TYPE_CHECKING"))
        texts[new] = (next((d for d in docs if d), "") + "\n" + "".join(future) + "\n" + "".join(plain) + "\n\n" + "\n\n".join(b.strip("\n") + "\n" for b in bodies))
    for new, olds in groups.items():
        target = root / new; target.parent.mkdir(parents=True, exist_ok=True)
        if len(olds) == 1 and olds[0] != new: subprocess.run(["git", "-C", str(root), "mv", "-f", olds[0], new], check=False)
        for o in olds[:]:
            if o != new and (root / o).exists(): subprocess.run(["git", "-C", str(root), "rm", "-qf", "--cached", o], check=False); (root / o).unlink()
        target.write_text(texts[new])
        pkg = target.parent
        while pkg != root and not (pkg / "__init__.py").exists():
            (pkg / "__init__.py").write_text(""); print("new package", pkg.relative_to(root)); pkg = pkg.parent
    # imports everywhere
    old_names = sorted(mods, key=len, reverse=True)
    rx = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, old_names)) + r")(?![\w])(?!\.\w+ import)") if mods else None
    paths = {o: n for n, olds in groups.items() for o in olds if o != n}
    prx = re.compile("|".join(map(re.escape, sorted(paths, key=len, reverse=True)))) if paths else None
    packages = {m.rsplit(".", 1)[0] for m in mods}
    for p in root.rglob("*"):
        rel = p.relative_to(root)
        if not p.is_file() or set(rel.parts) & {".git", ".venv", ".hypothesis", "__pycache__"} or p.suffix not in {".py", ".md", ".toml", ".yaml", ".js", ".json", ""} and p.name != "Makefile": continue
        try: t = p.read_text()
        except UnicodeDecodeError: continue
        u = t
        if p.suffix == ".py":  # from package import module
            for m in re.finditer(r"^([ \t]*)from ([\w.]+) import (\([^)]*\)|[^\n(]+)", t, re.M):
                pkg = m[2]
                if pkg not in packages: continue
                names = [x.strip() for x in re.sub(r"#.*", "", m[3].strip("()")).replace("\n", " ").split(",") if x.strip()]
                stay, go = [], []
                for x in names:
                    base = x.split(" as ")[0].strip()
                    (go if f"{pkg}.{base}" in mods else stay).append(x)
                if go:
                    outl = [f"{m[1]}from {pkg} import {', '.join(stay)}"] if stay else []
                    for x in go:
                        base, *alias = x.split(" as "); target = mods[f"{pkg}.{base.strip()}"]; tp, tn = target.rsplit(".", 1)
                        a = alias[0].strip() if alias else base.strip()
                        outl.append(f"{m[1]}from {tp} import {tn}" + (f" as {a}" if a != tn else ""))
                    u = u.replace(m[0], "\n".join(outl))
        if rx: u = rx.sub(lambda m: mods[m[1]], u)
        if prx: u = prx.sub(lambda m: paths[m[0]], u)
        if u != t: p.write_text(u)
    # a joined file's function-level imports of itself
    for new, olds in groups.items():
        p = root / new; t = p.read_text(); me = module(new)
        u = re.sub(rf"^[ \t]*from {re.escape(me)} import (\([^)]*\)|[^\n]+)\n", "", t, flags=re.M)
        if u != t: print("self import taken out of", new); p.write_text(u)
if __name__ == "__main__": main(sys.argv[1], sys.argv[2:])
