"""`graph-trainer export`: a checkpoint as a folder that `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graph_trainer.cli.command_line import CommandParser
from graph_trainer.errors import ConfigError

_ABOUT = """\
Write the model of a checkpoint to a folder that AutoModelForCausalLM and AutoTokenizer read.
Config and tokenizer are those of the output folder around the checkpoint; where it has none, give
the run's flags. Flags belong to the config: --checkpoint.export_dtype bfloat16 writes that."""


def main(argv: Sequence[str]) -> int:
    """Export a checkpoint, or raise a GraphTrainerError."""
    parser = CommandParser("graph-trainer export", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("checkpoint", help="such as outputs/checkpoint/step-40")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="a new folder")
    given, rest = parser.parse_known_args(argv)
    for place in (given.checkpoint, given.to):
        if "://" in place:
            raise ConfigError(f"{place}: copy it from or to remote storage, and export on a disk.")
    given.checkpoint, given.to = Path(given.checkpoint), Path(given.to)
    if not given.checkpoint.is_dir() and not any(given.checkpoint.parent.glob("step-*")):
        raise ConfigError(
            f"{given.checkpoint}: there is no such folder: name a folder step-N of a run."
        )
    if given.to.exists():
        raise ConfigError(f"--to {given.to}: it exists. Name a new folder.")
    from graph_trainer.titan.checkpoint_files import HF_INDEX, is_complete, steps_in
    from graph_trainer.titan.checkpoint_reader import METADATA
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.export import export
    from graph_trainer.titan.files import why_no_folder

    if not is_complete(given.checkpoint):
        steps: list[str] = []
        for folder in (given.checkpoint, given.checkpoint.parent, given.checkpoint / "checkpoint"):
            steps += [str(folder / f"step-{n}") for n, whole in steps_in(folder).items() if whole]
        named = " or ".join(steps[:5]) or "a folder step-N of a run"
        raise ConfigError(f"{given.checkpoint} is no checkpoint: name {named}.")
    if not (given.checkpoint / METADATA).is_file() and (given.checkpoint / HF_INDEX).is_file():
        raise ConfigError(f"{given.checkpoint} is an export already, which from_pretrained reads.")
    if problem := why_no_folder(given.to):
        raise ConfigError(f"--to {given.to}: {problem}. Name another folder.")
    run = given.checkpoint.resolve().parent.parent
    if not any(word.startswith("--config") for word in rest):
        if not (run / "config.toml").is_file():
            raise ConfigError(
                f"{given.checkpoint}: {run} has no config.toml, which says what model it is of. "
                "Name the config of its run with --config."
            )
        rest[:0] = ["--config", str(run / "config.toml")]
    config = load_config(
        rest, prog="graph-trainer export", command_flags=vars(given), reads_text=False
    )
    config.dump_folder = str(run)
    export(given.checkpoint, given.to, config)
    print(f"{given.to}: read it with AutoModelForCausalLM.from_pretrained({str(given.to)!r})")
    return 0
