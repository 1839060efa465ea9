"""Which causal families of transformers train as in transformers: `python -m benchmarks.families`.

For each family of AutoModelForCausalLM, tiny and at two and eight layers, the first loss and
gradient norm of a captured step on two ranks of FSDP 2 are compared with those of plain
transformers, in one process on the global batch. The folder is what `save_pretrained` writes of
random weights. Families run one after another, each in processes of its own and within a limit of
time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing.connection
import os
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import graph_trainer as gt
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.trainer import GraphTrainer
from graph_trainer.train import leave

# fmt: off
FAMILIES = [
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    "qwen3_5_text", "deepseek_v2", "deepseek_v3", "gpt_oss", "gemma", "gemma2", "gemma3_text",
    "gemma4_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "mpt",
    "falcon", "falcon_h1", "falcon_mamba", "mamba", "mamba2", "rwkv", "jamba", "bamba",
    "recurrent_gemma", "nemotron", "glm4", "glm4_moe", "phi", "phi3", "phimoe", "olmo2", "olmoe",
    "granite", "granitemoehybrid", "cohere2", "stablelm", "starcoder2", "smollm3", "ernie4_5_moe",
    "minimax", "llama4_text", "lfm2",
]
# fmt: on
RANKS, ROWS, LENGTH = 2, 2, 16
TOLERANCE = 1e-5
"""Relative, in float32: sums are added up in another order, through up to eight layers."""

# What a config is given where its class has such a field.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 2048),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok_total"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "n_mamba_heads", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_topk"), 8),
    **dict.fromkeys(("index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads", "expand", "mamba_expand"), 2),
    **dict.fromkeys(("linear_num_value_heads", "time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    "attention_hidden_size": 64,
    "mamba_d_ssm": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"
# What the fields above leave inconsistent.
_ALSO: dict[str, Callable[[int], dict[str, Any]]] = {
    "gptj": lambda layers: {"rotary_dim": 8},
    "deepseek_v3": lambda layers: {"head_dim": 8, "qk_head_dim": 16},
    "gpt_neo": lambda layers: {"attention_types": [[["global", "local"], layers // 2]]},
    "mamba2": lambda layers: {"num_heads": 8, "head_dim": 16},
}


def config_of(family: str, layers: int) -> Any:
    """Return a tiny config of a family, in which nothing is random."""
    import transformers

    cls = transformers.CONFIG_MAPPING[family]
    default = cls().to_dict()
    fields = default.keys() | cls.attribute_map
    values = {name: value for name, value in _SIZES.items() if name in fields}
    random = {name for name in default if "drop" in name or "jitter" in name}
    values |= {name: 0.0 for name in random if isinstance(default[name], float)}
    values |= {next(name for name in _LAYERS if name in fields): layers}
    return cls(**values | _ALSO.get(family, lambda layers: {})(layers))


def global_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels of the global batch, the same in every process."""
    tokens = torch.randint(3, 2048, (RANKS * ROWS, LENGTH + 1), generator=torch.manual_seed(7))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def by_transformers(family: str, layers: int, folder: Path) -> dict[str, Any]:
    """Write the folder of a tiny model, and return its first loss and gradient norm."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config_of(family, layers), dtype=torch.float32)
    with torch.no_grad():  # ones and zeros of norms and biases would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    tokens, labels = global_batch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt()
    return {"parameters": model.num_parameters(), "loss": loss.item(), "norm": norm.item()}


def by_graph_trainer(rank: int, server: socket.socket, folder: Path) -> dict[str, float] | None:
    """Return first loss and gradient norm of a captured step on FSDP 2, on the first rank."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= local | {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    host, port = server.getsockname()
    listening = {"is_master": True, "master_listen_fd": server.detach()} if rank == 0 else {}
    store = dist.TCPStore(host, port, RANKS, **listening)
    dist.init_process_group(gt.cpu_backend(), store=store, rank=rank, world_size=RANKS)
    words = ["--module", "graph_trainer.transformers", "--config", "debugmodel"]
    values = {"model.path": folder, "dump_folder": folder / "run", "training.seq_len": LENGTH}
    values |= {"training.local_batch_size": ROWS, "parallelism.data_parallel_shard_degree": RANKS}
    values |= {"training.mixed_precision_param": "float32", "debug.seed": 3}
    words += [word for key, value in values.items() for word in (f"--{key}", str(value))]
    trainer = GraphTrainer(load_config(words))
    first: dict[str, float] = {}
    step = trainer.forward_backward_step

    def recorded(**kwargs: Any) -> torch.Tensor:
        loss = step(**kwargs)
        total = loss.detach().double().sum()
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in trainer.model_parts[0].parameters():
            if isinstance(parameter.grad, DTensor):
                squares += parameter.grad.to_local().double().square().sum()
        dist.all_reduce(total)
        dist.all_reduce(squares)
        first.update(loss=total.item(), norm=squares.sqrt().item())
        return loss

    trainer.forward_backward_step = recorded
    tokens, labels = (each[rank * ROWS : (rank + 1) * ROWS] for each in global_batch())
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    trainer.step = 2  # at the first, the metrics want a clock of the data loader
    trainer.train_step(iter([({"input": tokens, "positions": positions}, labels)]))
    return first if rank == 0 else None


