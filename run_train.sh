#!/usr/bin/env bash
# Install what is missing, then run `graph-trainer train`. See --help for flags and environment, and
# graph_trainer/cli/launcher.py for what it does.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$here/scripts/environment.sh"

use_environment train graph_trainer torch torchtitan
# exec: a signal reaches the launcher itself, which ends every rank.
exec "$python" -m graph_trainer train "$@"
