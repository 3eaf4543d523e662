#!/usr/bin/env python3
"""Draws the report of kvarn-eval.

    plot_quality.py REPORT.json OUT.svg|OUT.png     all that the report has, one below the other
    plot_quality.py REPORT.json                     its tables, in Markdown
    plot_quality.py REPORT.json REPORT.json...      one table of several texts

Drawn are mean KL against bits per element; KL against position, accumulated and static; the share of
magnitude and direction in the squared error of keys. The tables are all methods, and each encoder
beside its strongest rival. "+-" is a standard error over windows.
"""

import math
import pathlib
import re
import statistics
import sys

from picture import load_pyplot, picture_path, save
from report_file import ReportError, read_report

# Methods by family: label, colour, marker. Two colours of the Okabe-Ito palette, which colour-blind
# readers can tell apart, for the encoders of kvarn; shapes and greys for the others.
OURS = {
    "query_aware": ("kvarn query_aware", "#0072B2", "o"),
    "tuned": ("kvarn tuned", "#D55E00", "s"),
    "paper": ("KVarN paper", "#000000", "D"),
}
GREYS = ("#555555", "#AAAAAA")
MARKERS = "v^xph*<>P+1234X"

# Methods of more bits are left to the table, those of fewer are "2 bits".
MOST_BITS_DRAWN = 6
TWO_BITS = 3


def load(path):
    """A report, checked as far as it is drawn."""
    report = read_report(path)
    methods = report.get("methods") if isinstance(report, dict) else None
    if not isinstance(methods, list) or not methods:
        raise ReportError(f'{path}: has no member "methods" with at least one method')
    for method in methods:
        for field in ("name", "bits_per_element", "all", "windows", "by_position", "heads"):
            if field not in method:
                raise ReportError(f'{path}: a method has no member "{field}"')
        if not method["all"].get("kl_mean", 0) > 0:
            raise ReportError(f"{path}: {method['name']}: kl_mean is {method['all'].get('kl_mean')}; "
                              "it must be positive to stand on a logarithmic axis")
    return report


def family_of(name):
    """paper_k4v2 -> ("paper", "K4V2"); names without bits are those of 2-bit methods."""
    match = re.fullmatch(r"(.*)_k(\d)v(\d)", name)
    return (match[1], f"K{match[2]}V{match[3]}") if match else (name, "")


def styles(methods):
    """{family: (label, colour, marker)}."""
    chosen = {}
    for method in methods:
        family, _ = family_of(method["name"])
        if family in OURS:
            chosen[family] = OURS[family]
        elif family not in chosen:
            i = sum(1 for f in chosen if f not in OURS)
            grey = GREYS[i // len(MARKERS) % len(GREYS)]
            chosen[family] = (family, grey, MARKERS[i % len(MARKERS)])
    return chosen


def draw_bits(axes, methods, chosen):
    for family, (label, colour, marker) in chosen.items():
        points = sorted((m["bits_per_element"], m["all"]["kl_mean"], family_of(m["name"])[1])
                        for m in methods if family_of(m["name"])[0] == family
                        and m["bits_per_element"] <= MOST_BITS_DRAWN)
        if not points:
            continue
        ours = family in OURS
        axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker=marker,
                  linestyle="none", markersize=6 if ours else 5, label=label,
                  zorder=3 if ours else 2)
        if not ours:
            continue
        # A line through the points with as many bits for keys as for values.
        alike = [p for p in points if p[2][1] == p[2][3]]
        axes.plot([p[0] for p in alike], [p[1] for p in alike], color=colour, linewidth=1, zorder=3)
        for bits, kl, widths in points:
            right = widths[1] == widths[3]
            axes.annotate(widths, (bits, kl), textcoords="offset points", va="center",
                          xytext=(6, 3) if right else (-6, 0), ha="left" if right else "right",
                          fontsize=6, color=colour)
    axes.set_yscale("log")
    axes.set_xlabel("bits per element, metadata included")
    axes.set_ylabel("mean KL, nats")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title("Next-token distribution against an exact cache")


def is_static(method):
    return all("static_kl" in b for b in method["by_position"])


def draw_position(axes, methods, chosen):
    drawn = [m for m in methods
             if m["bits_per_element"] < TWO_BITS and len(m["by_position"]) > 1]
    drawn = [m for m in drawn if is_static(m)] or drawn
    for i, method in enumerate(drawn):
        family, _ = family_of(method["name"])
        bins = method["by_position"]
        label, colour, marker = chosen[family]
        x = [b["position"] for b in bins]
        ours = family in OURS
        shape = {"color": colour, "marker": marker, "markersize": 4,
                 "markevery": (i % 3, 3), "linewidth": 1.4 if ours else 0.8}
        axes.plot(x, [b["kl"] for b in bins], label=label, **shape)
        if is_static(method):
            axes.plot(x, [b["static_kl"] for b in bins], linestyle=":", **shape)
    axes.set_yscale("log")
    axes.set_xlabel("position of the first of the scored tokens")
    axes.set_ylabel("mean KL, nats")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title("Error along the text, 2 bits: accumulated (solid), static (dotted)")


