#!/usr/bin/env bash
# Without arguments: lint, format, types, then every unit and integration test.
# With arguments: pytest alone, with these; paths are relative to the checkout.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$here/scripts/environment.sh"

use_environment dev graph_trainer torch torchtitan \
    hatchling hypothesis jsonschema mypy plotly pytest pytest_timeout ruff selenium transformers \
    xdist
cd "$here"

# Tests start many ranks on few cores, and never need the network.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

if (($# > 0)); then
    exec "$python" -m pytest "$@"
fi

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
gate pytest tests/integration
gate pytest tests/unit --numprocesses 2 --dist loadfile

if ((${#failed[@]} > 0)); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
