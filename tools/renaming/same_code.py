"""python tools/renaming/same_code.py WORKTREE BASE: Python files changed since BASE differ in docstrings and comments alone."""
import ast, subprocess, sys
root, base = sys.argv[1:3]
def bare(text):
    tree = ast.parse(text)
    for n in ast.walk(tree):
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and n.body and isinstance(n.body[0], ast.Expr) and isinstance(n.body[0].value, ast.Constant) and isinstance(n.body[0].value.value, str):
            n.body[0].value.value = ""
    return ast.dump(tree)
bad = 0
for f in subprocess.run(["git", "-C", root, "diff", "--name-only", base, "--", "*.py"], capture_output=True, text=True).stdout.split():
    old = subprocess.run(["git", "-C", root, "show", f"{base}:{f}"], capture_output=True, text=True).stdout
    try: new = open(f"{root}/{f}").read()
    except FileNotFoundError: print("gone:", f); bad += 1; continue
    if bare(old) != bare(new): print("code differs:", f); bad += 1
print("same" if not bad else f"{bad} files differ"); sys.exit(bool(bad))
