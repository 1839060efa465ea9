"""`graph-trainer export`: a checkpoint as a folder that `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graph_trainer.errors import ConfigError

USAGE = """\
usage: graph-trainer export CHECKPOINT --to FOLDER [--section.key VALUE]

Write the model of a checkpoint, such as outputs/checkpoint/step-40, to a new folder that
AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained read: weights, config.json,
tokenizer, and SHA256SUMS of them. Config and tokenizer are those of the output folder around the
checkpoint; where there is no config.toml, give the --config and the flags of its run.
--checkpoint.export_dtype bfloat16 writes another dtype than that config's.
"""


def main(argv: Sequence[str]) -> int:
    """Export a checkpoint of a run.

    Raises:
        GraphTrainerError: bad input, or a checkpoint that is damaged or of another model.
    """
    if {"-h", "--help"} & set(argv):
        print(USAGE, end="")
        return 0
    from graph_trainer.titan.checkpoint_files import is_complete
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.config.sources import read_flags, take_flags
    from graph_trainer.titan.data.tokenizer import TOKENIZER
    from graph_trainer.titan.export import export

    values, rest = take_flags(argv, {"--to": "exported"})
    if "--to" not in values or not rest or rest[0].startswith("--"):
        raise ConfigError(f"name a checkpoint and the folder to write.\n{USAGE}")
    checkpoint, folder = Path(rest.pop(0)), Path(values["--to"])
    if not is_complete(checkpoint):
        raise ConfigError(f"{checkpoint} is no checkpoint: name a folder step-N of a run.")
    if folder.exists():
        raise ConfigError(f"--to {folder}: it exists. Name a new folder.")
    run = checkpoint.resolve().parent.parent
    if read_flags(rest).config is None and (run / "config.toml").is_file():
        rest[:0] = ["--config", str(run / "config.toml")]
    config = load_config(rest, prog="graph-trainer export")
    own = run / TOKENIZER
    export(checkpoint, folder, config, own if own.is_dir() else Path(config.hf_assets_path))
    print(f"{folder}: read it with AutoModelForCausalLM.from_pretrained({str(folder)!r})")
    return 0
