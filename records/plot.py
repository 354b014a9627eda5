"""Draws runs: validation loss against seconds and tokens, step times with the slow ones named; or a ladder.

    python records/plot.py FOLDER... [-o runs.png]          folders and logs; a baseline/ sub-folder is drawn as well
    python records/plot.py --ladder FOLDER [-o ladder.png]  seconds to the target rung by rung, and the published times

Several runs of one folder become their mean and a band from the lowest to the highest. Colours are those of Okabe and
Ito, told apart by line style too; pictures are made to be read at 800 pixels of width.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from records import check  # noqa: E402
from records.logs import Log, LogError, read_places  # noqa: E402

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)   # yellow is too pale for lines on white
STYLES = ("-", "--", "-.", ":")
PUBLISHED_MINUTES = {1: 22.3, 2: 15.2, 3: 10.8, 4: 8.2, 5: 2.99}   # of the public race, 8 x H100, loss 3.28
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


def mean_curve(logs: list[Log]) -> dict[str, list[float]]:
    """Mean validation curve at the steps that all runs validated: lists seconds, tokens, loss, low, high (of loss)."""
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
    """Lower and upper end of the loss axis. The upper end leaves out the fall from the random start: it lies a little
    above where the curves are after a third of their validations."""
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
        name = f"{label} (n = {len(logs)})"
        for axes, key, scale in ((by_time, "seconds", 1), (by_tokens, "tokens", 1e6)):
            x = [value / scale for value in curve[key]]
            axes.plot(x, curve["loss"], marker="o", markersize=3.5, label=name, **look)
            if len(logs) > 1:
                axes.fill_between(x, curve["low"], curve["high"], color=look["color"], alpha=0.25, linewidth=0)
    low, high = loss_limits(curves, target)
    by_time.set_ylim(low, high)
    for axes in (by_time, by_tokens):
        axes.set_xlim(left=0)
        if target is not None:
            axes.axhline(target, color=BLACK, linewidth=1, linestyle=(0, (1, 1.5)))
    if target is not None:
        by_time.annotate(f"target {target:g}", (0, target), xytext=(4, 3), textcoords="offset points", fontsize=9.5)
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
    """Step times of the first run of each group, its slowest steps named in rows above the traces. A step over twice
    the usual time is cut at the top of the traces, marked with a triangle, and still named with its own number."""
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
        axes.plot(range(1, len(log.step_times_ms) + 1), [min(ms, ceiling) for ms in log.step_times_ms], color=colour,
                  linewidth=1)
        named += [(slow, colour) for slow in log.slow_steps[:SLOW_NAMED]]
    row_ends: list[float] = []   # where the labels of each row end so far: a label takes the lowest row with room
    row_height = 0.13 * span
    for slow, colour in sorted(named, key=lambda pair: (pair[0].step, pair[0].ms)):
        text = f"step {slow.step}: {slow.ms:,.{0 if slow.ms >= 100 else 1}f} ms{slow.why and f', {slow.why}'}"
        width = last * 0.0125 * len(text)
        leftwards = slow.step + width > last and slow.step > width
        start = slow.step - width if leftwards else slow.step
        row = next((k for k, row_end in enumerate(row_ends) if row_end <= start), len(row_ends))
        row_ends[row:row + 1] = [start + width + 0.01 * last]
        height, foot = min(slow.ms, ceiling), ceiling + 0.08 * span + row * row_height
        axes.plot([slow.step] * 2, [height, foot], color=colour, linewidth=0.8, linestyle=":")
        axes.plot([slow.step], [height], marker="^" if slow.ms > ceiling else "o", markersize=5, color=colour)
        axes.text(slow.step, foot, text, fontsize=9, color=colour, va="bottom", ha="right" if leftwards else "left",
                  bbox=dict(facecolor="white", edgecolor="none", pad=0.6))
    axes.set_xlim(0, last * 1.01)
    axes.set_ylim(max(0.0, min(usual) - 0.12 * span), ceiling + (0.08 + 0.13 * len(row_ends)) * span)
    if slow_ms:
        most = "" if len(slow_ms) == len(named) else f", {len(named)} of {len(slow_ms)}"
        axes.set_title(f"step times of each group's first run (slow steps named{most})", loc="left")


def draw_ladder(folder: Path):
    """Figure of one ladder folder: seconds to its target for every rung, and the same relative to rung 1 beside the
    published minutes."""
    plt = pyplot()
    rungs, problems = check.rungs_of(folder)
    if problems or not rungs:
        raise PlotError(f"{folder.name}: {problems[0] if problems else 'no rungs'}")
    try:
        target = float(check.read_claim(folder)["target"])
    except (check.ClaimError, KeyError, ValueError):
        raise PlotError(f"{folder.name}: README.md has no claim block with a target") from None
    seconds = [rung.seconds_to(target) for rung in rungs]
    reached = [value for value in seconds if value is not None]
    if not reached:
        raise PlotError(f"{folder.name}: no rung reaches the target {target}")
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH_INCHES, 7.2), dpi=DPI, sharex=True, layout="constrained",
                                          height_ratios=(1, 1))
    places = list(range(len(rungs)))
    _staircase(above, places, seconds, BLUE, "-")
    for x, rung, value in zip(places, rungs, seconds, strict=True):
        if value is None:
            above.annotate(f"not reached\n(ends at {rung.val_loss:.3f})", (x, max(reached)), ha="center", va="bottom",
                           fontsize=9.5, color=RED)
        else:
            above.annotate(f"{value:.0f} s", (x, value), xytext=(0, 4), textcoords="offset points", ha="center",
                           fontsize=10.5, color=BLUE, fontweight="bold")
    above.set_xlim(-0.5, len(rungs) - 0.5)
    above.set_ylim(0, 1.2 * max(reached))
    runs = {len(rung.logs) for rung in rungs}
    above.set_ylabel("timed training seconds")
    above.set_title(f"measured here: seconds to validation loss {target:g}, {rungs[0].logs[0].hardware}, "
                    f"n = {' to '.join(map(str, sorted({min(runs), max(runs)})))} a rung", loc="left")
    above.grid(axis="x", visible=False)
    ours = {rung.number: value for rung, value in zip(rungs, seconds, strict=True)}
    first = ours.get(1)
    published = [PUBLISHED_MINUTES.get(rung.number) for rung in rungs]
    relative_published = [None if minutes is None else 100 * minutes / PUBLISHED_MINUTES[1] for minutes in published]
    _staircase(below, places, relative_published, ORANGE, "--", "published (8 x H100, loss 3.28)")
    relative_ours = [None if value is None or first is None else 100 * value / first for value in seconds]
    _staircase(below, places, relative_ours, BLUE, "-", "measured here")
    for x, own, other, minutes in zip(places, relative_ours, relative_published, published, strict=True):
        own_above = own is not None and (other is None or own >= other)
        if own is not None:
            below.annotate(f"{own:.0f}%", (x, own), xytext=(0, 4 if own_above else -5), textcoords="offset points",
                           ha="center", va="bottom" if own_above else "top", color=BLUE, fontsize=10, fontweight="bold")
        if other is not None:
            below.annotate(f"{other:.0f}% ({minutes:g} min)", (x, other), xytext=(0, -5 if own_above else 4),
                           textcoords="offset points", ha="center", va="top" if own_above else "bottom", fontsize=9.5,
                           color="#8a5f00")
    highest = max([100.0, *(value for value in relative_ours if value is not None)])
    below.set_ylim(0, 1.2 * highest)
    below.set_ylabel("time relative to rung 1 (%)")
    below.set_title("relative to rung 1, beside the public race", loc="left")
    below.set_xticks(places, [f"{rung.number}\n{_two_lines(rung.title)}" for rung in rungs])
    below.set_xlabel("rung (each keeps what the ones before it changed)")
    below.legend(loc="upper right")
    below.grid(axis="x", visible=False)
    return figure


def _two_lines(title: str) -> str:
    """A title broken near its middle if it is long."""
    words = title.split()
    if len(title) <= 13 or len(words) < 2:
        return title
    cut = min(range(1, len(words)), key=lambda k: abs(len(" ".join(words[:k])) - len(" ".join(words[k:]))))
    return " ".join(words[:cut]) + "\n" + " ".join(words[cut:])


def _staircase(axes, places, values, colour, style, label=None) -> None:
    """One flat tread around each place, joined by risers; no tread where the value is None."""
    xs, ys = [], []
    for x, value in zip(places, values, strict=True):
        xs += [x - 0.5, x + 0.5]
        ys += [math.nan if value is None else value] * 2
    axes.plot(xs, ys, color=colour, linestyle=style, linewidth=2.2, label=label, solid_joinstyle="miter")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", metavar="FOLDER", help="folders of logs, or single logs")
    parser.add_argument("-o", "--output", type=Path, help="the PNG to write (default runs.png or ladder.png)")
    parser.add_argument("--ladder", action="store_true", help="draw the one folder as a ladder")
    options = parser.parse_args(argv)
    if options.ladder and len(options.places) != 1:
        parser.error("--ladder draws one folder")
    output = options.output or Path("ladder.png" if options.ladder else "runs.png")
    try:
        if options.ladder:
            folder = Path(options.places[0]).resolve()
            if not folder.is_dir():
                raise PlotError(f"{folder}: no such folder")
            figure = draw_ladder(folder)
        else:
            figure = draw_runs(read_places(options.places))
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
