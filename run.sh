#!/bin/bash
# One command to train, one to test, on a fresh machine with Python 3.11 or newer: ./run.sh --help.
# Plain bash (3.2 and newer) that needs no program but Python: a PATH with nothing but Python is enough.
set -euo pipefail
trap '' PIPE                            # a console that is gone is no reason to stop (Python ignores it as well)

usage() {
    printf '%s\n' \
        "./run.sh [script.py] [--key=value ...]   train on all that is there (default script: train_gpt.py)" \
        "./run.sh test [--all] [pytest args]      ruff and pytest; --all adds the slow tests" \
        "" \
        "With GPUs it trains the record on FineWeb; without, the demo on built-in text. --preset and" \
        "--train_files choose otherwise. FineWeb shards that the run needs are fetched first. Paths start" \
        "at the repository. Keys and defaults: python train_gpt.py --help" \
        "Environment: PYTHON=interpreter to use   NPROC=processes to start   TRAIN_GPT=script that is tested"
}

say() { printf 'run.sh: %s\n' "$*" >&2 2>/dev/null || true; }
die() { say "$*"; exit 1; }

# ---- which Python ------------------------------------------------------------------------------------------

# why_not PYTHON [requirement files]: the reason against it on stdout, nothing if it will do.
why_not() {
    local interpreter=$1
    shift
    "$interpreter" data/survey.py why_not "$@" 2>/dev/null || echo "does not run"
}

# Sets $python. Arguments: requirement files that must be satisfied beyond torch (tests), none for training.
choose_python() {
    local name found reason note=""
    if [ -n "${PYTHON:-}" ]; then
        python=$(type -P "$PYTHON") || die "PYTHON=$PYTHON: no such interpreter"
        reason=$(why_not "$python" "$@")
        [ -z "$reason" ] || die "PYTHON=$PYTHON $reason (install it there; unset, run.sh makes a .venv)"
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

# ---- our own .venv -----------------------------------------------------------------------------------------

# .venv/made-by-run.sh     marks the folder as ours; holds the process id of an installation that is under way
# .venv/FILE.installed     copy of requirements FILE, written when its installation is complete, never before
stamp() { if [ -f ".venv/$1.installed" ]; then printf '%s' "$(<".venv/$1.installed")"; fi; }

# Sets $python to .venv's, making or completing it first. Arguments: why it is needed, requirement files.
use_venv() {
    local why=$1 file reason installer complete=yes
    local -a requirements
    shift
    python=$root/.venv/bin/python
    if [ -d .venv ] && [ ! -f .venv/made-by-run.sh ]; then  # somebody else's: used or refused, never changed
        reason=$(why_not "$python" "$@")
        [ -z "$reason" ] || die ".venv $reason and run.sh did not make it: complete it, or move it away"
        return
    fi
    [ $# -gt 0 ] || set -- requirements.txt
    for file in "$@"; do
        if [ "$(stamp "$file")" != "$(<"$file")" ]; then complete=""; fi
    done
    if [ -n "$complete" ] && "$python" -c '' 2>/dev/null; then return; fi
    if [ -f .venv/made-by-run.sh ]; then
        installer=$(<.venv/made-by-run.sh)
        if [ -n "$installer" ] && kill -0 "$installer" 2>/dev/null; then
            die "process $installer is installing into .venv: wait for it (or end it, and delete .venv)"
        fi
    fi
    say "$why: using .venv"
    trap 'say "interrupted: run again to finish the installation"; exit 130' INT
    if [ -z "$(stamp requirements.txt)" ] || ! "$python" -c '' 2>/dev/null; then
        find_base
        "$base" data/survey.py empty_venv $$ || die "cannot write .venv in $root"
        "$base" -m venv .venv || die "$base could not make .venv (see above)"
    fi
    printf '%s' $$ >.venv/made-by-run.sh
    requirements=()
    for file in "$@"; do requirements+=(-r "$file"); done
    for file in requirements.txt requirements-dev.txt; do : >".venv/$file.installed"; done
    say "installing $* into .venv, once: 1 GB with a CPU build of torch, 5 GB with CUDA; 1 to 15 minutes"
    PIP_USER=0 "$python" -m pip install --disable-pip-version-check --no-input "${requirements[@]}" >&2 ||
        die "pip could not install the requirements (see above; is the package index in reach?)"
    for file in "$@"; do printf '%s\n' "$(<"$file")" >".venv/$file.installed"; done
    : >.venv/made-by-run.sh
    trap - INT
}

# Sets $base: a Python that can make a .venv.
find_base() {
    local name found version="" remedy=""
    local version_of='import sys; v = sys.version_info; print("%d.%d" % tuple(v[:2])); sys.exit(v < (3, 11))'
    for name in python3 python python3.14 python3.13 python3.12 python3.11; do
        found=$(type -P "$name") || continue
        version=$("$found" -c "$version_of" 2>/dev/null) || continue
        if "$found" -c 'import ensurepip, venv' 2>/dev/null; then base=$found; return; fi
        remedy="$found lacks the venv module: sudo apt install python$version-venv (Debian), then run again"
    done
    [ -z "$remedy" ] || die "$remedy"
    die "Python 3.11 or newer is needed${version:+ (found $version)}: install it, or set PYTHON=/path/to/it"
}

# ---- test --------------------------------------------------------------------------------------------------

run_tests() {
    local lint=0
    if [ -n "${TRAIN_GPT:-}" ] && [ -f "$start/$TRAIN_GPT" ]; then export TRAIN_GPT="$start/$TRAIN_GPT"; fi
    choose_python requirements.txt requirements-dev.txt
    say "ruff and pytest with $python: 6 to 10 minutes on two cores; with --all 15 to 30"
    "$python" -m ruff check --quiet . || lint=$?
    if [ $lint -eq 0 ]; then exec "$python" -m pytest "$@"; fi
    "$python" -m pytest "$@" || true
    die "ruff found faults, listed at the top"
}

# ---- train -------------------------------------------------------------------------------------------------

# nvidia-smi's first line, if it has one to say within 5 s.
nvidia_gpu() {
    local line="" status=0
    type -P nvidia-smi >/dev/null || return 0
    read -r -t 5 line < <(exec nvidia-smi -L 2>/dev/null) || status=$?
    if [ $status -gt 128 ]; then
        say "nvidia-smi gave no answer within 5 s"
        kill $! 2>/dev/null || true
    fi
    printf '%s' "$line"
}

# Runs a program to its end with signals passed on, says which Python it was, exits with the program's code.
run_and_tell() {
    local child status=0 name
    (trap - INT; exec "$@") <&0 &
    child=$!
    trap : INT                                           # Ctrl-C reaches the program without our help
    for name in TERM HUP USR1 USR2; do
        trap "kill -$name $child 2>/dev/null || true" "$name"
    done
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done      # a signal ends wait alone
    wait "$child" || status=$?
    case $python in
        "$root/.venv/bin/python") say "python and torchrun in this shell: source $root/.venv/bin/activate" ;;
        *) say "python is $python; its torchrun is: $python -m torch.distributed.run" ;;
    esac
    exit $status
}

