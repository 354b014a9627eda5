"""Draws runs: validation loss against seconds and tokens, step times with the slow ones named; or a scaling
table.

    python records/plot.py FOLDER... [-o runs.png]      folders and logs; a baseline/ sub-folder is drawn too
    python records/plot.py --scaling=TABLE.csv [--target=3.28] [-o scaling.png]    two recipes at several sizes

TABLE.csv has a line for each recipe at each size; what has no log is named a figure, and drawn hollow:

    recipe,size,log,gpu_seconds,loss
    record 20,124M,2027-01-31_Base/*.txt,,
    record 20,350M,figure,5200,3.02

Several runs of one folder become their mean and a band from the lowest to the highest. Colours are those of
Okabe and Ito, told apart by line style too; pictures are made to be read at 800 pixels of width.
"""

import argparse
import csv
import glob
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from records.logs import Log, LogError, parse_log, read_places  # noqa: E402

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)   # yellow is too pale for lines on white
STYLES = ("-", "--", "-.", ":")
SLOW_NAMED = 4            # slow steps named for each group
WIDTH_INCHES, DPI = 8, 150
FONT = {"font.size": 10, "axes.titlesize": 10.5, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.7, "legend.frameon": False,
        "legend.fontsize": 9.5, "lines.linewidth": 1.8}


class PlotError(Exception):
    """One readable line about why nothing can be drawn."""


def pyplot():
    """matplotlib.pyplot on the file backend. Raises PlotError when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise PlotError("needs matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update(FONT)
    return plt


def as_label(text: str) -> str:
    """A name for a picture: $ begins no formula, and a first _ does not hide it from the legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def mean_curve(logs: list[Log]) -> dict[str, list[float]]:
    """Mean validation curve at the steps that all runs validated: lists seconds, tokens, loss, low, high (of
    loss)."""
    at = [{point.step: point for point in log.validation} for log in logs]
    curve = {key: [] for key in ("seconds", "tokens", "loss", "low", "high")}
    for step in sorted(set.intersection(*map(set, at))):
        losses = [points[step].loss for points in at]
        if not all(map(math.isfinite, losses)):
            continue
        curve["seconds"].append(statistics.fmean(points[step].seconds for points in at))
        curve["tokens"].append(statistics.fmean(log.tokens_at(step) for log in logs))
        curve["loss"].append(statistics.fmean(losses))
        curve["low"].append(min(losses))
        curve["high"].append(max(losses))
    return curve


