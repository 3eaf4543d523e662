#!/usr/bin/env python3
"""Draws the report of kvarn-demo.

    plot_report.py REPORT.json OUT.svg|OUT.png

Above: attention KL against bits per element, geometric mean over the heads of the report.
Below: error of the attention output per head, methods with 2-bit keys and values.
"""

import math
import re
import sys

from picture import load_pyplot, picture_path, save, use_plain_style
from report_file import ReportError, read_report

# Methods by family: label, colour, marker, weight. Two colours of the Okabe-Ito palette, which
# colour-blind readers can tell apart, for the encoders of kvarn; shapes and greys for the others.
FAMILIES = {
    "query_aware": ("kvarn query_aware", "#0072B2", "o", True),
    "tuned": ("kvarn tuned", "#D55E00", "s", True),
    "refit": ("least-squares refit", "#777777", "p", False),
    "paper": ("KVarN paper", "#000000", "D", False),
    "rotation_kivi": ("rotation + KIVI", "#777777", "v", False),
    "kivi": ("KIVI", "#777777", "^", False),
    "kitty": ("Kitty", "#777777", "*", False),
    "kvquant_channels": ("KVQuant channels", "#777777", "<", False),
    "kvquant_sparse": ("KVQuant sparse", "#777777", ">", False),
    "quarot_token": ("QuaRot per token", "#777777", "P", False),
    "turbo": ("TurboQuant", "#777777", "h", False),
    "turbo_nc": ("TurboQuant nc", "#777777", "H", False),
    "turbo_vllm": ("TurboQuant in vLLM", "#777777", "8", False),
    "polar": ("PolarQuant", "#777777", "d", False),
    "polar_tree": ("PolarQuant tree", "#777777", "X", False),
    "q4_0": ("q4_0", "#777777", "1", False),
    "q4_0_rot": ("q4_0 rotated", "#777777", "2", False),
    "q4_1": ("q4_1", "#777777", "1", False),
    "q4_1_rot": ("q4_1 rotated", "#777777", "2", False),
    "iq4_nl": ("iq4_nl", "#777777", "3", False),
    "iq4_nl_rot": ("iq4_nl rotated", "#777777", "4", False),
    "q8_0": ("q8_0", "#777777", "1", False),
    "q8_0_rot": ("q8_0 rotated", "#777777", "2", False),
    "rtn_channel": ("RTN per channel", "#AAAAAA", "x", False),
    "rtn_token": ("RTN per token", "#AAAAAA", "+", False),
}
OTHER = ("#777777", "h", False)
UNFILLED = "x+1234"
FIELDS = ("bytes", "fp16_bytes", "attention_kl", "output_rel_sq_error")
ROW = 0.45  # inches, of a head in the lower panel


def load(path):
    """({head: {method: {field: number}}}, {method: (key bits, value bits)}) of a report, checked."""
    report = read_report(path)
    heads = report.get("heads") if isinstance(report, dict) else None
    if not isinstance(heads, dict) or not heads:
        raise ReportError(f'{path}: has no member "heads" with at least one head')
    for head, methods in heads.items():
        if not isinstance(methods, dict) or not methods:
            raise ReportError(f"{path}: head {head} has no methods")
        for method, values in methods.items():
            for field in FIELDS:
                value = values.get(field) if isinstance(values, dict) else None
                if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                    raise ReportError(
                        f"{path}: {head}, {method}: {field} is {value}; "
                        "it must be a positive number to stand on a logarithmic axis")
    described = report.get("methods")
    widths = {}
    for method in {method for methods in heads.values() for method in methods}:
        entry = described.get(method) if isinstance(described, dict) else None
        bits = [entry.get(field) if isinstance(entry, dict) else None
                for field in ("key_bits", "value_bits")]
        if not all(isinstance(value, int) for value in bits):
            raise ReportError(f'{path}: "methods" does not say key_bits and value_bits of {method}')
        widths[method] = tuple(bits)
    return heads, widths


def family_of(method):
    """paper_k4v2 -> paper"""
    return re.sub(r"_k\dv\d$", "", method)


def style(family):
    return FAMILIES.get(family, (family, *OTHER))


def means(heads, widths):
    """{family: [(bits, KL, key bits, value bits), ...]} over the methods that all heads have."""
    families = {}
    for method in next(iter(heads.values())):
        if not all(method in methods for methods in heads.values()):
            continue
        rows = [methods[method] for methods in heads.values()]
        bits = 16 * sum(row["bytes"] for row in rows) / sum(row["fp16_bytes"] for row in rows)
        kl = math.exp(sum(math.log(row["attention_kl"]) for row in rows) / len(rows))
        families.setdefault(family_of(method), []).append((bits, kl, *widths[method]))
    return families


def marker_style(family, size):
    _, colour, marker, ours = style(family)
    filled = marker not in UNFILLED
    return {
        "marker": marker,
        "markersize": size + 2.5 if ours else size,
        "markerfacecolor": colour,
        "markeredgecolor": "white" if filled else colour,
        "markeredgewidth": 0.6 if filled else 1.6,
        "linestyle": "none",
        "zorder": 3 if ours else 4,  # the smaller above the larger: both can be seen
    }


def spread(wanted, distance):
    """Positions near `wanted` (ascending) that are at least `distance` apart."""
    blocks = []  # [sum of (wanted - offset), count]: labels that touch move as one
    for y in wanted:
        blocks.append([y, 1])
        while len(blocks) > 1:
            (sum_a, n_a), (sum_b, n_b) = blocks[-2:]
            if sum_a / n_a + distance * n_a <= sum_b / n_b:
                break
            blocks[-2:] = [[sum_a + sum_b - distance * n_a * n_b, n_a + n_b]]
    return [total / n + distance * i for total, n in blocks for i in range(n)]


