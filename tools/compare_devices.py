#!/usr/bin/env python3
"""Compares a checkpoint on two devices: log-probabilities of a few texts, and greedy text.

usage: tools/compare_devices.py OCTET MODEL [--device cuda:0] [--flow bf16] [--new-tokens 64]

The CPU is what the other device is held to. Log-probabilities may differ by at most --largest, by
--mean on average. Greedy texts must be equal up to a place where the CPU's two best logits lie
within --gap. Exits with 1 where that does not hold.
"""

import argparse
import json
import subprocess
import sys

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees Celsius at sea level, but on a high mountain it boils",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "To solve 3x + 5 = 20, subtract 5 from both sides and divide by 3. So x =",
    "The quick brown fox jumps over the lazy dog. " * 12,
]


def octet(arguments, command, device, lines, *more):
    result = subprocess.run(
        [arguments.octet, command, "--model", arguments.model, "--device", device, "--flow",
         arguments.flow, "--input", "-", "--json", *more],
        input="".join(json.dumps(line) + "\n" for line in lines), capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"octet {command} on {device}: {result.stderr}{result.stdout}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def compare_scores(arguments):
    lines = [{"text": text} for text in TEXTS]
    expected = octet(arguments, "score", "cpu", lines)
    given = octet(arguments, "score", arguments.device, lines)
    differences = []
    for e, g in zip(expected, given):
        assert e["ids"] == g["ids"], "the ids of a text differ"
        differences += [abs(a - b) for a, b in zip(e["logprobs"][1:], g["logprobs"][1:])]
    mean, largest = sum(differences) / len(differences), max(differences)
    good = mean <= arguments.mean and largest <= arguments.largest
    print(f"{len(differences)} log-probabilities differ by {mean:.5f} on average, {largest:.5f} at "
          f"most: {'good' if good else 'BAD'}")
    return good, [e["ids"] for e in expected]


def compare_greedy(arguments, prompts):
    lines = [{"ids": ids} for ids in prompts]
    options = ["--temperature", "0", "--max-new-tokens", str(arguments.new_tokens)]
    expected = octet(arguments, "generate", "cpu", lines, *options)
    given = octet(arguments, "generate", arguments.device, lines, *options)
    good = True
    for number, (prompt, e, g) in enumerate(zip(prompts, expected, given), 1):
        a, b = e["ids"], g["ids"]
        place = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)
        if place is None:
            same = len(a) == len(b)
            good = good and same
            print(f"greedy text {number}: {len(a)} tokens, {'equal' if same else 'BAD: lengths'}")
            continue
        before = {"ids": prompt + a[:place]}
        top = octet(arguments, "score", "cpu", [before], "--top", "2")[0]["top"][-1]
        gap = top[0][1] - top[1][1]
        near = gap <= arguments.gap and {a[place], b[place]} == {top[0][0], top[1][0]}
        good = good and near
        print(f"greedy text {number}: equal for {place} tokens, then the CPU's two best logits lie "
              f"within {gap:.4f}: {'good' if near else 'BAD'}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("octet")
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--flow", default="bf16")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--mean", type=float, default=0.02)
    parser.add_argument("--largest", type=float, default=0.2)
    parser.add_argument("--gap", type=float, default=0.05)
    arguments = parser.parse_args()
    near, prompts = compare_scores(arguments)
    same = compare_greedy(arguments, prompts)
    return 0 if near and same else 1


if __name__ == "__main__":
    sys.exit(main())
