"""Values that are refused although their type is right: bounds, meshes, shapes, data, optimizer."""

from typing import NamedTuple


class Bad(NamedTuple):
    """One mistake. The last three are parts of the message."""

    given: str | list[str]
    """The text of a file, after its line `base`, or the flags of a command line."""
    key: str
    value: str
    remedy: str


def group(pattern: str, optimizer: str, arguments: str) -> str:
    """A file's only parameter group."""
    return (
        f'[[optimizer.param_groups]]\npattern = "{pattern}"\noptimizer_name = "{optimizer}"\n'
        f"optimizer_kwargs = {{ {arguments} }}"
    )


VALUES = {
    "no steps": Bad("[training]\nsteps = 0", "training.steps", "0", "to 1 or more"),
    "more steps than a counter holds": Bad(
        f"[training]\nsteps = {2**63}", "training.steps", "= 9223372036854775808", "below 2**63"
    ),
    "start that waits longer than a year": Bad(
        "[comm]\ninit_timeout_seconds = 31536001",
        "comm.init_timeout_seconds",
        "31536001",
        "at most a year",
    ),
    "step that waits longer than a year": Bad(
        "[comm]\ntrain_timeout_seconds = 31536001",
        "comm.train_timeout_seconds",
        "31536001",
        "at most a year",
    ),
    "no batch": Bad("[training]\nlocal_batch_size = -1", "training.local_batch_size", "-1", "1 or"),
    "global batch of zero": Bad(
        "[training]\nglobal_batch_size = 0", "training.global_batch_size", "0", "-1 for one"
    ),
    "norm of zero": Bad("[training]\nmax_norm = 0", "training.max_norm", "0", "positive"),
    "log never": Bad("[metrics]\nlog_freq = 0", "metrics.log_freq", "0", "1 or more"),
    "decay beyond the run": Bad(
        "[lr_scheduler]\ndecay_ratio = 1.5", "lr_scheduler.decay_ratio", "1.5", "fraction"
    ),
    "refused by torchtitan": Bad(
        "[checkpoint]\nkeep_latest_k = 1", "checkpoint.keep_latest_k", "= 1", "Change one of them"
    ),
    "validation steps": Bad(
        "[validator]\nsteps = 0", "validator.steps", "= 0", "must be positive or -1"
    ),
    "no graph kept": Bad("[compile]\nmax_graphs = 0", "compile.max_graphs", "0", "1 or more"),
    "no memory at all": Bad(
        "[compile]\nmemory_limit_gib = 0.0",
        "compile.memory_limit_gib",
        "0",
        "positive number of GiB",
    ),
    "cuda graphs": Bad(
        "[training]\ndisable_cuda_graphs = false", "training.disable_cuda_graphs", "false", "= true"
    ),
    "another sharding back end": Bad(
        '[parallelism]\nspmd_backend = "spmd_types"',
        "parallelism.spmd_backend",
        '"spmd_types"',
        '"partial_dtensor"',
    ),
    "pipeline parallelism": Bad(
        "[parallelism]\npipeline_parallel_degree = 2",
        "parallelism.pipeline_parallel_degree",
        "2",
        "= 1",
    ),
    "negative degree": Bad(
        "[parallelism]\ntensor_parallel_degree = -1",
        "parallelism.tensor_parallel_degree",
        "-1",
        "1 or more",
    ),
    "sequence that tensor parallelism does not divide": Bad(
        "[training]\nseq_len = 255\n[parallelism]\ntensor_parallel_degree = 2",
        "training.seq_len",
        "255",
        "Set training.seq_len to a multiple of 2 such as 254",
    ),
    "heads that tensor parallelism does not divide": Bad(
        "[training]\nseq_len = 300\n[parallelism]\ntensor_parallel_degree = 3",
        "parallelism.tensor_parallel_degree",
        "= 3",
        "Set it to a divisor of 16: 1, 2, 4, 8, 16",
    ),
    "sequence longer than the model's positions": Bad(
        "[training]\nseq_len = 200000", "training.seq_len", "200000", "131072 or less"
    ),
    "vocabulary larger than the model's": Bad(
        "[tokenizer]\nvocab_size = 4096", "tokenizer.vocab_size", "4096", "2048 or less"
    ),
    "vocabulary smaller than the bytes": Bad(
        "[tokenizer]\nvocab_size = 100", "tokenizer.vocab_size", "100", "258"
    ),
    "unknown dataset": Bad(
        '[dataloader]\ndataset = "stdlip"',
        "dataloader: unknown dataset",
        "'stdlip'",
        "Did you mean 'stdlib'?",
    ),
    "dataset that is not there": Bad(
        '[dataloader]\ndataset = "text"\ndataset_path = "no/such/folder"',
        "dataloader: dataset_path",
        "'no/such/folder'",
        "Name a .txt or .jsonl file",
    ),
    "validation set that is not there": Bad(
        "[validator]\nenable = true\n"
        '[validator.dataloader]\ndataset = "text"\ndataset_path = "no/such"',
        "validator.dataloader: dataset_path",
        "'no/such'",
        "Name a .txt or .jsonl file",
    ),
    "unknown Hugging Face dataset": Bad(
        '[dataloader]\ntype = "huggingface"\ndataset = "c44"',
        "dataloader.dataset",
        '"c44"',
        "Did you mean c4",
    ),
    "unknown dataset among several": Bad(
        '[dataloader]\ntype = "huggingface_interleaved"\nsources = [{ dataset = "c44" }]',
        "dataloader.sources[0].dataset",
        '"c44"',
        "c4",
    ),
    "tokenizer that is not there": Bad(
        'hf_assets_path = "no/assets"\n[tokenizer]\ntype = "huggingface"',
        "hf_assets_path",
        '"no/assets"',
        "Name the folder that holds tokenizer.json",
    ),
    "output folder that no system can name": Bad(
        'dump_folder = "out\\u0000put"', "dump_folder", '"out\\u0000put"', "Name a folder"
    ),
    "output folder without a name": Bad('dump_folder = ""', "dump_folder", '""', "Name a folder"),
    "module that is no string": Bad("module = 3", "module", "3", "graph_trainer.llama3"),
    "unknown module in a file": Bad(
        'module = "graph_trainer.lama3"',
        "module",
        '"graph_trainer.lama3"',
        "Did you mean graph_trainer.llama3?",
    ),
    "no parameter group": Bad(
        "[optimizer]\nparam_groups = []", "optimizer.param_groups", "[]", 'pattern = ".*"'
    ),
    "not a number": Bad(
        "[training]\nmax_norm = nan", "training.max_norm", "nan", "to a positive number"
    ),
    "seed beyond 64 bits": Bad(
        "[debug]\nseed = 18446744073709551616", "debug.seed", "18446744073709551616", "unset it"
    ),
    "seed below zero": Bad("[debug]\nseed = -1", "debug.seed", "= -1", "a seed from 0 to"),
    "step before the last": Bad(
        "[checkpoint]\nload_step = -2", "checkpoint.load_step", "-2", "-1 for the last one"
    ),
    "profile shorter than its warm-up": Bad(
        "[profiler]\nenable_profiling = true\nprofile_freq = 2",
        "profiler.profile_freq",
        "= 2",
        "profile_freq to 4 or more",
    ),
    "unknown optimizer": Bad(
        group(".*", "Adamm", "lr = 1e-3"),
        "optimizer.param_groups[0].optimizer_name",
        '"Adamm"',
        'Write "Adam", "AdamW"',
    ),
    "pattern that is no regular expression": Bad(
        group("(", "AdamW", "lr = 1e-3"),
        "optimizer.param_groups[0].pattern",
        '"("',
        'such as ".*"',
    ),
    "pattern that repeats without end": Bad(
        group("a{9999999999999}", "AdamW", "lr = 1e-3"),
        "optimizer.param_groups[0].pattern",
        '"a{9999999999999}"',
        'such as ".*"',
    ),
    "unknown argument of the optimizer": Bad(
        group(".*", "AdamW", "lrr = 1e-3"),
        "optimizer.param_groups[0].optimizer_kwargs",
        "{ lrr = 0.001 }",
        "such as { lr = 1e-3 }",
    ),
    "learning rate below zero": Bad(
        group(".*", "AdamW", "lr = -1.0"),
        "optimizer.param_groups[0].optimizer_kwargs",
        "{ lr = -1.0 }",
        "such as { lr = 1e-3 }",
    ),
    "text for a learning rate": Bad(
        group(".*", "AdamW", "lr = 'x'"),
        "optimizer.param_groups[0].optimizer_kwargs",
        '{ lr = "x" }',
        "such as { lr = 1e-3 }",
    ),
}
