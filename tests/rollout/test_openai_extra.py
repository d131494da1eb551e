"""The app's extra and its errors."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from ostinato_engines import EngineClosedError, EngineInputError, NonFiniteLogitsError, UnsupportedError
from ostinato_rollout import BudgetExceededError, NoReplicaError, ReplicaError, RequestTimeoutError, RolloutError
from ostinato_tokenization import TokenizationError
from ostinato_tools import ToolError


def test_the_rollout_needs_no_web_server():
    """Importing the package loads no web framework."""
    code = "import sys, ostinato_rollout; print([n for n in ('starlette', 'uvicorn', 'h11') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_a_missing_extra_says_how_to_install_it(missing):
    """Without the extra, importing the app is an error of the tree that names the package and the command."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from ostinato_engines import MissingDependencyError\n"
        "try:\n    import ostinato_rollout.openai_app\n"
        "except MissingDependencyError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "must be installed for the OpenAI app; run `pip install 'ostinato-rollout[serve]'`" in done.stdout


def test_errors_are_of_one_tree_and_survive_pickling():
    """Errors of the app are errors of the package and of the standard library, and keep what they carry."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from ostinato_rollout.openai_app import ApiError, ServeError, UnknownSessionError

    for error, standard in (
        (ApiError("m", status=413, param="messages", code="c"), RuntimeError),
        (ServeError("m"), ValueError),
        (UnknownSessionError("m"), LookupError),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, RolloutError)
        assert isinstance(again, standard)
        assert (type(again), str(again), vars(again)) == (type(error), "m", vars(error))


def caused(error):
    """What a client of replicas makes of an engine's error."""
    failed = ReplicaError("replica 0 failed", replica=0)
    failed.__cause__ = error
    return failed


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BudgetExceededError("too long"), 400),
        (TokenizationError("no template"), 400),
        (ToolError("no format"), 400),
        (caused(EngineInputError("ids")), 400),
        (caused(UnsupportedError("media")), 400),
        (caused(EngineClosedError("closed")), 503),
        (caused(NonFiniteLogitsError("NaN")), 502),
        (caused(TimeoutError("late")), 504),
        (ReplicaError("breaks its contract"), 502),
        (NoReplicaError("none"), 503),
        (RequestTimeoutError("late"), 504),
        (ZeroDivisionError("ours"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_error_has_a_status(error, status):
    """Who is to act, the client or the server, follows from the error's class; what nobody raises on purpose has no status."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from ostinato_rollout.openai_app.errors import as_api_error

    told = as_api_error(error)
    assert (None if told is None else told.status) == status
