#!/bin/sh
# Makes rung5.py ... rung0.py anew from the trainer: each rung is the one above it plus one patch.
#     records/ladder_sources/derive.sh [train_gpt.py]
# A patch that no longer applies leaves rungN.py.rej beside it. After mending rungs by hand: derive.sh --save [train_gpt.py]
# patches/adam_scalars.patch is a bug fix for the trainer itself; it is left out once the trainer has it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
save=no
if [ "${1:-}" = --save ]; then save=yes; shift; fi
base=$(mktemp)
cp "${1:-$here/../../train_gpt.py}" "$base"
fix=$here/patches/adam_scalars.patch
if patch --dry-run -s -f "$base" "$fix" > /dev/null; then patch -s "$base" "$fix"; fi
above=$base
for rung in 5 4 3 2 1 0; do
    if [ $save = yes ]; then
        diff -U2 --label above --label "rung$rung.py" "$above" "$here/rung$rung.py" > "$here/patches/rung$rung.patch" || true
    else
        cp "$above" "$here/rung$rung.new"
        patch -s --no-backup-if-mismatch -r "$here/rung$rung.py.rej" "$here/rung$rung.new" "$here/patches/rung$rung.patch"
        mv "$here/rung$rung.new" "$here/rung$rung.py"
    fi
    above=$here/rung$rung.py
done
rm -f "$base"
