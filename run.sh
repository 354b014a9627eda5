#!/bin/bash
# One command to train, one to test, on a fresh machine with Python 3.11 or newer: ./run.sh --help.
# Plain bash (3.2 and newer) that calls no program but Python, so that a PATH with nothing but Python is enough.
set -euo pipefail

usage() {
    printf '%s\n' \
        "./run.sh [script.py] [--key=value ...]   train on all that is there (default script: train_gpt.py)" \
        "./run.sh test [--all] [pytest args]      ruff and pytest; --all adds the slow tests" \
        "" \
        "With GPUs it trains the record on FineWeb, fetching the shards first; without, the demo on built-in text." \
        "Given --preset or --train_files it passes everything through. Paths in options start at the repository." \
        "Keys and defaults: python train_gpt.py --help" \
        "Environment: PYTHON=interpreter to use   NPROC=processes to start   TRAIN_GPT=script that the tests examine"
}

say() { printf 'run.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# ---- which Python ----------------------------------------------------------------------------------------------------

# Prints why an interpreter will not do, nothing if it will. Reads package metadata only: importing torch takes seconds.
# Arguments: requirement files whose packages must all be there (torch itself is always needed). Runs on any Python.
probe='
import sys
if sys.version_info < (3, 11):
    print("is Python %d.%d, 3.11 or newer is needed" % tuple(sys.version_info[:2]))
    sys.exit()
import re
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
wanted = [re.match("[A-Za-z0-9_.-]*", line).group() for path in sys.argv[1:] for line in open(path)]
missing = [name for name in wanted if name and name != "torch" and version(name) is None]
torch = version("torch")
if torch is None:
    print("has no torch")
elif not (2, 11) <= tuple(map(int, re.findall("[0-9]+", torch)[:2])) <= (2, 14):
    print("has torch %s, 2.11 to 2.14 is needed" % torch)
elif missing:
    print("lacks " + ", ".join(missing))
'

# why_not PYTHON [requirement files]: the reason against it on stdout, nothing if it will do.
why_not() {
    local interpreter=$1
    shift
    "$interpreter" -c "$probe" "$@" 2>/dev/null || echo "does not run"
}

# Sets $python. Arguments: requirement files that must be satisfied beyond torch (tests), none for training.
choose_python() {
    local name found reason note=""
    if [ -n "${PYTHON:-}" ]; then
        python=$(type -P "$PYTHON") || die "PYTHON=$PYTHON: no such interpreter"
        reason=$(why_not "$python" "$@")
        [ -z "$reason" ] || die "PYTHON=$PYTHON $reason (install it there, or unset PYTHON: run.sh then makes a .venv)"
        return
    fi
    for name in python3 python; do
        found=$(type -P "$name") || continue
        reason=$(why_not "$found" "$@")
        if [ -z "$reason" ]; then python=$found; return; fi
        [ -n "$note" ] || note="$found $reason"
    done
    use_venv "${note:-there is no python3 on the PATH}" "$@"
}

# ---- our own .venv ---------------------------------------------------------------------------------------------------

# .venv/made-by-run.sh     marks the folder as ours; holds the process id of an installation under way, else nothing
# .venv/FILE.installed     copy of requirements FILE, written when its installation is complete, never before
stamp() { if [ -f ".venv/$1.installed" ]; then printf '%s' "$(<".venv/$1.installed")"; fi; }

installed() {
    local file
    for file in "$@"; do
        if [ "$(stamp "$file")" != "$(<"$file")" ]; then return 1; fi
    done
    .venv/bin/python -c '' 2>/dev/null
}

# Sets $python to .venv's, making or completing it first. Arguments: why it is needed, requirement files.
use_venv() {
    local why=$1 file reason installer
    shift
    python=$root/.venv/bin/python
    if [ -d .venv ] && [ ! -f .venv/made-by-run.sh ]; then  # somebody else's: use it if it will do, never change it
        reason=$(why_not "$python" "$@")
        [ -z "$reason" ] || die ".venv $reason and run.sh did not make it: complete it, or move it away and run again"
        return
    fi
    [ $# -gt 0 ] || set -- requirements.txt
    if installed "$@"; then return; fi
    if [ -f .venv/made-by-run.sh ]; then
        installer=$(<.venv/made-by-run.sh)
        if [ -n "$installer" ] && kill -0 "$installer" 2>/dev/null; then
            die "process $installer is installing into .venv: wait for it (or end it, delete .venv and run again)"
        fi
    fi
    say "$why: using .venv"
    trap 'say "interrupted: run again to finish the installation"; exit 130' INT
    if [ -z "$(stamp requirements.txt)" ] || ! .venv/bin/python -c '' 2>/dev/null; then
        find_base
        empty_venv
        "$base" -m venv .venv || die "$base could not make .venv (see above)"
    fi
    printf '%s' $$ >.venv/made-by-run.sh
    for file in requirements.txt requirements-dev.txt; do : >".venv/$file.installed"; done
    install "$@"
    for file in "$@"; do printf '%s\n' "$(<"$file")" >".venv/$file.installed"; done
    : >.venv/made-by-run.sh
    trap - INT
}

# An interrupted pip can leave packages that look installed, so what was not completed is emptied and made anew.
empty_venv() {
    "$base" -c '
import os, shutil, sys
os.makedirs(".venv", exist_ok=True)
with open(".venv/made-by-run.sh", "w") as marker:
    marker.write(sys.argv[1])
for entry in os.scandir(".venv"):
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path)
    elif entry.name != "made-by-run.sh":
        os.unlink(entry.path)
' $$ || die "cannot write .venv in $root"
}

version_of='import sys; print("%d.%d" % tuple(sys.version_info[:2])); sys.exit(sys.version_info < (3, 11))'

# Sets $base: a Python that can make a .venv.
find_base() {
    local name found version="" remedy=""
    for name in python3 python python3.14 python3.13 python3.12 python3.11; do
        found=$(type -P "$name") || continue
        version=$("$found" -c "$version_of" 2>/dev/null) || continue
        if "$found" -c 'import ensurepip, venv' 2>/dev/null; then base=$found; return; fi
        remedy="$found lacks the venv module: sudo apt install python$version-venv (Debian, Ubuntu), then run again"
    done
    [ -z "$remedy" ] || die "$remedy"
    die "Python 3.11 or newer is needed${version:+ (found $version)}: install it, or set PYTHON=/path/to/python"
}

# pip install of the given requirement files into .venv; pip.log there gets its output, the terminal its latest line.
install() {
    local file line error=""
    local -a requirements
    requirements=()
    for file in "$@"; do requirements+=(-r "$file"); done
    say "installing $* into .venv, once: about 1 GB with a CPU build of torch, several GB with CUDA; 1 to 15 minutes"
    if PIP_USER=0 .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
        "${requirements[@]}" 2>&1 | while IFS= read -r line; do
            printf '%s\n' "$line" >>.venv/pip.log
            if [ -t 2 ]; then
                printf '\r\033[K%4d s  %.100s' "$SECONDS" "$line" >&2
            elif [[ $line == *Downloading*[GM]B\)* || $line == Installing* ]]; then
                printf '%4d s  %.100s\n' "$SECONDS" "$line" >&2
            fi
        done
    then
        if [ -t 2 ]; then printf '\r\033[K' >&2; fi
        say "installed in $SECONDS s"
        return
    fi
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
    while IFS= read -r line; do
        if [[ $line == *ERROR* || -z $error ]]; then error=$line; fi
    done <.venv/pip.log
    die "pip could not install the requirements (is the package index in reach?): $error [all of it: .venv/pip.log]"
}

