"""Every kind of bad input: what is given, and the key, value and remedy that its error names."""

from tests.unit.titan.config.bad_values import VALUES, Bad

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
} | VALUES

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