def _in_process(function: Callable[..., Any], sender: Any, *args: Any) -> None:
    """Send what a function returns, or why it does not, and end the process."""
    try:
        message = {"result": function(*args)}
    except BaseException as error:
        kind = "refused" if isinstance(error, ConfigError) else "error"
        message = {kind: f"{type(error).__name__}: {' '.join(str(error).split())}"}
    sender.send(message)
    sender.close()
    leave(0)


def within(seconds: float, function: Callable[..., Any], *calls: tuple[Any, ...]) -> dict[str, Any]:
    """Return what the first of several processes sends, or the first error of any."""
    context = multiprocessing.get_context("fork")
    processes, receivers = [], []
    for args in calls:
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_in_process, args=(function, sender, *args)))
        processes[-1].start()
        sender.close()
        receivers.append(receiver)
    messages: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    waiting = list(receivers)
    while waiting and not any("result" not in message for message in messages):
        ready = multiprocessing.connection.wait(waiting, max(end - time.monotonic(), 0))
        if not ready:
            messages.append({"error": f"not done after {seconds:.0f} s"})
        for receiver in ready:
            waiting.remove(receiver)
            try:
                messages.append(receiver.recv())
            except EOFError:
                messages.append({"error": "the process ended"})
    for process in processes:
        process.join(5)
        process.kill()
    failed = [message for message in messages if "result" not in message]
    results = [message["result"] for message in messages if message.get("result")]
    return failed[0] if failed else {"result": results[0]}


def verdict_of(family: str, layers: int, limit: float) -> dict[str, Any]:
    """Run a family by transformers and by graph_trainer, and compare."""
    row: dict[str, Any] = {"family": family, "layers": layers}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / family
        outcome = within(limit, by_transformers, (family, layers, folder))
        if "result" not in outcome:
            return row | {"verdict": "not by transformers", **outcome}
        expected = outcome["result"]
        with socket.create_server(("localhost", 0)) as server:
            calls = [(rank, server, folder) for rank in range(RANKS)]
            outcome = within(limit, by_graph_trainer, *calls)
    row |= {"by_transformers": expected}
    if "result" not in outcome:
        return row | {"verdict": "refused" if "refused" in outcome else "fails", **outcome}
    found = outcome["result"]
    row |= {"by_graph_trainer": found}
    row |= {"errors": [abs(found[name] / expected[name] - 1) for name in ("loss", "norm")]}
    return row | {"verdict": "equal" if max(row["errors"]) <= TOLERANCE else "differs"}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table in Markdown: outcome, and the families at two and at eight layers."""
    by_family: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_family[row["family"]][row["layers"]] = row
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    depths = sorted({row["layers"] for row in rows})
    for family, by_depth in by_family.items():
        outcomes = tuple(by_depth[d]["verdict"] if d in by_depth else "-" for d in depths)
        groups[outcomes].append(family)
    lines = ["| " + " | ".join(f"{depth} layers" for depth in depths) + " | | families |"]
    lines.append("|" + "---|" * (len(depths) + 2))
    for outcomes, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {' | '.join(outcomes)} | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 8])
    parser.add_argument("--limit", type=float, default=120, help="seconds a family and run")
    parser.add_argument("--json", type=Path, help="a file for the results too, as they come")
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    # what every process would import, once
    importlib.import_module("graph_trainer.transformers.config_registry")
    rows: list[dict[str, Any]] = []
    for layers in options.layers:
        for family in options.families:
            start = time.monotonic()
            config = transformers.CONFIG_MAPPING[family]
            importlib.import_module(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config].__module__)
            rows.append(verdict_of(family, layers, options.limit))
            row = rows[-1]
            seconds = time.monotonic() - start
            reason = str(row.get("refused") or row.get("error"))[:300]
            what = " ".join(f"{e:.1e}" for e in row["errors"]) if "errors" in row else reason
            print(f"{family} {layers}: {row['verdict']} ({what}), {seconds:.0f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main())