# ---- test ------------------------------------------------------------------------------------------------------------

run_tests() {
    local lint=0
    if [ -n "${TRAIN_GPT:-}" ] && [ -f "$start/$TRAIN_GPT" ]; then export TRAIN_GPT="$start/$TRAIN_GPT"; fi
    choose_python requirements.txt requirements-dev.txt
    "$python" -m ruff check --quiet . || lint=$?
    if [ $lint -eq 0 ]; then exec "$python" -m pytest "$@"; fi
    "$python" -m pytest "$@" || true
    die "ruff found faults, listed at the top"
}

# ---- train -----------------------------------------------------------------------------------------------------------

# Prints "GPUs cores" or, when torch does not import, the reason. Cores: physical ones that this process may use.
survey='
import os
try:
    import torch
    gpus = torch.cuda.device_count()
except Exception as error:
    print("%s: %s" % (type(error).__name__, " ".join(str(error).split())[:300]))
    raise SystemExit
cores = os.cpu_count() or 1
try:
    allowed = os.sched_getaffinity(0)
    siblings = set()
    for cpu in allowed:
        with open("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list" % cpu) as file:
            siblings.add(file.read())
    cores = len(siblings)
    with open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()
    if quota != "max":
        cores = max(1, min(cores, int(quota) // int(period)))
except (OSError, AttributeError, ValueError):
    pass
print(gpus, cores)
'

has_shards() {
    local file
    for file in data/fineweb10B/fineweb_train_*.bin; do
        [ -e "$file" ] && return
    done
    return 1
}

run_training() {
    local script=$root/train_gpt.py argument demo="" survey_result gpus cores processes status=0 data_named="" reason
    if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
        script=$1
        if [ "${script#/}" = "$script" ]; then
            if [ -f "$start/$script" ]; then script=$start/$script; else script=$root/$script; fi
        fi
        [ -f "$script" ] || die "no such script: $1"
        shift
    fi
    for argument in "$@"; do
        case $argument in --preset | --preset=* | --train_files | --train_files=*) data_named=yes ;; esac
    done
    [[ ${NPROC:-1} =~ ^[1-9][0-9]*$ ]] || die "NPROC=$NPROC: a number of processes is wanted, 1 or more"

    choose_python
    survey_result=$("$python" -c "$survey" 2>/dev/null) || survey_result="its import crashed"
    [[ $survey_result =~ ^[0-9]+\ [0-9]+$ ]] ||
        die "torch of $python does not import ($survey_result): repair it, or set PYTHON to another interpreter"
    gpus=${survey_result% *}
    cores=${survey_result#* }
    processes=${NPROC:-$gpus}
    if [ "$gpus" -eq 0 ] && type -P nvidia-smi >/dev/null && [ "${CUDA_VISIBLE_DEVICES-all}" = all ] &&
        [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then
        say "this machine has an NVIDIA GPU that torch of $python cannot use (a CPU build, or a driver that is too old)"
    fi

    if [ -z "$data_named" ] && [ "$gpus" -gt 0 ] && ! has_shards; then
        say "no FineWeb shards in data/fineweb10B: fetching 9 and the validation shard (2 GB)"
        "$python" data/cached_fineweb10B.py 9 || status=$?
        if [ $status -ge 128 ]; then exit $status; fi
        if [ $status -ne 0 ] || ! has_shards; then
            say "the record lacks data/fineweb10B/fineweb_train_*.bin (python data/cached_fineweb10B.py 9 gets them)"
            say "running the demo instead, a small model on built-in text"
            demo=yes
        fi
    elif [ -z "$data_named" ] && [ "$gpus" -eq 0 ]; then
        say "no GPU: running the demo, a small model on built-in text (with GPUs: the record, on FineWeb)"
        demo=yes
    fi
    if [ -n "$demo" ]; then
        if [ ! -f data/builtin/dataset.json ]; then
            # The trainer needs torch alone, making the text needs numpy as well.
            reason=$(why_not "$python" <(echo numpy))
            if [ -n "$reason" ]; then
                [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON $reason, which data/text.py needs: install it there"
                use_venv "$python $reason"
            fi
            "$python" data/text.py --builtin --tokenizer=bytes --out=data/builtin || exit $?
        fi
        processes=${NPROC:-1}
        set -- --preset=demo "$@"
        export TRAIN_GPT=$script                         # demo.py trains with it and then says what came out
        script=$root/records/demo.py
    fi

    # Waiting OpenMP threads spin: more of them than cores makes a step many times slower.
    if [ "$processes" -gt 1 ]; then
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$processes" "$script" "$@"
    fi
    if [ "$gpus" -eq 0 ]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"; fi
    exec "$python" "$script" "$@"
}

# ----------------------------------------------------------------------------------------------------------------------

start=$PWD
here=${BASH_SOURCE[0]}
case $here in */*) here=${here%/*} ;; *) here=. ;; esac
root=$(CDPATH='' cd -- "$here" && pwd -P)
case ${PYTHON:-} in /*) ;; */*) PYTHON=$start/$PYTHON ;; esac  # a relative path means relative to where the user stands
cd -- "$root"

case ${1:-} in
    -h | --help) usage ;;
    test) shift; run_tests "$@" ;;
    *) run_training "$@" ;;
esac
