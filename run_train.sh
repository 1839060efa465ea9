#!/usr/bin/env bash
# Train. Installs what is missing, then is `graph-trainer train`: --help explains flags and
# environment, and graph_trainer/cli/launcher.py decides everything.
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$here/scripts/environment.sh"

use_environment train graph_trainer torch torchtitan
# exec: a signal reaches the launcher itself, which ends every rank.
exec "$python" -m graph_trainer train "$@"
