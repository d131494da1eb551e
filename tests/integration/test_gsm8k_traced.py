"""From GSM8K's files to a trajectory in MLflow's own server: prepare, train with the tool agent, look.

All parts are the real ones: the commands in processes of their own, the embedded engine with a small model that is trained, the tools of
the recipe, MLflow over a SQLite file, and its server. Only what the policy says is written down beforehand, since a model of this
size calls no tool.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("mlflow")

from mlflow import MlflowClient

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.quickstart.tiny_model import save_model, save_tokenizer

SHARED = Path(os.environ.get("OSTINATO_SHARED", Path(__file__).parents[3] / "shared"))
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gsm8k_tool_cpu.yaml"
COMMAND = Path(sys.executable).with_name("ostinato")
MLFLOW = Path(sys.executable).with_name("mlflow")
DEADLINE_S = 280

OWN_ROWS = [
    {
        "question": f"A box holds {n} pens. How many pens do {n + 1} boxes hold?",
        "answer": f"They hold.\n#### {n * (n + 1)}",
    }
    for n in range(2, 10)
]

POLICY = '''
"""The embedded engine, whose turns are written down beforehand: a calculation, a check, an answer, right in every other trajectory."""

import json
from collections import Counter
from pathlib import Path

from ostinato_engines import PolicySpan, StopReason, TokenOutput
from ostinato_engines.transformers_server import TransformersServer
from ostinato_tokenization import ChatTokenizer

HERE = Path(__file__).parent
TOKENIZER = ChatTokenizer.from_pretrained(HERE / "model")
ANSWERS = json.loads((HERE / "answers.json").read_text())


class WrittenPolicy(TransformersServer):
    """Says what is written, under the version of the weights that it was sent."""

    turns = Counter()

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        turn = self.turns[request_id]
        self.turns[request_id] += 1
        prompt = TOKENIZER.decode(list(prompt_ids))
        truth = next(answer for question, answer in ANSWERS.items() if question in prompt)
        answer = truth if request_id.endswith("0") else "-1"
        calls = (("calculator", {"expression": "6*7"}), ("calc_gsm8k_reward", {"answer": answer}))
        ids = self._call(*calls[turn]) if turn < len(calls) else TOKENIZER.encode_text(f"#### {answer}")
        ids.append(TOKENIZER.token_id("<|im_end|>"))
        output = TokenOutput(
            ids, [-0.25] * len(ids), StopReason.STOP, ids[-1], (PolicySpan(0, self.policy_version),), num_cached_tokens=turn
        )
        with (HERE / "turns.jsonl").open("a") as file:
            print(json.dumps([request_id, list(prompt_ids), ids, self.policy_version]), file=file)
        return output

    def _call(self, name, arguments):
        text = json.dumps({"name": name, "arguments": arguments})
        return [
            TOKENIZER.token_id("<tool_call>"),
            *TOKENIZER.encode_text(f"\\n{text}\\n"),
            TOKENIZER.token_id("</tool_call>"),
        ]
'''


def run(*arguments: object, **environment: str) -> None:
    """Run the command as a user does, from the repository's root."""
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A few rows in GSM8K's own format: the real ones where they are at hand."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for split in ("train", "test"):
        real = SHARED / "data" / "gsm8k" / f"{split}.jsonl"
        lines = real.read_text().splitlines()[:4] if real.is_file() else [json.dumps(row) for row in OWN_ROWS[:4]]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def policy(raw: Path, tmp_path: Path) -> Path:
    """A small model that knows these texts' bytes, and the file of the engine's class."""
    rows = [json.loads(line) for file in sorted(raw.iterdir()) for line in file.read_text().splitlines()]
    template = (RECIPE.parent / "templates" / "chatml_hermes.jinja").read_text()
    save_tokenizer(tmp_path / "model", [row["question"] for row in rows] + [template])
    save_model(tmp_path / "model", seed=0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    answers = {row["question"]: row["answer"].rpartition("####")[2].strip().replace(",", "") for row in rows}
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    file = tmp_path / "written_policy.py"
    file.write_text(POLICY)
    return file


@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_trajectory_with_tool_calls_is_seen_in_mlflow(raw: Path, policy: Path, tmp_path: Path) -> None:
    """What a training run on GSM8K did with its tools is in MLflow, token by token, and MLflow's server shows it."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    run("prepare", "gsm8k", "--input", raw, "--output", tmp_path / "rows")
    run(
        "train",
        RECIPE,
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'rows' / 'train.parquet'}",
        f"data.val_files={tmp_path / 'rows' / 'test.parquet'}",
        "data.max_prompt_length=3000",
        "data.max_response_length=900",
        f"actor_rollout_ref.rollout.agent.custom_async_server.path={policy}",
        "actor_rollout_ref.rollout.agent.custom_async_server.name=WrittenPolicy",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.trace.backend=mlflow",
        "actor_rollout_ref.rollout.trace.token2text=true",
        "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=1",
        "actor_rollout_ref.rollout.trace.shutdown_timeout_s=120",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
        "trainer.logger=[jsonl,mlflow]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        MLFLOW_TRACKING_URI=store,
    )
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["agent_loop/failures"] for step in metrics] == [0, 0]
    assert all(step["critic/score/max"] == 1.0 and step["critic/score/min"] == 0.0 for step in metrics)
    assert metrics[-1]["trace/dropped_spans"] == 0

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("gsm8k")
    assert experiment is not None
    found = client.search_traces(locations=[experiment.experiment_id])
    labels = [
        tuple(trace.info.tags[name] for name in ("step", "sample_index", "rollout_n", "validate")) for trace in found
    ]
    assert sorted(labels) == [
        ("1", "0", "0", "false"),
        ("1", "0", "1", "false"),
        ("2", "0", "0", "false"),
        ("2", "0", "0", "true"),
        ("2", "0", "1", "false"),
    ]
    for trace in found:
        _check_trace(trace, tmp_path)
    [metrics_run] = client.search_runs([experiment.experiment_id])  # metrics and traces are side by side
    assert metrics_run.data.metrics["trace/dropped_spans"] == 0
    _check_server(store, experiment.experiment_id, {trace.info.trace_id for trace in found})


def _check_trace(trace, folder: Path) -> None:
    """One trajectory, as MLflow gives it back, against what the engine served and the data say."""
    served = [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]
    tokenizer = ChatTokenizer.from_pretrained(folder / "model")
    tags = trace.info.tags
    assert (tags["experiment_name"], tags["agent"]) == ("tool_cpu", "tool_agent")
    root, *spans = sorted(trace.data.spans, key=lambda span: (span.parent_id is not None, span.start_time_ns))
    assert [span.name for span in spans] == [
        "generate",
        "execute_tool calculator",
        "generate",
        "execute_tool calc_gsm8k_reward",
        "generate",
        "compute_score",
    ]
    right = tags["rollout_n"] == "0"
    assert spans[1].outputs["answer"] == "42"
    assert spans[3].outputs["reward"] == float(right)
    assert f"has score {float(right)}" in spans[3].outputs["answer"]
    assert spans[5].outputs["score"] == root.outputs["reward"] == float(right)
    turns = [turn for turn in served if turn[0] == tags["trajectory_id"]]
    context: list[int] = []
    for span, (_, prompt_ids, token_ids, version) in zip(spans[0:5:2], turns, strict=True):
        context += span.inputs["prompt_ids"]
        assert context == prompt_ids
        assert span.outputs["token_ids"] == token_ids
        assert span.outputs["logprobs"] == [-0.25] * len(token_ids)
        assert span.outputs["response_text"] == tokenizer.decode(token_ids)
        assert span.attributes["policy_versions"] == [{"start": 0, "version": version, "exact": True}]
        assert (span.attributes["replica"], span.attributes["stop_reason"]) == (0, "stop")
        context += token_ids
    assert turns[0][3] == int(tags["step"]) - (tags["validate"] == "false")
    assert [span.attributes["num_cached_tokens"] for span in spans[0:5:2]] == [0, 1, 2]
    question = root.inputs["messages"][-1]["content"]
    assert question in json.loads((folder / "answers.json").read_text())
    assert root.outputs["stop_reason"] == "no_tool_call"


def _check_server(store: str, experiment_id: str, trace_ids: set[str]) -> None:
    """`mlflow ui`, as the documentation says to start it, answers and lists the traces."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [MLFLOW, "ui", "--backend-store-uri", store, "--port", str(port), "--workers", "1"],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        base = f"http://127.0.0.1:{port}"
        _wait_for(f"{base}/health", server)
        assert b"<html" in _get(base)
        location = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment_id}}
        body = json.dumps({"locations": [location], "max_results": 100}).encode()
        request = urllib.request.Request(
            f"{base}/api/3.0/mlflow/traces/search", body, {"Content-Type": "application/json"}
        )
        listed = json.loads(_get(request))["traces"]
        assert {trace["trace_id"] for trace in listed} == trace_ids
        assert {trace["tags"]["experiment_name"] for trace in listed} == {"tool_cpu"}
    finally:
        _end(server)


def _get(request: str | urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def _wait_for(url: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            _get(url)
            return
        except OSError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)


def _end(server: subprocess.Popen) -> None:
    """End the server and the processes that it has started, which are a group of their own."""
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
