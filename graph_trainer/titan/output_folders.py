"""The folders that a run writes to."""

import os
from pathlib import Path

from torchtitan.tools.filesystem import is_remote

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.files import why_no_folder


def check_output_folders(config: GraphTrainerConfig) -> None:
    """Refuse folders that nothing can be written to, where the run would write.

    Raises:
        ConfigError: with the key of the folder.
    """
    metrics, checkpoint, profiler = config.metrics, config.checkpoint, config.profiler
    folders = [("dump_folder", ""), ("dump_folder", "structured_logs")]
    if metrics.enable_tensorboard:
        folders.append(("metrics.save_tb_folder", metrics.save_tb_folder))
    if checkpoint.enable and not checkpoint.load_only:
        folders.append(("checkpoint.folder", checkpoint.folder))
    if config.comm.trace_buf_size:
        folders.append(("comm.save_traces_folder", config.comm.save_traces_folder))
    if profiler.enable_profiling:
        folders.append(("profiler.save_traces_folder", profiler.save_traces_folder))
    if profiler.enable_memory_snapshot:
        name = "profiler.save_memory_snapshot_folder"
        folders.append((name, profiler.save_memory_snapshot_folder))
    for key, name in folders:
        if is_remote(os.path.join(config.dump_folder, name)):
            continue
        if problem := why_no_folder(Path(config.dump_folder, name)):
            value = config.dump_folder if key == "dump_folder" else name
            raise ConfigError(
                f'{key} = "{value}": {problem}. Set it to a folder that you may write.'
            )
