"""Bad input, one row for each class of mistakes: what is given, and what its error says of it."""

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
    Bad(
        'checkpoint.exclude_from_loading[1] = "optimiser": not one of the known values',
        'Did you mean optimizer? Write "optimizer", "lr_scheduler", "dataloader"',
        '[checkpoint]\nexclude_from_loading = ["generators", "optimiser"]',
    ),
    Bad(
        "optimizer.betas = [0.9]: expected a list of 2",
        "= [0.9, ...].",
        "[optimizer]\nbetas = [0.9]",
    ),
    Bad("training.stepz = 3", "Did you mean training.steps?"),
    Bad("trainning = { steps = 3 }", "Did you mean training?"),
    Bad('training.steps = "ten"', "Write training.steps = 1"),
    Bad("training.steps = 1.5", "Write training.steps = 1"),
    Bad('compile.passes = "default"', 'Write compile.passes = ["default"]'),
    Bad("training = 3", "under a [training] heading"),
    Bad(
        'parallelism.fsdp_reshard_after_forward = "allways"',
        'Did you mean always? Write "default", "always", "never", "auto"',
    ),
    Bad(
        'compile.passes = ["default", "rematerialise"]: there is no pass \'rematerialise\'',
        "did you mean 'rematerialize'? Known passes: ",
        '[compile]\npasses = ["default", "rematerialise"]',
    ),
    Bad("compile.enable = true", "`base` names"),
    Bad('dataloader.type = "txt"', 'Did you mean text? Write "text", "huggingface"'),
    Bad(
        'optimizer.param_groups[0] = { optimizer_name = "Adam" }',
        "Add optimizer.param_groups[0].pattern",
        "[[optimizer.param_groups]]\noptimizer_name = 'Adam'",
    ),
    Bad("dataloader.sources = 3", 'It belongs to type = "huggingface_interleaved"'),
    Bad(
        "compile.overlap_fsdp = { in_flight = 8 }: the pass 'overlap_fsdp' is disabled",
        "take it out of compile.disable_passes, or leave its options out.",
        f'{OVERLAPPED}disable_passes = ["overlap_fsdp"]\n[compile.overlap_fsdp]\nin_flight = 8',
    ),
    Bad(
        "compile.disable_passes = [\"rematerialize\"]: the pass 'rematerialize' cannot be left out",
        "take it out of compile.disable_passes, or set "
        'parallelism.fsdp_reshard_after_forward = "never".',
        '[parallelism]\nfsdp_reshard_after_forward = "always"\n'
        '[compile]\ndisable_passes = ["rematerialize"]',
    ),
    of_a_pass("compile.overlap_fsdp.in_flight = 0", "must be at least 1", OVERLAPPED),
    of_a_pass(
        "compile.schedule_overlap.max_in_flight_mib = 0.0", "a number of MiB above 0", SCHEDULED
    ),
    Bad(
        "the pass 'fuse_chained_reduce_scatters' declares that it changes the order of sums",
        "set compile.bitwise = false",
        '[compile]\nbitwise = true\npasses = ["default", "fuse_chained_reduce_scatters"]',
    ),
    Bad('compile.passes = ["rematerialize", "normalize_views"]', "put it in front"),
    Bad('dataloader.type = "no_such_module:X.Config"', "package.module:Class.Config"),
    Bad("training.steps = 0", "to 1 or more"),
    Bad("checkpoint.keep_latest_k = 1", "at least 2 checkpoint replicas"),
    Bad(
        'compile.memory_limit_gib = unset: activation_checkpoint.type = "budget" fills a',
        "set the GiB that a step may need",
        '[activation_checkpoint]\ntype = "budget"',
    ),
    Bad(
        'bad.toml: compile.hardware = "h1000": there is no such profile',
        "did you mean 'h100-sxm'?",
        '[compile]\nhardware = "h1000"',
    ),
    Bad(
        'parallelism.pipeline_parallel_schedule = "PipelineScheduleMulti"',
        "Set one of",
        "[parallelism]\npipeline_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "PipelineScheduleMulti"',
    ),
    Bad(
        'parallelism.pipeline_parallel_schedule_csv = "no.csv": cannot be read',
        "Write a line a rank",
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule_csv = "no.csv"',
    ),
    Bad(
        "parallelism.tensor_parallel_degree = 3",
        "Set it to a divisor of 16: 1, 2, 4, 8, 16",
        "[training]\nseq_len = 300\n[parallelism]\ntensor_parallel_degree = 3",
    ),
    Bad(
        "parallelism.context_parallel_degree = 32",
        'Set parallelism.context_parallel_method = "all_gather", or lower the degree',
        '[parallelism]\ncontext_parallel_degree = 32\ncontext_parallel_method = "ulysses"',
    ),
    Bad(
        'dataloader.dataset = "c4": a dataset of torchtitan\'s',
        'Set dataloader.type = "huggingface"',
        '[dataloader]\ndataset = "c4"',
    ),
    Bad(
        "dataloader.dataset = \"text\": dataset_path 'no/such/folder'",
        "Name a .txt or .jsonl file",
        '[dataloader]\ndataset = "text"\ndataset_path = "no/such/folder"',
    ),
    Bad(
        'hf_assets_path = "no/assets"',
        "Name the folder that holds tokenizer.json",
        'hf_assets_path = "no/assets"\n[tokenizer]\ntype = "huggingface"',
    ),
    Bad('dump_folder = "/dev/null"', "Name a folder"),
    of_a_group("optimizer_kwargs = { lrr = 0.001 }", TAKES, arguments="lrr = 1e-3"),
)

ON_THE_COMMAND_LINE = (
    Bad(
        'dataloader.dataset_path = "": the flag has no value',
        "Write --dataloader.dataset_path and one",
        ["--dataloader.dataset_path", "--training.steps", "3"],
    ),
    Bad(
        "got an unexpected keyword argument 'weight_decy'",
        "Did you mean weight_decay?",
        ["--optimizer.param_groups.0.optimizer_kwargs.weight_decy", "0.1"],
    ),
    Bad(
        'training.steps = "ten": expected an integer',
        "Write --training.steps 1.",
        ["--training.steps", "ten"],
    ),
    Bad(
        'compile.memory_limit_gib = "10GiB": expected a number',
        "Write --compile.memory_limit_gib 10, or",
        ["--compile.memory_limit_gib", "10GiB"],
    ),
    Bad(
        'optimizer.betas[1] = "abc": expected a number',
        "Write --optimizer.betas '[0.9, 1e-3]'",
        ["--optimizer.betas", "0.9,abc"],
    ),
    Bad(
        "optimizer.lr = 0.1: every parameter group sets its own",
        "--optimizer.param_groups.0.optimizer_kwargs.lr",
        ["--optimizer.lr", "0.1", "--optimizer.param_groups.0.optimizer_kwargs.lr", "1e-3"],
    ),
    Bad(
        'compile.passes = "[default, x]": expected a list',
        """Write --compile.passes '["default", "x"]'.""",
        ["--compile.passes=[default, x]"],
    ),
    Bad(
        "--training.steps: one flag gives this section a value",
        "Keep one of both",
        ["--training", "3", "--training.steps", "4"],
    ),
    Bad(
        'optimizer.param_groups = { 1 = { pattern = "x" } }',
        "Or --optimizer.param_groups.0.key value",
        ["--optimizer.param_groups.1.pattern", "x"],
    ),
    Bad('unexpected "steps"', "Every value follows its flag", ["steps"]),
    Bad("--config 8c", "Did you mean 8b? Known configs: "),
    Bad("--module graph_trainer.lama3", "Did you mean graph_trainer.llama3?"),
)
