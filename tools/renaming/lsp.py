"""A minimal client of pyright's language server: rename symbols in a checkout."""
import ast, json, os, pathlib, queue, subprocess, sys, threading, time
from urllib.parse import unquote, urlparse

class Server:
    def __init__(self, root, python):
        self.root = pathlib.Path(root).resolve()
        self.p = subprocess.Popen([str(pathlib.Path(python).parent / "pyright-langserver"), "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root)
        self.n = 0; self.answers = {}; self.cv = threading.Condition(); self.python = python
        threading.Thread(target=self._read, daemon=True).start()
        self.ask("initialize", {"processId": os.getpid(), "rootUri": self.root.as_uri(), "workspaceFolders": [{"uri": self.root.as_uri(), "name": "w"}],
            "capabilities": {"workspace": {"workspaceEdit": {"documentChanges": False}, "configuration": True, "workspaceFolders": True, "didChangeWatchedFiles": {"dynamicRegistration": True}}, "textDocument": {"rename": {"prepareSupport": False}}}})
        self.tell("initialized", {})
        self.version = {}
    def _send(self, m):
        b = json.dumps({"jsonrpc": "2.0", **m}).encode()
        self.p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b); self.p.stdin.flush()
    def tell(self, method, params): self._send({"method": method, "params": params})
    def ask(self, method, params, timeout=600):
        self.n += 1; n = self.n
        self._send({"id": n, "method": method, "params": params})
        with self.cv:
            end = time.time() + timeout
            while n not in self.answers:
                if not self.cv.wait(end - time.time()): raise TimeoutError(method)
            r = self.answers.pop(n)
        if "error" in r: raise RuntimeError(r["error"].get("message"))
        return r.get("result")
    def _read(self):
        f = self.p.stdout
        while True:
            h = {}
            while (line := f.readline().strip()): 
                k, v = line.split(b":", 1); h[k.lower()] = v.strip()
            if not h: return
            m = json.loads(f.read(int(h[b"content-length"])))
            if "id" in m and "method" in m:
                if m["method"] == "workspace/configuration":
                    r = [({"pythonPath": self.python} if i.get("section") == "python" else ({"diagnosticMode": "openFilesOnly"} if "analysis" in i.get("section", "") else {})) for i in m["params"]["items"]]
                else: r = None
                self._send({"id": m["id"], "result": r})
            elif "id" in m:
                with self.cv: self.answers[m["id"]] = m; self.cv.notify_all()
    def uri(self, path): return (self.root / path).resolve().as_uri()
    def open(self, path):
        self.tell("textDocument/didOpen", {"textDocument": {"uri": self.uri(path), "languageId": "python", "version": 1, "text": (self.root / path).read_text()}})
    def close(self, path): self.tell("textDocument/didClose", {"textDocument": {"uri": self.uri(path)}})
    def rename(self, path, line, column, new):
        self.open(path)
        try:
            r = self.ask("textDocument/rename", {"textDocument": {"uri": self.uri(path)}, "position": {"line": line, "character": column}, "newName": new})
        finally: self.close(path)
        if not r: return {}
        ch = r.get("changes") or {d["textDocument"]["uri"]: d["edits"] for d in r.get("documentChanges", [])}
        out = {}
        for uri, edits in ch.items():
            f = pathlib.Path(unquote(urlparse(uri).path)); 
            out[f] = edits
        return out
    def changed(self, files):
        self.tell("workspace/didChangeWatchedFiles", {"changes": [{"uri": pathlib.Path(f).as_uri(), "type": 2} for f in files]})

def apply(changes):
    for f, edits in changes.items():
        lines = f.read_text().splitlines(keepends=True)
        seen = set()
        for e in sorted(edits, key=lambda e: (e["range"]["start"]["line"], e["range"]["start"]["character"]), reverse=True):
            s, t = e["range"]["start"], e["range"]["end"]
            assert s["line"] == t["line"], e
            key = (s["line"], s["character"])
            if key in seen: continue
            seen.add(key)
            l = lines[s["line"]]
            # LSP columns are UTF-16 units
            u = l.encode("utf-16-le")
            l = u[: 2 * s["character"]].decode("utf-16-le") + e["newText"] + u[2 * t["character"]:].decode("utf-16-le")
            lines[s["line"]] = l
        f.write_text("".join(lines))

def find(root, path, symbol):
    """Line and column of a definition: NAME, Class.member, function.parameter, Class.method.parameter."""
    text = (pathlib.Path(root) / path).read_text(); tree = ast.parse(text); lines = text.splitlines()
    def col(line, name, start):
        i = line.index(name, start); return len(line[:i].encode("utf-16-le")) // 2
    def at(n): return len(lines[n.lineno-1].encode()[:n.col_offset].decode().encode("utf-16-le"))//2
    def children(node):
        for c in ast.iter_child_nodes(node):
            yield c
            if isinstance(c, (ast.If, ast.Try, ast.With, ast.For, ast.While)): yield from children(c)
    def members(node, name, deep):
        hits = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]:
                if x.arg == name: return [(x, x.lineno - 1, len(lines[x.lineno-1].encode()[:x.col_offset].decode().encode("utf-16-le"))//2)]
        for c in children(node):
            if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and c.name == name:
                hits.append((c, c.lineno - 1, col(lines[c.lineno - 1], name, lines[c.lineno - 1].index("class " if isinstance(c, ast.ClassDef) else "def ", c.col_offset) + 4)))
            elif isinstance(c, ast.AnnAssign) and isinstance(c.target, ast.Name) and c.target.id == name: hits.append((c, c.lineno - 1, at(c.target)))
            elif isinstance(c, ast.Assign):
                for t in ast.walk(ast.Tuple(elts=c.targets)):
                    if isinstance(t, ast.Name) and t.id == name and isinstance(t.ctx, ast.Store): hits.append((c, t.lineno - 1, at(t)))
            elif isinstance(c, ast.TypeAlias if hasattr(ast, "TypeAlias") else ()) and c.name.id == name: hits.append((c, c.lineno - 1, col(lines[c.lineno-1], name, 0)))
        if not hits and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]:
                if x.arg == name: hits.append((x, x.lineno - 1, len(lines[x.lineno-1].encode()[:x.col_offset].decode().encode("utf-16-le"))//2))
            for c in ast.walk(node):
                if isinstance(c, ast.Name) and c.id == name and isinstance(c.ctx, ast.Store): hits.append((c, c.lineno-1, len(lines[c.lineno-1].encode()[:c.col_offset].decode().encode("utf-16-le"))//2)); break
                if isinstance(c, (ast.FunctionDef,)) and c is not node and c.name == name: hits.append((c, c.lineno - 1, col(lines[c.lineno - 1], name, lines[c.lineno - 1].index("class " if isinstance(c, ast.ClassDef) else "def ", c.col_offset) + 4))); break
        if not hits and isinstance(node, ast.ClassDef):
            for c in ast.walk(node):
                if isinstance(c, ast.Attribute) and c.attr == name and isinstance(c.value, ast.Name) and c.value.id == "self" and isinstance(c.ctx, ast.Store):
                    l = lines[c.end_lineno - 1]; end = len(l.encode()[:c.end_col_offset].decode()); hits.append((c, c.end_lineno-1, len(l[:end-len(name)].encode("utf-16-le"))//2)); break
        return hits
    node = tree
    parts = symbol.split(".")
    for i, name in enumerate(parts):
        h = members(node, name, i)
        if not h: raise LookupError(f"{path}: no {symbol}")
        node, line, column = h[0]
    return line, column
