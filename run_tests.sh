#!/usr/bin/env bash
# Run lint, format, types, unit tests and one launch of real ranks: seven minutes on two cores.
# --full runs every test, as CI does: half an hour.
# Other arguments go to pytest, which runs alone; paths are relative to the checkout.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$here/scripts/environment.sh"

use_environment dev graph_trainer torch torchtitan \
    expecttest hatchling hypothesis jsonschema mypy pytest pytest_timeout ruff selenium transformers \
    xdist
cd "$here"

# Tests start many ranks on few cores, and need no network.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

case "${1:-}" in
"") integration=quick unit="not full" HYPOTHESIS_PROFILE=fast ;;
--full) integration="" unit="" HYPOTHESIS_PROFILE=full ;;
*) exec "$python" -m pytest "$@" ;;
esac
export HYPOTHESIS_PROFILE

# Every check runs, so that one call shows all failures.
failed=()
gate() {
    echo "== $*"
    "$python" -m "$@" || failed+=("$*")
}
gate ruff check .
gate ruff format --check .
gate mypy
# Tests on real ranks use every core; a unit test uses one, so two processes run them.
# Files run in the order of their names. Sorted by number of tests, as by xdist, files with one
# long test run last, and one of the processes waits.
gate pytest tests/integration -m "$integration"
gate pytest tests/docs tests/unit -m "$unit" --numprocesses 2 --dist loadfile --no-loadscope-reorder

if ((${#failed[@]} > 0)); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
