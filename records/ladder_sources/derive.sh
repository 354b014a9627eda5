#!/bin/sh
# Makes rung5.py ... rung0.py anew from the trainer: each rung is the one above it plus one patch.
#     records/ladder_sources/derive.sh [train_gpt.py]
# A patch that no longer applies leaves rungN.py.rej beside it. After editing rungs by hand: derive.sh --save [train_gpt.py]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
save=no
if [ "${1:-}" = --save ]; then save=yes; shift; fi
above=${1:-$here/../../train_gpt.py}
for rung in 5 4 3 2 1 0; do
    if [ $save = yes ]; then
        diff -U2 --label above --label "rung$rung.py" "$above" "$here/rung$rung.py" > "$here/patches/rung$rung.patch" || true
    else
        cp "$above" "$here/rung$rung.py"
        patch --no-backup-if-mismatch "$here/rung$rung.py" "$here/patches/rung$rung.patch"
    fi
    above=$here/rung$rung.py
done
