"""Every kind of bad input: what is given, and what its error says of it."""

from typing import NamedTuple


class Bad(NamedTuple):
    """One mistake in a file or on a command line."""

    said: str
    """The key and its value, as the message names them."""
    remedy: str
    """What the message says to do."""
    given: str | list[str] = ""
    """The text of a file after its line `base`, or the flags; by default those that `said` is."""

    @property
    def text(self) -> str:
        """What the file holds."""
        key, _, value = self.said.partition(" = ")
        section, _, name = key.rpartition(".")
        heading = f"[{section}]\n" if section else ""
        return self.given or f"{heading}{name} = {value}"

    @property
    def flags(self) -> list[str]:
        """The words of the command line."""
        return self.given or self.said.split(" ", 1)


KEYS_AND_TYPES = (
    Bad("optimizer.betas = []: expected a list of 2", "[..., ...].", "[optimizer]\nbetas = []"),
    Bad(
        "optimizer.betas = [0.9]: expected a list of 2",
        "= [0.9, ...].",
        "[optimizer]\nbetas = [0.9]",
    ),
    Bad(
        "optimizer.betas = [0.9, 0.9, 0.9]: expected a list of 2",
        "Write",
        "[optimizer]\nbetas = [0.9, 0.9, 0.9]",
    ),
    Bad("training.stepz = 3", "Did you mean training.steps?"),
    Bad("trainning = { steps = 3 }", "Did you mean training?"),
    Bad("steps = 3", "Did you mean training.steps"),
    Bad("metrics.seq_len = 3", "Did you mean training.seq_len?"),
    Bad("checkpoint.enable_checkpoint = true", "checkpoint.enable"),
    Bad('training.steps = "ten"', "Write training.steps = 1"),
    Bad('training.local_batch_size = "4"', "Write training.local_batch_size = 4."),
    Bad('checkpoint.enable = "no"', "Write checkpoint.enable = false."),
    Bad('optimizer.lr = "1e-3"', "Write optimizer.lr = 1e-3"),
    Bad("training.steps = true", "Write training.steps = 1"),
    Bad("training.steps = 1.5", "Write training.steps = 1"),
    Bad("training.seq_len = 12.5", "Write training.seq_len = 12."),
    Bad("metrics.enable_tensorboard = 1", "Write metrics.enable_tensorboard = true"),
    Bad('compile.passes = "default"', 'Write compile.passes = ["default"]'),
    Bad("compile.passes[0] = 1", 'Write compile.passes = ["text"]', "[compile]\npasses = [1]"),
    Bad("training = 3", "under a [training] heading"),
    Bad("training = [{ steps = 3 }]", "under a [training] heading"),
    Bad(
        'parallelism.fsdp_reshard_after_forward = "allways"',
        'Did you mean always? Write "default", "always", "never", "auto"',
    ),
    Bad('compile.mode = "jit"', 'Write "aot_fx_trace", "partitioned", "eager"'),
    Bad('compile.backend = "inducter"', "Did you mean inductor?"),
    Bad(
        'compile.passes = ["default", "rematerialise"]: there is no pass \'rematerialise\'',
        "did you mean 'rematerialize'? Known passes: ",
        '[compile]\npasses = ["default", "rematerialise"]',
    ),
    Bad(
        'compile.passes = ["default", "mypasses"]: there is no pass \'mypasses\'',
        "'mypasses': one of your own is written package.module:name. Known passes: normalize_views",
        '[compile]\npasses = ["default", "mypasses"]',
    ),
    Bad('compile.disable_passes = ["dedup_unshards"]', "did you mean 'deduplicate_unshards'?"),
    Bad("compile.enable = true", "`base` names"),
    Bad('compile.components = ["loss"]', "`base` names"),
    Bad('model_spec = "x"', "`base` names"),
    Bad('dataloader.type = "txt"', 'Did you mean text? Write "text", "huggingface"'),
    Bad("dataloader.type = 3", 'Write "text"'),
    Bad(
        "activation_checkpoint = { debug = true }: switched off",
        'set activation_checkpoint.type to "selective"',
        '[activation_checkpoint]\ntype = "none"\ndebug = true',
    ),
    Bad('activation_checkpoint.type = "memory_budget"', 'Write "selective"'),
    Bad('activation_checkpoint.type = "sel"', "Did you mean selective?"),
    Bad(
        'optimizer.param_groups[0] = { optimizer_name = "Adam" }',
        "Add optimizer.param_groups[0].pattern",
        "[[optimizer.param_groups]]\noptimizer_name = 'Adam'",
    ),
    Bad(
        'activation_checkpoint.path = "x.toml": unknown key',
        'It belongs to type = "file"',
        '[activation_checkpoint]\ntype = "budget"\npath = "x.toml"',
    ),
    Bad("dataloader.sources = 3", 'It belongs to type = "huggingface_interleaved"'),
    Bad('training.unset = "steps"', 'unset = ["key"]'),
    Bad(
        "training.steps = unset: expected an integer",
        "Write training.steps = 1",
        '[training]\nunset = ["steps"]',
    ),
    Bad("debug.sed = unset", "Did you mean debug.seed?", '[debug]\nunset = ["sed"]'),
    Bad("module = 3", "graph_trainer.llama3"),
)
"""What the schema refuses as well: a wrong key, type or choice, for itself alone."""

