"""Shared fixtures and hooks: the worker pool, the run's seed, the ``gpu`` marker."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from support import ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test reaches for the network
os.environ.setdefault("HF_DATASETS_CACHE", f"{tempfile.gettempdir()}/oslo-models-tests-{os.getuid()}-datasets")
for package, source in (("oslo_kernels", ROOT / "kernels"), ("oslo_models", ROOT)):
    if importlib.util.find_spec(package) is None:  # not installed
        sys.path.insert(0, str(source))
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for `benchmarks`

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from support.commit import day_of_commit, seed_of_commit  # noqa: E402
from support.drawn_cases import leave_cases_to_zoo, share_of_day  # noqa: E402
from support.pool import PRELOAD, Pool, worker_environment  # noqa: E402
from support.pool_server import start_server  # noqa: E402
from support.ports import shorten_socket_paths  # noqa: E402
from support.warm import WarmServer, warm_interpreters  # noqa: E402
from support.warm_process import start_warm_server  # noqa: E402

torch.set_num_threads(1)  # the cores are for the ranks
shorten_socket_paths()
hypothesis.settings.register_profile("oslo", deadline=None, print_blob=True)
hypothesis.settings.load_profile("oslo")


TURNS = Path(tempfile.gettempdir()) / f"oslo-models-tests-{os.getuid()}-{zlib.crc32(bytes(ROOT)):x}"
"""Lock file of this checkout. Every process locks it while it runs a test, for any command."""
WARM = pytest.StashKey[WarmServer]()


def can_fork() -> bool:
    """Return whether processes can fork after importing torch: a query for GPUs initialises their driver."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="what the `seed` fixture gives (default: of the commit)")
    parser.addoption("--day", type=int, default=None, help="the day whose `drawn` cases run (default: of the commit)")
    parser.addoption("--share", type=int, default=1, help="run one of so many parts of the tests, in turn by day")


def pytest_configure(config: pytest.Config) -> None:
    # after pytest's own garbage collections; libraries complain about live objects at the end of the process
    config.add_cleanup(gc.unfreeze)
    if config.option.seed is None:
        config.option.seed = seed_of_commit()
    if config.option.day is None:
        config.option.day = day_of_commit()


REFUSED_PEFT = "The version of PEFT you are using is not compatible"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test if transformers' adapter methods refuse the installed peft.

    transformers 5.24 wants peft 0.22, which is not released.
    """
    report = yield
    if report.failed and REFUSED_PEFT in str(report.longrepr):
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, f"transformers: {REFUSED_PEFT}")
    return report


def pytest_report_header(config: pytest.Config) -> str:
    seed, day = config.option.seed, config.option.day
    return f"seed: {seed}, day: {day} (repeat with --seed {seed} --day {day})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(pytest_report_header(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For a run of quantisation tests only, do not import modules without such tests."""
    is_left_out = config.option.markexpr.startswith("quantization ") and collection_path.name.startswith("test_")
    return True if is_left_out and not mentions_quantization(collection_path) else None


def mentions_quantization(module: Path) -> bool:
    return "mark.quantization" in module.read_text()


def hides_quantization(item: pytest.Item) -> bool:
    return item.get_closest_marker("quantization") is not None and not mentions_quantization(item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = config.option.keyword and "zoo" not in config.option.markexpr  # tests that -k names run on every day
    if "stacks" not in config.option.markexpr and not is_named:
        leave_cases_to_zoo(items, config.option.day)
    if hidden := {str(item.path) for item in items if hides_quantization(item)}:
        raise pytest.UsageError(f"they have to name mark.quantization, or no command runs all their tests: {hidden}")
    if not config.option.markexpr:
        others = ("zoo", "quantization")  # of other commands
        config.hook.pytest_deselected(items=[item for item in items if any(map(item.get_closest_marker, others))])
        items[:] = [item for item in items if not any(map(item.get_closest_marker, others))]
    if config.option.share > 1:
        items[:] = share_of_day(items, config.option.day, config.option.share)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Start parallel test processes with the common imports done, which saves 20 s of CPU time."""
    if not (session.config.pluginmanager.has_plugin("dsession") and can_fork()):
        return (yield)
    with warm_interpreters(start_warm_server(dict(os.environ), PRELOAD), nested=False):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports leave hardly any garbage, and the garbage collector takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze imported modules and collected tests. They live to the end, so later collections can skip them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the servers that tests need, before the first test. The pool server shares the output of the tests."""
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if session.config.option.collectonly:
        return
    if used & {"forked", "warm", "warm_module", "warm_launchers"} and can_fork():
        session.config.stash[WARM] = start_warm_server(dict(os.environ))
    if "pool" in used:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        start_server(PRELOAD, worker_environment())
        capture.suspend_global_capture()


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test marked ``alone`` while no other process runs a test; later tests wait for it."""
    with TURNS.open("a") as running, TURNS.with_suffix(".next").open("a") as following:
        fcntl.flock(following, fcntl.LOCK_EX)  # no test overtakes one that waits to run alone
        fcntl.flock(running, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(following, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes; see `Pool.run`."""
    workers = Pool()
    yield workers
    workers.close()


def warmed(config: pytest.Config, nested: bool) -> AbstractContextManager[None]:
    server = config.stash.get(WARM, None)
    return nullcontext() if server is None else warm_interpreters(server, nested)


@pytest.fixture
def warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the test's Python processes with torch and transformers imported; see `support.warm`."""
    with warmed(request.config, nested=False):
        yield


@pytest.fixture(scope="module")
def warm_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Like `warm`, for a module in which all tests use this fixture."""
    with warmed(request.config, nested=False):
        yield


@pytest.fixture
def warm_launchers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Like `warm`, also for processes that these processes start, such as the ranks of torchrun."""
    with warmed(request.config, nested=True):
        yield


@pytest.fixture(scope="session")
def forked(request: pytest.FixtureRequest) -> None:
    """Start the server that forks deployment workers."""
    from oslo_models.deploy.forking import start_fork_server
    from oslo_models.deploy.process_executor import worker_environment

    with warmed(request.config, nested=False):
        start_fork_server(worker_environment(0), ["oslo_models.models.gpt2"])


@pytest.fixture(scope="module")
def stand(forked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A deployed model on two workers; see `faults.Stand`."""
    from oslo_models.deploy import pending_call

    from support import faults

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_call, "GRACE", 0.5)  # seconds that every fault of one rank takes
        made = faults.Stand(tmp_path_factory.mktemp("stand"))
        yield made
        made.close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Callable[..., Any]:
    """Return a function that saves a tiny "gpt2" of a dtype in the working directory, which the ranks share."""
    from support.documents import tiny_gpt2

    monkeypatch.chdir(tmp_path)
    return partial(tiny_gpt2, seed)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed for random generators: ``--seed``, or a number that changes with every commit."""
    value: int = request.config.option.seed
    return value
