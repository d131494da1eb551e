"""What must hold after anything went wrong. Each check returns what it found, in words; an empty list is a pass."""

from collections import Counter
from pathlib import Path

_COUNTERS = ("num_calls", "num_conversations", "num_kept_bytes")


def ledger_findings(tasks, trajectories, expected, *, may_fail=()):
    """Each task has one outcome: what an undisturbed run gives, or, for those in `may_fail`, a recorded failure.

    Args:
        tasks: What was asked for.
        trajectories: What came, in any order.
        expected: Of the undisturbed run, by trajectory id.
        may_fail: Trajectory ids that may have failed.
    """
    found = []
    counts = Counter(trajectory.trajectory_id for trajectory in trajectories)
    asked = [task.trajectory_id for task in tasks]
    found += [f"{name} is lost" for name in asked if not counts[name]]
    found += [f"{name} came {count} times" for name, count in counts.items() if count > 1]
    found += [f"{name} was not asked for" for name in counts if name not in asked]
    for trajectory in trajectories:
        name = trajectory.trajectory_id
        if trajectory.failure is not None:
            if name not in may_fail:
                found.append(f"{name} failed: {trajectory.failure.message}")
        elif name in expected and ledgers_of(trajectory) != ledgers_of(expected[name]):
            found.append(f"{name} has other tokens than without the disturbance")
    return found


def ledgers_of(trajectory):
    """All that training reads of the tokens, but the versions."""
    return [
        (segment.prompt_ids, segment.response_ids, segment.response_mask, segment.response_logprobs)
        for segment in trajectory.segments
    ]


def version_findings(trajectories, allowed):
    """No token is of a policy version that nobody served by then."""
    return [
        f"{trajectory.trajectory_id} has tokens of version {span.version}"
        for trajectory in trajectories
        for segment in trajectory.segments
        for span in segment.policy_versions
        if span.version not in allowed
    ]


def client_findings(client):
    """Nothing in flight, no conversation, nobody waiting, and accounts of replicas at zero."""
    found = [f"replica {replica} has {count} in flight" for replica, count in client.num_in_flight.items() if count]
    if client.num_sticky:
        found.append(f"{client.num_sticky} conversations are not released")
    if client.num_waiting:
        found.append(f"{client.num_waiting} conversations wait for a place")
    found += [
        f"the account of replica {account.replica} holds {account.num_sessions} conversations, {account.held_tokens} tokens"
        for account in client.activity().replicas
        if account.num_sessions or account.held_tokens
    ]
    return found


def worker_findings(reports, *, num_workers, num_replicas):
    """All workers are there, reach all replicas, and have nothing under way."""
    found = [] if len(reports) == num_workers else [f"{len(reports)} of {num_workers} workers are there"]
    for number, report in enumerate(reports):
        if not report.is_idle:
            found.append(f"worker {number} has something under way: {report}")
        if report.num_replicas != num_replicas:
            found.append(f"worker {number} reaches {report.num_replicas} of {num_replicas} replicas")
    return found


def replica_findings(reports):
    """The services have no call, no conversation and no prompt left."""
    return [
        f"replica {number} has {name} {getattr(report, name)}"
        for number, report in enumerate(reports)
        for name in _COUNTERS
        if getattr(report, name)
    ]


def remote_findings(servers):
    """The callers' ends of the transport wait for nothing, and keep no prompt."""
    return [
        f"remote server {number} has {name} {getattr(server, name)}"
        for number, server in enumerate(servers)
        for name in ("num_waiting", "num_kept")
        if getattr(server, name)
    ]


def tool_findings(executor):
    """No trajectory has tools open."""
    return [f"{executor.num_open} trajectories have tools open"] if executor.num_open else []


def journal_findings(journal):
    """Each tool instance that was created was released, once."""
    created = Counter(name for event, name in journal if event == "create")
    released = Counter(name for event, name in journal if event == "release")
    return [
        f"tool instance {name} was created {created[name]} and released {released[name]} times"
        for name in sorted({*created, *released})
        if created[name] != released[name]
    ]


def process_findings(pids):
    """Processes that should have ended are gone; one whose result nobody has asked for is."""
    found = []
    for pid in sorted(pids):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(f"process {pid} is there, in state {state}")
    return found


def pool_findings(pool, *, num_replicas):
    """All replicas are in service, under one version."""
    found = [] if len(pool.servers) == num_replicas else [f"in service are {len(pool.servers)} of {num_replicas}"]
    versions = {server.policy_version for server in pool.servers}
    if len(versions) > 1:
        found.append(f"replicas serve the versions {sorted(versions)}")
    return found


def memory_findings(samples, *, allowed_bytes):
    """Resident memory after the warm-up does not rise: the last third of the samples is not above the first one.

    Args:
        samples: By process, bytes after each wave.
        allowed_bytes: What the noise of an allocator may add.

    Returns:
        What grew, by process.
    """
    found = {}
    for name, sizes in samples.items():
        third = max(1, len(sizes) // 3)
        growth = min(sizes[-third:]) - max(sizes[:third])
        if growth > allowed_bytes:
            found[name] = f"grew by {growth >> 10} KiB over {len(sizes)} waves"
    return found


def resident_bytes(pid):
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"process {pid} has no resident memory")
