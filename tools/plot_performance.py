#!/usr/bin/env python3
"""Draws a report of kvarn-bench, or prints the tables of docs/performance.md.

    plot_performance.py REPORT.json OUT.svg|OUT.png
    plot_performance.py REPORT.json

Times are medians. "of floor" is the time of a plain read of the same bytes in the same run, in
percent of the time measured; "FP16 x" how many times faster than attention over binary16.
"""

import re
import sys

from picture import load_pyplot, picture_path, save, use_plain_style
from report_file import ReportError, read_report

BASE = "d128/k2v2/gqa4/t16384/cold"
SHAPE = re.compile(r"attention/([^/]+)/d128/(k\d+v\d+)/gqa(\d+)/t16384/cold(/int8)?")

# What is wanted, in nanoseconds: heading, benchmark, goal.
GOALS = [
    ("attention, AVX-512, two parts", f"attention/avx512/{BASE}", 9),
    ("attention, AVX-512, one part", f"attention/avx512/{BASE}/int8", 7.5),
    ("attention, AMX", f"attention/amx/{BASE}", 6),
    ("attention, AVX-VNNI, two parts", f"attention/avx_vnni/{BASE}", 16),
    ("attention, AVX2, two parts", f"attention/avx2/{BASE}", 20),
    ("the same, AVX-512, 1 query head", "attention/avx512/d128/k2v2/gqa1/t16384/cold", 5.2),
    ("the same, AVX-512, 2 query heads", "attention/avx512/d128/k2v2/gqa2/t16384/cold", 6.2),
    ("the same, AVX-512, 8 query heads", "attention/avx512/d128/k2v2/gqa8/t16384/cold", 15),
    ("encode a tile, `paper`, 8 iterations", "encode/avx512/d128/k2/paper", 14000),
    ("encode a tile, `tuned`, keys", "encode/avx512/d128/k2/tuned", 5000),
    ("encode a tile, `tuned`, values", "encode/avx512/d128/v2/tuned", 8000),
    ("encode a tile, `query_aware`, keys", "encode/avx512/d128/k2/query_aware", 20000),
    ("factor of C", "factor/avx512/d128", 12000),
    ("Hadamard of 128 floats", "hadamard/avx512/d128", 14),
    ("decode a row of 128, AVX-512", "decode_rows/avx512/d128/k2", 5),
    ("decode a row of 128, AVX2", "decode_rows/avx2/d128/k2", 9),
]

# Goals of one time against another: heading, numerator, denominator, goal, whether less is better.
RATIOS = [
    ("FP16 attention / AVX-512, two parts", "attention/fp16/d128/k16v16/gqa4/t16384/cold",
     f"attention/avx512/{BASE}", 4.5, False),
    ("FP16 attention / AVX-512, one part", "attention/fp16/d128/k16v16/gqa4/t16384/cold",
     f"attention/avx512/{BASE}/int8", 5.5, False),
    ("one thread / two threads, AVX-512", f"attention/avx512/{BASE}/threads1",
     f"attention/avx512/{BASE}/threads2", 1.8, False),
    ("8 query tokens / one, AMX", f"attention/amx/{BASE}/q8", f"attention/amx/{BASE}", 2.0, True),
]

# Label and colour of each implementation; the colours of Okabe and Ito can be told apart by all.
STYLES = {
    "amx": ("kvarn, AMX", "#0072B2"),
    "avx512": ("kvarn, AVX-512", "#D55E00"),
    "avx_vnni": ("kvarn, AVX-VNNI", "#009E73"),
    "avx2": ("kvarn, AVX2", "#CC79A7"),
    "neon": ("kvarn, NEON", "#0072B2"),
    "q8_0": ("8-bit attention", "#777777"),
    "fp16": ("FP16 attention", "#000000"),
    "fp16_avx2": ("FP16 attention, AVX2", "#AAAAAA"),
    "eigen": ("Eigen, FP32", "#BBBBBB"),
}


