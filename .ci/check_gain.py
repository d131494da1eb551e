"""Check that a quickstart run learned: the mean reward of its last five steps exceeds that of its first five by 0.3 or more."""

import json
import sys
from pathlib import Path
from statistics import fmean


def main(metrics: Path) -> None:
    """Read the run's metrics, print the gain, fail where it is too small or the run began too well to show one."""
    records = (json.loads(line) for line in metrics.read_text().splitlines())
    rewards = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    print(f"mean reward of the first five of {len(rewards)} steps {first:.3f}, of the last five {last:.3f}")
    if first > 0.6 or last - first < 0.3:
        sys.exit("the quickstart did not learn as it should")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