def draw_split(axes, methods, chosen):
    rows = [m for m in methods if m["heads"]]
    for i, method in enumerate(rows):
        heads = method["heads"]
        error = sum(h["k_rel_sq_error"] for h in heads) / len(heads)
        magnitude = sum(h["k_rel_sq_error"] * h["e_m_share"] for h in heads) / len(heads)
        colour = chosen[family_of(method["name"])[0]][1]
        axes.barh(i, magnitude, color=colour)
        axes.barh(i, error - magnitude, left=magnitude, color=colour, alpha=0.35)
    axes.set_yticks(range(len(rows)), [m["name"] for m in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("squared error of keys / their squares, mean over heads")
    axes.set_title("Magnitude (dark) and direction (light)")


def draw(report, out):
    pyplot = load_pyplot()
    methods = report["methods"]
    chosen = styles(methods)
    split = sum(1 for m in methods if m["heads"])
    heights = [4.2, 3.6] + ([0.8 + 0.22 * split] if split else [])
    figure, panels = pyplot.subplots(len(heights), 1, figsize=(9, sum(heights)),
                                     gridspec_kw={"height_ratios": heights})
    draw_bits(panels[0], methods, chosen)
    draw_position(panels[1], methods, chosen)
    if split:
        draw_split(panels[2], methods, chosen)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.tight_layout()
    save(figure, out, dpi=150)


def error_of_mean(values):
    """None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def kl_of_windows(method):
    return [window["kl_mean"] for window in method["windows"]]


def number(value):
    if value is None:
        return ""
    return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"


def name_of(method):
    name = method["name"]
    return f"**{name}**" if family_of(name)[0] in OURS else name


def row(cells):
    return "| " + " | ".join(cells) + " |"


def table(report):
    """All methods, by bits and then by mean KL."""
    retrieval = {r["name"]: r["results"] for r in report.get("retrieval") or []}
    sizes = [str(r["lines"]) for r in next(iter(retrieval.values()), [])]
    heading = ["method", "bits", "KL mean", "+-", "median", "p99", "top-1", "perplexity",
               *(f"{size} lines" for size in sizes)]
    lines = [row(heading), "|" + "---|" * len(heading)]

    def answers(name):
        return [f"{r['right']}/{r['questions']}" for r in retrieval.get(name, [])]

    exact = report["methods"][0]["all"]["exact_perplexity"]
    lines.append(row(["exact", "32", "0", "0", "0", "0", "100 %", f"{exact:.3f}",
                      *answers("exact")]))
    for method in sorted(report["methods"],
                         key=lambda m: (m["bits_per_element"], m["all"]["kl_mean"])):
        a = method["all"]
        lines.append(row([name_of(method), f"{method['bits_per_element']:.2f}",
                          number(a["kl_mean"]), number(error_of_mean(kl_of_windows(method))),
                          number(a["kl_median"]), number(a["kl_p99"]), f"{100 * a['top1']:.1f} %",
                          f"{a['perplexity']:.3f}", *answers(method["name"])]))
    return "\n".join(lines)


def ratio(method, other):
    """The geometric mean over windows of one mean KL over another, with its standard error."""
    if method is other:
        return "1"
    logs = [math.log(a / b) for a, b in zip(kl_of_windows(method), kl_of_windows(other))]
    mean = math.exp(statistics.fmean(logs))
    error = error_of_mean(logs)
    return f"{mean:.3f}" + ("" if error is None else f" +- {mean * error:.3f}")


def rivals(report):
    """Each encoder beside `paper` of the same bits and the best of the others of no more bits."""
    methods = {m["name"]: m for m in report["methods"]}
    heading = ["encoder", "bits", "KL / KL of paper", "strongest rival", "its bits", "KL / its KL"]
    lines = [row(heading), "|" + "---|" * len(heading)]
    for method in methods.values():
        family, widths = family_of(method["name"])
        if family not in OURS:
            continue
        others = [m for m in methods.values() if family_of(m["name"])[0] not in OURS
                  and m["bits_per_element"] <= method["bits_per_element"]]
        if not others:
            continue
        paper = methods.get(f"paper_{widths.lower()}")
        best = min(others, key=lambda m: m["all"]["kl_mean"])
        lines.append(row([method["name"], f"{method['bits_per_element']:.2f}",
                          ratio(method, paper) if paper else "", best["name"],
                          f"{best['bits_per_element']:.2f}", ratio(method, best)]))
    return "\n".join(lines)


def side_by_side(reports):
    """The methods that all reports have, of one model on several texts, in the first report's order."""
    settings = [report.get("settings", {}) for report in reports]
    models = sorted({str(s.get("model")) for s in settings})
    if len(models) > 1:
        raise ReportError(f"reports of several models: {', '.join(models)}")
    heading = ["method", "bits"]
    exact = ["exact", "32"]
    for report, s in zip(reports, settings):
        heading += [f"{pathlib.Path(str(s.get('text'))).stem}: KL", "top-1", "perplexity"]
        exact += ["0", "100 %", f"{report['methods'][0]['all']['exact_perplexity']:.3f}"]
    lines = [row(heading), "|" + "---|" * len(heading), row(exact)]
    texts = [{m["name"]: m for m in report["methods"]} for report in reports]
    for method in reports[0]["methods"]:
        if not all(method["name"] in text for text in texts):
            continue
        cells = [name_of(method), f"{method['bits_per_element']:.2f}"]
        for text in texts:
            a = text[method["name"]]["all"]
            cells += [number(a["kl_mean"]), f"{100 * a['top1']:.1f} %", f"{a['perplexity']:.3f}"]
        lines.append(row(cells))
    return "\n".join(lines)


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        report = load(arguments[0])
        if len(arguments) == 1:
            print(table(report), rivals(report), sep="\n\n")
        elif all(path.endswith(".json") for path in arguments):
            print(side_by_side([report] + [load(path) for path in arguments[1:]]))
        elif len(arguments) == 2:
            draw(report, picture_path(arguments[1]))
        else:
            raise ReportError("several reports are one table; a picture is of one report")
    except ReportError as error:
        print(f"plot_quality: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