make_builtin_text() {
    local reason
    if [ -f data/builtin/dataset.json ]; then return; fi
    # The trainer needs torch alone, making the text needs numpy as well.
    reason=$(why_not "$python" <(echo numpy))
    if [ -n "$reason" ]; then
        [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON $reason, which data/text.py needs: install it there"
        use_venv "$python $reason"
    fi
    "$python" data/text.py --builtin --tokenizer=bytes --out=data/builtin || exit $?
}

run_training() {
    local script=$root/train_gpt.py argument found gpus cores shards processes status=0 data_named="" demo=""
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
    if [ ! -w . ] && [[ " $* " != *" --log_dir"* ]]; then
        die "$root is read-only, and runs write into it: cp -r '$root' ~/train_gpt && ~/train_gpt/run.sh"
    fi

    say "looking for Python, torch and GPUs: some seconds"
    choose_python
    found=$("$python" data/survey.py machine "$script" "$@" 2>/dev/null) || found="its import crashed"
    found=${found##*$'\n'}                               # the script may print when it is imported
    [[ $found =~ ^([0-9]+)\ ([0-9]+)\ ([0-9]+)$ ]] ||
        die "torch of $python does not import ($found): repair it, or set PYTHON to another interpreter"
    gpus=${BASH_REMATCH[1]} cores=${BASH_REMATCH[2]} shards=${BASH_REMATCH[3]}
    processes=${NPROC:-$gpus}
    if [ "$gpus" -eq 0 ] && [ "${CUDA_VISIBLE_DEVICES-all}" = all ] && [[ $(nvidia_gpu) == GPU* ]]; then
        say "this machine has an NVIDIA GPU that torch of $python cannot use (a CPU build? an old driver?)"
    fi

    if [ "$shards" -gt 0 ]; then
        say "the run reads data/fineweb10B, which is not there:" \
            "fetching $shards shards of 100M tokens and the validation shard," \
            "$(((shards + 1) / 5)).$(((shards + 1) % 5 * 2)) GB" \
            "(python data/cached_fineweb10B.py $shards)"
        "$python" data/cached_fineweb10B.py "$shards" || status=$?
        if [ $status -ge 128 ]; then exit $status; fi
        if [ $status -ne 0 ] && [ -z "$data_named" ]; then demo=yes; fi
    fi
    if [ -n "$demo" ]; then
        say "without those shards: running the demo instead, a small model on built-in text"
        # Compiling takes longer than training it: 34 s in all without, on one H200 (46 s on 16 of its cores).
        if [[ " $* " != *" --compile"* ]]; then set -- --compile=off "$@"; fi
    elif [ -z "$data_named" ] && [ "$gpus" -eq 0 ]; then
        say "no GPU: running the demo, a small model on built-in text (with GPUs: the record, on FineWeb)"
        demo=yes
    fi
    if [ -n "$demo" ]; then
        make_builtin_text
        processes=${NPROC:-1}
        set -- --preset=demo "$@"
        export TRAIN_GPT=$script                         # demo.py trains with it and then says what came out
        script=$root/records/demo.py
    fi

    # Waiting OpenMP threads spin: more of them than cores makes a step many times slower.
    if [ "$processes" -gt 1 ]; then
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        # What torchrun leaves its ranks to write a checkpoint in after a signal, in seconds; 30 unless told
        export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
        set -- -m torch.distributed.run --standalone --nproc_per_node="$processes" "$script" "$@"
    else
        if [ "$gpus" -eq 0 ]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"; fi
        set -- "$script" "$@"
    fi
    say "starting ${script#"$root/"} with $python ($gpus GPUs, $cores cores, NPROC=${processes/#0/1})"
    run_and_tell "$python" "$@"
}

# ------------------------------------------------------------------------------------------------------------

start=$PWD
here=${BASH_SOURCE[0]}
case $here in */*) here=${here%/*} ;; *) here=. ;; esac
root=$(CDPATH='' cd -- "$here" && pwd -P)
case ${PYTHON:-} in /*) ;; */*) PYTHON=$start/$PYTHON ;; esac  # relative to where the user stands
cd -- "$root"

case ${1:-} in
    -h | --help) usage ;;
    test) shift; run_tests "$@" ;;
    *) run_training "$@" ;;
esac
