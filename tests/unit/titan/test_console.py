"""The console of a rank: what is shown, how it is broken, and what the log file has."""

import logging
import re

import pytest
from torchtitan.tools import logging as titan_logging
from torchtitan.tools.utils import Color

from graph_trainer.titan import console
from graph_trainer.titan.config.load import load_config

STEP = f"{Color.red}step:  1  {Color.orange}loss:  8.0  {Color.magenta}mfu: 0.00%{Color.reset}"
NO_NEWS = [
    "Destroying the purge thread.",
    "[GC] Initial GC collection took 5.20 seconds",
    "Sleeping 2 seconds for other ranks to complete",
    "Error running lspci: no such file, fallback to use device_name",
    "Peak flops undefined for: x86_64, fallback to A100",
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = 1 will be overridden to 3 based on job config",
    "initial_load_model_only=True has no effect without an initial_load_path.",
    "model.safetensors.index.json not found at hf_assets_path: x",
    "While redistributing from (Partial(sum), Partial(sum)) to (Replicate(), Replicate()), 2",
]


@pytest.fixture
def log(tmp_path, monkeypatch, capsys):
    """Log what a run does on a CPU, with these flags; return what is shown."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(console, "device_type", "cpu")

    def log(*flags: str, **changes: object) -> list[str]:
        titan_logging.init_logger()
        config = load_config([*flags, "--dump_folder", str(tmp_path)])
        for key, value in changes.items():
            setattr(config.checkpoint, key, value)
        console.set_up_console(config)
        for text in NO_NEWS:
            root.warning(text)
        root.info("Building llama3 debugmodel")
        root.warning("the loss climbs")
        root.info(STEP)
        return capsys.readouterr().out.splitlines()

    yield log
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def test_messages_alone_without_what_means_nothing(log):
    shown = ["Building llama3 debugmodel", "warning: the loss climbs", "step:  1  loss:  8.0"]
    assert log() == shown
    assert log("--quiet") == shown[1:]


def test_verbose_is_torchtitans_own_console(log):
    shown = log("--verbose")
    assert len(shown) == len(NO_NEWS) + 3 and all(line.startswith("[titan] ") for line in shown)
    assert "mfu" in shown[-1] and "\x1b" not in "".join(shown)


def test_the_log_file_has_everything_without_colours(log, tmp_path):
    log("--quiet")
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert len(lines) == len(NO_NEWS) + 3 and "\x1b" not in lines[-1]
    assert re.match(r"\d{4}-\d\d-\d\d [\d:,]+ - INFO - step:  1 ", lines[-1])


def test_torchs_own_logger_leaves_out_how_it_redistributes(log):
    log()
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    redistributing, other = (
        logging.LogRecord(logger.name, logging.WARNING, "", 0, text, (), None)
        for text in (NO_NEWS[-1], "tensors of several meshes")
    )
    assert logger.filter(other) and not logger.filter(redistributing)


def test_a_warning_is_kept_where_it_means_something(log):
    assert any("safetensors" in line for line in log(initial_load_in_hf=True))


def test_a_terminal_gets_colours_and_a_gpu_its_mfu(log, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(console, "device_type", "cuda")
    assert log()[-1] == STEP
    monkeypatch.setattr(console, "device_type", "cpu")
    assert log()[-1] == STEP.partition("  " + Color.magenta)[0]


def step_line(loss: float, tps: int) -> str:
    """As torchtitan 0.3.0 writes it (`MetricsProcessor.log`)."""
    return (
        f"{Color.red}step: {2000:2}  {Color.green}loss: {loss:8.5f}  "
        f"{Color.orange}grad_norm: {1.25:7.4f}  {Color.turquoise}memory: {70.125:5.2f}GiB"
        f"({88.5:.2f}%)  {Color.blue}tps: {tps:,}  {Color.cyan}tflops: {451.25:,.2f}  "
        f"{Color.magenta}mfu: 45.62%{Color.reset}"
    )


@pytest.mark.parametrize(("loss", "tps"), [(2.5, 7123), (12.25, 112_345)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_line_of_progress_fits_behind_the_name_of_its_rank(log, monkeypatch, device, loss, tps):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(console, "device_type", device)
    log()
    shown = console._COLOUR.sub("", logged(step_line(loss, tps)))
    assert len(f"[rank0]:{shown}") <= 100
    for field in (f"loss: {loss:.5f}", "grad_norm: 1.2500", "GiB(88.5", f"tps: {tps:,}"):
        assert field in shown
    assert "mfu: 45.6" in shown or device == "cpu"


def logged(message: str) -> str:
    record = logging.LogRecord("titan", logging.INFO, "", 0, message, (), None)
    handler = logging.getLogger().handlers[0]
    assert handler.filter(record)
    return handler.format(record)