def draw_labels(axes, families, side):
    """Names of families in a column at that side, joined to their points, apart where they touch."""
    anchor, edge, align, step = {"left": (min, 0.23, "right", 1),
                                 "right": (max, 0.84, "left", -1)}[side]
    points = sorted(((anchor(points), family) for family, points in families.items()),
                    key=lambda entry: entry[0][1])
    to_pixels = axes.transData.transform
    line = 11.5 * axes.figure.dpi / 72
    heights = spread([to_pixels(point[:2])[1] for point, _ in points], line)
    for (point, family), height in zip(points, heights):
        label, colour, _, ours = style(family)
        x = axes.transAxes.transform((edge, 0))[0]
        text_x, y = axes.transData.inverted().transform((x, height))
        line_x = axes.transData.inverted().transform((x + step * 3, height))[0]
        axes.plot([line_x, point[0]], [y, point[1]], color="#BBBBBB", linewidth=0.6, zorder=1)
        axes.text(text_x, y, label, ha=align, va="center", fontsize=8.5,
                  color=colour if ours else "#333333", fontweight="bold" if ours else "normal")


def draw_kl(axes, heads, widths):
    families = means(heads, widths)
    first = math.log(min(point[0] for points in families.values() for point in points))
    last = math.log(max(point[0] for points in families.values() for point in points))
    width = max(last - first, 0.3)
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.set_xlim(math.exp(first - 0.42 * width), math.exp(last + 0.36 * width))
    ticks = [bits for bits in (2, 2.5, 3, 3.5, 4, 5, 6, 8) if bits > math.exp(first - 0.1 * width)]
    axes.set_xticks(ticks, [f"{bits:g}" for bits in ticks])
    axes.minorticks_off()

    for family, points in families.items():
        _, colour, _, ours = style(family)
        equal = sorted(p for p in points if p[2] == p[3])
        mixed = [p for p in points if p[2] != p[3]]
        axes.plot([p[0] for p in equal], [p[1] for p in equal], color=colour,
                  linewidth=2.0 if ours else 0.8, zorder=2)
        axes.plot([p[0] for p in equal], [p[1] for p in equal], **marker_style(family, 6))
        hollow = {**marker_style(family, 6), "markerfacecolor": "none",
                  "markeredgecolor": colour, "markeredgewidth": 1.3}
        axes.plot([p[0] for p in mixed], [p[1] for p in mixed], **hollow)

    axes.figure.canvas.draw()
    is_left = {family: min(points)[0] < 3 for family, points in families.items()}
    for side in ("left", "right"):
        draw_labels(axes, {family: points for family, points in families.items()
                           if is_left[family] == (side == "left")}, side)

    title = f"Attention KL, geometric mean over {len(heads)} heads (lower is better)" \
        if len(heads) > 1 else "Attention KL (lower is better)"
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    if any(p[2] != p[3] for points in families.values() for p in points):
        axes.text(1, 0.99, "filled: keys and values of equal bits\nhollow: of unlike bits",
                  transform=axes.transAxes, ha="right", va="top", fontsize=8.5, color="#555555",
                  linespacing=1.5)
    axes.set_xlabel("stored bits per element, metadata included")
    axes.set_ylabel("nats")


def draw_output(axes, heads, widths):
    for row, (head, methods) in enumerate(heads.items()):
        axes.axhline(row, color="#DDDDDD", linewidth=0.8, zorder=0)
        axes.annotate(head, (0, row), xycoords=("axes fraction", "data"), xytext=(0, 6.5),
                      textcoords="offset points", fontsize=8.5, color="#333333")
        for method, values in methods.items():
            if widths[method] == (2, 2):
                axes.plot(values["output_rel_sq_error"], row, clip_on=False,
                          **marker_style(family_of(method), 7))
    axes.set_xscale("log")
    axes.set_yticks([])
    axes.set_ylim(len(heads) - 0.6, -0.6)
    axes.spines["left"].set_visible(False)
    axes.grid(False, axis="y")
    axes.set_title("Error of the attention output, 2-bit keys and values (lower is better)", loc="left",
                   fontsize=10.5, fontweight="bold")
    axes.set_xlabel("sum of squared errors / sum of squares")
    shown = {family_of(method) for methods in heads.values() for method in methods
             if widths[method] == (2, 2)}
    ordered = [family for family in FAMILIES if family in shown] + sorted(shown - set(FAMILIES))
    handles = [axes.plot([], [], label=style(family)[0], **marker_style(family, 7))[0]
               for family in ordered]
    axes.legend(handles=handles, loc="upper right", bbox_to_anchor=(1, -0.5 / (ROW * len(heads))),
                ncols=4, frameon=False, fontsize=8.5, handletextpad=0.2, columnspacing=1.2,
                borderpad=0)


def draw(heads, widths, out):
    pyplot = load_pyplot()
    use_plain_style(pyplot)
    above, below = 4.8, ROW * len(heads)
    figure, (kl, output) = pyplot.subplots(
        2, 1, figsize=(8, above + below + 2.2), height_ratios=[above, below], layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)
    draw_output(output, heads, widths)
    draw_kl(kl, heads, widths)
    save(figure, out)


def main(arguments):
    if len(arguments) != 2:
        print("usage: plot_report.py REPORT.json OUT.svg|OUT.png", file=sys.stderr)
        return 1
    try:
        out = picture_path(arguments[1])
        draw(*load(arguments[0]), out)
    except ReportError as error:
        print(f"plot_report.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
