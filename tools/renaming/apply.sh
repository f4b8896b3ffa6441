# bash apply.sh WORKTREE PYTHON RULES...   Renames (two processes), keys and words; commit before, nothing is committed here.
set -u
W=$1; PY=$2; shift 2
T=$(cd "$(dirname "$0")" && pwd)
cd "$W" || exit 1
timeout 2400 "$PY" "$T/rename2.py" . "$PY" --shard 0/2 --out /tmp/e0.json "$@" > /tmp/r0.log 2>&1 &
timeout 2400 "$PY" "$T/rename2.py" . "$PY" --shard 1/2 --out /tmp/e1.json "$@" > /tmp/r1.log 2>&1 &
wait
tail -n 1 /tmp/r0.log /tmp/r1.log
"$PY" "$T/rename2.py" . "$PY" --apply /tmp/e0.json /tmp/e1.json
"$PY" "$T/texts.py" . "$@" > /tmp/texts.log
