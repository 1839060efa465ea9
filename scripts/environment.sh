# shellcheck shell=bash
# Sourced by run_train.sh and run_tests.sh: chooses the Python that they run, and installs the
# package into .venv beside them the first time that nothing else will do.

root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)

fail() {
    printf 'graph_trainer: %s\n' "$*" >&2
    exit 2
}

# has_modules INTERPRETER MODULE...: Python 3.11 or newer with every module installed?
# Nothing is imported, so that asking stays cheap. -P, which older versions refuse, keeps the
# current folder off the path: a checkout is no installation.
has_modules() {
    local interpreter=$1
    shift
    "$interpreter" -P -c '
import sys
from importlib.util import find_spec
# No origin: a folder without a module, all that is left of a package whose checkout is gone.
specs = [find_spec(name) for name in sys.argv[1:]]
sys.exit(not all(spec and spec.origin for spec in specs))
' "$@" >/dev/null 2>&1
}

# find_python: a Python that can make the virtual environment. The user's own python3 comes first.
# Each one is run, not just looked up: a version manager's shim can exist and still fail.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.13 python3.12 python3.11; do
        if has_modules "$candidate" venv ensurepip; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer with venv and pip, and found $(python3 -V 2>&1 || echo none)." \
        "Install one (Debian and Ubuntu: python3 and python3-venv), or name it: PYTHON=/path/to/python3"
}

# fingerprint VENV: what an installation depends on. It changes when the dependencies, the Python
# or the folder of the checkout do.
fingerprint() {
    printf '%s %s %s\n' "$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)" \
        "$("$1/bin/python" -V 2>&1)" "$root"
}

# is_ready VENV KIND: has this very installation been finished?
is_ready() {
    [[ -x $1/bin/python && -f $1/graph_trainer-$2.stamp ]] &&
        [[ $(<"$1/graph_trainer-$2.stamp") == "$(fingerprint "$1")" ]]
}

# install VENV KIND: runs in a subshell of its own, which holds the lock until it ends.
install() {
    local venv=$1 kind=$2 base target=$root
    if command -v flock >/dev/null; then
        exec 9>"$root/.venv.lock"
        flock -n 9 || {
            echo "graph_trainer: waiting for another set-up of $venv" >&2
            flock 9
        }
        # The set-up that had the lock has probably done the work.
        if is_ready "$venv" "$kind"; then return; fi
    fi
    if ! has_modules "$venv/bin/python" venv; then
        base=$(find_python)
        echo "graph_trainer: making $venv with $("$base" -V)" >&2
        "$base" -m venv --clear "$venv"
    fi
    # Absent where another tool made the environment, or where making it was interrupted.
    has_modules "$venv/bin/python" pip || "$venv/bin/python" -m ensurepip >/dev/null
    if [[ $kind == dev ]]; then target="${root}[dev]"; fi
    echo "graph_trainer: installing the package and its pinned dependencies, once; this takes minutes" >&2
    "$venv/bin/python" -m pip install --disable-pip-version-check \
        -c "$root/constraints.txt" -e "$target" >&2
    # Last, so that an interrupted installation is taken up again.
    fingerprint "$venv" >"$venv/graph_trainer-$kind.stamp"
}

# use_environment KIND MODULE...: sets $python to the active environment where it has every module
# named, else to .venv, where KIND is "train" or "dev", the extra to install.
use_environment() {
    local kind=$1 candidate status venv=$root/.venv
    shift
    for candidate in python python3; do
        if has_modules "$candidate" "$@"; then
            # shellcheck disable=SC2034  # for the caller
            python=$candidate
            return
        fi
    done
    # The dev extra holds all that training needs.
    if ! is_ready "$venv" dev && ! { [[ $kind == train ]] && is_ready "$venv" train; }; then
        # Its exit status is looked at afterwards: as a condition it would run without errexit.
        set +e
        (
            set -e
            install "$venv" "$kind"
        )
        status=$?
        set -e
        ((status == 0)) ||
            fail "the set-up of $venv failed, see above. Run the same command again to go on."
    fi
    # shellcheck disable=SC2034  # for the caller
    python=$venv/bin/python
}
