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
from graph_trainer.planner.plan_report import plan_report
from graph_trainer.planner.processes import in_processes
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
    assert results[0][1] == os.getpid() and len({pid for _, pid in results}) == 3
    assert started == list(range(7)) and sorted(ended) == list(enumerate(results))


@pytest.mark.parametrize("items, most", [(3, 1), (2, 3), (1, 3), (0, 3)])
def test_one_process_is_enough_for_one_item_after_the_first(items, most):
    assert {pid for _, pid in in_processes(together, range(items), most)} <= {os.getpid()}


def test_other_processes_have_no_more_than_the_memory_that_there_is(monkeypatch):
    for left, expected in ((2.9, 3), (1.1, 2), (0.9, 1)):
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


def test_an_item_whose_process_is_killed_is_done_here():
    here = os.getpid()

    def killed(number):
        time.sleep(0.1)
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return number, os.getpid()

    assert in_processes(killed, range(5), 3) == [(number, here) for number in range(5)]


def test_an_interrupt_ends_the_other_processes():
    here = os.getpid()

    def interrupted(number):
        if number and os.getpid() == here:
            raise KeyboardInterrupt
        time.sleep(0.1 if number == 0 else 60)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        in_processes(interrupted, range(7), 3)
    assert time.perf_counter() - start < 30 and not multiprocessing.active_children()


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
    assert said[1] == said[3] and said[1][2].startswith("tracing") and "3 of 3" in said[1][2]
    assert len(said[1]) > 3 and all(line.startswith("planning") for line in said[1][3:])


def test_what_is_done_aside_sees_what_was_there_when_it_began():
    seen = [1]
    with processes.Aside(3) as aside:
        results = [aside.begin(lambda: (list(seen), os.getpid()))]
        seen.append(2)
        results.append(aside.begin(lambda: (list(seen), os.getpid())))
        seen.append(3)
        (first, one), (second, other) = (result() for result in results)
        assert results[0]() == (first, one)  # as often as it is asked for
    assert (first, second) == ([1], [1, 2]) and len({one, other, os.getpid()}) == 3


def test_a_process_that_is_done_makes_room_and_ends():
    with processes.Aside(2) as aside:
        first, second = (aside.begin(os.getpid)() for _ in range(2))
        assert len({first, second, os.getpid()}) == 3
        for worker in aside._workers:
            worker.process.join(20)
            assert not worker.process.is_alive()


@pytest.mark.parametrize("most", [1, 2])
def test_where_no_process_is_free_the_task_is_done_here(most):
    with processes.Aside(most) as aside:
        results = [aside.begin(lambda: together(0)) for _ in range(2)]
    pids = [result()[1] for result in results[most - 1 :]]
    assert pids == [os.getpid()] * len(pids)


def test_an_error_aside_is_raised_where_its_result_is_asked_for():
    def fail():
        raise ConfigError("no")

    with processes.Aside(2) as aside:
        failed = aside.begin(fail)
        with pytest.raises(ConfigError, match="no"):
            failed()
        killed = aside.begin(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(GraphTrainerError, match="killed"):
            killed()


def test_a_plan_of_several_processes_is_that_of_one():
    plans = []
    for number in (1, 2):
        document = plan_report(make_plan(load(), 4, HARDWARE, processes=number))
        for row in document["ledger"]:
            row.pop("pass_seconds")
        plans.append(document)
    assert plans[0] == plans[1]


def test_what_cannot_be_sent_back_is_an_error_of_its_own():
    with processes.Aside(2) as aside:
        unsendable = aside.begin(lambda: threading.Lock())
        with pytest.raises(TypeError, match="pickle"):
            unsendable()


def test_processes_end_with_the_one_that_forked_them(tmp_path):
    """Even where that is killed: what is at work ends with its item, what waits at once."""
    parent = os.fork()
    if parent == 0:
        aside = processes.Aside(3)
        for _ in range(2):
            aside.begin(lambda: (tmp_path / str(os.getpid())).touch() or time.sleep(0.2))
        waiting = processes._Worker(together)
        (tmp_path / str(waiting.process.pid)).touch()
        time.sleep(60)
        os._exit(0)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
