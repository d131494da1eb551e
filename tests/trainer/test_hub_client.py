"""Files of the hub through its real client, from a hub on this machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"data/train-0.jsonl": b'{"a": 1}\n', "data/train-1.jsonl": b'{"a": 2}\n', "README.md": b"about\n"}
REVISIONS = {"main", "v1", "refs%2Fconvert%2Fparquet"}


class Hub(BaseHTTPRequestHandler):
    """Knows owner/rows with three files, owner/gated, whose files nobody gets, and nothing else."""

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        status, headers, body = self._found(self.path.partition("?")[0])
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _found(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/datasets/owner/gated/"):
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}, b""
        if path.startswith("/api/datasets/owner/rows/tree/"):
            listed = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()
        if not path.startswith("/datasets/owner/rows/resolve/"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        revision, _, name = path.removeprefix("/datasets/owner/rows/resolve/").partition("/")
        if revision not in REVISIONS:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if name not in FILES:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        return 200, {"ETag": f'"{name.replace("/", "-")}"', "X-Repo-Commit": COMMIT}, FILES[name]


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Address of a hub that ends with the test."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


CLIENT = """
import json, sys
from ostinato_trainer.data.files import open_data_file
from ostinato_trainer.data.paths import data_file_names
from ostinato_trainer.errors import DatasetError
found = []
for name in json.loads(sys.argv[1]):
    try:
        found.append([list(open_data_file(file).rows()) for file in data_file_names([name])])
    except DatasetError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def read(names: list[str], endpoint: str, home: Path, *, offline: bool = False) -> list:
    """Rows of each name's files, or its error, as a process with its own cache finds them."""
    result = subprocess.run(
        [sys.executable, "-c", CLIENT, json.dumps([f"hf://datasets/{name}" for name in names])],
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "",
            "NO_PROXY": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_files_come_from_the_hub_and_then_from_the_cache(endpoint: str, tmp_path: Path) -> None:
    """Files, revisions and patterns are fetched; offline what was fetched is found, and what was not is an error."""
    rows = [{"a": 1}], [{"a": 2}]
    names = ["owner/rows/data/train-0.jsonl", "owner/rows@~parquet/data/train-1.jsonl", "owner/rows@v1/data/*.jsonl"]
    assert read(names, endpoint, tmp_path) == [[rows[0]], [rows[1]], [rows[0], rows[1]]]
    again, new, pattern = read(
        [names[0], "owner/rows/data/train-1.jsonl", "owner/rows/*.jsonl"], endpoint, tmp_path, offline=True
    )
    assert again == [rows[0]]
    assert new == [rows[1]]  # its commit is the one that the other revision was fetched from
    assert "no network, or HF_HUB_OFFLINE=1, and no copy in the cache" in pattern
    (missing,) = read(names[:1], endpoint, tmp_path / "other", offline=True)
    assert "no copy in the cache; connect once, or download the file and name its local path" in missing


def test_what_the_hub_refuses_is_said_with_the_cure(endpoint: str, tmp_path: Path) -> None:
    """No such file, revision or repository, and one that needs a permission, each say what to do."""
    messages = read(
        [
            "owner/rows/data/no.jsonl",
            "owner/rows@v9/data/train-0.jsonl",
            "owner/nothing/x.jsonl",
            "owner/gated/x.jsonl",
            "owner/rows/*.parquet",
        ],
        endpoint,
        tmp_path,
    )
    expected = [
        "got no file data/no.jsonl in owner/rows; choose one of https://huggingface.co/datasets/owner/rows/tree/main",
        "got no revision v9; choose one of https://huggingface.co/datasets/owner/rows/refs",
        "got no repository owner/nothing that may be read; check the name; if it is private, set HF_TOKEN",
        "got a gated repository; ask for access at https://huggingface.co/datasets/owner/gated and set HF_TOKEN",
        "must match at least one, got hf://datasets/owner/rows/*.parquet; the repository has data/train-0.jsonl",
    ]
    assert [part in message for part, message in zip(expected, messages, strict=True)] == [True] * 5, messages


@pytest.mark.slow  # the client tries again and again for a while
def test_without_a_network_the_cache_is_enough(endpoint: str, tmp_path: Path) -> None:
    """A hub that cannot be reached is no obstacle for what is in the cache, and an error for what is not."""
    name = "owner/rows/data/train-0.jsonl"
    read([name], endpoint, tmp_path)
    nobody = "http://127.0.0.1:1"
    assert read([name], nobody, tmp_path) == [[[{"a": 1}]]]
    assert "no network, or HF_HUB_OFFLINE=1, and no copy in the cache" in read([name], nobody, tmp_path / "other")[0]
