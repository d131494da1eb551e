"""What an engine's log says about why it died: the lines that matter, and the likely cure. Knows no engine."""

import re
from collections.abc import Iterable

_ERROR = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (.+)$")
_CONSEQUENCES = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "Worker failed with error",
    "WorkerProc initialization failed",
    "cancelled",
    "See root cause above",
)
"""Errors that only report another one."""
_CURES = (
    (r"block size", "leave block_size out, or use a multiple of what the message names"),
    (
        r"max seq len|maximum model length|max_model_len|longer than the maximum",
        "lower max_model_len, or give the key-value cache more memory",
    ),
    (
        r"out of memory|OutOfMemory|No available memory|Free memory on device|can't allocate memory",
        "lower gpu_memory_utilization, max_model_len or max_num_seqs, or free the device: another process may hold its memory",
    ),
    (
        r"memory utilization|requested memory for kv|less than requested memory|kv cache",
        "ask for less: lower gpu_memory_utilization, or set VLLM_CPU_KVCACHE_SPACE (GiB) on a machine without a GPU",
    ),
    (r"must hold this package|No module named '?ostinato_engines", "install it there, in the version that is here"),
    (r"No module named", "install what is missing into the environment of the engine's interpreter"),
    (r"trust_remote_code", "pass engine_args={'trust_remote_code': True} if you trust the checkpoint's code"),
    (
        r"are not supported for now|[Aa]rchitectures? .*not supported|no vLLM implementation|Cannot find model",
        "use a model that this vLLM serves, a newer vLLM, or TransformersServer",
    ),
    (r"re-initialize CUDA|forked subprocess", "start the engine before anything else uses the device"),
    (
        r"driver version is insufficient|no NVIDIA driver|CUDA driver|no kernel image|libcuda",
        "install the build of vllm that fits this machine's driver, or the CPU build",
    ),
    (
        r"undefined symbol|_C\.abi3|cannot open shared object|has no attribute '_C'",
        "vllm and torch do not fit each other: install both anew, in an environment of their own",
    ),
    (r"bootstrapping phase|freeze_support", "put the program's start under `if __name__ == '__main__':`"),
    (
        r"No such file|not a valid model|Repo id must|Can't load|does not appear to have|config\.json",
        "check the model's path",
    ),
    (r"Address already in use|\bport\b", "let the engine choose its ports: unset VLLM_PORT and MASTER_PORT"),
    (r"no answer within", "give it more time to start, or see what it waits for at the end of the whole log"),
    (r"nccl|NCCL", "check that the GPUs can reach each other; NCCL_DEBUG=INFO says more"),
    (r"Killed|signal 9|SIGKILL|exitcode -9|died unexpectedly", "the system may have run out of memory: ask for less"),
)
_NO_LOG_CURE = "its processes wrote nothing: put the program's start under `if __name__ == '__main__':`, and see stderr"
_SEE_LOG = "see the whole log"
_MAX_LINES = 6
_MAX_LENGTH = 400


def last_lines_that_matter(log: str) -> list[str]:
    """The distinct errors of a log in their order, those that only report others left out where there is one more."""
    errors = [
        f"{found[1]}: {found[2].strip()}"[:_MAX_LENGTH] for line in log.splitlines() if (found := _ERROR.search(line))
    ]
    distinct = list(dict.fromkeys(errors))
    causes = [line for line in distinct if not any(word in line for word in _CONSEQUENCES)]
    if not (causes or distinct):
        return [line.strip()[:_MAX_LENGTH] for line in log.splitlines() if line.strip()][-_MAX_LINES:]
    return (causes or distinct)[-_MAX_LINES:]


def likely_cure(lines: Iterable[str]) -> str:
    """What to do about it, as far as it is known."""
    text = "\n".join(lines)
    if not text:
        return _NO_LOG_CURE
    return next((cure for pattern, cure in _CURES if re.search(pattern, text)), _SEE_LOG)


def explain(log: str, error: BaseException) -> str:
    """What happened and what to do, in one text: the lines that matter of a log and of the error that ended it all."""
    own = f"{type(error).__name__}: {error}".strip()
    lines = last_lines_that_matter(log)
    if not any(word in own for word in _CONSEQUENCES) and own not in lines:
        lines = [*lines, own[: 3 * _MAX_LENGTH]][-_MAX_LINES:]
    shown = "\n".join(f"  {line}" for line in lines) or f"  {own}"
    return f"\n{shown}\n{likely_cure(lines)}"
