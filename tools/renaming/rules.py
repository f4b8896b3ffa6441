"""Rules of a renaming: reading them, checking them without a language server.

    python tools/renaming/rules.py WORKTREE RULES...      every definition must be found, no two rules may meet

Lines:
    rename FILE SYMBOL -> NEW      SYMBOL: Name, Class.member, function.parameter, Class.method.parameter, function.local
    move FILE -> FILE              several files with one target are joined in the order of the lines
    word GLOB[,GLOB] OLD -> NEW    whole word as text, in all files matching (code, strings, prose); for what no symbol covers
    key OLD -> NEW                 a setting's, event's or record's key: quoted strings equal to it, YAML and JSON keys, dotted --set paths
"""
import collections, fnmatch, pathlib, re, sys
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import lsp

def read(files):
    rules = []
    for f in files:
        for n, line in enumerate(pathlib.Path(f).read_text().splitlines(), 1):
            line = line.split(" #")[0].strip()
            if not line or line.startswith("#"): continue
            m = re.fullmatch(r"(rename|move|word|key)\s+(.*?)\s*->\s*(\S+)", line)
            if not m: raise SystemExit(f"{f}:{n}: cannot be read: {line}")
            kind, left, new = m.groups(); left = left.split()
            want = {"rename": 2, "move": 1, "word": 2, "key": 1}[kind]
            if len(left) != want: raise SystemExit(f"{f}:{n}: {kind} takes {want} words before the arrow: {line}")
            rules.append((kind, left, new, f"{f}:{n}"))
    return rules

def main(root, files):
    rules = read(files); bad = 0; seen = {}; new_classes = collections.Counter()
    for kind, left, new, place in rules:
        key = (kind, *left)
        if key in seen: print(f"{place}: again, first at {seen[key]}: {left}"); bad += 1
        seen[key] = place
        if kind == "rename":
            try: lsp.find(root, *left)
            except Exception as e: print(f"{place}: {e!r}"); bad += 1
            if not new.isidentifier(): print(f"{place}: {new} is no identifier"); bad += 1
        elif kind == "move":
            if not (pathlib.Path(root) / left[0]).exists(): print(f"{place}: no file {left[0]}"); bad += 1
    print(len(rules), "rules,", bad, "faults"); return bad
if __name__ == "__main__": sys.exit(bool(main(sys.argv[1], sys.argv[2:])))
