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
    flags, rest = parser.parse_known_args(argv)
    for place in (flags.checkpoint, flags.to):
        if "://" in place:
            raise ConfigError(f"{place}: copy it from or to remote storage, and export on a disk.")
    flags.checkpoint, flags.to = Path(flags.checkpoint), Path(flags.to)
    if not flags.checkpoint.is_dir() and not any(flags.checkpoint.parent.glob("step-*")):
        raise ConfigError(
            f"{flags.checkpoint}: there is no such folder: name a folder step-N of a run."
        )
    if flags.to.exists():
        raise ConfigError(f"--to {flags.to}: it exists. Name a new folder.")
    from graph_trainer.titan.checkpoint_files import HF_INDEX, is_complete, steps_in
    from graph_trainer.titan.checkpoint_reader import METADATA
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.files import why_no_folder
    from graph_trainer.titan.hugging_face_export import export

    if not is_complete(flags.checkpoint):
        steps: list[str] = []
        for folder in (flags.checkpoint, flags.checkpoint.parent, flags.checkpoint / "checkpoint"):
            steps += [
                str(folder / f"step-{n}") for n, complete in steps_in(folder).items() if complete
            ]
        named = " or ".join(steps[:5]) or "a folder step-N of a run"
        raise ConfigError(f"{flags.checkpoint} is no checkpoint: name {named}.")
    if not (flags.checkpoint / METADATA).is_file() and (flags.checkpoint / HF_INDEX).is_file():
        raise ConfigError(f"{flags.checkpoint} is an export already, which from_pretrained reads.")
    if problem := why_no_folder(flags.to):
        raise ConfigError(f"--to {flags.to}: {problem}. Name another folder.")
    run = flags.checkpoint.resolve().parent.parent
    if not any(word.startswith("--config") for word in rest):
        if not (run / "config.toml").is_file():
            raise ConfigError(
                f"{flags.checkpoint}: {run} has no config.toml, which says what model it is of. "
                "Name the config of its run with --config."
            )
        rest[:0] = ["--config", str(run / "config.toml")]
    config = load_config(
        rest, prog="graph-trainer export", command_flags=vars(flags), reads_text=False
    )
    config.dump_folder = str(run)
    export(flags.checkpoint, flags.to, config)
    print(f"{flags.to}: read it with AutoModelForCausalLM.from_pretrained({str(flags.to)!r})")
    return 0
