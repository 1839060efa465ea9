"""Every kind of bad input: what is given, and the key, value and remedy that its error names."""

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


IN_FILES = {
    "unknown key": Bad(
        "[training]\nstepz = 3", "training.stepz", "= 3", "Did you mean training.steps?"
    ),
    "unknown section": Bad(
        "[trainning]\nsteps = 3", "trainning", "{ steps = 3 }", "Did you mean training?"
    ),
    "key without its section": Bad("steps = 3", "steps", "= 3", "Did you mean training.steps"),
    "key in the wrong section": Bad(
        "[metrics]\nseq_len = 3", "metrics.seq_len", "= 3", "Did you mean training.seq_len?"
    ),
    "string for an integer": Bad(
        '[training]\nsteps = "ten"', "training.steps", '"ten"', "Write training.steps = 1"
    ),
    "boolean for an integer": Bad(
        "[training]\nsteps = true", "training.steps", "true", "Write training.steps = 1"
    ),
    "float for an integer": Bad(
        "[training]\nsteps = 1.5", "training.steps", "1.5", "Write training.steps = 1"
    ),
    "integer for a boolean": Bad(
        "[metrics]\nenable_tensorboard = 1",
        "metrics.enable_tensorboard",
        "= 1",
        "Write metrics.enable_tensorboard = true",
    ),
    "integer too large for a float": Bad(
        f"[lr_scheduler]\nmin_lr_factor = {10**400}",
        "lr_scheduler.min_lr_factor",
        "1000",
        "Write lr_scheduler.min_lr_factor = 0.5",
    ),
    "string for a list": Bad(
        '[compile]\npasses = "default"',
        "compile.passes",
        '"default"',
        "Write compile.passes = [...]",
    ),
    "integer in a list of strings": Bad(
        "[compile]\npasses = [1]", "compile.passes[0]", "= 1", 'Write compile.passes = "text"'
    ),
    "value for a section": Bad("training = 3", "training", "= 3", "under a [training] heading"),
    "list for a section": Bad(
        "[[training]]\nsteps = 3", "training", "[{ steps = 3 }]", "under a [training] heading"
    ),
    "unknown policy": Bad(
        '[parallelism]\nfsdp_reshard_after_forward = "allways"',
        "parallelism.fsdp_reshard_after_forward",
        '"allways"',
        'Write "default", "always" or "never"',
    ),
    "unknown mode": Bad(
        '[compile]\nmode = "jit"', "compile.mode", '"jit"', 'Write "aot_fx_trace" or "eager"'
    ),
    "unknown backend": Bad(
        '[compile]\nbackend = "inducter"', "compile.backend", '"inducter"', "Did you mean inductor?"
    ),
    "unknown pass": Bad(
        '[compile]\npasses = ["default", "rematerialise"]',
        "compile.passes",
        '"rematerialise"',
        "Did you mean rematerialize? Known passes: ",
    ),
    "unknown disabled pass": Bad(
        '[compile]\ndisable_passes = ["dedup_unshards"]',
        "compile.disable_passes",
        '"dedup_unshards"',
        "Did you mean deduplicate_unshards",
    ),
    "option of a pass that does not run": Bad(
        "[compile.schedule_overlap]\nprefetch_depth = 3",
        "compile.schedule_overlap.prefetch_depth",
        "= 3: has no effect",
        'Add "schedule_overlap" to compile.passes',
    ),
    "option of a pass that is disabled": Bad(
        '[compile]\npasses = ["default", "overlap_fsdp"]\ndisable_passes = ["overlap_fsdp"]\n'
        "[compile.overlap_fsdp]\nin_flight = 8",
        "compile.overlap_fsdp.in_flight",
        'the pass overlap_fsdp is in compile.disable_passes = ["overlap_fsdp"]',
        'Take "overlap_fsdp" out of compile.disable_passes, or leave',
    ),
    "buckets of what is not tagged": Bad(
        '[compile]\ndisable_passes = ["tag_buckets"]\n[compile.bucketing]\nstrategy = "size"',
        "compile.bucketing.strategy",
        '"size": has no effect: the pass tag_buckets is in',
        'Take "tag_buckets" out of compile.disable_passes',
    ),
    "buckets in a list that tags nothing": Bad(
        '[compile]\npasses = ["bucket_collectives"]\n[compile.bucketing]\nstrategy = "size"',
        "compile.bucketing.strategy",
        '"size": has no effect: the pass tag_buckets is not in compile.passes',
        'Add "tag_buckets" to compile.passes',
    ),
    "nothing in flight": Bad(
        '[compile]\npasses = ["default", "overlap_fsdp"]\n[compile.overlap_fsdp]\nin_flight = 0',
        "compile.overlap_fsdp.in_flight",
        "0",
        "it must be at least 1",
    ),
    "gathers less than in place": Bad(
        '[compile]\npasses = ["default", "schedule_overlap"]\nhardware = "h100-sxm"\n'
        "[compile.schedule_overlap]\nprefetch_depth = -1",
        "compile.schedule_overlap.prefetch_depth",
        "-1",
        "it must be 0",
    ),
    "no bytes in flight": Bad(
        '[compile]\npasses = ["default", "schedule_overlap"]\nhardware = "h100-sxm"\n'
        "[compile.schedule_overlap]\nmax_in_flight_mib = 0.0",
        "compile.schedule_overlap.max_in_flight_mib",
        "0.0",
        "a number of MiB above 0",
    ),
    "a peak that shrinks": Bad(
        '[compile]\npasses = ["default", "schedule_overlap"]\nhardware = "h100-sxm"\n'
        "[compile.schedule_overlap]\nmax_peak_growth = -0.5",
        "compile.schedule_overlap.max_peak_growth",
        "-0.5",
        "it must be a part of the peak",
    ),
    "no compute at all": Bad(
        '[compile]\npasses = ["default", "schedule_overlap"]\nhardware = "h100-sxm"\n'
        "[compile.schedule_overlap]\nmax_consecutive_compute = 0",
        "compile.schedule_overlap.max_consecutive_compute",
        "0",
        "it must be at least 1",
    ),
    "pass listed twice": Bad(
        '[compile]\npasses = ["rematerialize", "rematerialize"]',
        "compile.passes",
        '["rematerialize", "rematerialize"]',
        "remove one",
    ),
    "passes out of order": Bad(
        '[compile]\npasses = ["rematerialize", "normalize_views"]',
        "compile.passes",
        '["rematerialize", "normalize_views"]',
        "put it in front",
    ),
    "torch.compile switch": Bad(
        "[compile]\nenable = true", "compile.enable", "= true", "set compile.mode, compile.backend"
    ),
    "torch.compile components": Bad(
        '[compile]\ncomponents = ["loss"]',
        "compile.components",
        '["loss"]',
        "set compile.mode, compile.backend",
    ),
    "model in a file": Bad(
        "[model_spec]\nname = 'x'", "model_spec", '{ name = "x" }', "`base` names"
    ),
    "unknown type": Bad(
        '[dataloader]\ntype = "txt"',
        "dataloader.type",
        '"txt"',
        'Did you mean text? Write "text", "huggingface"',
    ),
    "type that is no string": Bad("[dataloader]\ntype = 3", "dataloader.type", "3", '"text"'),
    "type of another section": Bad(
        '[dataloader]\ntype = "torchtitan.components.loss:CrossEntropyLoss.Config"',
        "dataloader.type",
        "CrossEntropyLoss.Config",
        'Write "text", "huggingface"',
    ),
    "type that cannot be imported": Bad(
        '[dataloader]\ntype = "no_such_module:X.Config"',
        "dataloader.type",
        "no_such_module",
        "package.module:Class.Config",
    ),
    "type that is no path": Bad(
        '[dataloader]\ntype = "a b:c"', "dataloader.type", "a b:c", "package.module:Class.Config"
    ),
    "key of a section that is off": Bad(
        '[activation_checkpoint]\ntype = "none"\ndebug = true',
        "activation_checkpoint.debug",
        "true",
        "Choose another type",
    ),
    "key of a section that was off": Bad(
        "[activation_checkpoint]\ndebug = true",
        "activation_checkpoint",
        "debug",
        'Add type = "selective" or "full"',
    ),
    "memory budget without a compiler": Bad(
        '[activation_checkpoint]\ntype = "memory_budget"',
        "activation_checkpoint.type",
        '"memory_budget"',
        '"selective"',
    ),
    "missing key in a list of tables": Bad(
        "[[optimizer.param_groups]]\npattern = '.*'",
        "optimizer.param_groups[0]",
        '{ pattern = ".*" }',
        "Add optimizer.param_groups[0].optimizer_name",
    ),
    "unset that is no list": Bad(
        '[training]\nunset = "steps"', "training.unset", '"steps"', 'unset = ["key"]'
    ),
    "unset of what cannot be unset": Bad(
        '[training]\nunset = ["steps"]', "training.unset", '["steps"]', "set training.steps instead"
    ),
    "unset of an unknown key": Bad(
        '[debug]\nunset = ["sed"]', "debug.unset", '["sed"]', "Did you mean debug.seed?"
    ),
    "set and unset": Bad('[debug]\nunset = ["seed"]\nseed = 1', "debug.seed", "1", "Keep one"),
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

ON_THE_COMMAND_LINE = {
    "unknown flag": Bad(
        ["--training.stepz", "3"], "--training.stepz", " 3", "Did you mean --training.steps?"
    ),
    "unknown flag with =": Bad(
        ["--training.stepz=3"], "--training.stepz", " 3", "Did you mean --training.steps?"
    ),
    "flag without its section": Bad(
        ["--tensor_parallel_degree", "2"],
        "--tensor_parallel_degree",
        " 2",
        "Did you mean --parallelism.tensor_parallel_degree?",
    ),
    "wrong type": Bad(["--training.steps", "ten"], "--training.steps", "'ten'", "--help` says"),
    "no value": Bad(["--training.steps"], "--training.steps", "Missing value", "--help` says"),
    "unknown choice": Bad(
        ["--parallelism.fsdp_reshard_after_forward", "sometimes"],
        "--parallelism.fsdp_reshard_after_forward",
        "'sometimes'",
        "one of ('default', 'always', 'never')",
    ),
    "stray word": Bad(["steps"], "unexpected", '"steps"', "every value follows its flag"),
    "torch.compile switch": Bad(
        ["--compile.enable"], "--compile.enable", "torch.compile switch", "set compile.mode"
    ),
    "section's own check": Bad(
        ["--checkpoint.interval", "0"], "--checkpoint.interval", " 0", "at least 1 step"
    ),
    "section's assertion": Bad(
        ["--validator.steps", "0"], "--validator.steps", " 0", "must be positive or -1"
    ),
    "flag of a section that is off": Bad(
        ["--activation_checkpoint.debug"],
        "--activation_checkpoint.debug",
        "switched off",
        "--activation_checkpoint.type chooses",
    ),
    "option of a pass that does not run": Bad(
        ["--compile.schedule_overlap.prefetch_depth", "3"],
        "command line: compile.schedule_overlap.prefetch_depth",
        "= 3: has no effect",
        'Add "schedule_overlap" to compile.passes',
    ),
    "unknown type": Bad(
        ["--dataloader.type", "hf"], "dataloader.type", '"hf"', 'Write "text", "huggingface"'
    ),
    "type of no section": Bad(
        ["--trainign.type", "x"], "trainign", '{ type = "x" }', "Did you mean training?"
    ),
    "type without a value": Bad(
        ["--dataloader.type"],
        "--dataloader.type",
        "no value",
        "Write for example --dataloader.type none",
    ),
    "config without a value": Bad(
        ["--config"], "--config", "no value", "Write for example --config debugmodel"
    ),
    "module without a value": Bad(
        ["--module", "--config", "8b"],
        "--module",
        "no value",
        "Write for example --module graph_trainer.llama3",
    ),
    "unknown config": Bad(["--config", "8c"], "--config", "8c", "Did you mean 8b? Known configs: "),
    "unknown file": Bad(["--config", "no/such.toml"], "--config", "no/such.toml", "Check the path"),
    "config with a name too long for a file": Bad(
        ["--config", "a" * 300], "--config", "a" * 300, "Known configs: "
    ),
    "config with a NUL in its name": Bad(["--config", "x\0"], "--config", "x\0", "Known configs: "),
    "file with a name too long": Bad(
        ["--config", "a" * 300 + ".toml"], "--config", "a" * 300, "Name a readable"
    ),
    "file with a NUL in its name": Bad(
        ["--config", "x\0.toml"], "--config", "x\0.toml", "Name a readable"
    ),
    "unknown module": Bad(
        ["--module", "graph_trainer.lama3"],
        "--module",
        "graph_trainer.lama3",
        "Did you mean graph_trainer.llama3?",
    ),
    "impossible module": Bad(
        ["--module", "..a b"], "--module", "..a b", "Known modules: graph_trainer.llama3"
    ),
    "module without configs": Bad(
        ["--module", "json"], "--module", "json", "Known modules: graph_trainer.llama3"
    ),
    "bad value": Bad(["--training.steps", "0"], "training.steps", "= 0", "to 1 or more"),
    "unknown pass": Bad(
        ["--compile.passes", "x,default"], "compile.passes", '"x"', "Known passes: "
    ),
}
