"""What several test modules of the trainer start from."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """Handlers of signals as a program has them that was started in the foreground, whatever earlier tests have left (Ray sets its own) and
    however this one was started (in the background a shell ignores SIGINT)."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def quickstart_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's files; the model is as it was made, without a warm start."""
    from ostinato_trainer.quickstart.run import make_files

    folder = tmp_path_factory.mktemp("quickstart_home")
    make_files(folder, seed=0)
    (folder / "warm_start").symlink_to(folder / "model")
    return folder


@pytest.fixture
def megatron_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks make Megatron run on a CPU first, with what lies beside this file."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import megatron_on_cpu  # pyright: ignore[reportMissingImports]

    from ostinato_trainer.backends.megatron import setup

    made = setup.megatron_factory
    monkeypatch.setattr(setup, "megatron_factory", lambda *args, **keys: megatron_on_cpu.OnCPU(made(*args, **keys)))


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store of the test's own, which is MLflow's until the test is over; what a program has set goes before the environment."""
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    mlflow.set_tracking_uri(store)
    yield store
    mlflow.set_tracking_uri(None)
