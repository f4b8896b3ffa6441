"""Keys and words as text: python texts.py WORKTREE RULES..."""
import pathlib, sys
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import rename, rules as R
_tree = rename.tree
def tree(root):
    for rel in _tree(root):
        s = str(rel)
        if s.startswith(("experiments/records/", "docs/reference/")) or s.endswith("rename_record_keys.py") or s in ("tools/structure.py", "constraints.txt"): continue
        if s.startswith("workbench/demo/") or "tests/data" in s: continue
        yield rel
rename.tree = tree
root = pathlib.Path(sys.argv[1]).resolve(); rs = R.read(sys.argv[2:])
rename.keys(root, rs, sys.stdout); rename.words(root, rs, sys.stdout)
