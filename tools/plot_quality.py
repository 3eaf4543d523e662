#!/usr/bin/env python3
"""Draws the report of kvarn-eval.

    plot_quality.py REPORT.json OUT.svg|OUT.png     all that the report has, one below the other
    plot_quality.py REPORT.json                     its table, in Markdown

Mean KL against bits per element; KL against position, accumulated and static; the share of magnitude
and direction in the squared error of keys.
"""

import re
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
GREYS = ("#777777", "#999999", "#555555")
MARKERS = "v^xph*<>P+1234X"


def load(path):
    """A report, checked as far as it is drawn."""
    report = read_report(path)
    methods = report.get("methods") if isinstance(report, dict) else None
    if not isinstance(methods, list) or not methods:
        raise ReportError(f'{path}: has no member "methods" with at least one method')
    for method in methods:
        for field in ("name", "bits_per_element", "all", "by_position", "heads"):
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
            chosen[family] = (family, GREYS[i % len(GREYS)], MARKERS[i % len(MARKERS)])
    return chosen


def draw_bits(axes, methods, chosen):
    for family, (label, colour, marker) in chosen.items():
        points = sorted((m["bits_per_element"], m["all"]["kl_mean"], family_of(m["name"])[1])
                        for m in methods if family_of(m["name"])[0] == family)
        ours = family in OURS
        axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker=marker,
                  linestyle="-" if ours else "none", linewidth=1, markersize=6 if ours else 5,
                  label=label, zorder=3 if ours else 2)
        if ours:
            for bits, kl, widths in points:
                axes.annotate(widths, (bits, kl), textcoords="offset points", xytext=(5, 4),
                              fontsize=6, color=colour)
    axes.set_yscale("log")
    axes.set_xlabel("bits per element, metadata included")
    axes.set_ylabel("mean KL, nats")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title("Next-token distribution against an exact cache")


def draw_position(axes, methods, chosen):
    for method in methods:
        family, widths = family_of(method["name"])
        bins = method["by_position"]
        if widths not in ("", "K2V2") or len(bins) < 2:
            continue
        label, colour, _ = chosen[family]
        x = [b["position"] for b in bins]
        ours = family in OURS
        axes.plot(x, [b["kl"] for b in bins], color=colour, linewidth=1.4 if ours else 0.8,
                  label=label)
        if all("static_kl" in b for b in bins):
            axes.plot(x, [b["static_kl"] for b in bins], color=colour, linestyle=":",
                      linewidth=1.4 if ours else 0.8)
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


def table(report):
    retrieval = {r["name"]: r["results"] for r in report.get("retrieval") or []}
    sizes = [str(r["lines"]) for r in next(iter(retrieval.values()), [])]
    lines = ["| method | bits | KL mean | median | p99 | top-1 | perplexity |"
             + "".join(f" {size} lines |" for size in sizes),
             "|---|---|---|---|---|---|---|" + "---|" * len(sizes)]

    def row(name, cells):
        results = retrieval.get(name, [])
        cells = [name] + cells + [f"{r['right']}/{r['questions']}" for r in results]
        cells += [""] * (7 + len(sizes) - len(cells))
        lines.append("| " + " | ".join(cells) + " |")

    exact = report["methods"][0]["all"]["exact_perplexity"]
    row("exact", ["32", "0", "0", "0", "100 %", f"{exact:.3f}"])
    for method in report["methods"]:
        a = method["all"]
        row(method["name"], [f"{method['bits_per_element']:.2f}", f"{a['kl_mean']:.4f}",
                             f"{a['kl_median']:.4f}", f"{a['kl_p99']:.3f}",
                             f"{100 * a['top1']:.1f} %", f"{a['perplexity']:.3f}"])
    return "\n".join(lines)


def main(arguments):
    if len(arguments) not in (1, 2) or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        report = load(arguments[0])
        if len(arguments) == 1:
            print(table(report))
        else:
            draw(report, picture_path(arguments[1]))
    except ReportError as error:
        print(f"plot_quality: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
