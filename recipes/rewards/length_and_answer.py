#!/usr/bin/env python3
"""A reward for Octet in plain Python: the right answer, and a small price for length.

Set it in a config:

    [reward]
    command = "python3 recipes/rewards/length_and_answer.py"

Octet starts this program once. For every batch it writes one line of JSON,

    {"prompts": [...], "completions": [...], "completion_ids": [[...]], "answer": [...]}

with every other column of the data under its own name, and waits for one line back,

    {"rewards": [1.0, 0.0, null, ...]}

with one entry per completion; null gives that sample no reward. Standard output is for answers
only: print messages to standard error, and flush after each line.
"""

import json
import re
import sys
from fractions import Fraction

PRICE_PER_TOKEN = 0.0005
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text):
    found = NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None


def score(completion, ids, answer):
    if answer is None:
        return None
    wanted = last_number(str(answer))
    if wanted is None:
        return None
    correct = 1.0 if last_number(completion) == wanted else 0.0
    return correct - PRICE_PER_TOKEN * len(ids)


def main():
    for line in sys.stdin:
        batch = json.loads(line)
        answers = batch.get("answer") or [None] * len(batch["completions"])
        rows = zip(batch["completions"], batch["completion_ids"], answers)
        print(json.dumps({"rewards": [score(*row) for row in rows]}), flush=True)


if __name__ == "__main__":
    main()
