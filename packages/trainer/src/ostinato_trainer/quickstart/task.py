"""Arithmetic in words: one or two calculations with operands 1 to 9, asked in four ways each.

Invariant: a first calculation (operands and operator) belongs either to training or to evaluation, however it is worded, so that
no evaluated problem was ever trained on.
"""

import random
from collections.abc import Iterator

import msgspec

OPERATORS = ("+", "-", "*")
FIRST_STEP = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "Find the sum of {a} and {b}.", "How much are {a} and {b}?"),
    "-": (
        "What is {a} minus {b}?",
        "Start at {a} and subtract {b}.",
        "From {a} take away {b}.",
        "How much is {a} less {b}?",
    ),
    "*": (
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "Find the product of {a} and {b}.",
        "How much is {a} by {b}?",
    ),
}
SECOND_STEP = {
    "+": ("Then add {c}.", "Then plus {c}.", "Now add {c}.", "After that add {c}."),
    "-": ("Then subtract {c}.", "Then minus {c}.", "Now take away {c}.", "After that subtract {c}."),
    "*": ("Then multiply by {c}.", "Then times {c}.", "Now multiply by {c}.", "After that times {c}."),
}
HELD_OUT_SHARE = 0.15


class Step(msgspec.Struct, frozen=True):
    """One calculation `left operator right`."""

    left: int
    operator: str
    right: int

    @property
    def expression(self) -> str:
        """What the calculator is to be asked."""
        return f"{self.left}{self.operator}{self.right}"

    @property
    def value(self) -> int:
        """What it answers."""
        match self.operator:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case _:
                return self.left * self.right


class Problem(msgspec.Struct, frozen=True):
    """A question in words and the calculations that answer it."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """The value of the last step."""
        return self.steps[-1].value

    def row(self, index: int, split: str) -> dict:
        """The dataset row of this problem."""
        return {
            "data_source": "ostinato/quickstart",
            "prompt": [{"role": "user", "content": self.question}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(self.answer)},
            "extra_info": {"split": split, "index": index, "expressions": [step.expression for step in self.steps]},
        }


def first_steps(*, held_out: bool, seed: int) -> list[Step]:
    """The first calculations of one side of the split, in a fixed order."""
    steps = [Step(a, op, b) for op in OPERATORS for a in range(1, 10) for b in range(1, 10)]
    random.Random(f"split-{seed}").shuffle(steps)
    num_held_out = round(len(steps) * HELD_OUT_SHARE)
    return steps[:num_held_out] if held_out else steps[num_held_out:]


def problems(*, held_out: bool, seed: int) -> Iterator[Problem]:
    """An endless stream of problems of one side of the split; half of them have a second step."""
    rng = random.Random(f"problems-{held_out}-{seed}")
    candidates = first_steps(held_out=held_out, seed=seed)
    while True:
        first = rng.choice(candidates)
        question = rng.choice(FIRST_STEP[first.operator]).format(a=first.left, b=first.right)
        steps = [first]
        if rng.random() < 0.5:
            second = Step(first.value, rng.choice(OPERATORS), rng.randint(1, 9))
            question += " " + rng.choice(SECOND_STEP[second.operator]).format(c=second.right)
            steps.append(second)
        yield Problem(question=question, steps=tuple(steps))


def distinct_problems(count: int, *, held_out: bool, seed: int) -> list[Problem]:
    """The first `count` problems of the stream whose questions differ."""
    found: dict[str, Problem] = {}
    for problem in problems(held_out=held_out, seed=seed):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            return list(found.values())
    raise AssertionError("the stream of problems is endless")
