#!/usr/bin/env bash
# Lint, format, types, unit tests and one launch of real ranks: seven minutes on two cores.
# --full runs every test, as CI does: half an hour.
# With other arguments: pytest alone, with these; paths are relative to the checkout.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$here/scripts/environment.sh"

use_environment dev graph_trainer torch torchtitan \
    expecttest hatchling hypothesis jsonschema mypy pytest pytest_timeout ruff selenium transformers \
    xdist
cd "$here"

# Tests start many ranks on few cores, and never need the network.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

case "${1:-}" in
"") integration=quick unit="not full" HYPOTHESIS_PROFILE=fast ;;
--full) integration="" unit="" HYPOTHESIS_PROFILE=full ;;
*) exec "$python" -m pytest "$@" ;;
esac
export HYPOTHESIS_PROFILE

# Every gate runs, so that one call shows all there is to mend.
failed=()
gate() {
    echo "== $*"
    "$python" -m "$@" || failed+=("$*")
}
gate ruff check .
gate ruff format --check .
gate mypy
# Tests on real ranks take every core; unit tests take one each, and two processes keep two busy.
# In the order of their names the files that take minutes come long before the last: sorted by their
# number of tests, as xdist would, those of one long test came at the end, and one process waited.
gate pytest tests/integration -m "$integration"
gate pytest tests/docs tests/unit -m "$unit" --numprocesses 2 --dist loadfile --no-loadscope-reorder

if ((${#failed[@]} > 0)); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