def load(path):
    """{name: counters of its median}, in the order of the report, and its context."""
    report = read_report(path)
    try:
        runs = report["benchmarks"]
        medians = {run["run_name"].removesuffix("/real_time"): run
                   for run in runs if run.get("aggregate_name") == "median" and "ns" in run}
        context = report["context"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{path}: is not a report of kvarn-bench: {error!r}") from error
    if not medians:
        raise ReportError(f"{path}: has no medians; repeat each benchmark at least twice")
    return medians, context


def digits(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def percent(run):
    return f"{run['floor_percent']:.0f} %" if "floor_percent" in run else ""


def ratio(run):
    return f"{run['fp16_ratio']:.2f}" if "fp16_ratio" in run else ""


def print_cache(medians):
    """The cache beside the bare work below it, which cache_bench.cpp measures under bare/..."""
    rows = [(name, run, medians.get(name.replace("cache/", "bare/", 1)
                                    .replace("bare/save", "bare/file")
                                    .replace("bare/restore", "bare/file")))
            for name, run in medians.items() if name.startswith("cache/")]
    if not rows:
        return
    print("\n| cache | per | bare | cache | cache / bare | beyond, ns | GB/s |")
    print("|---|---|---|---|---|---|---|")
    for name, run, bare in rows:
        speed = f"{run['bytes_per_second'] * 1e-9:.1f}" if "bytes_per_second" in run else ""
        below = ["", "", ""] if bare is None else [
            f"{digits(bare['ns'])} ns", f"{run['ns'] / bare['ns']:.3f}",
            "" if speed else digits(run["ns"] - bare["ns"])]
        print(f"| {name.partition('/')[2]} | {run.get('label', '')} | {below[0]} "
              f"| {digits(run['ns'])} ns | {below[1]} | {below[2]} | {speed} |")


def print_tables(medians, context):
    print("| what | goal | measured | of floor | FP16 x | |")
    print("|---|---|---|---|---|---|")
    for what, name, goal in GOALS:
        if name not in medians:
            continue
        run = medians[name]
        verdict = "holds" if run["ns"] <= goal else f"missed by {run['ns'] / goal - 1:.0%}"
        print(f"| {what} | {digits(goal)} ns | {digits(run['ns'])} ns | {percent(run)} "
              f"| {ratio(run)} | {verdict} |")
    for what, above, below, goal, is_limit in RATIOS:
        if above not in medians or below not in medians:
            continue
        value = medians[above]["ns"] / medians[below]["ns"]
        holds = value <= goal if is_limit else value >= goal
        print(f"| {what} | {'at most' if is_limit else 'at least'} {goal} | {value:.2f} | | "
              f"| {'holds' if holds else 'missed'} |")

    print_cache(medians)
    for group in dict.fromkeys(name.split("/")[0] for name in medians):
        if group in ("cache", "bare"):
            continue
        print(f"\n### {group}\n")
        print("| benchmark | median ns | per | GB/s | of floor | FP16 x |")
        print("|---|---|---|---|---|---|")
        for name, run in medians.items():
            if name.split("/")[0] != group:
                continue
            speed = f"{run['bytes_per_second'] * 1e-9:.1f}" if "bytes_per_second" in run else ""
            print(f"| {name.partition('/')[2]} | {digits(run['ns'])} | {run.get('label', '')} "
                  f"| {speed} | {percent(run)} | {ratio(run)} |")

    print(f"\n{context.get('num_cpus')} processors, {context.get('targets')}; "
          f"g++ or clang++ {context.get('compiler')}; {context.get('date')}; load at the start "
          f"{', '.join(f'{x:.2f}' for x in context.get('load_avg', []))}")


def draw_targets(axes, medians):
    """A bar for each implementation at the base shape; a mark where its own floor stands."""
    bars = []
    for name, run in medians.items():
        match = SHAPE.fullmatch(name)
        if match and match[3] == "4" and match[1] in STYLES and match[2] in (
                "k2v2", "k8v8", "k16v16", "k32v32"):
            label, colour = STYLES[match[1]]
            bars.append((run["ns"], label + (", one part" if match[4] else ""), colour,
                         bool(match[4]), run.get("floor_percent")))
    bars.sort(key=lambda bar: bar[0])
    for row, (ns, label, colour, hollow, floor) in enumerate(bars):
        axes.barh(row, ns, color="white" if hollow else colour, edgecolor=colour, height=0.62,
                  linewidth=1.3)
        axes.annotate(f"{ns:.1f}", (ns, row), xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=8.5, color="#333333")
        if floor is not None:
            at = ns * floor / 100
            axes.plot([at, at], [row - 0.42, row + 0.42], color="#E69F00", linewidth=2.5,
                      solid_capstyle="butt", zorder=3)
    axes.plot([], [], color="#E69F00", linewidth=2.5, label="plain read of the same bytes")
    axes.legend(loc="upper right", frameon=False, fontsize=8.5)
    axes.set_yticks(range(len(bars)), [bar[1] for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max((bar[0] for bar in bars), default=1))
    axes.grid(False, axis="y")
    axes.set_xlabel("ns per token and KV head")
    axes.set_title("4 query heads per KV head", loc="left", fontsize=10, fontweight="bold")
    return len(bars)


def draw_heads(axes, medians):
    """A line for each implementation over the query heads that share a KV head."""
    lines = {}
    for name, run in medians.items():
        match = SHAPE.fullmatch(name)
        if match and not match[4] and match[1] in STYLES and match[2] in ("k2v2", "k16v16"):
            lines.setdefault(match[1], []).append((int(match[3]), run["ns"]))
    for kind, points in lines.items():
        if len(points) < 2:
            continue
        label, colour = STYLES[kind]
        points.sort()
        axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker="o",
                  markersize=4.5, linewidth=1.6, label=label)
    floor = medians.get("floor/d128/k2v2/t16384/cold")
    if floor:
        axes.axhline(floor["ns"], color="#E69F00", linewidth=1.6, zorder=1,
                     label="plain read of the 2-bit bytes")
    axes.set_yscale("log")
    axes.set_yticks([4, 6, 10, 20, 40, 60], ["4", "6", "10", "20", "40", "60"])
    axes.minorticks_off()
    axes.set_xticks([1, 2, 3, 4, 6, 8])
    axes.set_xlabel("query heads per KV head")
    axes.set_ylabel("ns per token and KV head")
    axes.set_title("by query heads", loc="left", fontsize=10, fontweight="bold")
    axes.legend(frameon=False, fontsize=8.5)


def draw(medians, out):
    pyplot = load_pyplot()
    use_plain_style(pyplot)
    figure, (targets, heads) = pyplot.subplots(
        1, 2, figsize=(10.5, 4.2), width_ratios=[1.15, 1], layout="constrained")
    if draw_targets(targets, medians) == 0:
        raise ReportError(f"the report has no attention at {BASE}")
    draw_heads(heads, medians)
    figure.suptitle("Decode attention, D 128, 16,384 tokens, 2 bits, cold caches, one thread",
                    x=0.01, ha="left", fontsize=11, fontweight="bold")
    save(figure, out)


def main(arguments):
    if len(arguments) not in (1, 2):
        print("usage: plot_performance.py REPORT.json [OUT.svg|OUT.png]", file=sys.stderr)
        return 1
    try:
        medians, context = load(arguments[0])
        if len(arguments) == 1:
            print_tables(medians, context)
            return 0
        out = picture_path(arguments[1])
        draw(medians, out)
    except ReportError as error:
        print(f"plot_performance.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