SCHEDULED = '[compile]\nhardware = "h100-sxm"\n'
OVERLAPPED = '[compile]\npasses = ["default", "overlap_fsdp"]\n'


def of_a_pass(said: str, remedy: str, compile_section: str) -> Bad:
    """An option's bad value where the pass runs."""
    return Bad(said, remedy, f"{compile_section}{Bad(said, remedy).text}")


def of_a_group(
    said: str, remedy: str, pattern: str = ".*", name: str = "AdamW", arguments: str = "lr = 1e-3"
) -> Bad:
    """A mistake in the only parameter group."""
    given = f'[[optimizer.param_groups]]\npattern = "{pattern}"\noptimizer_name = "{name}"\n'
    given += f"optimizer_kwargs = {{ {arguments} }}"
    return Bad(f"optimizer.param_groups[0].{said}", remedy, given)


TAKES = "such as { lr = 1e-3 }"
IN_FILES = (
    *KEYS_AND_TYPES,
    Bad(
        f"lr_scheduler.min_lr_factor = 1{'0' * 70}",
        "Write lr_scheduler.min_lr_factor = 1e-3",
        f"[lr_scheduler]\nmin_lr_factor = {10**400}",
    ),
    Bad(
        "compile.overlap_fsdp.in_flight = 3: has no effect",
        'Add "overlap_fsdp" to compile.passes',
        "[compile.overlap_fsdp]\nin_flight = 3",
    ),
    Bad(
        "compile.overlap_fsdp.in_flight = 8: has no effect: the pass overlap_fsdp is in "
        "compile.disable_passes",
        'Take "overlap_fsdp" out of compile.disable_passes, or leave',
        f'{OVERLAPPED}disable_passes = ["overlap_fsdp"]\n[compile.overlap_fsdp]\nin_flight = 8',
    ),
    Bad(
        'compile.bucketing.strategy = "size": has no effect: the pass tag_buckets is in',
        'Take "tag_buckets" out of compile.disable_passes',
        '[compile]\ndisable_passes = ["tag_buckets"]\n[compile.bucketing]\nstrategy = "size"',
    ),
    Bad(
        'compile.bucketing.strategy = "size": has no effect: the pass tag_buckets is not in',
        'Add "tag_buckets" to compile.passes',
        '[compile]\npasses = ["bucket_collectives"]\n[compile.bucketing]\nstrategy = "size"',
    ),
    Bad(
        "compile.bucketing.cap_mib = 5.0: has no effect",
        'Set compile.bucketing.strategy to "size", or leave compile.bucketing.cap_mib out.',
        "[compile.bucketing]\ncap_mib = 5",
    ),
    Bad(
        'compile.tag_activations.matmuls = "keep": has no effect',
        'Set activation_checkpoint.type to "selective", or leave',
        '[activation_checkpoint]\ntype = "full"\n[compile.tag_activations]\nmatmuls = "keep"',
    ),
    Bad(
        "activation_checkpoint.layers = 7: more than the 6 blocks of the model",
        "Set 1 to 6.",
        '[activation_checkpoint]\ntype = "layers"\nlayers = 7',
    ),
    Bad(
        'parallelism.fsdp_reshard_after_forward = "always": has no effect: the pass rematerialize',
        'Take "rematerialize" out of compile.disable_passes, or set '
        'parallelism.fsdp_reshard_after_forward = "never".',
        '[parallelism]\nfsdp_reshard_after_forward = "always"\n'
        '[compile]\ndisable_passes = ["rematerialize"]',
    ),
    Bad(
        'activation_checkpoint.type = "full": has no effect: the pass tag_activations',
        'Add "tag_activations" to compile.passes, or set activation_checkpoint.type = "none".',
        '[activation_checkpoint]\ntype = "full"\n'
        '[compile]\npasses = ["tag_fsdp_unshards", "rematerialize"]',
    ),
    Bad(
        'activation_checkpoint.type = "budget": has no effect: the pass plan_memory is listed '
        "after tag_fsdp_unshards",
        'Put "plan_memory" in front of "tag_fsdp_unshards" in compile.passes',
        '[activation_checkpoint]\ntype = "budget"\n[compile]\nmemory_limit_gib = 8\n'
        'passes = ["tag_fsdp_unshards", "plan_memory", "rematerialize"]',
    ),
    of_a_pass("compile.overlap_fsdp.in_flight = 0", "must be at least 1", OVERLAPPED),
    of_a_pass("compile.schedule_overlap.prefetch_depth = -1", "it must be 0", SCHEDULED),
    of_a_pass(
        "compile.schedule_overlap.max_in_flight_mib = 0.0", "a number of MiB above 0", SCHEDULED
    ),
    of_a_pass("compile.schedule_overlap.max_peak_growth = -0.5", "a part of the peak", SCHEDULED),
    of_a_pass(
        "compile.schedule_overlap.max_consecutive_compute = 0", "must be at least 1", SCHEDULED
    ),
    Bad('compile.passes = ["rematerialize", "rematerialize"]', "remove one"),
    Bad(
        "the pass 'fuse_chained_reduce_scatters' declares that it changes the order of sums",
        "set compile.bitwise = false",
        '[compile]\nbitwise = true\npasses = ["default", "fuse_chained_reduce_scatters"]',
    ),
    Bad('compile.passes = ["rematerialize", "normalize_views"]', "put it in front"),
    Bad(
        'dataloader.type = "torchtitan.components.loss:CrossEntropyLoss.Config"',
        'Write "text", "huggingface"',
    ),
    Bad('dataloader.type = "no_such_module:X.Config"', "package.module:Class.Config"),
    Bad('dataloader.type = "a b:c"', "package.module:Class.Config"),
    Bad(
        "activation_checkpoint = { debug = true }: switched off, so this has no effect",
        'set activation_checkpoint.type to "selective", "full", "layers", "budget"',
        "[activation_checkpoint]\ndebug = true",
    ),
    Bad("debug.seed = 1", "Keep one", '[debug]\nunset = ["seed"]\nseed = 1'),
    Bad("training.steps = 0", "to 1 or more"),
    Bad(f"training.steps = {2**63}", "below 2**63"),
    Bad("comm.init_timeout_seconds = 31536001", "at most a year"),
    Bad("comm.train_timeout_seconds = 31536001", "at most a year"),
    Bad("training.local_batch_size = -1", "1 or"),
    Bad("training.global_batch_size = 0", "-1 for one"),
    Bad("training.max_norm = 0", "to a positive number"),
    Bad("training.max_norm = nan", "to a positive number"),
    Bad("metrics.log_freq = 0", "1 or more"),
    Bad(
        'metrics.save_routing = "r.json": llama3 debugmodel has no experts',
        "Leave it out",
        '[metrics]\nsave_routing = "r.json"',
    ),
    Bad("lr_scheduler.decay_ratio = 1.5", "fraction"),
    Bad("checkpoint.keep_latest_k = 1", "at least 2 checkpoint replicas"),
    Bad("checkpoint.load_step = -2", "-1 for the last one"),
    Bad("validator.steps = 0", "must be positive or -1"),
    Bad("compile.max_graphs = 0", "1 or more"),
    Bad(
        'activation_checkpoint.type = "budget": it fills a memory limit, and '
        "compile.memory_limit_gib is unset",
        "Set the GiB that a step may need",
        '[activation_checkpoint]\ntype = "budget"',
    ),
    Bad(
        'parallelism.fsdp_reshard_after_forward = "auto": it fills a memory limit, and '
        "compile.memory_limit_gib is 0, which is no limit",
        "Set the GiB that a step may need",
        '[parallelism]\nfsdp_reshard_after_forward = "auto"\n[compile]\nmemory_limit_gib = 0.0',
    ),
    Bad(
        'activation_checkpoint.type = "budget": it acts on a captured step',
        'Set compile.mode = "aot_fx_trace"',
        '[activation_checkpoint]\ntype = "budget"\n[compile]\nmode = "eager"',
    ),
    Bad(
        'compile.partition = "min_cut": it parts forward and backward, and compile.mode is',
        'Set compile.mode = "partitioned" too',
        '[compile]\npartition = "min_cut"',
    ),
    Bad(
        "compile.allow_offload = true: there is no budget that could choose it",
        'Set activation_checkpoint.type = "budget" too',
        "[compile]\nallow_offload = true",
    ),
    Bad(
        "activation_checkpoint.layers = 0: out of bounds",
        'activation_checkpoint.type = "none"',
        '[activation_checkpoint]\ntype = "layers"\nlayers = 0',
    ),
    Bad(
        'activation_checkpoint.type = "file": ',
        "Set the path to a TOML file",
        '[activation_checkpoint]\ntype = "file"',
    ),
    Bad(
        'bad.toml: activation_checkpoint.path = "no/such.toml": there is no such file',
        "Check the path",
        '[activation_checkpoint]\ntype = "file"\npath = "no/such.toml"',
    ),
    Bad(
        'bad.toml: compile.hardware = "h1000": there is no such profile',
        "did you mean 'h100-sxm'?",
        '[compile]\nhardware = "h1000"',
    ),
    Bad("compile.memory_limit_gib = -1.0", "Set the GiB that a step may need"),
    Bad("compile.memory_limit_gib = nan", "or unset it for what the device has"),
    Bad("compile.memory_limit_gib = inf", "0 to refuse no step"),
    Bad("training.disable_cuda_graphs = false", "= true"),
    Bad('parallelism.spmd_backend = "spmd_types"', '"partial_dtensor"'),
    Bad("parallelism.pipeline_parallel_degree = 2", "= 1"),
    Bad("parallelism.tensor_parallel_degree = -1", "1 or more"),
    Bad(
        "training.seq_len = 255",
        "Set training.seq_len to a multiple of 2 such as 254",
        "[training]\nseq_len = 255\n[parallelism]\ntensor_parallel_degree = 2",
    ),
    Bad(
        "parallelism.tensor_parallel_degree = 3",
        "Set it to a divisor of 16: 1, 2, 4, 8, 16",
        "[training]\nseq_len = 300\n[parallelism]\ntensor_parallel_degree = 3",
    ),
    Bad(
        "training.seq_len = 254",
        "Set training.seq_len to a multiple of 4 such as 252",
        "[training]\nseq_len = 254\n[parallelism]\ncontext_parallel_degree = 2",
    ),
    Bad(
        "training.seq_len = 252: not divisible by 8: parallelism.context_parallel_degree = 2 "
        "splits a sequence into 4 chunks, and sequence parallelism each of them into 2",
        "multiple of 8 such as 248",
        "[training]\nseq_len = 252\n"
        "[parallelism]\ncontext_parallel_degree = 2\ntensor_parallel_degree = 2",
    ),
    Bad(
        "parallelism.context_parallel_degree = 32",
        'Set parallelism.context_parallel_method = "all_gather", or lower the degree',
        '[parallelism]\ncontext_parallel_degree = 32\ncontext_parallel_method = "ulysses"',
    ),
    Bad(
        'parallelism.context_parallel_load_balancer = "ptrr"',
        'Set "headtail"',
        '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_load_balancer = "ptrr"',
    ),
    Bad("parallelism.context_parallel_degree = 0", "1 or more"),
    Bad("training.seq_len = 200000", "131072 or less"),
    Bad("tokenizer.vocab_size = 4096", "2048 or less"),
    Bad("tokenizer.vocab_size = 100", "258"),
    Bad(
        'dataloader.dataset = "c4": a dataset of torchtitan\'s',
        'Set dataloader.type = "huggingface"',
        '[dataloader]\ndataset = "c4"',
    ),
    Bad(
        'dataloader.dataset = "stdlip": unknown dataset',
        "Did you mean 'stdlib'?",
        '[dataloader]\ndataset = "stdlip"',
    ),
    Bad(
        "dataloader.dataset = \"text\": dataset_path 'no/such/folder'",
        "Name a .txt or .jsonl file",
        '[dataloader]\ndataset = "text"\ndataset_path = "no/such/folder"',
    ),
    Bad(
        "validator.dataloader.dataset = \"text\": dataset_path 'no/such'",
        "Name a .txt or .jsonl file",
        "[validator]\nenable = true\n"
        '[validator.dataloader]\ndataset = "text"\ndataset_path = "no/such"',
    ),
    Bad(
        'dataloader.dataset_path = "no/such": dataset_path',
        "Name a .txt",
        "dataloader.dataset_path = 'no/such'",
    ),
    Bad(
        "validator.dataloader.dataset = unset: the training data is no text",
        'dataset = "c4_validation"',
        '[dataloader]\ntype = "huggingface"\ndataset = "c4"\n[validator]\nenable = true',
    ),
    Bad(
        'dataloader.dataset = "c44"',
        "Did you mean c4?",
        '[dataloader]\ntype = "huggingface"\ndataset = "c44"',
    ),
    Bad(
        'dataloader.sources[0].dataset = "c44"',
        "Write c4 or",
        '[dataloader]\ntype = "huggingface_interleaved"\nsources = [{ dataset = "c44" }]',
    ),
    Bad(
        'hf_assets_path = "no/assets"',
        "Name the folder that holds tokenizer.json",
        'hf_assets_path = "no/assets"\n[tokenizer]\ntype = "huggingface"',
    ),
    Bad('dump_folder = "out\\u0000put"', "Name a folder"),
    Bad('dump_folder = ""', "Name a folder"),
    Bad('dump_folder = "/dev/null"', "Name a folder"),
    Bad('module = "graph_trainer.lama3"', "Did you mean graph_trainer.llama3?"),
    Bad("optimizer.param_groups = []", 'pattern = ".*"'),
    Bad(
        "optimizer.betas = [0.9, 1.5]: Invalid beta",
        "another value",
        "[optimizer]\nbetas = [0.9, 1.5]",
    ),
    Bad(
        "optimizer.lr = unset: group 0 of parameters has no",
        "Set optimizer.lr",
        """\
[optimizer]
unset = ["lr"]
param_groups = [{ pattern = ".*", optimizer_name = "Adam" }]""",
    ),
    Bad(f"debug.seed = {2**64}", "unset it"),
    Bad("debug.seed = -1", "a seed from 0 to"),
    Bad(
        "profiler.profile_freq = 2",
        "profile_freq to 4 or more",
        "[profiler]\nenable_profiling = true\nprofile_freq = 2",
    ),
    of_a_group(
        'optimizer_kwargs.lr = "1e-3": expected a number',
        "optimizer_kwargs.lr = 1e-3.",
        arguments='lr = "1e-3"',
    ),
    of_a_group('optimizer_name = "Adamm"', 'Write "Adam", "AdamW"', name="Adamm"),
    of_a_group('pattern = "("', 'such as ".*"', pattern="("),
    of_a_group('pattern = "a{9999999999999}"', 'such as ".*"', pattern="a{9999999999999}"),
    of_a_group("optimizer_kwargs = { lrr = 0.001 }", TAKES, arguments="lrr = 1e-3"),
    of_a_group("optimizer_kwargs = { lr = -1.0 }", TAKES, arguments="lr = -1.0"),
)

