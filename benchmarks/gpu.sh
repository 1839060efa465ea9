#!/usr/bin/env bash
# On a machine with a GPU: the tests of the core, those that want CUDA among them, then
# benchmarks.gpu with 1B, and with as many blocks of 8B as fit. Needs Python with torch 2.13 or
# newer, tomli, pytest, pytest-timeout and hypothesis, and no network. Without torchtitan a few files
# of tests cannot be imported, which is said at the end.
# Writes logs and JSON into the folder that the first argument names, by default gpu_results.
set -euo pipefail
cd "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
out=${1:-gpu_results}
mkdir -p "$out"
failed=0
export PYTHONPATH=$PWD
python -c 'import torch; assert torch.cuda.is_available(), "no GPU here"'
python -m pytest tests/unit/core -q -rs --continue-on-collection-errors 2>&1 | tee "$out/tests.log" || failed=1
measure() {  # a name, and flags of benchmarks.gpu
    python -m benchmarks.gpu "${@:2}" --json "$out/$1.json" 2>&1 | tee "$out/$1.log"
}
measure 1b --size 1b || failed=1
fitted=0
for blocks in 32 24 16 8 4; do
    if measure "8b_$blocks" --size 8b --blocks "$blocks"; then
        fitted=1
        break
    fi
done
exit "$((failed || !fitted))"
