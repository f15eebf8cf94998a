#!/usr/bin/env python3
"""Holds a device to the CPU on a real checkpoint: log-probabilities and greedy text.

    tools/compare_devices.py MODEL [--octet build-cuda/octet] [--device cuda]

Prints the differences of log-probabilities, beside how far both are from the CPU's float32 (two
ways of rounding to BF16 cannot be much nearer to each other than to that), and where greedy texts
part, by how much the CPU's logits of the two choices differ there. The CPU's portable kernels,
which differ from its others in the order of their sums alone, are held to it likewise: no device can
be nearer than that. Fails where the device's texts part at more than 0.05. Standard library only.
"""

import argparse
import json
import subprocess
import sys

LARGEST_GAP = 0.05
PROMPTS = [
    "The capital of France is",
    "Once upon a time, a fox and a crow",
    "def fibonacci(n):",
    "Water boils at 100 degrees because",
    "Dear Sir or Madam,",
    "A train leaves at nine and travels 60 miles an hour. At noon it has",
    "The three laws of thermodynamics say",
    "Ingredients: flour, two eggs, sugar.",
    "My favourite season is",
    "SELECT name, age FROM",
    "In 1969, humans first",
    "The best way to learn a language is",
    "Q: What is photosynthesis? A:",
    "To be or not to be,",
    "The stock market fell today after",
    "import numpy as np\n",
    "Chapter 1. It was a dark and",
    "List three countries in Africa:",
    "A list of prime numbers: 2, 3, 5,",
    "The recipe calls for",
    "She opened the door and saw",
    "The mitochondria is",
    "Breaking news:",
    "If x + 2 = 5, then",
]


def octet(program: str, command: list[str], lines: list[dict]) -> list[dict]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(
        [program, *command, "--input", "-", "--json"], input=text, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        sys.exit(f"octet {' '.join(command)} failed: {done.stdout}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--octet", default="build-cuda/octet")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    def generate(device: str, *more: str) -> list[list[int]]:
        command = ["generate", "--model", arguments.model, "--device", device, *more]
        command += ["--temperature", "0", "--max-new-tokens", str(arguments.new_tokens)]
        return [row["ids"] for row in octet(arguments.octet, command, [{"text": p} for p in PROMPTS])]

    def score(device: str, sequences: list[list[int]], *more: str) -> list[list[float]]:
        command = ["score", "--model", arguments.model, "--device", device, *more]
        return [
            row["logprobs"] for row in octet(arguments.octet, command, [{"ids": s} for s in sequences])
        ]

    tokenize = ["tokenize", "--tokenizer", arguments.model]
    rows = octet(arguments.octet, tokenize, [{"text": p} for p in PROMPTS])
    prompts = [row["ids"] for row in rows]
    portable = ["--cpu-isa", "portable"]
    expected = generate("cpu")

    sequences = [prompt + ids for prompt, ids in zip(prompts, expected)]
    cpu, device = score("cpu", sequences), score(arguments.device, sequences)
    exact = score("cpu", sequences, "--dtype", "float32")

    def compare(name: str, ours: list[list[float]], theirs: list[list[float]]) -> None:
        pairs = zip(ours, theirs)
        differences = [abs(a - b) for x, y in pairs for a, b in zip(x, y) if a is not None]
        print(
            f"{len(differences)} log-probabilities, {name}: largest difference "
            f"{max(differences):.4g}, mean {sum(differences) / len(differences):.4g}"
        )

    compare(f"cpu and {arguments.device}", cpu, device)
    compare("cpu and its float32", cpu, exact)
    compare(f"{arguments.device} and the cpu's float32", device, exact)

    compare("cpu and its portable kernels", cpu, score("cpu", sequences, *portable))

    # Where texts part, the CPU's logit of its choice less that of the other.
    def gaps(name: str, given: list[list[int]]) -> list[float]:
        parting, choices = [], []
        for index, (ours, theirs) in enumerate(zip(expected, given)):
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
            if at is None:
                continue
            parting.append((index, at))
            choices += [prompts[index] + ours[: at + 1], prompts[index] + theirs[: at + 1]]
        print(f"{name}: {len(PROMPTS) - len(parting)} of {len(PROMPTS)} greedy texts are equal")
        last = [row[-1] for row in score("cpu", choices)] if choices else []
        found = [last[2 * i] - last[2 * i + 1] for i in range(len(parting))]
        for (index, at), gap in zip(parting, found):
            print(f"  prompt {index} parts at new token {at}, where the CPU's logits differ by {gap:.4f}")
        return found

    gaps("the cpu's portable kernels", generate("cpu", *portable))
    sys.exit(any(gap > LARGEST_GAP for gap in gaps(arguments.device, generate(arguments.device))))


if __name__ == "__main__":
    main()