def loss_limits(curves, target: float | None) -> tuple[float, float]:
    """Lower and upper end of the loss axis. The upper end leaves out the fall from the random start: it lies
    a little above where the curves are after a third of their validations."""
    low = min([*(min(curve["low"]) for curve in curves), *([target] if target is not None else [])])
    tails = [curve["high"][min(len(curve["high"]) - 1, max(1, len(curve["high"]) // 3)):] for curve in curves]
    high = max(max(tail) for tail in tails)
    room = max(high - low, 0.02)
    return low - 0.08 * room, high + 0.08 * room


def draw_runs(groups: list[tuple[str, list[Log]]]):
    """Figure of the groups [(label, logs)]: loss against seconds and tokens above, step times below."""
    plt = pyplot()
    curves = [mean_curve(logs) for _, logs in groups]
    empty = [label for (label, _), curve in zip(groups, curves, strict=True) if not curve["loss"]]
    if empty:
        raise PlotError(f"{empty[0]}: no step that all its runs validated")
    targets = {log.target_loss for _, logs in groups for log in logs if log.target_loss is not None}
    target = targets.pop() if len(targets) == 1 else None
    figure = plt.figure(figsize=(WIDTH_INCHES, 6.9), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    by_time = figure.add_subplot(grid[0, 0])
    by_tokens = figure.add_subplot(grid[0, 1], sharey=by_time)
    steps = figure.add_subplot(grid[1, :])
    for i, ((label, logs), curve) in enumerate(zip(groups, curves, strict=True)):
        look = dict(color=COLOURS[i % len(COLOURS)], linestyle=STYLES[(i // len(COLOURS) + i) % len(STYLES)])
        name = as_label(f"{label} (n = {len(logs)})")
        for axes, key, scale in ((by_time, "seconds", 1), (by_tokens, "tokens", 1e6)):
            x = [value / scale for value in curve[key]]
            axes.plot(x, curve["loss"], marker="o", markersize=3.5, label=name, **look)
            if len(logs) > 1:
                axes.fill_between(x, curve["low"], curve["high"], color=look["color"], alpha=0.25,
                                  linewidth=0)
    low, high = loss_limits(curves, target)
    by_time.set_ylim(low, high)
    for axes in (by_time, by_tokens):
        axes.set_xlim(left=0)
        if target is not None:
            axes.axhline(target, color=BLACK, linewidth=1, linestyle=(0, (1, 1.5)))
    if target is not None:
        by_time.annotate(f"target {target:g}", (0, target), xytext=(4, 3), textcoords="offset points",
                         fontsize=9.5)
    by_time.set(xlabel="timed training seconds", ylabel="validation loss (nats per token)")
    by_tokens.set(xlabel="training tokens (millions)")
    by_tokens.tick_params(labelleft=False)
    handles, labels = by_time.get_legend_handles_labels()
    banded = any(len(logs) > 1 for _, logs in groups)
    columns = 2 if len(labels) > 1 and max(map(len, labels)) <= 50 else 1
    figure.legend(handles, labels, loc="outside upper left", ncols=columns,
                  title="mean of the runs; band: lowest to highest run" if banded else None, title_fontsize=9,
                  alignment="left")
    draw_steps(steps, groups)
    return figure


def draw_steps(axes, groups) -> None:
    """Step times of the first run of each group, its slowest steps named in rows above the traces. A step
    over twice the usual time is cut at the top of the traces, marked with a triangle, and still named with
    its own number."""
    shown = [(i, logs[0]) for i, (_, logs) in enumerate(groups) if logs[0].step_times_ms]
    axes.set(xlabel="step", ylabel="step time (ms)")
    axes.set_title("step times of each group's first run", loc="left")
    if not shown:
        axes.text(0.5, 0.5, "no step times in these logs", transform=axes.transAxes, ha="center")
        return
    slow_ms = [slow.ms for _, log in shown for slow in log.slow_steps]
    usual = [ms for _, log in shown for ms in log.step_times_ms if ms not in slow_ms] or slow_ms
    ceiling = min(2.0 * max(usual), max(usual + slow_ms))
    span = max(ceiling - min(usual), 0.1 * ceiling, 1e-3)
    last = max(len(log.step_times_ms) for _, log in shown)
    named = []
    for i, log in shown:
        colour = COLOURS[i % len(COLOURS)]
        shown_ms = [min(ms, ceiling) for ms in log.step_times_ms]
        axes.plot(range(1, len(shown_ms) + 1), shown_ms, color=colour, linewidth=1)
        named += [(slow, colour) for slow in log.slow_steps[:SLOW_NAMED]]
    row_ends: list[float] = []   # where the labels of each row end so far; a label takes the lowest with room
    row_height = 0.13 * span
    for slow, colour in sorted(named, key=lambda pair: (pair[0].step, pair[0].ms)):
        digits = 0 if slow.ms >= 100 else 1
        text = f"step {slow.step}: {slow.ms:,.{digits}f} ms"
        if slow.why:
            text += f", {slow.why}"
        width = last * 0.0125 * len(text)
        leftwards = slow.step + width > last and slow.step > width
        start = slow.step - width if leftwards else slow.step
        row = next((k for k, row_end in enumerate(row_ends) if row_end <= start), len(row_ends))
        row_ends[row:row + 1] = [start + width + 0.01 * last]
        height, foot = min(slow.ms, ceiling), ceiling + 0.08 * span + row * row_height
        axes.plot([slow.step] * 2, [height, foot], color=colour, linewidth=0.8, linestyle=":")
        axes.plot([slow.step], [height], marker="^" if slow.ms > ceiling else "o", markersize=5, color=colour)
        axes.text(slow.step, foot, text, fontsize=9, color=colour, va="bottom",
                  ha="right" if leftwards else "left",
                  bbox=dict(facecolor="white", edgecolor="none", pad=0.6))
    axes.set_xlim(0, last * 1.01)
    axes.set_ylim(max(0.0, min(usual) - 0.12 * span), ceiling + (0.08 + 0.13 * len(row_ends)) * span)
    if slow_ms:
        most = "" if len(slow_ms) == len(named) else f", {len(named)} of {len(slow_ms)}"
        axes.set_title(f"step times of each group's first run (slow steps named{most})", loc="left")


# --------------------------------------------------------------------------------------------------- scaling

@dataclass(frozen=True)
class Scale:
    """One recipe at one size, from a line of a scaling table. `is_figure`: it stands there as numbers, no
    log."""
    recipe: str
    size: str
    gpu_seconds: float
    loss: float
    is_figure: bool


def read_scaling(table: Path) -> dict[str, list[Scale]]:
    """{recipe: its points, cheapest first} of a CSV table with the columns recipe, size, log, gpu_seconds,
    loss.

    `log` is a pattern of logs, from the table's folder (their means count, seconds times GPUs), or the word
    `figure`; then gpu_seconds and loss stand in the line. Raises PlotError, and LogError for a log that can't
    be read.
    """
    try:
        with open(table, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlotError(f"{table}: can't be read as a table ({error})") from None
    recipes: dict[str, list[Scale]] = {}
    for number, row in enumerate(rows, 2):
        if not all(row.get(column) for column in ("recipe", "size", "log")):
            raise PlotError(f"{table}: line {number} lacks recipe, size or log")
        if row["log"] == "figure":
            point = _figure_of(row, f"{table}: line {number}")
        else:
            point = _point_of_logs(row, table)
        recipes.setdefault(point.recipe, []).append(point)
    if len(recipes) != 2:
        raise PlotError(f"{table}: holds {len(recipes)} recipes ({', '.join(recipes)}), expected two")
    return {recipe: sorted(points, key=lambda point: point.gpu_seconds) for recipe, points in recipes.items()}


def _figure_of(row: dict, where: str) -> Scale:
    try:
        gpu_seconds, loss = float(row["gpu_seconds"]), float(row["loss"])
    except (TypeError, ValueError):
        raise PlotError(f"{where} is a figure without numbers for gpu_seconds and loss") from None
    if not (0 < gpu_seconds < math.inf and math.isfinite(loss)):
        raise PlotError(f"{where}: gpu_seconds {gpu_seconds} and loss {loss}, expected finite ones, seconds "
                        "above 0")
    return Scale(row["recipe"], row["size"], gpu_seconds, loss, True)


def _point_of_logs(row: dict, table: Path) -> Scale:
    pattern = os.path.join(glob.escape(str(table.parent)), row["log"])      # an absolute one stays as it is
    paths = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not paths:
        raise PlotError(f"{table}: no log matches {row['log']}")
    logs = [parse_log(path) for path in paths]
    unfinished = [log.path.name for log in logs if not log.finished]
    if unfinished:
        raise PlotError(f"{table}: {unfinished[0]} is no finished run")
    gpu_seconds = statistics.fmean(log.train_time_s * log.header["world_size"] for log in logs)
    loss = statistics.fmean(log.val_loss for log in logs)
    return Scale(row["recipe"], row["size"], gpu_seconds, loss, False)


def gpu_seconds_to(points: list[Scale], loss: float) -> float | None:
    """GPU-seconds that a recipe needs to a loss, on straight lines between its points over the logarithm of
    GPU-seconds; None outside of what they reach."""
    for before, after in zip(points, points[1:], strict=False):
        if before.loss >= loss >= after.loss and before.loss > after.loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.gpu_seconds * (after.gpu_seconds / before.gpu_seconds) ** share
    return None


def scaling_ratios(first: list[Scale], second: list[Scale], target: float | None
                   ) -> list[tuple[float, float, float]]:
    """[(loss, GPU-seconds of the first recipe, those of the second to the same loss / those)]: at the losses
    of all points and at the target, wherever both recipes reach the loss."""
    losses = [point.loss for point in first + second]
    if target is not None:
        losses.append(target)
    found = []
    for loss in sorted(set(losses), reverse=True):
        ours, theirs = gpu_seconds_to(first, loss), gpu_seconds_to(second, loss)
        if ours is not None and theirs is not None:
            found.append((loss, ours, theirs / ours))
    return found


def draw_scaling(recipes: dict[str, list[Scale]], target: float | None = None):
    """Figure of two recipes, 800 pixels wide: loss against GPU-seconds, a point for each size, and beneath it
    the second recipe's GPU-seconds to equal loss in parts of the first one's. Points without a log are
    hollow."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH_INCHES, 6.4), dpi=800 / WIDTH_INCHES,
                                          sharex=True, layout="constrained", height_ratios=(1.6, 1))
    for (recipe, points), colour, style in zip(recipes.items(), COLOURS, STYLES):
        above.plot([point.gpu_seconds for point in points], [point.loss for point in points], color=colour,
                   linestyle=style, label=as_label(recipe))
        for point in points:
            above.plot([point.gpu_seconds], [point.loss], marker="o", markersize=7, color=colour,
                       markerfacecolor="white" if point.is_figure else colour)
            above.annotate(as_label(point.size), (point.gpu_seconds, point.loss), xytext=(6, 5),
                           textcoords="offset points", color=colour)
    if any(point.is_figure for points in recipes.values() for point in points):
        above.plot([], [], marker="o", linestyle="", color=BLACK, markerfacecolor="white",
                   label="a figure, no log")
    if target is not None:
        above.axhline(target, color=BLACK, linewidth=1, linestyle=(0, (1, 1.5)), label=f"target {target:g}")
    above.set(xscale="log", ylabel="validation loss (nats per token)")
    above.legend(loc="upper right")
    (first_name, first), (second_name, second) = ((as_label(name), points) for name, points in recipes.items())
    ratios = scaling_ratios(first, second, target)
    if ratios:
        below.plot([seconds for _, seconds, _ in ratios], [share for *_, share in ratios], marker="o",
                   color=BLACK)
        below.axhline(1, color="#888888", linewidth=1)
        below.set_ylim(0, 1.25 * max(1.0, *(share for *_, share in ratios)))
    else:
        below.text(0.5, 0.5, "no loss that both recipes reach", transform=below.transAxes, ha="center")
    for i, (loss, seconds, share) in enumerate(ratios):      # in turn above and below: neighbours lie close
        is_above = i % 2 == 0
        below.annotate(f"{share:.3f} at {loss:.3f}", (seconds, share), xytext=(0, 7 if is_above else -7),
                       textcoords="offset points", fontsize=9, ha="center",
                       va="bottom" if is_above else "top")
    below.set(xlabel=f"GPU-seconds (beneath: of {first_name})", ylabel="ratio at equal loss")
    below.set_title(f"GPU-seconds of {second_name} / those of {first_name}, at equal loss", loc="left")
    return figure


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="FOLDER", help="folders of logs, or single logs")
    parser.add_argument("-o", "--output", type=Path, help="the picture to write (runs.png or scaling.png)")
    parser.add_argument("--scaling", type=Path, metavar="TABLE",
                        help="draw this table (CSV: recipe, size, log, gpu_seconds, loss)")
    parser.add_argument("--target", type=float, help="with --scaling: the loss to draw a line at")
    options = parser.parse_args(argv)
    if bool(options.places) == bool(options.scaling):
        parser.error("expected folders of logs, or --scaling=TABLE")
    output = options.output or Path("scaling.png" if options.scaling else "runs.png")
    if output.suffix in ("", "."):
        output = output.parent / f"{output.name.rstrip('.') or 'picture'}.png"
    try:
        if options.scaling:
            figure = draw_scaling(read_scaling(options.scaling), options.target)
        else:
            figure = draw_runs(read_places(options.places))
        kinds = sorted(figure.canvas.get_supported_filetypes())
        if output.suffix[1:].lower() not in kinds:
            raise PlotError(f"{output}: expected a name that ends in one of .{', .'.join(kinds)}")
        figure.savefig(output)
    except (LogError, PlotError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"plot: {output} can't be written ({error.strerror})", file=sys.stderr)
        return 2
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
