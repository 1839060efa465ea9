"""Communication that a step waits for, as the simulator has it: plain, ours and the peer's passes.

    python -m benchmarks.communication                          # 8B and 70B, many minutes
    python -m benchmarks.communication --cases 8b:16:8:2        # config:fsdp:tp:batch
    python -m benchmarks.communication --caps 2560 8192 32768   # overlap within fixed caps

Each case is captured once, in a process of its own, as `graph-trainer plan` captures it; every
variant starts from a copy of that graph, the peer's passes too, and all are simulated on the same
hardware. Activation checkpointing is off, so that nothing is recomputed that gathers could hide
behind, and so that both sides keep the same.

With `--caps` the cases are as their configs have them, checkpointing included, and only what
`schedule_overlap` may have in flight differs: as much as memory allows, or a fixed number of MiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# A batch of as many sequences as ranks share one, so that each rank computes one.
CASES = ("8b:128:1:1", "8b:16:8:8", "70b:32:8:8")
CAP_CASES = (
    *("8b:8:1:1", "8b:64:1:1", "8b:512:1:1", "70b:64:1:1", "70b:512:1:1", "405b:512:1:1"),
    *("qwen3/30b-a3b:64:1:1", "qwen3/30b-a3b:512:1:1", "deepseek_v3/671b:512:1:1"),
)
POLICIES = ("always", "never")
STRATEGIES = ("transformer_block", "size", "auto")
# "default" is the default pass list as it is: "transformer_block", with schedule_overlap.
SCHEDULED = ("default", *(f"{strategy} overlap" for strategy in STRATEGIES[1:]))
VARIANTS = ("plain", *STRATEGIES, *SCHEDULED, "peer")
_FSDP = ("unshard", "reduce_grad")
_GIB = 1024**3


def main() -> None:
    """Simulate every case, print tables and one line of JSON."""
    arguments = parse()
    if arguments.child:
        print(json.dumps(measure(json.loads(arguments.child))))
        return
    keys = ("policies", "variants", "hardware", "layers", "sequence", "fused")
    keys += ("unfused_qkv", "reduce_dtype")
    common = {key: getattr(arguments, key) for key in keys}
    results = []
    if arguments.caps:
        print(CAPS_HEADING)
    for case in arguments.cases or (CAP_CASES if arguments.caps else CASES):
        results.append(in_a_process({"case": case, "caps": arguments.caps, **common}))
        (print_caps if arguments.caps else print_tables)(results[-1])
        sys.stdout.flush()
    text = json.dumps(results)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", metavar="CONFIG:FSDP:TP:BATCH")
    parser.add_argument("--caps", nargs="+", type=float, metavar="MIB", help="compare these caps")
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--fused", action="store_true", help="as the inductor backend fuses")
    parser.add_argument("--unfused-qkv", action="store_true", help="nine parameters a layer")
    parser.add_argument("--reduce-dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--json", help="write the results to this file as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(wanted: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.communication", "--child", json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{wanted} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(wanted: dict[str, Any]) -> dict[str, Any]:
    """Capture a case and simulate its variants."""
    from benchmarks.simulated import captured_case, simulated_caps, simulated_variants

    if wanted["caps"]:
        return simulated_caps(wanted)
    case = captured_case(wanted)
    rows = []
    for policy in wanted["policies"]:
        variants = simulated_variants(case, policy, wanted)
        rows += [{"policy": policy, "variant": name, **row} for name, row in variants]
    return {"wanted": wanted, "nodes": len(case.joint.graph.nodes), "rows": rows}


CAPS_HEADING = (
    f"{'case':<26}{'largest':>8}{'left':>7}{'plain':>9}{'default':>9}{'grows':>7}{'best':>9}"
    f"{'at MiB':>8}{'ratio':>7}"
)


def print_caps(result: dict[str, Any]) -> None:
    """One line a case: the step with the default, and with the best of the fixed caps."""
    fixed = {float(cap): seconds for cap, seconds in result["fixed"].items()}
    best = min(fixed, key=fixed.__getitem__)
    print(
        f"{result['wanted']['case']:<26}{result['largest_bytes'] / _GIB:>8.2f}"
        f"{result['left_bytes'] / _GIB:>7.1f}{1e3 * result['plain']:>9.1f}"
        f"{1e3 * result['default']:>9.1f}{result['grown_bytes'] / _GIB:>7.2f}"
        f"{1e3 * fixed[best]:>9.1f}{best:>8g}{result['default'] / fixed[best]:>7.3f}"
    )


def print_tables(result: dict[str, Any]) -> None:
    """One table a case and policy, and below it what cannot be helped and what TP leaves."""
    wanted = result["wanted"]
    config, fsdp, tensor, batch = wanted["case"].split(":")
    apart = ", wq, wk, wv apart" if wanted["unfused_qkv"] else ""
    print(
        f"Llama 3 {config}{apart}, {int(fsdp) * int(tensor)} fake ranks ({fsdp} x {tensor}), "
        f"{result['nodes']:,} nodes\n{wanted['hardware']}, local batch {batch}, sequence "
        f"{wanted['sequence']}, gradients reduced in {wanted['reduce_dtype']}"
    )
    for policy in wanted["policies"]:
        rows = [row for row in result["rows"] if row["policy"] == policy]
        print_table(policy, rows)
        print_floor(rows[0]["floor"])
        print_of_plain(rows)
        print_tensor_parallel(rows)


def print_table(policy: str, rows: list[dict[str, Any]]) -> None:
    """The variants of a case under one reshard policy."""
    print(
        f"{policy:<26}{'gather':>7}{'again':>6}{'reduce':>7}{'+ tp':>5}{'unshard':>8}{'reduce':>7}"
        f"{'tp':>7}{'step ms':>9}{'GiB':>8}{'peak':>7}"
    )
    plain = next((row for row in rows if row["variant"] == "plain"), None)
    for row in rows:
        exposed = row["exposed_seconds"]
        change = f"{row['peak_bytes'] / plain['peak_bytes'] - 1:+.1%}" if plain else "-"
        print(
            f"{row['variant']:<26}{row['gathers']:>7}{row['gathers_again']:>6}"
            f"{row['reductions']:>7}{row['reductions_elsewhere']:>5}"
            f"{1e3 * exposed['unshard']:>8.1f}{1e3 * exposed['reduce_grad']:>7.1f}"
            f"{1e3 * (exposed['tensor_parallel'] + exposed['other']):>7.1f}"
            f"{1e3 * row['step_seconds']:>9.1f}{row['peak_bytes'] / _GIB:>8.2f}{change:>7}"
        )


def print_floor(floor: dict[str, Any]) -> None:
    """What no order goes below."""
    print(f"  {1e3 * floor['compute']:>7.1f} ms  compute alone")
    for ranks, seconds in floor["bandwidth"].items():
        print(f"  {1e3 * seconds:>7.1f} ms  bytes over bandwidth, {ranks}")
    print(f"  {1e3 * floor['ends']:>7.1f} ms  of that in the first gather and the last reduction")


def print_of_plain(rows: list[dict[str, Any]]) -> None:
    """What part of the time that FSDP leaves exposed in the plain graph each variant leaves."""
    exposed = {
        row["variant"]: sum(row["exposed_seconds"][traffic] for traffic in _FSDP) for row in rows
    }
    if plain := exposed.pop("plain", 0.0):
        parts = ", ".join(f"{name} {seconds / plain:.1%}" for name, seconds in exposed.items())
        print(f"  of FSDP's exposed ms in 'plain' are left: {parts}")


def print_tensor_parallel(rows: list[dict[str, Any]]) -> None:
    """What tensor parallelism leaves exposed in the last of our variants and in the peer's."""
    for row in [r for r in rows if r["variant"] != "peer"][-1:] + rows[-1:]:
        worst = [w for w in row["exposed_tensor_parallel"] if w["seconds"] > 1e-4]
        if worst:
            print(f"  left exposed by tensor parallelism in '{row['variant']}':")
        for w in worst[:8]:
            print(
                f"  {1e3 * w['seconds']:>7.1f} ms  {w['phase']:<9}{w['collectives']:>4} x "
                f"{w['kind']:<24} {w['part']}"
            )


if __name__ == "__main__":
    main()
