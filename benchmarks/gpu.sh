#!/usr/bin/env bash
# On a machine with a GPU: the tests of the core on CUDA, then benchmarks.gpu in every size that
# fits. Needs Python with torch 2.11 or newer and pytest, and neither torchtitan nor a network.
# Writes logs and JSON into the folder that the first argument names, by default gpu_results.
set -euo pipefail
cd "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
out=${1:-gpu_results}
mkdir -p "$out"
failed=0
export PYTHONPATH=$PWD
python -c 'import torch; assert torch.cuda.is_available(), "no GPU here"'
python -m pytest tests/unit/core -q -rs 2>&1 | tee "$out/tests.log" || failed=1
for size in 1b 8b; do
    python -m benchmarks.gpu --size "$size" --json "$out/$size.json" 2>&1 | tee "$out/$size.log"
done
exit "$failed"
