"""What a rank shows while it runs, and what its first rank writes to console.log."""

import contextlib
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

from torchtitan.tools.utils import device_type

from graph_trainer.core.text import width_of_ranks, wrapped
from graph_trainer.titan.config.run_config import GraphTrainerConfig

CONSOLE_LOG = "console.log"
"""The file of the dump folder with everything that rank 0 logs, in torchtitan's format."""

_NO_NEWS = (
    "Error running lspci",  # the device's name is used instead
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",  # torchtitan's own default
    "initial_load_model_only=True has no effect",  # it is the default
    "While redistributing from",  # the norm of the gradients, a checkpoint of another mesh
    "Pipeline Parallel loss is not visible",  # all ranks have it
    "Destroying the purge thread",
    "[GC] ",
    "Sleeping 2 seconds",
)
_NO_NEWS_OF_TORCH = (
    r"DTensor (random operators|manual_seed\(\)) may not have complete support on cpu",
    "To get the last learning rate computed by the scheduler",  # torchtitan's, when it resumes
    "In CPU autocast, but the target dtype is not supported",  # torchtitan's experts use float32
)

_COLOUR = re.compile(r"\x1b\[[\d;]+m")
_PROGRESS = re.compile(r"(validate )?step: ")
_MFU = re.compile(r"\s+(\x1b\[[\d;]+m)?mfu: \S+$")
_NARROWER = (  # one after the other, until a line of progress fits
    (re.compile(r"(?<=:) +"), " "),
    (re.compile("  "), " "),
    (re.compile(r"(?<=\.\d)\d(?=%)"), ""),
    (re.compile(r"\s+(\x1b\[[\d;]+m)?tflops: \S+"), ""),  # MFU says it too
)


def is_news(record: logging.LogRecord) -> bool:
    """Tell whether a record is none of those that mean nothing wherever they are logged."""
    return not _COLOUR.sub("", record.getMessage()).startswith(_NO_NEWS)


def set_up_console(config: GraphTrainerConfig) -> None:
    """Replace what torchtitan's `init_logger` has set up, unless `metrics.console` is "verbose".

    Warnings that mean nothing in this run are left out, by what they say. On a device without a
    known peak there is no MFU. A colour is a terminal's: the launcher sets NO_COLOR for the rest.
    """
    console = getattr(config.metrics, "console", "normal")  # metrics may be a user's own
    root = logging.getLogger()
    (handler,) = root.handlers
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # an error of the folder comes with the first file
            path = Path(config.dump_folder) / CONSOLE_LOG
            path.parent.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(path, encoding="utf-8")
            file.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(plain)s"))
            file.addFilter(_with_plain_text)
            root.addHandler(file)
    handler.addFilter(_with_plain_text)
    if console == "verbose":
        return
    for message in _NO_NEWS_OF_TORCH:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(is_news)
    no_news: tuple[str, ...] = _NO_NEWS
    if not config.checkpoint.initial_load_in_hf:
        no_news += ("model.safetensors.index.json not found",)
    if device_type == "cpu":
        no_news += ("Peak flops undefined", "Peak FLOPS used")

    def is_shown(record: Any) -> bool:
        progress = record.levelno >= logging.WARNING or _PROGRESS.match(record.plain) is not None
        return not record.plain.startswith(no_news) and (progress or console != "quiet")

    handler.addFilter(is_shown)
    handler.setFormatter(_Lines())


def _with_plain_text(record: Any) -> bool:
    """Add to a record its message without colours, and show that where colours are not."""
    record.plain = _COLOUR.sub("", record.getMessage())
    if "NO_COLOR" in os.environ:
        record.msg, record.args = record.plain, ()
    return True


class _Lines(logging.Formatter):
    """Messages alone, in lines that end at spaces but for those in `a = b`."""

    def format(self, record: Any) -> str:
        text = super().format(record)  # with the traceback, where there is one
        if _PROGRESS.match(record.plain):
            text = _MFU.sub("", text) if device_type == "cpu" else text
            for pattern, instead in _NARROWER:
                if len(_COLOUR.sub("", text)) > width_of_ranks():
                    text = pattern.sub(instead, text)
            return text
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return "\n".join(map(wrapped, text.split("\n")))