ON_THE_COMMAND_LINE = (
    Bad(
        'dataloader.dataset_path = "": the flag has no value',
        "Write --dataloader.dataset_path and one",
        ["--dataloader.dataset_path", "--training.steps", "3"],
    ),
    Bad(
        "requires last_save_model_only=True",
        "Set checkpoint.last_save_model_only = true too",
        ["--checkpoint.enable", "--checkpoint.last_save_in_hf"],
    ),
    Bad(
        "got an unexpected keyword argument 'weight_decy'",
        "Did you mean weight_decay?",
        ["--optimizer.param_groups.0.optimizer_kwargs.weight_decy", "0.1"],
    ),
    Bad(
        'dataloader.dataset = "c4": a dataset of torchtitan',
        'and tokenizer.type = "huggingface"',
        ["--dataloader.dataset", "c4"],
    ),
    Bad('lr = "3"', "Did you mean optimizer.lr?", ["--lr", "3"]),
    Bad("nosuch", "`graph-trainer train --help` lists", ["--nosuch.key", "3"]),
    Bad('training.stepz = "3"', "Did you mean training.steps?", ["--training.stepz", "3"]),
    Bad('training.stepz = "3"', "Did you mean training.steps?", ["--training.stepz=3"]),
    Bad(
        'tensor_parallel_degree = "2"',
        "Did you mean parallelism.tensor_parallel_degree?",
        ["--tensor_parallel_degree", "2"],
    ),
    Bad(
        'training.steps = "ten": expected an integer',
        "Write --training.steps 1.",
        ["--training.steps", "ten"],
    ),
    Bad(
        f'training.steps = "{"9" * 40}',
        "Write --training.steps 1.",
        ["--training.steps=" + "9" * 5000],
    ),
    Bad(
        'compile.memory_limit_gib = "": expected a number',
        "or --compile.memory_limit_gib None",
        ["--compile.memory_limit_gib", ""],
    ),
    Bad(
        'compile.memory_limit_gib = "10GiB": expected a number',
        "Write --compile.memory_limit_gib 10, or",
        ["--compile.memory_limit_gib", "10GiB"],
    ),
    Bad(
        'compile.memory_limit_gib = "10MiB": expected a number',
        "Write --compile.memory_limit_gib 1e-3, or",
        ["--compile.memory_limit_gib", "10MiB"],
    ),
    Bad(
        'optimizer.betas[1] = "abc": expected a number',
        "Write --optimizer.betas '[0.9, 1e-3]'",
        ["--optimizer.betas", "0.9,abc"],
    ),
    Bad(
        'optimizer.betas[0] = "a": expected a number',
        "Write --optimizer.betas '[1e-3, 1e-3]'",
        ["--optimizer.betas", "a,b"],
    ),
    Bad(
        'checkpoint.initial_load_path = "here": refused: initial_load_path must be an absolute',
        'Write "/',
        [
            "--checkpoint.enable",
            "--checkpoint.initial_load_path",
            "here",
            "--checkpoint.interval=3",
        ],
    ),
    Bad(
        "training.local_batch_size = 99999999999999999999: out of bounds",
        "below 2**63",
        ["--training.local_batch_size", "99999999999999999999"],
    ),
    Bad("optimizer.lr = -1.0: Invalid learning", "another value", ["--optimizer.lr", "-1"]),
    Bad("optimizer.lr = inf: out of bounds", "Set a finite number.", ["--optimizer.lr", "inf"]),
    Bad("optimizer.eps = nan: out of bounds", "Set a finite number.", ["--optimizer.eps", "nan"]),
    Bad(
        "optimizer.lr = 0.1: every parameter group sets its own",
        "--optimizer.param_groups.0.optimizer_kwargs.lr",
        ["--optimizer.lr", "0.1", "--optimizer.param_groups.0.optimizer_kwargs.lr", "1e-3"],
    ),
    Bad(
        'command line: activation_checkpoint.path = "no/such.toml": there is no such file',
        "Check the path",
        ["--activation_checkpoint.type", "file", "--activation_checkpoint.path", "no/such.toml"],
    ),
    Bad(
        'command line: compile.hardware = "h1000": there is no such profile',
        "did you mean 'h100-sxm'?",
        ["--compile.hardware", "h1000"],
    ),
    Bad(
        'command line: activation_checkpoint.type = "budget": it fills a memory limit, and '
        "compile.memory_limit_gib is 0, which is no limit",
        "Set the GiB that a step may need",
        ["--activation_checkpoint.type", "budget", "--compile.memory_limit_gib", "0"],
    ),
    Bad(
        'training.steps = "": expected an integer',
        "Write --training.steps 1.",
        ["--training.steps"],
    ),
    Bad(
        'compile.passes = "[\\"default\\"": expected a list',
        """Write --compile.passes '["default"]'.""",
        ["--compile.passes", '["default"'],
    ),
    Bad(
        'compile.passes = "[default, x]": expected a list',
        """Write --compile.passes '["default", "x"]'.""",
        ["--compile.passes=[default, x]"],
    ),
    Bad("training = 3: expected a section", "as --training.key value", ["--training", "3"]),
    Bad(
        "--training.steps: one flag gives this section a value",
        "Keep one of both",
        ["--training", "3", "--training.steps", "4"],
    ),
    Bad("training.steps = true: expected an integer", "steps 1", ["--training.steps", "true"]),
    Bad(
        'checkpoint.enable = "True": expected true', "enable true.", ["--checkpoint.enable", "True"]
    ),
    Bad(
        'optimizer.param_groups = { 1 = { pattern = "x" } }',
        "Or --optimizer.param_groups.0.key value",
        ["--optimizer.param_groups.1.pattern", "x"],
    ),
    Bad(
        "optimizer.param_groups[0].patern",
        "Did you mean",
        ["--optimizer.param_groups.0.patern", "x"],
    ),
    Bad('unexpected "steps"', "Every value follows its flag", ["steps"]),
    Bad('unexpected "training.steps"', "Did you mean --training.steps 5?", ["training.steps=5"]),
    Bad(
        'compile.enable = "": not settable',
        "`base` names",
        ["--compile.enable"],
    ),
    Bad("validator.steps = 0: refused", "must be positive or -1", ["--validator.steps", "0"]),
    Bad(
        'command line: activation_checkpoint = { debug = "" }: switched off',
        'set activation_checkpoint.type to "selective", "full", "layers", "budget"',
        ["--activation_checkpoint.debug"],
    ),
    Bad(
        "command line: compile.overlap_fsdp.in_flight = 3: has no effect",
        'Add "overlap_fsdp" to compile.passes',
        ["--compile.overlap_fsdp.in_flight", "3"],
    ),
    Bad('trainign = { type = "x" }', "Did you mean training?", ["--trainign.type", "x"]),
    Bad(
        'dataloader.type = "": no such type',
        'Write "text", "huggingface"',
        ["--dataloader.type"],
    ),
    Bad("--config has no value", "Write for example --config debugmodel", ["--config"]),
    Bad(
        "--module has no value",
        "Write for example --module graph_trainer.llama3",
        ["--module", "--config", "8b"],
    ),
    Bad("--config 8c", "Did you mean 8b? Known configs: "),
    Bad("--config no/such.toml", "Check the path"),
    # names that no system has: too long, or with a NUL
    Bad(f"--config {'a' * 300}", "Known configs: "),
    Bad("--config x\0", "Known configs: "),
    Bad(f"--config {'a' * 300}.toml", "Name a readable"),
    Bad("--config x\0.toml", "Name a readable"),
    Bad("--module graph_trainer.lama3", "Did you mean graph_trainer.llama3?"),
    Bad("--module ..a b", "Known modules: graph_trainer.deepseek_v3, "),
    Bad("--module json", "Known modules: graph_trainer.deepseek_v3, "),
    Bad('compile.passes = ["x"', "Known passes: ", ["--compile.passes", "x,default"]),
)
