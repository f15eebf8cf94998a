#!/usr/bin/env python3
"""Draws one metric of several runs as an SVG, and prints its means over the runs' ends.

    tools/plot_rewards.py OUT.svg LABEL=RUN [LABEL=RUN ...] [--metric reward]

RUN is a run's folder. Pale lines are the values of each step, strong ones their mean over the 15
steps around. Standard library only.
"""

import argparse
import json
import pathlib
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 44, 48
COLOURS = ["#1f5fa8", "#c8501e", "#3a7d44", "#7a4a9e"]
HALF_WINDOW = 7


def read_metric(run, metric):
    points = []
    with open(pathlib.Path(run) / "metrics.jsonl", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row.get(metric) is not None:
                points.append((row["step"], row[metric]))
    if not points:
        sys.exit(f'{run}: metrics.jsonl has no "{metric}"')
    return points


def smoothed(points):
    result = []
    for i, (step, _) in enumerate(points):
        near = [value for _, value in points[max(0, i - HALF_WINDOW) : i + HALF_WINDOW + 1]]
        result.append((step, sum(near) / len(near)))
    return result


def mean(values):
    return sum(values) / len(values)


def draw(runs, metric):
    last_step = max(points[-1][0] for _, points in runs)
    values = [value for _, points in runs for _, value in points]
    low, high = min(0.0, min(values)), max(1.0, max(values))

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step

    def y(value):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def line(points, style):
        where = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        return f'<polyline points="{where}" fill="none" {style}/>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for i in range(6):
        value = low + (high - low) * i / 5
        out.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#e0e0e0"/>')
        out.append(
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
        )
        step = round(last_step * i / 5)
        out.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    out.append(f'<text x="{LEFT}" y="24" font-weight="bold">{escape(metric)}</text>')
    for colour, (_, points) in zip(COLOURS, runs):
        out.append(line(points, f'stroke="{colour}" stroke-opacity="0.3"'))
    legend = WIDTH - RIGHT - 150 * len(runs)
    for i, (colour, (label, points)) in enumerate(zip(COLOURS, runs)):
        out.append(line(smoothed(points), f'stroke="{colour}" stroke-width="2.5"'))
        at = legend + 150 * i
        out.append(f'<path d="M{at} 20h28" stroke="{colour}" stroke-width="2.5"/>')
        out.append(f'<text x="{at + 36}" y="24">{escape(label)}</text>')
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="the SVG to write")
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    parser.add_argument("--metric", default="reward")
    arguments = parser.parse_args()
    if len(arguments.runs) > len(COLOURS):
        parser.error(f"at most {len(COLOURS)} runs, but {len(arguments.runs)} are given")
    runs = []
    for word in arguments.runs:
        label, equals, run = word.partition("=")
        if not equals:
            parser.error(f'"{word}" must be LABEL=RUN')
        runs.append((label, read_metric(run, arguments.metric)))
    pathlib.Path(arguments.out).write_text(draw(runs, arguments.metric), encoding="utf-8")
    for label, points in runs:
        values = [value for _, value in points]
        tenth = max(1, len(values) // 10)
        print(
            f"{label}: {len(values)} steps, mean of the first tenth {mean(values[:tenth]):.3f}, "
            f"of the last {mean(values[-tenth:]):.3f}"
        )


if __name__ == "__main__":
    main()
