"""Work in several processes gives what one process gives, whatever happens to the others."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner import processes
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.changes import compare, settings
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.processes import Workers, in_processes
from graph_trainer.planner.saved_plan import plan_every_class
from graph_trainer.titan.config.load import load_config

HARDWARE = load_hardware("h100-sxm")


def load(flags=(), world_size=4):
    words = ["--training.seq_len", "64", *flags]
    config = load_config(words, world_size=world_size)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    return config


@pytest.fixture(autouse=True)
def no_process_remains():
    yield
    assert not multiprocessing.active_children()


def together(number):
    """The process that does an item; it waits, so that each process has one."""
    time.sleep(0.2)
    return number, os.getpid()


def test_the_first_item_is_done_here_and_the_others_by_all_processes():
    started, ended = [], []
    results = in_processes(
        together,
        range(7),
        3,
        on_start=started.append,
        on_end=lambda item, result: ended.append((item, result)),
    )
    assert [number for number, _ in results] == list(range(7))
    assert results[0][1] == os.getpid() and len({pid for _, pid in results[1:]}) == 3
    assert started == list(range(7)) and ended == list(enumerate(results))


@pytest.mark.parametrize("items, most", [(3, 1), (2, 3), (0, 3)])
def test_one_process_is_enough_for_one_item_after_the_first(items, most):
    assert {pid for _, pid in in_processes(together, range(items), most)} <= {os.getpid()}


def test_other_processes_have_no_more_than_the_memory_that_there_is(monkeypatch):
    for left, expected in ((2.9, 3), (1.9, 1)):
        available = int(left * processes._peak_bytes())
        monkeypatch.setattr(processes, "available_on_cpu", lambda of=available: (of, "in a test"))
        results = in_processes(together, range(6), 3)
        assert len({pid for _, pid in results}) == expected, left


@pytest.mark.parametrize("most", [1, 3])
def test_the_error_is_that_of_the_first_item_that_has_one(most):
    def fails(number):
        time.sleep(0.3 if number == 2 else 0)
        if number in (2, 3):
            raise ConfigError(f"item {number}")

    with pytest.raises(ConfigError, match="item 2"):
        in_processes(fails, range(7), most)


def test_a_killed_process_is_an_error():
    here = os.getpid()

    def killed(number):
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(GraphTrainerError, match="memory ran out"):
        in_processes(killed, range(5), 3)


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(TypeError, match="pickle"):
        in_processes(lambda number: threading.Lock(), range(3), 2)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_forked_processes_end_with_the_one_that_forked_them(tmp_path, signal_number):
    def work(number):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60 if number else 0)

    parent = os.fork()
    if parent == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            in_processes(work, range(7), 2)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    # a terminal sends Ctrl-C to the process group
    (os.killpg if signal_number == signal.SIGINT else os.kill)(parent, signal_number)
    os.waitpid(parent, 0)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_a_comparison_is_the_same_in_several_processes():
    wanted = settings(
        [
            "parallelism.tensor_parallel_degree=1,2,3",
            "parallelism.fsdp_reshard_after_forward=always,never",
        ]
    )

    def rows(processes):
        said, captures = [], Captures()

        def plan(config):
            return make_plan(config, 4, HARDWARE, every_pass=False, captures=captures)

        # three does not divide the ranks
        return compare(wanted, refusing(load), plan, said.append, processes), said

    def refusing(load):
        def loads(flags):
            config = load(flags)
            if config.parallelism.fsdp_reshard_after_forward == "never" and "1" in flags:
                raise ConfigError("not without tensor parallelism")
            return config

        return loads

    with pytest.raises(ConfigError, match="tensor_parallel_degree"):
        rows(2)
    wanted["parallelism.tensor_parallel_degree"] = ("1", "2")
    outcomes, said = several = rows(3)
    assert several == rows(1)
    assert [line.partition(":")[0] for line in said] == [f"{n} of 4" for n in range(1, 5)]
    assert [bool(each.error) for each in outcomes] == [False, False, False, True]


def test_classes_of_ranks_are_the_same_in_several_processes():
    plan = make_plan(load(world_size=3), 3, HARDWARE, every_pass=False)
    said = {1: [], 3: []}
    alone, others = (
        plan_every_class(plan, processes=most, on_progress=said[most].append) for most in (1, 3)
    )
    assert alone == others and len(alone.classes) == 3
    assert said[1] == said[3] and "3 of 3" in said[1][2]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def refuses_odd(number):
    if number % 2:
        raise ConfigError(f"{number} is odd")
    return number, os.getpid()


@pytest.mark.parametrize("most", [1, 2])
def test_workers_take_items_one_by_one(most):
    results = {}
    with Workers(refuses_odd, most) as workers:
        for number in (0, 2, 4, 6):
            if not workers.free:
                item, result = workers.next()
                results[item] = result
            workers.submit(number)
        while workers.busy:
            item, result = workers.next()
            results[item] = result
        assert workers.free == most
    assert {item: number for item, (number, _) in results.items()} == {n: n for n in (0, 2, 4, 6)}
    assert ({pid for _, pid in results.values()} == {os.getpid()}) is (most == 1)


@pytest.mark.parametrize("most", [1, 2])
def test_an_item_that_fails_is_an_error_here(most):
    with pytest.raises(ConfigError, match="1 is odd"), Workers(refuses_odd, most) as workers:
        workers.submit(1)
        workers.next()


def test_a_worker_that_is_killed_is_an_error_and_no_hang():
    with pytest.raises(GraphTrainerError, match="memory"), Workers(die, 2) as workers:
        workers.submit(0)
        workers.next()


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)
